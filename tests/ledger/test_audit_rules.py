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
    outcome,
)
from tests.tiers import budget
from twinbus.ledger import (
    AUDIT_WORDS,
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
    return {name: getattr(found, name).total() for name in AUDIT_WORDS if getattr(found, name)}


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


ELSEWHERE = "contoso/elsewhere"


def redirects(completion_is_recorded: bool) -> list[Entry]:
    """A redirect of an older version that was killed before it recorded the move."""
    copied, removed = (
        replace(op(stage), destination=ELSEWHERE) for stage in (Stage.RESUBMIT_BACKLOG, Stage.COMPLETE_BACKLOG)
    )
    return [divert(), moved(Move.DEAD_LETTERED), copied, removed if completion_is_recorded else intent(removed)]


def audited(entries: Sequence[Entry], there: MessageKey | None) -> tuple[AuditFindings, list[Entry]]:
    """Returns what an audit finds that sees this one message, and the entries with what the audit recorded."""
    reading = read_for_audit(entries, [f"deadletter-host-1-{WRITER.digits}"])
    shown = BacklogLook(Counter([] if there is None else [there]))
    found = compare_with_backlog(reading, shown, reading, shown, namespace=SECONDARY)
    return found, [*entries, *written(found)]


@pytest.mark.parametrize("completion_is_recorded", [False, True])
def test_l3_an_audit_records_a_redirect_that_was_killed_before_its_record(completion_is_recorded: bool) -> None:
    """Nothing is on the way for ever: the next audit decides about the message at its new destination."""
    there = MessageKey(ELSEWHERE, "a")
    found, entries = audited(redirects(completion_is_recorded), there)
    assert found.redirected == Counter({MESSAGE: 1})
    assert (Move.REDIRECTED, 1) in recorded(found)
    found, again = audited(entries, there)
    assert (words(found), again) == ({"there": 1}, entries)
    found, entries = audited(entries, None)
    assert found.absent == Counter({there: 1})
    assert read_for_audit(entries).balance.lost == Counter({there: 1})


@pytest.mark.parametrize("completion_is_recorded", [False, True])
def test_l3_a_redirect_without_a_record_that_came_home_is_delivered_after_an_audit(
    completion_is_recorded: bool,
) -> None:
    home = [replace(returned(), entity="elsewhere"), replace(completed(), destination=ELSEWHERE)]
    _, entries = audited([*redirects(completion_is_recorded), *home], None)
    balance = read_for_audit(entries).balance
    assert balance.delivered == balance.accepted == Counter({MessageKey(ELSEWHERE, "a"): 1})
    assert not balance.unconfirmed
    found, again = audited(entries, None)
    assert (words(found), again) == ({}, entries)


@pytest.mark.parametrize("missing", [["3 entries are missing: No space left on device"], []])
def test_l3_a_redirect_is_not_settled_if_entries_are_missing_or_the_looks_are_partial(missing: list[str]) -> None:
    reading = read_for_audit(redirects(completion_is_recorded=True))
    shown = BacklogLook(is_partial=not missing)
    found = compare_with_backlog(reading, shown, reading, shown, namespace=SECONDARY, missing=missing)
    assert words(found) == {"redirected" if missing else "not_looked_at": 1}
    assert recorded(found) == []


def test_l3_a_redirect_is_on_its_way_while_its_program_lives() -> None:
    """The program will record the move. Two records of one move would make two copies."""
    begun = intent(replace(op(Stage.RESUBMIT_BACKLOG), destination=ELSEWHERE))
    entries: list[Entry] = [divert(), moved(Move.DEAD_LETTERED), begun]
    reading = read_for_audit(entries)
    found = compare_with_backlog(reading, BacklogLook(), reading, BacklogLook(), namespace=SECONDARY)
    assert (words(found), recorded(found)) == ({"moving": 1}, [])
    assert audited(entries, None)[0].redirected == Counter({MESSAGE: 1})


def test_l3_a_first_look_does_not_settle_a_redirect() -> None:
    reading = read_for_audit(redirects(completion_is_recorded=True))
    found = compare_with_backlog(reading, BacklogLook(), reading, None, namespace=SECONDARY)
    assert found.needs_second_look
    assert (words(found), recorded(found)) == ({"redirected": 1}, [])


def test_l3_a_repeated_line_does_not_hide_a_redirect_without_a_record() -> None:
    """Another message with this id is at the new destination. Its resubmission is recorded, in a repeated line."""
    at_home = [replace(one, destination=ELSEWHERE) for one in (divert(), op(Stage.RESUBMIT_BACKLOG))]
    resubmitted = replace(moved(Move.RESUBMITTED), destination=ELSEWHERE)
    found, _ = audited([*at_home, resubmitted, resubmitted, *redirects(completion_is_recorded=True)], None)
    assert found.redirected == Counter({MESSAGE: 1})


@pytest.mark.parametrize("in_two_lines", [False, True])
def test_l3_a_redirect_that_was_refused_hides_no_loss(in_two_lines: bool) -> None:
    refused = replace(op(Stage.RESUBMIT_BACKLOG, "not_tried"), destination=ELSEWHERE)
    lines: list[Entry] = [intent(refused), outcome(refused, "not_tried")] if in_two_lines else [refused]
    found, _ = audited([divert(), moved(Move.DEAD_LETTERED), *lines], None)
    assert (words(found), recorded(found)) == ({"absent": 1}, [(LOST, 1)])


# --- dead letters that no syphon made --------------------------------------------------------------------------------


def dead_letter_seen(entries: Sequence[Entry], dead: Sequence[str] = ()) -> tuple[AuditFindings, list[Entry]]:
    """Returns what an audit finds that sees one dead letter, and the entries with what the audit recorded."""
    reading = read_for_audit(entries, dead)
    shown = BacklogLook(Counter([MESSAGE]), Counter([MESSAGE]))
    found = compare_with_backlog(reading, shown, reading, None, namespace=SECONDARY)
    return found, [*entries, *written(found)]


def test_l3_a_dead_letter_that_no_syphon_made_is_dead_lettered_after_one_look() -> None:
    found, entries = dead_letter_seen([divert()])
    assert (words(found), recorded(found)) == ({"there": 1}, [(Move.DEAD_LETTERED, 1)])
    assert read_for_audit(entries).balance.dead_lettered == Counter({MESSAGE: 1})
    assert recorded(dead_letter_seen(entries)[0]) == [], "it is recorded once"
    resubmitted = [*entries, op(Stage.RESUBMIT_BACKLOG), moved(Move.RESUBMITTED), completed()]
    assert read_for_audit(resubmitted).balance.in_backlog == Counter({MESSAGE: 1})
    again = read_for_audit([*resubmitted, moved(Move.DEAD_LETTERED)])
    assert again.balance.dead_lettered == Counter({MESSAGE: 1})


def test_l3_a_dead_letter_that_no_syphon_made_and_that_was_resubmitted_unseen_is_counted_right_by_the_next_audit() -> (
    None
):
    resubmitted: list[Entry] = [divert(), op(Stage.RESUBMIT_BACKLOG), moved(Move.RESUBMITTED), completed()]
    _, entries = dead_letter_seen([*resubmitted, moved(Move.DEAD_LETTERED)])
    assert read_for_audit(entries).balance.dead_lettered == Counter({MESSAGE: 1})
    in_the_queue = compared(resubmitted, 1)
    entries = [*resubmitted, *written(in_the_queue)]
    assert read_for_audit(entries).balance.in_backlog == Counter({MESSAGE: 1})
    later = read_for_audit([*entries, moved(Move.DEAD_LETTERED)])
    assert later.balance.dead_lettered == Counter({MESSAGE: 1})


def test_l3_a_dead_letter_that_was_never_accepted_or_was_delivered_is_not_recorded() -> None:
    assert recorded(dead_letter_seen([])[0]) == []
    assert recorded(dead_letter_seen([divert(), returned(), completed()])[0]) == []


def test_l3_a_dead_letter_that_no_syphon_made_proves_nothing_about_another_copy() -> None:
    entries: list[Entry] = [divert(), divert(), SENT_ON]
    dead = [f"syphon-host-1-{WRITER.digits}"]
    assert read_for_audit(entries, dead).balance.unknown == Counter({MESSAGE: 1})
    _, entries = dead_letter_seen(entries, dead)
    found = read_for_audit(entries, dead).balance
    assert (found.dead_lettered, found.unknown) == (Counter({MESSAGE: 1}), Counter({MESSAGE: 1}))


def test_l5_a_dead_letter_that_an_audit_with_a_fast_clock_saw_is_no_proof_against_a_later_doubt() -> None:
    _, entries = dead_letter_seen([divert()])
    late = [replace(one, at=one.at + 10**6) if one is entries[-1] else one for one in entries]
    resubmitted = [*late, op(Stage.RESUBMIT_BACKLOG), moved(Move.RESUBMITTED), completed()]
    found = read_for_audit([*resubmitted, SENT_ON], [f"syphon-host-1-{WRITER.digits}"]).balance
    assert found.unknown == Counter({MESSAGE: 1})


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
            destination=one.message.destination, reason=one.reason, broker_at=one.broker_at,
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
    audits = dead_letters = 0
    for seed in range(first, first + 10):
        world = AuditedWorld(seed, thieves=False)
        for found, balance in world.run(STEPS):
            assert not found.absent, f"seed {seed}: nothing was taken"
            assert not balance.lost, f"seed {seed}: nothing was lost"
        found, balance = world.rest()
        assert not found.absent
        assert not balance.lost
        assert world.only_dead() <= {message.id for message in balance.dead_lettered}, f"seed {seed}"
        dead_letters += len(world.only_dead())
        audits += world.audits
    assert dead_letters > 0
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
