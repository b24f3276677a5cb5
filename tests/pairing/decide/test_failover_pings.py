"""The failover machine's pings, clause by clause: G2, G4."""

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
    RAISING,
    SENT,
    K,
    raising,
)
from twinbus.backlog import UNUSABLE_FAILURES, FailureKind
from twinbus.pairing.decide import failover as f
from twinbus.pairing.decide import failover_events as e
from twinbus.pairing.decide.failover import EntityMode, FailoverDecision, SendRoute, advance

# --- G2 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chance", "at"), [(0.0, 100.0), (0.5, 107.5), (0.999, 114.985)])
def test_g2_the_first_ping_comes_one_interval_after_failover_spread_by_chance(chance: float, at: float) -> None:
    entity, effects = advance(FAILING, e.FailoverTimerFired(), 70.0, chance)
    assert effects[-1] == e.ArmPing(pytest.approx(at))  # type: ignore[arg-type]  # approx stands in for the number
    assert entity.next_ping == pytest.approx(at)


@pytest.mark.parametrize("entity", [OVER, advance(GONE, SENT, 0.0).entity])
def test_g2_a_ping_is_sent_when_due_and_the_next_one_an_interval_later(entity: f.Entity) -> None:
    due = 131.0
    pinging, effects = advance(entity, e.PingDue(), due)
    assert effects == (e.SendPing(1),)
    assert (pinging.pinging, pinging.next_ping, pinging.mode) == (True, due + 30.0, entity.mode)
    waiting, effects = advance(pinging, e.PingFailed(1, K.TIMEOUT), due + 10.0)
    assert effects == (e.ArmPing(due + 30.0),)
    assert (waiting.pinging, waiting.mode, waiting.cause) == (False, entity.mode, entity.cause)


def test_g2_a_ping_that_is_due_early_waits_for_its_time() -> None:
    assert advance(OVER, e.PingDue(), 99.9) == FailoverDecision(OVER, (e.ArmPing(100.0),))


def test_g2_after_a_ping_longer_than_its_interval_the_next_one_follows_at_once() -> None:
    assert advance(PINGING, e.PingFailed(1, K.TIMEOUT), 145.0).effects == (e.ArmPing(145.0),)


def test_g2_there_are_never_two_pings_at_once() -> None:
    assert advance(PINGING, e.PingDue(), 200.0) == FailoverDecision(PINGING)


@pytest.mark.parametrize("entity", [PINGING, advance(GONE, e.PingDue(), 131.0).entity])
def test_g2_a_ping_that_succeeds_restores_and_stops_the_pings(entity: f.Entity) -> None:
    after, effects = advance(entity, e.PingSucceeded(1), 132.0)
    restored = e.Restored("orders", 132.0, 1, outage=62.0, diverted=0, forced=False)
    assert effects == (e.StopPings(), e.PublishNotice(restored))
    assert after == f.Entity("orders", POLICY, 132.0, EntityMode.ON_TRIAL, episode=1)
    assert after.route is SendRoute.PRIMARY


@pytest.mark.parametrize("event", [e.PingSucceeded(1), e.PingFailed(1, K.TIMEOUT), e.PingFailed(1, K.UNAUTHORIZED)])
def test_g2_a_ping_of_an_earlier_failover_tells_nothing_about_this_one(event: e.Event) -> None:
    back = advance(PINGING, e.RestoreForced(), 101.0).entity
    over = advance(back, e.FailoverForced(), 102.0).entity
    pinging = advance(over, e.PingDue(), 132.0).entity
    assert pinging.pinging
    for entity in (back, over, pinging):
        assert advance(entity, event, 133.0) == FailoverDecision(entity)


@pytest.mark.parametrize("event", [e.PingSucceeded(1), e.PingFailed(1, K.TIMEOUT), e.PingFailed(1, K.UNAUTHORIZED)])
def test_g2_an_answer_that_nobody_waits_for_is_passed_over(event: e.Event) -> None:
    assert advance(OVER, event, 133.0) == FailoverDecision(OVER)


@pytest.mark.parametrize("entity", [HEALTHY, FAILING, CLOSED])
def test_g2_a_ping_timer_that_was_stopped_too_late_does_no_harm(entity: f.Entity) -> None:
    assert advance(entity, e.PingDue(), 1e6) == FailoverDecision(entity)


# --- G4 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(UNUSABLE_FAILURES))
def test_g4_a_ping_that_finds_the_entity_gone_or_the_credential_refused_makes_it_unusable(kind: FailureKind) -> None:
    entity, effects = advance(PINGING, e.PingFailed(1, kind), 101.0)
    assert effects == (e.PublishNotice(e.PrimaryUnusable("orders", 101.0, 1, kind)), e.ArmPing(130.0))
    assert (entity.mode, entity.cause, entity.since, entity.pinging) == (EntityMode.UNUSABLE, kind, 101.0, False)
    assert entity.engaged == 70.0


def test_g4_unusable_is_gone_or_refused_and_nothing_else() -> None:
    assert {K.ENTITY_NOT_FOUND, K.UNAUTHORIZED, K.AUTHENTICATION} == UNUSABLE_FAILURES


@pytest.mark.parametrize("kind", sorted(set(FailureKind) - UNUSABLE_FAILURES))
def test_g4_any_other_failure_goes_on_pinging(kind: FailureKind) -> None:
    entity, effects = advance(PINGING, e.PingFailed(1, kind), 101.0)
    assert (entity.mode, entity.since, entity.cause) == (EntityMode.FAILED_OVER, 70.0, K.TIMEOUT)
    assert effects == (e.ArmPing(130.0),)


def test_g4_while_unusable_sends_still_divert_and_pings_go_on() -> None:
    assert GONE.route is SendRoute.BACKLOG
    pinging = advance(GONE, e.PingDue(), 130.0).entity
    for kind, cause in ((K.TIMEOUT, K.ENTITY_NOT_FOUND), (K.UNAUTHORIZED, K.UNAUTHORIZED)):
        entity, effects = advance(pinging, e.PingFailed(1, kind), 131.0)
        assert (entity.mode, entity.cause, entity.since) == (EntityMode.UNUSABLE, cause, 101.0)
        assert not entity.pinging
        assert effects == (e.ArmPing(160.0),)


@pytest.mark.parametrize("kind", sorted(UNUSABLE_FAILURES))
def test_g4_on_unusable_raise_makes_sends_raise(kind: FailureKind) -> None:
    entity = raising(kind)
    assert entity.route is SendRoute.UNUSABLE
    assert advance(entity, FAILED, 32.0) == FailoverDecision(entity, (e.RaiseUnusable(kind),))
    assert advance(entity, e.PrimarySendFailed(K.SERVER_BUSY), 32.0) == FailoverDecision(
        entity, (e.RaiseUnusable(kind),)
    )


def test_g4_on_unusable_raise_diverts_as_long_as_the_entity_is_only_failed_over() -> None:
    over = advance(f.Entity("orders", RAISING, 0.0), FAILED, 0.0).entity
    assert over.route is SendRoute.BACKLOG
    assert advance(over, FAILED, 1.0) == FailoverDecision(over, (e.SendToBacklog(),))
