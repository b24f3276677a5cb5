"""Whether anybody brings the backlog home, decided (Y1)."""

from __future__ import annotations

import pytest

from twinbus.backlog import CREDENTIAL_REFUSED, FailureKind
from twinbus.pairing.decide import backlog_watch as a
from twinbus.pairing.decide.backlog_watch import Attendance, Oldest, Step, Watch, advance

NEW = Attendance(300.0, 1800.0)
LATER = a.ArmLook(300.0)


def after(state: Attendance, *events: tuple[float, a.Event]) -> Step:
    """The last of the steps."""
    step = Step(state)
    for now, event in events:
        step = advance(step.attendance, event, now)
    return step


def looked(state: Attendance, now: float, *seen: a.QueueSeen | a.QueueNotSeen) -> tuple[Attendance, list[a.Effect]]:
    """One look, and all that came of it."""
    effects: list[a.Effect] = []
    for event in (a.LookDue(), *seen, a.LookEnded()):
        step = advance(state, event, now)
        state = step.attendance
        effects += step.effects
    return state, [effect for effect in effects if not isinstance(effect, a.Look)]


def oldest(seconds: float, number: int = 7, *, failed_over: bool = False) -> a.QueueSeen:
    return a.QueueSeen("b0", Oldest(number, seconds, "orders", failed_over))


def unattended(state: Attendance) -> list[bool]:
    return [watch.unattended for watch in state.watches]


USED = after(NEW, (0.0, a.QueueUsed("b0"))).attendance
TOLD = a.Emit(a.BacklogUnattended("b0", 2000.0, "orders", 1801.0))


def test_y1_the_first_diverted_message_begins_the_looking_and_the_next_say_nothing_new() -> None:
    assert advance(NEW, a.QueueUsed("b0"), 0.0) == Step(USED, (LATER,))
    assert NEW.has_news("b0")
    assert not USED.has_news("b0")
    assert USED.has_news("b1")
    assert advance(USED, a.QueueUsed("b1"), 5.0).effects == ()


def test_y1_a_look_is_one_peek_for_each_queue_and_the_next_is_an_interval_later() -> None:
    state = advance(USED, a.QueueUsed("b1"), 5.0).attendance
    step = advance(state, a.LookDue(), 300.0)
    assert step.effects == (a.Look((a.Peek("b0", 1, 1), a.Peek("b1", 1, 1))),)
    assert advance(step.attendance, a.LookDue(), 300.0).effects == ()
    assert looked(state, 300.0, oldest(290.0))[1] == [a.ArmLook(600.0)]


def test_y1_an_interval_of_0_never_looks() -> None:
    never = Attendance(0.0, 1800.0)
    assert not never.has_news("b0")
    assert advance(never, a.QueueUsed("b0"), 0.0) == Step(never)


def test_y1_the_looking_stops_when_the_queues_are_seen_empty_and_begins_anew() -> None:
    state, effects = looked(USED, 300.0, a.QueueSeen("b0", None))
    assert effects == []
    assert state.watches == (Watch("b0", empty=True),)
    assert advance(state, a.LookDue(), 600.0).effects == ()
    assert state.has_news("b0")
    assert advance(state, a.QueueUsed("b0"), 700.0).effects == (a.ArmLook(1000.0),)


def test_y1_what_comes_while_a_queue_is_peeked_at_is_looked_for_again() -> None:
    looking = after(USED, (300.0, a.LookDue())).attendance
    assert looking.has_news("b0")
    step = after(looking, (301.0, a.QueueUsed("b0")), (302.0, a.QueueSeen("b0", None)), (302.0, a.LookEnded()))
    assert step.effects == (a.ArmLook(602.0),)
    assert looked(step.attendance, 602.0, a.QueueSeen("b0", None))[1] == []


@pytest.mark.parametrize(("seconds", "tells"), [(1800.0, []), (1801.0, [TOLD])])
def test_y1_a_message_that_waits_longer_than_it_may_is_told(seconds: float, tells: list[a.Effect]) -> None:
    state, effects = looked(USED, 2000.0, oldest(seconds))
    assert effects == [*tells, a.ArmLook(2300.0)]
    assert unattended(state) == [bool(tells)]
    assert state.watches[0].oldest == seconds


def test_y1_it_is_told_once_until_somebody_takes_it() -> None:
    state, _ = looked(USED, 2000.0, oldest(1801.0))
    state, effects = looked(state, 2300.0, oldest(2101.0))
    assert (effects, unattended(state)) == ([a.ArmLook(2600.0)], [True])
    state, effects = looked(state, 2600.0, oldest(2400.0, 8))
    assert (effects, unattended(state)) == ([a.ArmLook(2900.0)], [False])
    state, effects = looked(state, 4401.0, oldest(4201.0, 8))
    assert effects[0] == a.Emit(a.BacklogUnattended("b0", 4401.0, "orders", 4201.0))


def test_y1_it_is_attended_again_when_the_queue_is_empty() -> None:
    state, _ = looked(USED, 2000.0, oldest(1801.0))
    assert unattended(looked(state, 2300.0, a.QueueSeen("b0", None))[0]) == [False]


def test_y1_while_its_entity_is_failed_over_a_message_cannot_go_home_and_then_it_has_its_time() -> None:
    state, effects = looked(USED, 2000.0, oldest(1900.0, failed_over=True))
    assert (effects, unattended(state)) == ([a.ArmLook(2300.0)], [False])
    state, _ = looked(state, 3800.0, oldest(3700.0))
    assert unattended(state) == [False]
    assert unattended(looked(state, 3801.0, oldest(3701.0))[0]) == [True]


def test_y1_a_failover_in_between_is_not_told_again() -> None:
    state, _ = looked(USED, 2000.0, oldest(1801.0))
    state, _ = looked(state, 2300.0, oldest(2101.0, failed_over=True))
    assert unattended(state) == [False]
    state, effects = looked(state, 9000.0, oldest(8801.0))
    assert (effects, unattended(state)) == ([a.ArmLook(9300.0)], [True])


def test_y1_what_a_syphon_has_put_aside_is_attended_and_looked_past() -> None:
    state, _ = looked(USED, 2000.0, oldest(1801.0))
    state, effects = looked(state, 2300.0, a.QueueSeen("b0", None, 8))
    assert (effects, unattended(state)) == ([a.ArmLook(2600.0)], [False])
    assert advance(state, a.LookDue(), 2600.0).effects == (a.Look((a.Peek("b0", 8, 2),)),)
    state, _ = looked(state, 2600.0, oldest(2400.0, 9))
    assert unattended(state) == [False]
    assert advance(state, a.LookDue(), 2900.0).effects == (a.Look((a.Peek("b0", 9, 1),)),)


def test_y1_more_are_peeked_at_once_the_more_are_put_aside_up_to_a_limit() -> None:
    state = USED
    for number in range(12):
        state, _ = looked(state, 300.0 * number, a.QueueSeen("b0", None, number + 2))
    assert state.watches[0].count == 256


@pytest.mark.parametrize("kind", sorted(CREDENTIAL_REFUSED))
def test_y1_a_secondary_that_refuses_listen_is_told_once_and_looked_at_no_more(kind: FailureKind) -> None:
    state, effects = looked(USED, 300.0, a.QueueNotSeen("b0", kind), a.QueueNotSeen("b1", kind))
    assert effects == [a.TellRefused("b0", kind)]
    assert state.watches == ()
    assert not state.has_news("b0")


@pytest.mark.parametrize("kind", sorted(set(FailureKind) - CREDENTIAL_REFUSED))
def test_y1_a_look_that_fails_changes_nothing_and_the_next_comes(kind: FailureKind) -> None:
    before, _ = looked(USED, 2000.0, oldest(1801.0))
    state, effects = looked(before, 2300.0, a.QueueNotSeen("b0", kind))
    assert (state, effects) == (before, [a.ArmLook(2600.0)])


def test_c3_closed_it_looks_no_more() -> None:
    closed = advance(after(USED, (300.0, a.LookDue())).attendance, a.PairClosed(), 301.0).attendance
    for event in (a.QueueUsed("b0"), oldest(1801.0), a.LookEnded(), a.LookDue()):
        assert advance(closed, event, 302.0) == Step(closed)
    assert not closed.has_news("b0")
