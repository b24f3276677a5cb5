"""The oracle reports every kind of failure, and reports nothing for a correct history."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.crash.oracle import EntityOracle, ObservedMessage, Oracle, Where

BODY = b"body"


@pytest.fixture
def oracle() -> Oracle:
    return Oracle(
        {"q": ("q",), "d": ("d",), "u": ("u",), "t": ("t/a", "t/b")}, deletes=("d",), detects_duplicates=("u",)
    )


def sent(oracle: Oracle, *ids: str, to: str = "q", session: str | None = None, due: int | None = None) -> EntityOracle:
    """Send messages and record the acknowledgement."""
    oracle.send_confirmed(oracle.send_asked(to, [(id, BODY, session) for id in ids], due))
    return oracle.accounts[to if to != "t" else "t/a"]


def saw(
    id: str, number: int, where: Where = Where.ACTIVE, *, body: bytes = BODY, abandoned: int = 0, at: int = 0
) -> ObservedMessage:
    return ObservedMessage(id, number, where, body, abandoned, at)


def settled(account: EntityOracle, id: str, where: Where, *, confirmed: bool = True) -> None:
    account.asked([id], where)
    (account.confirmed if confirmed else account.unanswered)([id], where)


def test_a_correct_history_has_no_failure(oracle: Oracle) -> None:
    queue = sent(oracle, "a", "b", "c", "d")
    for number, id in enumerate("abcd", 1):
        queue.sighted(saw(id, number))
    settled(queue, "a", Where.NOWHERE)
    settled(queue, "b", Where.DEFERRED)
    settled(queue, "c", Where.DEAD, confirmed=False)
    settled(queue, "d", Where.ACTIVE)
    oracle.send_unanswered(oracle.send_asked("q", [("e", BODY, None), ("f", BODY, None)]))
    there = [saw("b", 2, Where.DEFERRED), saw("c", 3, Where.DEAD), saw("d", 4, abandoned=1), saw("e", 5), saw("f", 6)]
    queue.found(there)
    queue.counted({Where.ACTIVE: 4, Where.DEAD: 1, Where.SCHEDULED: 0}, there)
    queue.check_numbers()
    oracle.check_wholes()
    assert oracle.wrong == []


def lost(oracle: Oracle) -> None:
    sent(oracle, "a", "b").found([saw("b", 2)])


def lost_where_some_may_be_gone(oracle: Oracle) -> None:
    account = sent(oracle, "a", "b", "c", to="d")
    account.outstanding = 1
    account.found([saw("a", 1)])


def completed_and_there_again(oracle: Oracle) -> None:
    queue = sent(oracle, "a")
    queue.sighted(saw("a", 1))
    settled(queue, "a", Where.NOWHERE)
    queue.sighted(saw("a", 1))


def completed_and_still_there(oracle: Oracle) -> None:
    queue = sent(oracle, "a")
    queue.sighted(saw("a", 1))
    settled(queue, "a", Where.NOWHERE)
    queue.found([saw("a", 1)])


def received_and_deleted_twice(oracle: Oracle) -> None:
    account = sent(oracle, "a", to="d")
    account.deleted(saw("a", 1))
    account.deleted(saw("a", 1))


def deferred_and_active(oracle: Oracle) -> None:
    queue = sent(oracle, "a")
    queue.sighted(saw("a", 1))
    settled(queue, "a", Where.DEFERRED)
    queue.found([saw("a", 1)])


def dead_lettered_and_lost(oracle: Oracle) -> None:
    queue = sent(oracle, "a")
    queue.sighted(saw("a", 1))
    settled(queue, "a", Where.DEAD)
    queue.found([])


def found_once_and_lost_later(oracle: Oracle) -> None:
    oracle.send_unanswered(oracle.send_asked("q", [("a", BODY, None)]))
    oracle.accounts["q"].found([saw("a", 1)])
    oracle.accounts["q"].found([])


def not_found_and_there_later(oracle: Oracle) -> None:
    oracle.send_unanswered(oracle.send_asked("q", [("a", BODY, None)]))
    oracle.accounts["q"].found([])
    oracle.accounts["q"].sighted(saw("a", 1))


def never_sent(oracle: Oracle) -> None:
    oracle.accounts["q"].found([saw("a", 1)])


def another_body(oracle: Oracle) -> None:
    sent(oracle, "a").sighted(saw("a", 1, body=b"other"))


def there_twice(oracle: Oracle) -> None:
    sent(oracle, "a").found([saw("a", 1), saw("a", 1, Where.DEAD)])


def a_duplicate(oracle: Oracle) -> None:
    account = sent(oracle, "a", to="u")
    account.sighted(saw("a", 1))
    settled(account, "a", Where.NOWHERE)
    sent(oracle, "a", to="u")
    account.sighted(saw("a", 2))


def a_number_reused(oracle: Oracle) -> None:
    queue = sent(oracle, "a", "b")
    queue.sighted(saw("a", 1))
    settled(queue, "a", Where.NOWHERE)
    queue.sighted(saw("b", 1))


def another_number(oracle: Oracle) -> None:
    queue = sent(oracle, "a")
    queue.sighted(saw("a", 1))
    queue.sighted(saw("a", 2))


def a_number_that_fell(oracle: Oracle) -> None:
    sent(oracle, "a")
    queue = sent(oracle, "b")
    queue.found([saw("b", 1), saw("a", 2)])
    queue.check_numbers()


def an_abandonment_forgotten(oracle: Oracle) -> None:
    queue = sent(oracle, "a")
    queue.sighted(saw("a", 1))
    settled(queue, "a", Where.ACTIVE)
    queue.sighted(saw("a", 1, abandoned=0))


def before_it_was_due(oracle: Oracle) -> None:
    sent(oracle, "a", due=1000).sighted(saw("a", 2, at=999))


def cancelled_and_there(oracle: Oracle) -> None:
    queue = sent(oracle, "a", due=1000)
    settled(queue, "a", Where.NOWHERE)
    queue.sighted(saw("a", 2, at=1000))


def not_scheduled_before_it_was_due(oracle: Oracle) -> None:
    queue = sent(oracle, "a", due=1000)
    queue.asked(["a"], Where.NOWHERE)
    queue.cancel_refused("a", 999)


def overtaken_in_its_session(oracle: Oracle) -> None:
    sent(oracle, "a", "b", session="s").sighted(saw("b", 2), hold=1)


def half_a_batch(oracle: Oracle) -> None:
    oracle.send_unanswered(oracle.send_asked("q", [("a", BODY, None), ("b", BODY, None)]))
    oracle.accounts["q"].found([saw("a", 1)])
    oracle.check_wholes()


def in_one_subscription_only(oracle: Oracle) -> None:
    oracle.send_unanswered(oracle.send_asked("t", [("a", BODY, None)]))
    oracle.accounts["t/a"].found([saw("a", 1)])
    oracle.accounts["t/b"].found([])
    oracle.check_wholes()


def a_state_fallen_back(oracle: Oracle) -> None:
    queue = oracle.accounts["q"]
    for state in (b"1", b"2"):
        queue.state_asked("s", state)
        queue.state_certain("s", state)
    queue.state_certain("s", b"1")


def a_wrong_count(oracle: Oracle) -> None:
    sent(oracle, "a").counted({Where.ACTIVE: 2}, [saw("a", 1)])


FAILURES: dict[Callable[[Oracle], None], str] = {
    lost: "a is lost",
    lost_where_some_may_be_gone: "c is lost",
    completed_and_there_again: "has to be nowhere, and is active",
    completed_and_still_there: "has to be nowhere, and is active",
    received_and_deleted_twice: "has to be nowhere, and is active",
    deferred_and_active: "has to be deferred, and is active",
    dead_lettered_and_lost: "is lost: it has to be dead-letter",
    found_once_and_lost_later: "is lost",
    not_found_and_there_later: "has to be nowhere, and is active",
    never_sent: "was never sent",
    another_body: "has another body",
    there_twice: "is there twice",
    a_duplicate: "has to be nowhere, and is active",
    a_number_reused: "which a had",
    another_number: "had number 1 and now has 2",
    a_number_that_fell: "though stored before b was sent",
    an_abandonment_forgotten: "was abandoned 1 to 1 times, not 0",
    before_it_was_due: "was due at 1000 and came at 999",
    cancelled_and_there: "has to be nowhere, and is active",
    not_scheduled_before_it_was_due: "is not scheduled though due",
    overtaken_in_its_session: "came before a of the same session",
    half_a_batch: "of one transfer ['a'] arrived and ['b'] did not",
    in_one_subscription_only: "of one transfer ['a'] arrived and ['a'] did not",
    a_state_fallen_back: "has state b'1'",
    a_wrong_count: "the count is",
}


@pytest.mark.parametrize("fail", FAILURES, ids=lambda fail: fail.__name__)
def test_a_failure_is_reported(oracle: Oracle, fail: Callable[[Oracle], None]) -> None:
    fail(oracle)
    assert any(FAILURES[fail] in line for line in oracle.wrong), oracle.wrong
