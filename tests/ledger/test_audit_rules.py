"""The rules of the audit: single cases, and worlds that know the truth while everything happens at once (L3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.ledger.audited_world import (
    DESTINATION,
    QUEUE,
    SECONDARY,
    AuditedWorld,
    Writer,
    intent,
    movement,
    operation,
)
from tests.tiers import budget
from twinbus.ledger import (
    AuditFindings,
    BacklogLook,
    Entry,
    MessageKey,
    Move,
    Movement,
    Operation,
    Stage,
    compare_with_backlog,
    grouped_moves,
    id_text,
    id_value,
    read_for_audit,
)

STEPS = 1500
MESSAGE = MessageKey(DESTINATION, "a")
WRITER = Writer("0" * 16)
FOUND, LOST, REAPPEARED, AGAIN = Move.FOUND, Move.LOST, Move.REAPPEARED, Move.POSSIBLE_DUPLICATE


def op(stage: Stage, result: str = "ok") -> Operation:
    return operation(WRITER, stage, "a", result)


def divert(result: str = "ok") -> Operation:
    return op(Stage.SEND_BACKLOG, result)


def returned(result: str = "ok") -> Operation:
    return op(Stage.RETURN_PRIMARY, result)


def completed(result: str = "ok") -> Operation:
    return op(Stage.COMPLETE_BACKLOG, result)


def moved(move: Move) -> Movement:
    return movement(WRITER, move, "a")


def look(copies: int) -> BacklogLook:
    return BacklogLook(Counter({MESSAGE: copies} if copies else {}))


def compared(
    before: Sequence[Entry],
    first: int,
    later: Sequence[Entry] = (),
    second: int | None = None,
    *,
    missing: Sequence[str] = (),
    dead: Sequence[str] = (),
) -> AuditFindings:
    """Compare a ledger with looks that show this number of copies. `later`: entries that the second reading has too."""
    after = read_for_audit([*before, *later], dead)
    shown = None if second is None else look(second)
    return compare_with_backlog(
        read_for_audit(before, dead), look(first), after, shown, namespace=SECONDARY, missing=missing
    )


def words(found: AuditFindings) -> dict[str, int]:
    names = ("there", "absent", "come_again", "unconfirmed", "found", "moving", "not_looked_at")
    return {name: getattr(found, name).total() for name in names if getattr(found, name)}


def recorded(found: AuditFindings) -> list[tuple[Move, int]]:
    return [(one.move, one.copies) for one in found.moves]


SENT_ON = intent(returned())
RESUBMIT = intent(op(Stage.RESUBMIT_BACKLOG))


@pytest.mark.parametrize(
    ("before", "looks", "later", "expected", "moves"),
    [
        pytest.param([divert()], (1, None), [], {"there": 1}, [], id="believed there and seen"),
        pytest.param([divert()], (0, None), [], {"absent": 1}, [], id="not seen: a second look is needed"),
        pytest.param([divert()], (0, 0), [], {"absent": 1}, [(LOST, 1)], id="not seen twice"),
        pytest.param([divert()], (0, 1), [], {"there": 1}, [], id="seen in the second look"),
        pytest.param([divert()], (1, 0), [], {"there": 1}, [], id="seen in the first look"),
        pytest.param([divert(), moved(Move.DEAD_LETTERED)], (0, 0), [], {"absent": 1}, [(LOST, 1)], id="dead letter"),
        pytest.param([], (0, 0), [divert()], {}, [], id="sent after the looks"),
        pytest.param([divert()], (0, 0), [returned()], {}, [], id="delivered meanwhile"),
        pytest.param([divert()], (0, 0), [SENT_ON], {"moving": 1}, [], id="on its way to the primary"),
        pytest.param([divert(), SENT_ON], (0, 0), [], {"moving": 1}, [], id="on its way since before"),
        pytest.param(
            [divert(), moved(Move.DEAD_LETTERED)], (0, 0), [RESUBMIT], {"moving": 1}, [], id="being resubmitted"
        ),
        pytest.param([divert()], (0, 0), [moved(Move.KEPT)], {"moving": 1}, [], id="an entry was added"),
        pytest.param(
            [divert(), returned("unknown")], (0, 0), [], {"absent": 1}, [(LOST, 1)], id="not seen, perhaps delivered"
        ),
        pytest.param([divert(), returned("server_busy")], (0, 0), [], {"absent": 1}, [(LOST, 1)], id="refused"),
        pytest.param([divert(), divert()], (1, 1), [], {"there": 1, "absent": 1}, [(LOST, 1)], id="one of two copies"),
        pytest.param(
            [divert("unknown"), divert()], (0, 0), [], {"absent": 1}, [(LOST, 2)], id="perhaps stored twice, not seen"
        ),
        pytest.param([divert("unknown"), divert()], (1, 1), [], {"there": 1}, [], id="perhaps stored twice, seen once"),
        pytest.param(
            [divert("unknown"), divert()], (2, 2), [], {"there": 1, "come_again": 1}, [(AGAIN, 1)], id="stored twice"
        ),
        pytest.param([divert(), returned()], (1, None), [], {"come_again": 1}, [], id="seen though delivered"),
        pytest.param([divert(), returned()], (1, 0), [], {}, [], id="was about to be completed"),
        pytest.param([divert(), returned()], (1, 1), [completed()], {}, [], id="completed meanwhile"),
        pytest.param([divert(), returned()], (0, 0), [], {}, [], id="delivered, and the completion is not booked"),
        pytest.param(
            [divert(), returned(), completed()], (1, 1), [], {"come_again": 1}, [(AGAIN, 1)], id="completed in vain"
        ),
        pytest.param(
            [divert(), returned(), moved(AGAIN)], (1, 1), [], {"come_again": 1}, [], id="a duplicate that is known"
        ),
        pytest.param([], (1, 1), [], {"unconfirmed": 1}, [(FOUND, 1)], id="never accepted"),
        pytest.param([divert("unknown")], (1, 1), [], {"unconfirmed": 1}, [], id="a send that timed out"),
        pytest.param([], (1, 1), [divert()], {"there": 1}, [], id="accepted meanwhile"),
        pytest.param([divert(), completed("unknown")], (1, 1), [], {"found": 1}, [(FOUND, 1)], id="unknown, and seen"),
        pytest.param(
            [divert(), completed("unknown")], (1, None), [], {"found": 1}, [(FOUND, 1)], id="unknown, and seen once"
        ),
        pytest.param([divert(), completed("unknown")], (0, 0), [], {}, [], id="unknown, and not seen"),
        pytest.param([], (1, None), [], {"unconfirmed": 1}, [], id="never accepted, perhaps not yet"),
        pytest.param(
            [divert(), moved(LOST)], (1, 1), [], {"found": 1}, [(REAPPEARED, 1), (FOUND, 1)], id="lost, and seen"
        ),
        pytest.param([divert(), moved(LOST)], (0, 0), [], {}, [], id="lost, and not seen"),
    ],
)
def test_l3_what_a_ledger_and_the_looks_say_together(
    before: list[Entry],
    looks: tuple[int, int | None],
    later: list[Entry],
    expected: dict[str, int],
    moves: list[tuple[Move, int]],
) -> None:
    found = compared(before, looks[0], later, looks[1])
    assert words(found) == expected
    assert recorded(found) == moves


def test_l3_while_entries_are_missing_an_absent_message_is_not_called_lost() -> None:
    found = compared([divert()], 0, (), 0, missing=["3 entries are missing: No space left on device"])
    assert words(found) == {"absent": 1}
    assert recorded(found) == []
    found = compared([divert(), moved(LOST)], 1, (), 1, missing=["a segment is not there"])
    assert recorded(found) == [(REAPPEARED, 1), (FOUND, 1)]


@pytest.mark.parametrize("completion_is_recorded", [False, True])
def test_l3_a_redirect_that_was_killed_before_it_was_recorded_is_no_loss(completion_is_recorded: bool) -> None:
    elsewhere = "contoso/elsewhere"
    before: list[Entry] = [divert(), moved(Move.DEAD_LETTERED)]
    killed = [replace(op(stage), destination=elsewhere) for stage in (Stage.RESUBMIT_BACKLOG, Stage.COMPLETE_BACKLOG)]
    last = killed[1] if completion_is_recorded else intent(killed[1])
    reading = read_for_audit([*before, killed[0], last], [f"deadletter-host-1-{WRITER.digits}"])
    shown = BacklogLook(Counter({MessageKey(elsewhere, "a"): 1}))
    found = compare_with_backlog(reading, shown, reading, shown, namespace=SECONDARY)
    assert found.moving == Counter({MESSAGE: 1})
    assert LOST not in [one.move for one in found.moves]
    recorded_at_last = replace(moved(Move.REDIRECTED), source=DESTINATION, destination=elsewhere)
    reading = read_for_audit([*before, *killed, recorded_at_last])
    found = compare_with_backlog(reading, BacklogLook(), reading, BacklogLook(), namespace=SECONDARY)
    assert found.absent == Counter({MessageKey(elsewhere, "a"): 1}), "the redirected message itself can be lost"


def test_l3_a_look_that_may_not_show_everything_makes_no_loss() -> None:
    reading = read_for_audit([divert()])
    partial = BacklogLook(is_partial=True)
    found = compare_with_backlog(reading, partial, reading, look(0), namespace=SECONDARY)
    assert (words(found), recorded(found)) == ({"not_looked_at": 1}, [])


def test_l3_a_message_on_another_namespace_is_not_called_lost() -> None:
    entry = divert()
    elsewhere = replace(divert(), namespace="rome")
    found = compared([elsewhere], 0, (), 0)
    assert words(found) == {"not_looked_at": 1}
    assert recorded(found) == []
    assert read_for_audit([entry, elsewhere]).queues("PARIS") == {QUEUE}


def test_l3_a_delivery_in_flight_of_a_dead_writer_does_not_hide_that_the_message_is_gone() -> None:
    dead = [f"syphon-host-1-{WRITER.digits}"]
    found = compared([divert(), SENT_ON], 0, (), 0, dead=dead)
    assert "moving" not in words(found)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_l3_after_an_audit_the_balance_agrees_with_what_was_seen(copies: int) -> None:
    """A second audit finds nothing more to record, and nothing that was seen is lost."""
    histories: list[list[Entry]] = [
        [divert(), moved(LOST)],
        [divert(), completed()],
        [divert(), returned("unknown"), completed()],
        [divert(), completed("unknown"), completed("unknown")],
        [divert(), divert(), completed(), moved(LOST)],
        [divert(), divert("unknown"), returned("unknown"), completed("unknown"), completed()],
    ]
    for entries in histories:
        found = compared(entries, copies, (), copies)
        after = [*entries, *written(found)]
        assert not read_for_audit(after).balance.lost or copies < read_for_audit(after).balance.accepted.total()
        assert recorded(compared(after, copies, (), copies)) == []


def written(found: AuditFindings) -> list[Entry]:
    return [
        Movement(
            at=next(WRITER.clock), id=WRITER.new_id(), move=one.move, ids=tuple(ids), source=one.source,
            destination=one.message.destination, reason=one.reason,
        )
        for one, ids in grouped_moves(found.moves)
    ]  # fmt: skip


def test_l3_moves_are_grouped_into_entries_of_bounded_size() -> None:
    before = [operation(WRITER, Stage.SEND_BACKLOG, f"n{number}") for number in range(7)]
    none = BacklogLook()
    found = compare_with_backlog(read_for_audit(before), none, read_for_audit(before), none, namespace=SECONDARY)
    groups = [ids for _, ids in grouped_moves(found.moves, 3)]
    assert [len(ids) for ids in groups] == [3, 3, 1]
    assert sorted(one for ids in groups for one in ids) == [f"n{number}" for number in range(7)]
    assert {one.source for one in found.moves} == {f"{SECONDARY}/{QUEUE}"}


@pytest.mark.parametrize("text", ["a", "", "a:b", "string:uuid:x", "ulong:5", "binary:00ff", "None"])
def test_the_text_of_an_id_leads_back_to_the_id(text: str) -> None:
    assert id_text(id_value(text)) == text


def names(counter: Counter[MessageKey]) -> Counter[str]:
    return Counter({message.id: count for message, count in counter.items()})


@pytest.mark.parametrize("first", range(0, budget(20, 100, 4000), 10))
def test_l3_no_interleaving_makes_a_false_loss(first: int) -> None:
    audits = 0
    for seed in range(first, first + 10):
        world = AuditedWorld(seed, thieves=False)
        for found, balance in world.run(STEPS):
            assert not found.absent, f"seed {seed}: nothing was taken"
            assert not balance.lost, f"seed {seed}: nothing was lost"
        found, balance = world.rest()
        assert not found.absent
        assert not balance.lost
        audits += world.audits
    assert audits > 50


@pytest.mark.parametrize("first", range(0, budget(20, 100, 4000), 10))
def test_l3_with_thieves_only_lost_messages_are_called_lost_and_at_rest_every_one(first: int) -> None:
    named = 0
    for seed in range(first, first + 10):
        world = AuditedWorld(seed, thieves=True)
        for _, balance in world.run(STEPS):
            assert names(balance.lost) <= world.truly_lost(), f"seed {seed}: a false loss"
        world.rest()
        # If one id has several copies, an audit may find one of them first, and miss the others in the next audit.
        _, balance = world.rest()
        lost = names(balance.lost)
        assert lost <= world.truly_lost(), f"seed {seed}: a false loss at rest"
        assert world.lost_by_number() - lost - names(balance.unknown) == Counter(), f"seed {seed}: a missed loss"
        named += lost.total()
    assert named > 20
