"""The accounts find every kind of failure, and report nothing for a correct history."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from tests.chaos.entities import NEWS, PLACES, PLAIN, PRIMARY, WATCHFUL
from tests.chaos.message_accounts import MessageAccounts
from twinbus.ledger import OK, UNKNOWN, Entry, Operation, Stage, balance

GONE_HOME = (("received", "a"), ("sending", "a"), ("confirmed", "a"), ("completed", "a"))
_numbers = count()


def operation(stage: Stage, result: str = OK, name: str = "a", destination: str = PLAIN) -> Operation:
    to_primary = stage in {Stage.SEND_PRIMARY, Stage.RETURN_PRIMARY}
    return Operation(
        at=0,
        id=str(next(_numbers)),
        stage=stage,
        namespace=PRIMARY if to_primary else "harbour",
        entity=destination if to_primary else "backlog",
        ids=(name,),
        bytes=1,
        units=1,
        destination=None if to_primary else f"{PRIMARY}/{destination}",
        seconds=0.0,
        result=result,
    )


def sent(
    books: MessageAccounts, stage: Stage, result: str = OK, destination: str = PLAIN, *, safe: bool = True
) -> None:
    books.asked(destination, ["a"])
    books.clients_ledger([operation(stage, result, destination=destination)])
    if safe:
        books.safe(["a"])


def lived(books: MessageAccounts, *told: tuple[str, str], killed: bool = False) -> None:
    books.life([(event, [name]) for event, name in told], killed=killed)


def received(books: MessageAccounts, copies: int = 1, destination: str = PLAIN) -> None:
    for place in PLACES[destination]:
        for _ in range(copies):
            books.received(place, "a")


def judged(books: MessageAccounts, *entries: Entry) -> list[str]:
    books.judge()
    if entries:
        books.judge_ledger(balance(entries))
    return books.wrong


def test_a_message_that_went_to_the_primary_is_well() -> None:
    books = MessageAccounts()
    sent(books, Stage.SEND_PRIMARY, destination=NEWS)
    received(books, destination=NEWS)
    assert judged(books, operation(Stage.SEND_PRIMARY, destination=NEWS)) == []


def test_a_message_that_was_brought_home_is_well() -> None:
    books = MessageAccounts()
    sent(books, Stage.SEND_BACKLOG)
    lived(books, *GONE_HOME)
    received(books)
    stages = (Stage.SEND_BACKLOG, Stage.RETURN_PRIMARY, Stage.COMPLETE_BACKLOG)
    assert judged(books, *map(operation, stages)) == []
    assert books.figures["lost"] == books.figures["further copies"] == 0


@pytest.mark.parametrize(
    ("told", "killed"),
    [
        ((("sending", "a"),), True),
        ((("sending", "a"), ("confirmed", "a")), True),
        ((("sending", "a"), ("confirmed", "a"), ("lost", "a")), False),
        ((("sending", "a"), ("confirmed", "a"), ("uncompleted", "a")), False),
        ((("sending", "a"), ("unsure", "a")), False),
    ],
)
def test_a_further_copy_is_explained_by_what_was_never_finished(
    told: tuple[tuple[str, str], ...], killed: bool
) -> None:
    books = MessageAccounts()
    sent(books, Stage.SEND_BACKLOG)
    lived(books, *told, killed=killed)
    lived(books, *GONE_HOME)
    received(books, 2)
    assert judged(books) == []
    assert books.figures["further copies"] == 1


def test_a_further_copy_is_explained_by_a_send_that_was_not_acknowledged() -> None:
    books = MessageAccounts()
    sent(books, Stage.SEND_PRIMARY, UNKNOWN, safe=False)
    sent(books, Stage.SEND_PRIMARY)
    received(books, 2)
    assert judged(books) == []


# --- failures --------------------------------------------------------------------------------------------------------


def lost(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_BACKLOG)
    lived(books, ("received", "a"), killed=True)


def lost_at_one_subscription(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_PRIMARY, destination=NEWS)
    books.received(PLACES[NEWS][0], "a")


def copied_without_a_reason(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_BACKLOG)
    lived(books, *GONE_HOME)
    lived(books, *GONE_HOME)
    received(books, 2)


def copied_behind_the_books(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_BACKLOG)
    lived(books, *GONE_HOME)
    received(books, 2)


def copied_where_duplicates_are_detected(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_BACKLOG, destination=WATCHFUL)
    lived(books, ("sending", "a"), ("confirmed", "a"), killed=True)
    lived(books, *GONE_HOME)
    received(books, 2, WATCHFUL)


def completed_first(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_BACKLOG)
    lived(books, ("sending", "a"), ("completed", "a"))
    received(books)


def left_behind_in_order(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_BACKLOG)
    lived(books, ("sending", "a"), ("confirmed", "a"))
    received(books)


def acknowledged_and_not_there(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_PRIMARY, safe=False)


def from_nowhere(books: MessageAccounts) -> None:
    books.received(PLAIN, "a")


def elsewhere(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_PRIMARY)
    received(books)
    books.received(WATCHFUL, "a")


def changed(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_PRIMARY)
    books.received(PLAIN, "a", "body b'?'")


def safe_twice(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_PRIMARY)
    books.safe(["a"])
    received(books)


def missing_in_the_ledger(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_PRIMARY)
    received(books)
    books.judge_ledger(balance([]))


def delivered_in_the_ledger_alone(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_BACKLOG)
    books.judge_ledger(balance([operation(Stage.SEND_PRIMARY)]))


def lost_in_the_ledger_alone(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_BACKLOG)
    lived(books, *GONE_HOME)
    received(books)
    books.judge_ledger(balance(map(operation, (Stage.SEND_BACKLOG, Stage.COMPLETE_BACKLOG))))


def delivery_missing_in_the_ledger(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_BACKLOG)
    lived(books, *GONE_HOME)
    received(books)
    books.judge_ledger(balance([operation(Stage.SEND_BACKLOG)]))


def unknown_in_the_ledger(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_BACKLOG)
    lived(books, ("sending", "a"), killed=True)
    lived(books, *GONE_HOME)
    received(books)
    entries = [operation(Stage.SEND_BACKLOG), operation(Stage.RETURN_PRIMARY, UNKNOWN)]
    books.judge_ledger(balance([*entries, operation(Stage.COMPLETE_BACKLOG)]))


def copies_missing_in_the_ledger(books: MessageAccounts) -> None:
    sent(books, Stage.SEND_BACKLOG)
    lived(books, ("sending", "a"), killed=True)
    lived(books, *GONE_HOME)
    received(books, 2)
    books.judge_ledger(balance(map(operation, (Stage.SEND_BACKLOG, Stage.RETURN_PRIMARY, Stage.COMPLETE_BACKLOG))))


FAILURES: dict[Callable[[MessageAccounts], None], str] = {
    lost: "a: is lost, though reported safe",
    lost_at_one_subscription: "a: is lost, though reported safe",
    copied_without_a_reason: "a: 1 further copies at plain, though nothing explains them",
    copied_behind_the_books: "a: received 2 times, sent 1 times",
    copied_where_duplicates_are_detected: "a: 1 further copies at watchful, though it detects duplicates",
    completed_first: "a: completed before its delivery was confirmed",
    left_behind_in_order: "a: was sent and not completed, by a syphon that ended in order",
    acknowledged_and_not_there: "a: acknowledged by the primary 1 times, received 0 times",
    from_nowhere: "a: was received from plain, where it was never sent",
    elsewhere: "a: was received from watchful, where it was never sent",
    changed: "a: was received from plain changed: body b'?'",
    safe_twice: "a: was reported safe 2 times",
    missing_in_the_ledger: "ledger: a was reported safe, and is not accepted",
    delivered_in_the_ledger_alone: "ledger: a is delivered, and was not received",
    lost_in_the_ledger_alone: "ledger: a is lost",
    delivery_missing_in_the_ledger: "ledger: a is in the backlog, which is empty",
    unknown_in_the_ledger: "ledger: a is unknown, though it was brought home",
    copies_missing_in_the_ledger: "ledger: a is 0 times perhaps duplicated, and was 1 times",
}


@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
def test_a_failure_is_reported(fail: Callable[[MessageAccounts], None]) -> None:
    books = MessageAccounts()
    fail(books)
    assert FAILURES[fail] in judged(books)
