"""The trial of an entity after a restore, clause by clause: S14."""

from __future__ import annotations

import pytest

from tests.pairing.decide.test_failover import AT_ONCE, FAILED, GONE, OVER, PINGING, POLICY, SENT, K
from twinbus.backlog import CALLER_FAILURES, COUNTING_FAILURES, FailureKind
from twinbus.pairing.decide import failover as f
from twinbus.pairing.decide import failover_events as e
from twinbus.pairing.decide.failover import EntityMode, FailoverDecision, SendRoute, advance

TRIAL = advance(OVER, e.RestoreForced(), 130.0).entity
"""On trial since 130.0, after one failover. `POLICY`: interval 60 s, pings every 30 s."""
HEALTHY_AGAIN = advance(TRIAL, SENT, 140.0).entity
BEFORE, AFTER = 0, 1
"""Restores when a call began: before the restore of `TRIAL`, and after it."""


def test_s14_both_ways_to_restore_begin_a_trial_on_which_senders_use_the_primary() -> None:
    pinged = advance(PINGING, e.PingSucceeded(1), 130.0).entity
    forced_from_unusable = advance(GONE, e.RestoreForced(), 130.0).entity
    assert pinged == forced_from_unusable == TRIAL
    assert (TRIAL.mode, TRIAL.route, TRIAL.since) == (EntityMode.ON_TRIAL, SendRoute.PRIMARY, 130.0)
    assert TRIAL.awaits_success


def test_s14_a_message_that_the_primary_accepts_ends_the_trial() -> None:
    entity, effects = advance(TRIAL, e.PrimarySendSucceeded(AFTER, True), 140.0)
    assert effects == (e.PublishNotice(e.TrialPassed("orders", 140.0, 1, lasted=10.0)),)
    assert entity == f.Entity("orders", POLICY, 140.0, episode=1)
    assert not entity.awaits_success


@pytest.mark.parametrize("success", [e.PrimarySendSucceeded(AFTER, False), e.PrimarySendSucceeded(BEFORE, True)])
def test_s14_opening_a_link_and_calls_from_before_the_restore_do_not_end_the_trial(
    success: e.PrimarySendSucceeded,
) -> None:
    assert advance(TRIAL, success, 140.0) == FailoverDecision(TRIAL)


@pytest.mark.parametrize("policy", [POLICY, AT_ONCE])
@pytest.mark.parametrize("kind", sorted(COUNTING_FAILURES))
def test_s14_a_counting_failure_engages_failover_at_once_and_the_call_diverts(
    policy: f.FailoverPolicy, kind: FailureKind
) -> None:
    trial = f.Entity("orders", policy, 130.0, EntityMode.ON_TRIAL, episode=1, diverted=7)
    entity, effects = advance(trial, e.PrimarySendFailed(kind, AFTER, True), 140.0)
    assert effects == (
        e.PublishNotice(e.TrialFailed("orders", 140.0, 1, kind, ping_interval=60.0)),
        e.PublishNotice(e.FailoverEngaged("orders", 140.0, 2, kind)),
        e.ArmPing(200.0),
        e.SendToBacklog(),
    )
    assert (entity.mode, entity.cause, entity.episode) == (EntityMode.FAILED_OVER, kind, 2)
    assert (entity.diverted, entity.failed_trials) == (0, 1)


@pytest.mark.parametrize("policy", [POLICY, AT_ONCE])
@pytest.mark.parametrize("origin", [(AFTER, False), (BEFORE, True), (BEFORE, False)])
def test_s14_opening_a_link_and_calls_from_before_the_restore_do_not_fail_the_trial_and_divert(
    policy: f.FailoverPolicy, origin: tuple[int, bool]
) -> None:
    trial = f.Entity("orders", policy, 130.0, EntityMode.ON_TRIAL, episode=1)
    failed = e.PrimarySendFailed(K.TIMEOUT, *origin)
    assert advance(trial, failed, 140.0) == FailoverDecision(trial, (e.SendToBacklog(),))


@pytest.mark.parametrize("kind", sorted(set(FailureKind) - COUNTING_FAILURES))
@pytest.mark.parametrize("origin", [(AFTER, True), (AFTER, False), (BEFORE, True)])
def test_s14_other_failures_reach_the_caller_and_leave_the_trial_open(
    kind: FailureKind, origin: tuple[int, bool]
) -> None:
    assert advance(TRIAL, e.PrimarySendFailed(kind, *origin), 140.0) == FailoverDecision(TRIAL, (e.RaiseToCaller(),))


def test_s14_failover_on_decides_what_fails_a_trial() -> None:
    policy = f.FailoverPolicy(counting=frozenset({K.SERVER_BUSY, *CALLER_FAILURES}))
    trial = f.Entity("orders", policy, 0.0, EntityMode.ON_TRIAL, episode=1)
    assert advance(trial, e.PrimarySendFailed(K.SERVER_BUSY, 1), 1.0).entity.mode is EntityMode.FAILED_OVER
    assert advance(trial, e.PrimarySendFailed(K.TIMEOUT, 1), 1.0) == FailoverDecision(trial, (e.RaiseToCaller(),))


# --- S5: calls from before the restore, whatever came of the trial ---------------------------------------------------


@pytest.mark.parametrize("policy", [POLICY, AT_ONCE])
def test_s5_a_call_from_before_the_failover_diverts_even_after_the_trial_and_counts_for_nothing(
    policy: f.FailoverPolicy,
) -> None:
    healthy = f.Entity("orders", policy, 140.0, episode=1)
    stale = e.PrimarySendFailed(K.TIMEOUT, BEFORE, True)
    assert advance(healthy, stale, 150.0) == FailoverDecision(healthy, (e.SendToBacklog(),))
    failing = advance(HEALTHY_AGAIN, FAILED, 150.0).entity
    assert advance(failing, stale, 1e6) == FailoverDecision(failing, (e.SendToBacklog(),))
    closed = advance(healthy, e.PairClosed(), 150.0).entity
    assert advance(closed, stale, 151.0) == FailoverDecision(closed, (e.RaiseToCaller(),))


def test_s5_a_call_that_began_on_the_trial_counts_after_the_trial() -> None:
    entity, effects = advance(HEALTHY_AGAIN, e.PrimarySendFailed(K.TIMEOUT, AFTER, True), 150.0)
    assert entity.mode is EntityMode.FAILING
    assert effects == (e.ArmFailoverTimer(210.0), e.RaiseToCaller())


def test_s3_a_success_of_any_call_stops_the_timer_also_after_a_restore() -> None:
    failing = advance(HEALTHY_AGAIN, FAILED, 150.0).entity
    for success in (e.PrimarySendSucceeded(BEFORE, True), e.PrimarySendSucceeded(AFTER, False)):
        assert advance(failing, success, 151.0).entity.mode is EntityMode.HEALTHY


# --- restores are numbered -------------------------------------------------------------------------------------------


def test_s14_restores_counts_the_failovers_that_have_ended() -> None:
    again = advance(TRIAL, FAILED, 140.0).entity
    back = advance(again, e.RestoreForced(), 150.0).entity
    assert [entity.restores for entity in (OVER, TRIAL, HEALTHY_AGAIN, again, back)] == [0, 1, 1, 1, 2]
    assert advance(back, e.PrimarySendSucceeded(1, True), 151.0) == FailoverDecision(back)


# --- pings -----------------------------------------------------------------------------------------------------------


def test_s14_each_failed_trial_doubles_the_ping_interval_up_to_30_minutes() -> None:
    entity, now = TRIAL, 1000.0
    waits, next_waits = [], []
    for _ in range(9):
        entity = advance(entity, FAILED, now).entity
        assert entity.next_ping is not None
        waits.append(entity.next_ping - now)
        pinging = advance(entity, e.PingDue(), entity.next_ping).entity
        assert pinging.next_ping is not None
        next_waits.append(pinging.next_ping - entity.next_ping)
        entity = advance(pinging, e.PingSucceeded(entity.episode), entity.next_ping).entity
    assert waits == next_waits == [60.0, 120.0, 240.0, 480.0, 960.0, 1800.0, 1800.0, 1800.0, 1800.0]


@pytest.mark.parametrize("interval", [1.0, 1800.0])
def test_s14_a_thousand_failed_trials_ping_every_30_minutes(interval: float) -> None:
    policy = f.FailoverPolicy(ping_interval=interval)
    assert f.Entity("orders", policy, 0.0, failed_trials=10_000).ping_interval == 1800.0
    assert f.Entity("orders", policy, 0.0).ping_interval == interval


def test_s14_the_doubled_interval_is_spread_by_chance_too() -> None:
    entity, effects = advance(TRIAL, FAILED, 140.0, chance=0.5)
    assert entity.next_ping == 140.0 + 60.0 * 1.25
    assert e.ArmPing(215.0) in effects


def test_s14_a_trial_that_passes_sets_the_ping_interval_back() -> None:
    doubled = advance(advance(TRIAL, FAILED, 140.0).entity, e.RestoreForced(), 150.0).entity
    assert doubled.failed_trials == 1
    passed = advance(doubled, SENT, 160.0).entity
    over = advance(passed, e.FailoverForced(), 170.0).entity
    assert (passed.failed_trials, over.next_ping) == (0, 200.0)


def test_s14_an_operator_who_ends_a_trial_does_not_change_the_ping_interval() -> None:
    doubled = advance(advance(TRIAL, FAILED, 140.0).entity, e.RestoreForced(), 150.0).entity
    for trial, wait in ((TRIAL, 30.0), (doubled, 60.0)):
        entity, effects = advance(trial, e.FailoverForced(), 160.0)
        engaged = e.PublishNotice(e.FailoverEngaged("orders", 160.0, trial.episode + 1, e.DrillCause.FORCED))
        assert effects == (engaged, e.ArmPing(160.0 + wait))
        assert entity.failed_trials == trial.failed_trials


# --- what else can happen on trial -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "event",
    [e.RestoreForced(), e.FailoverTimerFired(), e.PingDue(), e.PingSucceeded(1), e.PingFailed(1, K.UNAUTHORIZED)],
)
def test_s14_late_timers_pings_and_another_force_restore_do_not_touch_the_trial(event: e.Event) -> None:
    assert advance(TRIAL, event, 1e6) == FailoverDecision(TRIAL)


def test_c1_closing_ends_the_trial_without_an_event() -> None:
    step = advance(TRIAL, e.PairClosed(), 150.0)
    assert step == FailoverDecision(f.Entity("orders", POLICY, 150.0, EntityMode.CLOSED, episode=1))


def test_s11_the_notices_of_a_trial_have_the_names_of_the_docs() -> None:
    assert (e.TrialPassed.name, e.TrialFailed.name) == ("trial_passed", "trial_failed")
