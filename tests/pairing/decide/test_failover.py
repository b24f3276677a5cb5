"""The failover machine, clause by clause."""

from __future__ import annotations

import pytest

from twinbus.backlog import CALLER_FAILURES, COUNTING_FAILURES, FAILURE_RULES, FailureKind
from twinbus.pairing.decide import failover as f
from twinbus.pairing.decide import failover_events as e
from twinbus.pairing.decide.failover import EntityMode, FailoverDecision, SendRoute, advance

K = FailureKind
POLICY = f.FailoverPolicy(failover_interval=60, ping_interval=30, ping_jitter=0.5)
AT_ONCE = f.FailoverPolicy(failover_interval=0, ping_interval=30)
RAISING = f.FailoverPolicy(failover_interval=0, ping_interval=30, divert_while_unusable=False)
FAILED = e.PrimarySendFailed(K.TIMEOUT)
SENT = e.PrimarySendSucceeded()
HEALTHY = f.Entity("orders", POLICY, 0.0)
FAILING = advance(HEALTHY, FAILED, 10.0).entity
OVER = advance(FAILING, e.FailoverTimerFired(), 70.0).entity
PINGING = advance(OVER, e.PingDue(), 100.0).entity
GONE = advance(PINGING, e.PingFailed(1, K.ENTITY_NOT_FOUND), 101.0).entity
CLOSED = advance(OVER, e.PairClosed(), 80.0).entity


def raising(kind: FailureKind = K.ENTITY_NOT_FOUND) -> f.Entity:
    over = advance(f.Entity("orders", RAISING, 0.0), FAILED, 0.0).entity
    return advance(advance(over, e.PingDue(), 30.0).entity, e.PingFailed(1, kind), 31.0).entity


# --- S1, S3 ----------------------------------------------------------------------------------------------------------


def test_s1_a_healthy_entity_sends_to_the_primary_and_a_success_changes_nothing() -> None:
    assert HEALTHY.route is SendRoute.PRIMARY
    assert HEALTHY.deadline is None
    step = advance(HEALTHY, SENT, 5.0)
    assert step == FailoverDecision(HEALTHY)
    assert step.entity is HEALTHY


@pytest.mark.parametrize("kind", sorted(COUNTING_FAILURES))
def test_s3_the_first_counting_failure_starts_the_timer(kind: FailureKind) -> None:
    entity, effects = advance(HEALTHY, e.PrimarySendFailed(kind), 10.0)
    assert effects == (e.ArmFailoverTimer(70.0), e.RaiseToCaller())
    assert (entity.mode, entity.since, entity.cause, entity.deadline) == (EntityMode.FAILING, 10.0, kind, 70.0)
    assert entity.route is SendRoute.PRIMARY


@pytest.mark.parametrize("kind", sorted(set(FailureKind) - COUNTING_FAILURES))
def test_s2_a_failure_that_does_not_count_reaches_the_caller_and_starts_nothing(kind: FailureKind) -> None:
    assert advance(HEALTHY, e.PrimarySendFailed(kind), 10.0) == FailoverDecision(HEALTHY, (e.RaiseToCaller(),))
    assert advance(FAILING, e.PrimarySendFailed(kind), 11.0) == FailoverDecision(FAILING, (e.RaiseToCaller(),))


def test_s3_further_failures_reach_the_caller_and_do_not_move_the_timer() -> None:
    later = advance(FAILING, e.PrimarySendFailed(K.DETACHED), 69.9)
    assert later == FailoverDecision(FAILING, (e.RaiseToCaller(),))


def test_s3_any_success_stops_the_timer() -> None:
    entity, effects = advance(FAILING, SENT, 69.9)
    assert effects == (e.DisarmFailoverTimer(),)
    assert entity == f.Entity("orders", POLICY, 69.9)


def test_s3_after_a_success_the_timer_starts_anew_with_the_next_failure() -> None:
    entity, _ = advance(advance(FAILING, SENT, 69.0).entity, e.PrimarySendFailed(K.INTERNAL), 100.0)
    assert (entity.deadline, entity.cause) == (160.0, K.INTERNAL)


def test_s3_the_timer_fires_without_traffic() -> None:
    entity, effects = advance(FAILING, e.FailoverTimerFired(), 70.0)
    assert effects == (e.PublishNotice(e.FailoverEngaged("orders", 70.0, 1, K.TIMEOUT)), e.ArmPing(100.0))
    assert (entity.mode, entity.since, entity.engaged, entity.deadline) == (EntityMode.FAILED_OVER, 70.0, 70.0, None)
    assert (entity.cause, entity.episode, entity.next_ping, entity.diverted) == (K.TIMEOUT, 1, 100.0, 0)
    assert entity.route is SendRoute.BACKLOG


def test_s3_a_timer_that_fires_early_is_armed_again() -> None:
    assert advance(FAILING, e.FailoverTimerFired(), 69.999) == FailoverDecision(FAILING, (e.ArmFailoverTimer(70.0),))


def test_s3_a_failure_after_the_deadline_need_not_wait_for_the_timer() -> None:
    entity, effects = advance(FAILING, e.PrimarySendFailed(K.DETACHED), 70.0)
    engaged = e.PublishNotice(e.FailoverEngaged("orders", 70.0, 1, K.TIMEOUT))
    assert effects == (e.DisarmFailoverTimer(), engaged, e.ArmPing(100.0), e.SendToBacklog())
    assert entity.mode is EntityMode.FAILED_OVER


@pytest.mark.parametrize("entity", [HEALTHY, OVER, GONE, CLOSED])
def test_s3_a_timer_that_was_disarmed_too_late_does_no_harm(entity: f.Entity) -> None:
    assert advance(entity, e.FailoverTimerFired(), 1e6) == FailoverDecision(entity)


def test_s2_failover_on_decides_what_counts() -> None:
    busy = f.Entity("orders", f.FailoverPolicy(counting=frozenset({K.SERVER_BUSY})), 0.0)
    assert advance(busy, e.PrimarySendFailed(K.SERVER_BUSY), 1.0).entity.mode is EntityMode.FAILING
    assert advance(busy, FAILED, 1.0) == FailoverDecision(busy, (e.RaiseToCaller(),))


def test_s2_a_fault_of_the_caller_counts_where_it_was_asked_for() -> None:
    strict = f.Entity("orders", f.FailoverPolicy(failover_interval=0, counting=frozenset({K.UNKNOWN})), 0.0)
    entity, effects = advance(strict, e.PrimarySendFailed(K.UNKNOWN), 1.0)
    assert (entity.mode, effects[-1]) == (EntityMode.FAILED_OVER, e.SendToBacklog())


# --- S4, S5 ----------------------------------------------------------------------------------------------------------


def test_s4_with_interval_0_the_failing_call_itself_diverts() -> None:
    entity, effects = advance(f.Entity("orders", AT_ONCE, 0.0), e.PrimarySendFailed(K.DNS), 10.0)
    assert effects == (e.PublishNotice(e.FailoverEngaged("orders", 10.0, 1, K.DNS)), e.ArmPing(40.0), e.SendToBacklog())
    assert (entity.mode, entity.cause, entity.engaged) == (EntityMode.FAILED_OVER, K.DNS, 10.0)


def test_s4_with_an_interval_above_0_the_failing_call_does_not_divert() -> None:
    policy = f.FailoverPolicy(failover_interval=0.001)
    assert advance(f.Entity("orders", policy, 0.0), FAILED, 0.0).effects[-1] == e.RaiseToCaller()


@pytest.mark.parametrize("entity", [OVER, PINGING, GONE])
@pytest.mark.parametrize("kind", sorted(set(FailureKind) - CALLER_FAILURES))
def test_s5_a_call_in_flight_that_fails_after_failover_diverts(entity: f.Entity, kind: FailureKind) -> None:
    assert advance(entity, e.PrimarySendFailed(kind), 102.0) == FailoverDecision(entity, (e.SendToBacklog(),))


@pytest.mark.parametrize("entity", [OVER, GONE, raising()])
@pytest.mark.parametrize("kind", sorted(CALLER_FAILURES))
def test_s5_a_call_in_flight_that_fails_by_its_own_fault_raises(entity: f.Entity, kind: FailureKind) -> None:
    assert advance(entity, e.PrimarySendFailed(kind), 102.0) == FailoverDecision(entity, (e.RaiseToCaller(),))


def test_s5_with_interval_0_a_call_in_flight_diverts_without_a_second_failover() -> None:
    over = advance(f.Entity("orders", AT_ONCE, 0.0), FAILED, 10.0).entity
    assert advance(over, FAILED, 11.0) == FailoverDecision(over, (e.SendToBacklog(),))


@pytest.mark.parametrize("entity", [OVER, GONE])
def test_s5_a_late_success_neither_restores_nor_errors(entity: f.Entity) -> None:
    assert advance(entity, SENT, 102.0) == FailoverDecision(entity)


# --- S11 -------------------------------------------------------------------------------------------------------------


def test_s11_force_failover_diverts_a_healthy_entity_and_pings_it() -> None:
    entity, effects = advance(HEALTHY, e.FailoverForced(), 5.0)
    assert effects == (e.PublishNotice(e.FailoverEngaged("orders", 5.0, 1, e.DrillCause.FORCED)), e.ArmPing(35.0))
    assert (entity.mode, entity.route, entity.cause) == (EntityMode.FAILED_OVER, SendRoute.BACKLOG, e.DrillCause.FORCED)


def test_s11_force_failover_takes_the_place_of_a_timer_that_runs() -> None:
    entity, effects = advance(FAILING, e.FailoverForced(), 20.0)
    engaged = e.PublishNotice(e.FailoverEngaged("orders", 20.0, 1, e.DrillCause.FORCED))
    assert effects == (e.DisarmFailoverTimer(), engaged, e.ArmPing(50.0))
    assert (entity.deadline, entity.cause) == (None, e.DrillCause.FORCED)


@pytest.mark.parametrize("entity", [OVER, GONE, CLOSED])
def test_s11_force_failover_of_what_does_not_send_to_the_primary_changes_nothing(entity: f.Entity) -> None:
    assert advance(entity, e.FailoverForced(), 102.0) == FailoverDecision(entity)


@pytest.mark.parametrize("entity", [OVER, PINGING, GONE])
def test_s11_force_restore_sends_to_the_primary_again(entity: f.Entity) -> None:
    diverting = advance(entity, e.BacklogAccepted(7), 101.0).entity
    after, effects = advance(diverting, e.RestoreForced(), 130.0)
    restored = e.Restored("orders", 130.0, 1, outage=60.0, diverted=7, forced=True)
    assert effects == (e.StopPings(), e.PublishNotice(restored))
    assert after == f.Entity("orders", POLICY, 130.0, EntityMode.ON_TRIAL, episode=1, diverted=7)
    assert after.route is SendRoute.PRIMARY


def test_s11_force_restore_stops_a_timer_that_runs() -> None:
    assert advance(FAILING, e.RestoreForced(), 20.0) == FailoverDecision(
        f.Entity("orders", POLICY, 20.0), (e.DisarmFailoverTimer(),)
    )


@pytest.mark.parametrize("entity", [HEALTHY, CLOSED])
def test_s11_force_restore_of_what_is_not_failed_over_changes_nothing(entity: f.Entity) -> None:
    assert advance(entity, e.RestoreForced(), 102.0) == FailoverDecision(entity)


def test_s11_a_drill_says_that_it_is_one() -> None:
    assert str(e.DrillCause.FORCED) == "forced"


def test_s11_the_notices_have_the_names_of_the_spec() -> None:
    names = [e.FailoverEngaged.name, e.Restored.name, e.PrimaryUnusable.name]
    assert names == ["failover_engaged", "restored", "primary_unusable"]


@pytest.mark.parametrize("entity", [HEALTHY, FAILING, OVER, GONE, CLOSED])
def test_s11_diverted_messages_are_counted_in_any_mode(entity: f.Entity) -> None:
    once = advance(entity, e.BacklogAccepted(), 110.0)
    assert (once.entity.diverted, once.effects) == (entity.diverted + 1, ())
    assert advance(once.entity, e.BacklogAccepted(5), 111.0).entity.diverted == entity.diverted + 6


def test_s11_each_failover_counts_its_own_messages_and_has_its_own_number() -> None:
    first = advance(OVER, e.BacklogAccepted(3), 80.0).entity
    back = advance(first, e.RestoreForced(), 90.0).entity
    again = advance(back, e.FailoverForced(), 95.0).entity
    assert (again.episode, again.diverted, again.engaged, again.since) == (2, 0, 95.0, 95.0)


# --- C -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entity", "effects"),
    [
        (HEALTHY, ()),
        (FAILING, (e.DisarmFailoverTimer(),)),
        (OVER, (e.StopPings(),)),
        (PINGING, (e.StopPings(),)),
        (GONE, (e.StopPings(),)),
        (CLOSED, ()),
    ],
)
def test_c1_closing_stops_timers_and_pings(entity: f.Entity, effects: tuple[e.Effect, ...]) -> None:
    step = advance(entity, e.PairClosed(), 80.0)
    assert step.effects == effects
    assert step.entity == f.Entity("orders", POLICY, 80.0, EntityMode.CLOSED, episode=entity.episode)
    assert (step.entity.next_ping, step.entity.deadline, step.entity.pinging) == (None, None, False)


def test_c3_a_closed_entity_refuses_sends_and_its_calls_in_flight_raise() -> None:
    assert CLOSED.route is SendRoute.CLOSED
    for kind in FailureKind:
        assert advance(CLOSED, e.PrimarySendFailed(kind), 81.0) == FailoverDecision(CLOSED, (e.RaiseToCaller(),))


def test_c3_with_interval_0_a_call_in_flight_of_a_closed_entity_raises() -> None:
    closed = advance(f.Entity("orders", AT_ONCE, 0.0), e.PairClosed(), 1.0).entity
    assert advance(closed, FAILED, 2.0) == FailoverDecision(closed, (e.RaiseToCaller(),))


# --- the table -------------------------------------------------------------------------------------------------------

EVENTS: tuple[e.Event, ...] = (
    *(e.PrimarySendSucceeded(restores, sent) for restores in (0, 1, 2) for sent in (True, False)),
    *(e.PrimarySendFailed(kind, r, sent) for kind in FailureKind for r in (None, 0) for sent in (True, False)),
    e.FailoverTimerFired(),
    e.PingDue(),
    *(e.PingSucceeded(episode) for episode in (0, 1, 2)),
    *(e.PingFailed(episode, kind) for episode in (1, 2) for kind in FailureKind),
    e.BacklogAccepted(2),
    e.FailoverForced(),
    e.FailoverForced(hold=True),
    e.RestoreForced(),
    e.FailoverKnown(K.TIMEOUT, engaged=-10.0, next_ping=0.0),
    e.FailoverKnown(e.DrillCause.FORCED, engaged=-10.0, hold=True),
    e.PairClosed(),
)


def test_every_cell_of_the_table_is_decided() -> None:
    assert set(f.TABLE) == {(mode, trigger) for mode in EntityMode for trigger in f.Trigger}


def test_a_walk_through_every_state_that_can_be_reached_meets_every_cell_that_can_be_met() -> None:
    met = set().union(*(walk(policy) for policy in (POLICY, AT_ONCE, RAISING)))
    t = f.Trigger
    timers = {(mode, t.TIMER_DUE) for mode in EntityMode if mode is not EntityMode.FAILING}
    answers = (t.PING_DUE, t.PING_BUSY, t.PING_SUCCEEDED, t.PING_REFUSED, t.PING_FAILED)
    diverting = (EntityMode.FAILED_OVER, EntityMode.UNUSABLE)
    pings = {(mode, answer) for mode in EntityMode if mode not in diverting for answer in answers}
    elsewhere = {(mode, t.FAILED_WITHOUT_MESSAGE) for mode in EntityMode if mode is not EntityMode.ON_TRIAL}
    # A timer is due only where one runs, a ping only where there are pings. A trial has no interval.
    assert set(f.TABLE) - met == timers | pings | elsewhere | {(EntityMode.ON_TRIAL, t.FAILED_COUNTING)}


def walk(policy: f.FailoverPolicy) -> set[tuple[EntityMode, f.Trigger]]:
    """Apply every event, early and late, to every reachable state. Differences in times and counts are ignored."""
    waiting = [(f.Entity("orders", policy, 0.0), 0.0)]
    seen = set[tuple[EntityMode, bool, int]]()
    met = set[tuple[EntityMode, f.Trigger]]()
    while waiting:
        entity, now = waiting.pop()
        for event in EVENTS:
            for later in (now + 1.0, now + 1000.0):
                met.add((entity.mode, f.trigger_of(entity, event, later)))
                after, effects = advance(entity, event, later)
                check_step(entity, event, after, effects)
                shape = (after.mode, after.pinging, after.episode)
                if after.episode <= 2 and shape not in seen:
                    seen.add(shape)
                    waiting.append((after, later))
    return met


def check_step(before: f.Entity, event: e.Event, after: f.Entity, effects: tuple[e.Effect, ...]) -> None:
    over = after.mode in (EntityMode.FAILED_OVER, EntityMode.UNUSABLE)
    assert (after.deadline is not None) is (after.mode is EntityMode.FAILING)
    assert (after.next_ping is not None) is over
    assert (after.engaged is not None) is (over or after.mode is EntityMode.HELD)
    assert over or not after.pinging
    answers = [effect for effect in effects if isinstance(effect, e.RaiseToCaller | e.SendToBacklog | e.RaiseUnusable)]
    assert len(answers) == isinstance(event, e.PrimarySendFailed)
    if before.mode is EntityMode.FAILING and after.mode is not EntityMode.FAILING:
        assert e.DisarmFailoverTimer() in effects or isinstance(event, e.FailoverTimerFired)
    if before.next_ping is not None and after.next_ping is None:
        assert e.StopPings() in effects
    if over and not after.pinging and (before.pinging or before.next_ping is None):
        assert any(isinstance(effect, e.ArmPing) for effect in effects)


def test_every_kind_of_failure_is_judged() -> None:
    assert set(FAILURE_RULES) == set(FailureKind)
