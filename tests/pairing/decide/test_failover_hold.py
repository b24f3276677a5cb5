"""A failover that an operator holds, clause by clause: S15."""

from __future__ import annotations

import pytest

from tests.pairing.decide.test_failover import (
    CLOSED,
    FAILED,
    FAILING,
    GONE,
    HEALTHY,
    OVER,
    PINGING,
    POLICY,
    SENT,
    K,
    raising,
)
from tests.pairing.decide.test_failover_trial import TRIAL
from twinbus.backlog import CALLER_FAILURES, FailureKind
from twinbus.pairing.decide import failover as f
from twinbus.pairing.decide import failover_events as e
from twinbus.pairing.decide.failover import EntityMode, FailoverDecision, SendRoute, advance

HOLD = e.FailoverForced(hold=True)
HELD = advance(HEALTHY, HOLD, 5.0).entity
"""Held since 5.0."""


@pytest.mark.parametrize(("entity", "before"), [(HEALTHY, ()), (FAILING, (e.DisarmFailoverTimer(),)), (TRIAL, ())])
def test_s15_a_hold_diverts_and_sends_no_ping(entity: f.Entity, before: tuple[e.Effect, ...]) -> None:
    held, effects = advance(entity, HOLD, 200.0)
    episode = entity.episode + 1
    engaged = e.PublishNotice(e.FailoverEngaged("orders", 200.0, episode, e.DrillCause.FORCED))
    assert effects == (*before, engaged, e.PublishNotice(e.FailoverHeld("orders", 200.0, episode)))
    assert (held.mode, held.route, held.cause) == (EntityMode.HELD, SendRoute.BACKLOG, e.DrillCause.FORCED)
    assert (held.since, held.engaged, held.next_ping, held.deadline) == (200.0, 200.0, None, None)
    assert (held.diverted, held.episode, held.restores) == (0, episode, entity.restores)


@pytest.mark.parametrize("entity", [OVER, PINGING, GONE, raising()])
def test_s15_an_entity_that_is_failed_over_already_is_held_and_its_pings_stop(entity: f.Entity) -> None:
    counted = advance(entity, e.BacklogAccepted(3), 150.0).entity
    held, effects = advance(counted, HOLD, 200.0)
    assert effects == (e.StopPings(), e.PublishNotice(e.FailoverHeld("orders", 200.0, 1)))
    assert (held.mode, held.route, held.since) == (EntityMode.HELD, SendRoute.BACKLOG, 200.0)
    assert (held.engaged, held.episode, held.diverted) == (entity.engaged, 1, 3)
    assert (held.next_ping, held.pinging, held.cause) == (None, False, entity.cause)


@pytest.mark.parametrize(
    "event",
    [
        SENT,
        e.PingDue(),
        e.PingSucceeded(1),
        e.PingFailed(1, K.ENTITY_NOT_FOUND),
        e.FailoverTimerFired(),
        e.FailoverForced(),
        HOLD,
    ],
)
def test_s15_nothing_but_force_restore_ends_a_hold(event: e.Event) -> None:
    assert advance(HELD, event, 1e6) == FailoverDecision(HELD)


@pytest.mark.parametrize("kind", sorted(FailureKind))
@pytest.mark.parametrize("restores", [None, 0])
def test_s5_s15_a_call_in_flight_that_fails_while_held_diverts_unless_it_is_its_callers_fault(
    kind: FailureKind, restores: int | None
) -> None:
    effect = e.RaiseToCaller() if kind in CALLER_FAILURES else e.SendToBacklog()
    assert advance(HELD, e.PrimarySendFailed(kind, restores), 10.0) == FailoverDecision(HELD, (effect,))


def test_s5_s15_a_call_from_before_an_earlier_restore_diverts_while_held_too() -> None:
    again = advance(TRIAL, HOLD, 200.0).entity
    assert advance(again, e.PrimarySendFailed(K.TIMEOUT, 0), 201.0) == FailoverDecision(again, (e.SendToBacklog(),))


def test_s15_force_restore_ends_the_hold_and_begins_a_trial() -> None:
    diverting = advance(HELD, e.BacklogAccepted(2), 8.0).entity
    entity, effects = advance(diverting, e.RestoreForced(), 65.0)
    restored = e.Restored("orders", 65.0, 1, outage=60.0, diverted=2, forced=True)
    assert effects == (e.PublishNotice(restored),)
    assert entity == f.Entity("orders", POLICY, 65.0, EntityMode.ON_TRIAL, episode=1, diverted=2)


def test_s14_s15_a_failed_trial_after_a_hold_fails_over_with_pings() -> None:
    trial = advance(HELD, e.RestoreForced(), 65.0).entity
    entity, effects = advance(trial, FAILED, 70.0)
    assert entity.mode is EntityMode.FAILED_OVER
    assert e.ArmPing(130.0) in effects


def test_s14_s15_a_hold_on_trial_does_not_count_as_a_failed_trial() -> None:
    assert advance(TRIAL, HOLD, 200.0).entity.failed_trials == 0


def test_c1_closing_a_held_entity_stops_nothing() -> None:
    step = advance(HELD, e.PairClosed(), 9.0)
    assert step == FailoverDecision(f.Entity("orders", POLICY, 9.0, EntityMode.CLOSED, episode=1))
    assert advance(CLOSED, HOLD, 9.0) == FailoverDecision(CLOSED)


def test_s11_the_notice_of_a_hold_has_the_name_of_the_docs() -> None:
    assert e.FailoverHeld.name == "failover_held"
