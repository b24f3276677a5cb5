"""S2: server busy that lasts counts towards failover, if the option `server_busy_counts_after` is set."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.backlog import FailureKind
from twinbus.pairing.decide import failover as f
from twinbus.pairing.decide import failover_events as e
from twinbus.pairing.decide.failover import EntityMode, FailoverDecision, SendRoute, advance

K = FailureKind
AFTER = 30.0
POLICY = f.FailoverPolicy(failover_interval=60, ping_interval=30, ping_jitter=0, server_busy_counts_after=AFTER)
HEALTHY = f.Entity("orders", POLICY, 0.0)
AT_ONCE = f.Entity("orders", replace(POLICY, failover_interval=0.0), 0.0)
BUSY = e.PrimarySendFailed(K.SERVER_BUSY)
SENT = e.PrimarySendSucceeded()
OPENED = e.PrimarySendSucceeded(with_message=False)
TIMED_OUT = e.PrimarySendFailed(K.TIMEOUT)


def after(entity: f.Entity, *events: tuple[float, e.Event]) -> f.Entity:
    for at, event in events:
        entity = advance(entity, event, at).entity
    return entity


def test_s2_without_the_option_server_busy_never_counts() -> None:
    entity = f.Entity("orders", f.FailoverPolicy(), 0.0)
    for at in (0.0, 3600.0, 1e9):
        assert advance(entity, BUSY, at) == FailoverDecision(entity, (e.RaiseToCaller(),))


def test_s2_the_first_server_busy_reaches_the_caller_and_starts_no_timer() -> None:
    entity, effects = advance(HEALTHY, BUSY, 10.0)
    assert effects == (e.RaiseToCaller(),)
    assert (entity.mode, entity.deadline, entity.busy_since) == (EntityMode.HEALTHY, None, 10.0)
    assert entity.awaits_success


@pytest.mark.parametrize(
    ("events", "at", "counts"),
    [
        ([(10.0, BUSY)], 39.999, False),
        ([(10.0, BUSY)], 40.0, True),
        ([(10.0, BUSY), (25.0, BUSY)], 40.0, True),
        ([(10.0, BUSY), (25.0, BUSY), (40.0 - 1e-9, BUSY)], 40.0, True),
        # Silence: nothing shows that the primary was busy between two answers that are further apart than 30 s.
        ([(10.0, BUSY)], 40.001, False),
        ([(10.0, BUSY)], 36_000.0, False),
        ([(10.0, BUSY), (25.0, BUSY)], 55.001, False),
        ([(10.0, BUSY), (25.0, BUSY), (56.0, BUSY)], 85.0, False),
        ([(10.0, BUSY), (25.0, BUSY), (56.0, BUSY)], 86.0, True),
        ([(10.0, BUSY), (39.0, SENT)], 40.0, False),
        ([(10.0, BUSY), (20.0, SENT), (21.0, BUSY)], 50.999, False),
        ([(10.0, BUSY), (20.0, SENT), (21.0, BUSY)], 51.0, True),
        # A link opens although the service is busy: only an accepted message shows that the service is not.
        ([(10.0, BUSY), (39.0, OPENED)], 40.0, True),
        ([(10.0, BUSY), (11.0, TIMED_OUT), (12.0, OPENED)], 40.0, True),
        # A force_restore of an entity that had only begun to fail.
        ([(10.0, BUSY), (11.0, TIMED_OUT), (12.0, e.RestoreForced())], 40.0, True),
    ],
)
def test_s2_server_busy_counts_when_no_message_was_accepted_for_so_long(
    events: list[tuple[float, e.Event]], at: float, counts: bool
) -> None:
    entity, effects = advance(after(HEALTHY, *events), BUSY, at)
    if counts:
        assert effects == (e.ArmFailoverTimer(at + 60.0), e.RaiseToCaller())
        assert (entity.mode, entity.cause) == (EntityMode.FAILING, K.SERVER_BUSY)
    else:
        assert effects == (e.RaiseToCaller(),)
        assert entity.mode is EntityMode.HEALTHY


def test_s2_s4_server_busy_that_counts_diverts_the_failing_call_with_interval_0() -> None:
    entity, effects = advance(after(AT_ONCE, (10.0, BUSY)), BUSY, 40.0)
    engaged = e.PublishNotice(e.FailoverEngaged("orders", 40.0, 1, K.SERVER_BUSY))
    assert effects == (engaged, e.ArmPing(70.0), e.SendToBacklog())
    assert entity.route is SendRoute.BACKLOG


def test_s2_an_accepted_message_ends_the_time_and_the_wait_for_a_success() -> None:
    entity, effects = advance(after(HEALTHY, (10.0, BUSY)), SENT, 20.0)
    assert effects == ()
    assert entity == HEALTHY
    assert not entity.awaits_success


def test_s2_server_busy_that_counted_stops_with_a_success_like_every_failure() -> None:
    failing = after(HEALTHY, (10.0, BUSY), (40.0, BUSY))
    entity, effects = advance(failing, SENT, 50.0)
    assert effects == (e.DisarmFailoverTimer(),)
    assert (entity.mode, entity.busy_since) == (EntityMode.HEALTHY, None)


def test_s14_server_busy_that_failed_over_fails_the_trial_without_an_error_to_the_caller() -> None:
    # A link ping restores the entity, because links open although the service is busy.
    events = ((10.0, BUSY), (40.0, BUSY), (70.0, e.PingDue()), (71.0, e.PingSucceeded(1)))
    trial = after(AT_ONCE, *events)
    assert trial.mode is EntityMode.ON_TRIAL
    entity, effects = advance(trial, e.PrimarySendFailed(K.SERVER_BUSY, 1), 72.0)
    assert entity.mode is EntityMode.FAILED_OVER
    assert effects[-1] == e.SendToBacklog()
    assert entity.ping_interval == 60.0


def test_s14_the_first_server_busy_on_trial_reaches_the_caller() -> None:
    trial = after(AT_ONCE, (10.0, TIMED_OUT), (40.0, e.PingDue()), (41.0, e.PingSucceeded(1)))
    entity, effects = advance(trial, e.PrimarySendFailed(K.SERVER_BUSY, 1), 42.0)
    assert (entity.mode, entity.busy_since, effects) == (EntityMode.ON_TRIAL, 42.0, (e.RaiseToCaller(),))


def test_s2_a_call_from_before_the_restore_shows_nothing_about_the_service_now() -> None:
    events = ((10.0, TIMED_OUT), (40.0, e.PingDue()), (41.0, e.PingSucceeded(1)))
    trial = after(AT_ONCE, *events)
    late = advance(trial, e.PrimarySendFailed(K.SERVER_BUSY, 0), 42.0).entity
    assert late == trial
    busy = after(trial, (43.0, e.PrimarySendFailed(K.SERVER_BUSY, 1)))
    assert advance(busy, e.PrimarySendSucceeded(0), 44.0).entity == busy
    assert advance(busy, e.PrimarySendFailed(K.SERVER_BUSY, 0), 90.0).effects == (e.SendToBacklog(),)


@pytest.mark.parametrize("hold", [False, True])
def test_s5_server_busy_while_failed_over_diverts_and_starts_no_time(hold: bool) -> None:
    over = after(HEALTHY, (5.0, e.FailoverForced(hold=hold)))
    assert advance(over, BUSY, 10.0) == FailoverDecision(over, (e.SendToBacklog(),))


def test_s2_failover_on_server_busy_counts_at_once_whatever_the_option_is() -> None:
    policy = replace(POLICY, counting=POLICY.counting | {K.SERVER_BUSY})
    assert advance(f.Entity("orders", policy, 0.0), BUSY, 1.0).entity.mode is EntityMode.FAILING


EVENTS = st.sampled_from(
    [BUSY, SENT, OPENED, TIMED_OUT, e.FailoverForced(), e.RestoreForced(), e.FailoverTimerFired(), e.PingDue()]
)


@given(st.lists(st.tuples(st.floats(0.0, 50.0), EVENTS), max_size=12))
def test_s2_without_the_option_the_machine_is_the_same_as_with_an_endless_one(
    steps: list[tuple[float, e.Event]],
) -> None:
    never = f.Entity("orders", replace(POLICY, server_busy_counts_after=None), 0.0)
    endless = f.Entity("orders", replace(POLICY, server_busy_counts_after=1e9), 0.0)
    now = 0.0
    for pause, event in steps:
        now += pause
        (never, mine), (endless, other) = advance(never, event, now), advance(endless, event, now)
        assert mine == other
        assert (never.mode, never.deadline, never.busy_since) == (endless.mode, endless.deadline, None)
