"""Deciding whether a syphon empties the backlog (Y1)."""

from __future__ import annotations

import pytest

from twinbus.backlog import CREDENTIAL_REFUSED, FailureKind
from twinbus.pairing.decide import backlog_watch as w
from twinbus.pairing.decide.backlog_watch import BacklogWatch, OldestMessage, QueueStatus, WatchDecision, advance
from twinbus.pairing.decide.failover_events import PairClosed

NEW = BacklogWatch(300.0, 1800.0)
FIRST_CHECK = w.ScheduleCheck(300.0)


def after(state: BacklogWatch, *events: tuple[float, w.Event]) -> WatchDecision:
    """Return the last decision."""
    decision = WatchDecision(state)
    for now, event in events:
        decision = advance(decision.watch, event, now)
    return decision


def checked(
    state: BacklogWatch, now: float, *peeks: w.QueuePeeked | w.PeekFailed
) -> tuple[BacklogWatch, list[w.Effect]]:
    """Run one check. Returns the state after it and all effects but the peeks."""
    effects: list[w.Effect] = []
    for event in (w.CheckDue(), *peeks, w.CheckFinished()):
        decision = advance(state, event, now)
        state = decision.watch
        effects += decision.effects
    return state, [effect for effect in effects if not isinstance(effect, w.PeekQueues)]


def oldest(seconds: float, number: int = 7, *, failed_over: bool = False) -> w.QueuePeeked:
    return w.QueuePeeked("b0", OldestMessage(number, seconds, "orders", failed_over))


def unattended(state: BacklogWatch) -> list[bool]:
    return [status.unattended for status in state.queues]


DIVERTED = after(NEW, (0.0, w.MessageDiverted("b0"))).watch
ALERT = w.RaiseAlert("b0", "orders", 1801.0)


def test_y1_the_first_diverted_message_schedules_a_check_and_the_next_change_nothing() -> None:
    assert advance(NEW, w.MessageDiverted("b0"), 0.0) == WatchDecision(DIVERTED, (FIRST_CHECK,))
    assert NEW.needs_event_for("b0")
    assert not DIVERTED.needs_event_for("b0")
    assert DIVERTED.needs_event_for("b1")
    assert advance(DIVERTED, w.MessageDiverted("b1"), 5.0).effects == ()
    # The gauges show these before the first peek.
    assert [(status.oldest_age, status.unattended) for status in DIVERTED.queues] == [(0.0, False)]


def test_y1_a_check_is_one_peek_for_each_queue_and_the_next_is_an_interval_later() -> None:
    state = advance(DIVERTED, w.MessageDiverted("b1"), 5.0).watch
    decision = advance(state, w.CheckDue(), 300.0)
    assert decision.effects == (w.PeekQueues((w.PeekPage("b0", 1, 1), w.PeekPage("b1", 1, 1))),)
    assert advance(decision.watch, w.CheckDue(), 300.0).effects == ()
    assert checked(state, 300.0, oldest(290.0))[1] == [w.ScheduleCheck(600.0)]


def test_y1_an_interval_of_0_disables_checks() -> None:
    never = BacklogWatch(0.0, 1800.0)
    assert not never.needs_event_for("b0")
    assert advance(never, w.MessageDiverted("b0"), 0.0) == WatchDecision(never)


def test_y1_checks_stop_when_the_queues_are_empty_and_start_again_with_the_next_message() -> None:
    state, effects = checked(DIVERTED, 300.0, w.QueuePeeked("b0", None))
    assert effects == []
    assert state.queues == (QueueStatus("b0", empty=True),)
    assert advance(state, w.CheckDue(), 600.0).effects == ()
    assert state.needs_event_for("b0")
    assert advance(state, w.MessageDiverted("b0"), 700.0).effects == (w.ScheduleCheck(1000.0),)


def test_y1_a_message_seen_in_a_queue_that_was_empty_is_watched() -> None:
    state, _ = checked(DIVERTED, 300.0, w.QueuePeeked("b0", None))
    assert [status.empty for status in state.queues] == [True]
    assert [status.empty for status in advance(state, oldest(1.0), 301.0).watch.queues] == [False]


def test_y1_a_message_that_arrives_during_a_check_is_checked_for_again() -> None:
    checking = after(DIVERTED, (300.0, w.CheckDue())).watch
    assert checking.needs_event_for("b0")
    decision = after(
        checking, (301.0, w.MessageDiverted("b0")), (302.0, w.QueuePeeked("b0", None)), (302.0, w.CheckFinished())
    )
    assert decision.effects == (w.ScheduleCheck(602.0),)
    assert checked(decision.watch, 602.0, w.QueuePeeked("b0", None))[1] == []


@pytest.mark.parametrize(("seconds", "alerts"), [(1800.0, []), (1801.0, [ALERT])])
def test_y1_a_message_that_waits_too_long_raises_an_alert(seconds: float, alerts: list[w.Effect]) -> None:
    state, effects = checked(DIVERTED, 2000.0, oldest(seconds))
    assert effects == [*alerts, w.ScheduleCheck(2300.0)]
    assert unattended(state) == [bool(alerts)]
    assert state.queues[0].oldest_age == seconds


def test_y1_the_alert_is_raised_once_until_somebody_takes_the_message() -> None:
    state, _ = checked(DIVERTED, 2000.0, oldest(1801.0))
    state, effects = checked(state, 2300.0, oldest(2101.0))
    assert (effects, unattended(state)) == ([w.ScheduleCheck(2600.0)], [True])
    state, effects = checked(state, 2600.0, oldest(2400.0, 8))
    assert (effects, unattended(state)) == ([w.ScheduleCheck(2900.0)], [False])
    state, effects = checked(state, 4401.0, oldest(4201.0, 8))
    assert effects[0] == w.RaiseAlert("b0", "orders", 4201.0)


def test_y1_an_empty_queue_is_not_unattended() -> None:
    state, _ = checked(DIVERTED, 2000.0, oldest(1801.0))
    assert unattended(checked(state, 2300.0, w.QueuePeeked("b0", None))[0]) == [False]


def test_y1_the_waiting_time_of_a_message_starts_when_its_entity_is_restored() -> None:
    state, effects = checked(DIVERTED, 2000.0, oldest(1900.0, failed_over=True))
    assert (effects, unattended(state)) == ([w.ScheduleCheck(2300.0)], [False])
    state, _ = checked(state, 3800.0, oldest(3700.0))
    assert unattended(state) == [False]
    assert unattended(checked(state, 3801.0, oldest(3701.0))[0]) == [True]


def test_y1_a_failover_in_between_raises_no_second_alert() -> None:
    state, _ = checked(DIVERTED, 2000.0, oldest(1801.0))
    state, _ = checked(state, 2300.0, oldest(2101.0, failed_over=True))
    assert unattended(state) == [False]
    state, effects = checked(state, 9000.0, oldest(8801.0))
    assert (effects, unattended(state)) == ([w.ScheduleCheck(9300.0)], [True])


def test_y1_messages_that_a_syphon_deferred_raise_no_alert_and_are_skipped() -> None:
    state, _ = checked(DIVERTED, 2000.0, oldest(1801.0))
    state, effects = checked(state, 2300.0, w.QueuePeeked("b0", None, 8))
    assert (effects, unattended(state)) == ([w.ScheduleCheck(2600.0)], [False])
    assert advance(state, w.CheckDue(), 2600.0).effects == (w.PeekQueues((w.PeekPage("b0", 8, 2),)),)
    state, _ = checked(state, 2600.0, oldest(2400.0, 9))
    assert unattended(state) == [False]
    assert advance(state, w.CheckDue(), 2900.0).effects == (w.PeekQueues((w.PeekPage("b0", 9, 1),)),)


def test_y1_the_page_grows_while_it_holds_only_deferred_messages_up_to_a_limit() -> None:
    state = DIVERTED
    for number in range(12):
        state, _ = checked(state, 300.0 * number, w.QueuePeeked("b0", None, number + 2))
    assert state.queues[0].page_size == 256


def test_y1_a_queue_that_was_empty_is_peeked_from_where_its_last_message_was() -> None:
    state, _ = checked(DIVERTED, 300.0, oldest(10.0, 7))
    state, _ = checked(state, 600.0, w.QueuePeeked("b0", None))
    state = advance(state, w.MessageDiverted("b0"), 700.0).watch
    assert advance(state, w.CheckDue(), 1000.0).effects == (w.PeekQueues((w.PeekPage("b0", 7, 1),)),)


def test_y1_a_message_that_arrives_during_a_check_matters_for_that_check_only() -> None:
    checking = after(DIVERTED, (300.0, w.CheckDue()), (301.0, w.MessageDiverted("b0"))).watch
    state = after(checking, (302.0, w.PeekFailed("b0", FailureKind.TIMEOUT)), (302.0, w.CheckFinished())).watch
    assert checked(state, 602.0, w.QueuePeeked("b0", None))[1] == []


def test_y1_a_peek_at_an_unknown_queue_changes_nothing() -> None:
    assert advance(DIVERTED, w.QueuePeeked("b9", None), 300.0) == WatchDecision(DIVERTED)


@pytest.mark.parametrize("kind", sorted(CREDENTIAL_REFUSED))
def test_y1_a_secondary_that_refuses_listen_is_reported_once_and_checked_no_more(kind: FailureKind) -> None:
    state, effects = checked(DIVERTED, 300.0, w.PeekFailed("b0", kind), w.PeekFailed("b1", kind))
    assert effects == [w.ReportNoListenRight("b0", kind)]
    assert state.queues == ()
    assert not state.needs_event_for("b0")


@pytest.mark.parametrize("kind", sorted(set(FailureKind) - CREDENTIAL_REFUSED))
def test_y1_a_peek_that_fails_changes_nothing_and_the_next_check_is_scheduled(kind: FailureKind) -> None:
    before, _ = checked(DIVERTED, 2000.0, oldest(1801.0))
    state, effects = checked(before, 2300.0, w.PeekFailed("b0", kind))
    assert (state, effects) == (before, [w.ScheduleCheck(2600.0)])


def test_c3_a_closed_watch_checks_no_more() -> None:
    closed = advance(after(DIVERTED, (300.0, w.CheckDue())).watch, PairClosed(), 301.0).watch
    for event in (w.MessageDiverted("b0"), oldest(1801.0), w.CheckFinished(), w.CheckDue()):
        assert advance(closed, event, 302.0) == WatchDecision(closed)
    assert not closed.needs_event_for("b0")
