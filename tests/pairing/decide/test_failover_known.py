"""A failover or a hold that another process knows of, clause by clause: S16, S15."""

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
    K,
    raising,
)
from tests.pairing.decide.test_failover_hold import HELD
from tests.pairing.decide.test_failover_trial import TRIAL
from twinbus.pairing.decide import failover as f
from twinbus.pairing.decide import failover_events as e
from twinbus.pairing.decide.failover import EntityMode, FailoverDecision, SendRoute, advance

KNOWN = e.FailoverKnown(K.DNS, engaged=150.0, next_ping=210.0)
HOLD = e.FailoverKnown(e.DrillCause.FORCED, engaged=150.0, hold=True)
PINGS_LATE = f.FailoverPolicy(ping_interval=1800)


@pytest.mark.parametrize(("entity", "before"), [(HEALTHY, ()), (FAILING, (e.DisarmFailoverTimer(),))])
def test_s16_a_known_failover_is_taken_over_with_its_cause_its_age_and_its_next_ping(
    entity: f.Entity, before: tuple[e.Effect, ...]
) -> None:
    over, effects = advance(entity, KNOWN, 200.0, chance=0.9)
    engaged = e.PublishNotice(e.FailoverEngaged("orders", 200.0, 1, K.DNS))
    taken_over = e.PublishNotice(e.FailoverTakenOver("orders", 200.0, 1, outage=50.0))
    assert effects == (*before, engaged, taken_over, e.ArmPing(210.0))
    assert (over.mode, over.route, over.cause) == (EntityMode.FAILED_OVER, SendRoute.BACKLOG, K.DNS)
    assert (over.since, over.engaged, over.next_ping, over.deadline) == (200.0, 150.0, 210.0, None)
    assert (over.episode, over.diverted, over.failed_trials, over.pinging) == (1, 0, 0, False)


def test_s16_a_ping_that_is_due_is_sent_at_once() -> None:
    over, effects = advance(HEALTHY, e.FailoverKnown(K.DNS, engaged=150.0, next_ping=190.0), 200.0)
    assert effects[-1] == e.ArmPing(200.0)
    assert advance(over, e.PingDue(), 200.0).effects == (e.SendPing(1),)


def test_s16_the_next_ping_is_due_after_one_interval_at_the_latest_whatever_the_other_clock_says() -> None:
    late = e.FailoverKnown(K.DNS, engaged=150.0, next_ping=9e9)
    assert advance(HEALTHY, late, 200.0).entity.next_ping == 230.0
    doubled = e.FailoverKnown(K.DNS, engaged=150.0, next_ping=9e9, failed_trials=2)
    assert advance(HEALTHY, doubled, 200.0).entity.next_ping == 320.0


def test_s16_a_failover_that_engaged_in_the_future_engages_now() -> None:
    over, effects = advance(HEALTHY, e.FailoverKnown(K.DNS, engaged=250.0, next_ping=210.0), 200.0)
    assert over.engaged == 200.0
    assert e.PublishNotice(e.FailoverTakenOver("orders", 200.0, 1, outage=0.0)) in effects


def test_s14_s16_failed_trials_of_the_other_process_count() -> None:
    over = advance(HEALTHY, e.FailoverKnown(K.DNS, engaged=150.0, next_ping=200.0, failed_trials=3), 200.0).entity
    assert (over.failed_trials, over.ping_interval) == (3, 240.0)
    assert advance(over, e.PingDue(), 200.0).entity.next_ping == 440.0


@pytest.mark.parametrize("entity", [OVER, PINGING, GONE, raising(), HELD, TRIAL, CLOSED])
def test_s16_an_entity_that_knows_better_itself_takes_no_failover_over(entity: f.Entity) -> None:
    assert advance(entity, KNOWN, 200.0) == FailoverDecision(entity)


@pytest.mark.parametrize(("entity", "before"), [(HEALTHY, ()), (FAILING, (e.DisarmFailoverTimer(),)), (TRIAL, ())])
def test_s15_s16_a_known_hold_is_taken_over_without_pings(entity: f.Entity, before: tuple[e.Effect, ...]) -> None:
    held, effects = advance(entity, HOLD, 200.0)
    episode = entity.episode + 1
    engaged = e.PublishNotice(e.FailoverEngaged("orders", 200.0, episode, e.DrillCause.FORCED))
    taken_over = e.PublishNotice(e.FailoverTakenOver("orders", 200.0, episode, outage=50.0))
    assert effects == (*before, engaged, taken_over, e.PublishNotice(e.FailoverHeld("orders", 200.0, episode)))
    assert (held.mode, held.route, held.cause) == (EntityMode.HELD, SendRoute.BACKLOG, e.DrillCause.FORCED)
    assert (held.since, held.engaged, held.next_ping, held.deadline) == (200.0, 150.0, None, None)


@pytest.mark.parametrize("entity", [OVER, PINGING, GONE, raising()])
def test_s15_s16_a_known_hold_stops_the_pings_of_an_entity_that_is_failed_over(entity: f.Entity) -> None:
    held, effects = advance(entity, HOLD, 200.0)
    assert effects == (e.StopPings(), e.PublishNotice(e.FailoverHeld("orders", 200.0, 1)))
    assert (held.mode, held.engaged, held.cause) == (EntityMode.HELD, entity.engaged, entity.cause)


@pytest.mark.parametrize("entity", [HELD, CLOSED])
def test_s15_s16_a_known_hold_changes_nothing_where_one_is_or_the_pair_is_closed(entity: f.Entity) -> None:
    assert advance(entity, HOLD, 200.0) == FailoverDecision(entity)


def test_s5_s16_a_call_in_flight_that_fails_after_a_take_over_diverts() -> None:
    over = advance(HEALTHY, KNOWN, 200.0).entity
    assert advance(over, FAILED, 201.0) == FailoverDecision(over, (e.SendToBacklog(),))


def test_s16_a_failover_that_was_taken_over_ends_with_a_ping_and_knows_how_long_it_lasted() -> None:
    over = advance(HEALTHY, KNOWN, 200.0).entity
    pinging = advance(over, e.PingDue(), 210.0).entity
    entity, effects = advance(pinging, e.PingSucceeded(1), 211.0)
    restored = e.Restored("orders", 211.0, 1, outage=61.0, diverted=0, forced=False)
    assert effects == (e.StopPings(), e.PublishNotice(restored))
    assert entity == f.Entity("orders", POLICY, 211.0, EntityMode.ON_TRIAL, episode=1)


def test_s16_the_longest_interval_bounds_a_taken_over_ping_too() -> None:
    slow = f.Entity("orders", PINGS_LATE, 0.0)
    known = e.FailoverKnown(K.DNS, engaged=0.0, next_ping=9e9, failed_trials=5)
    assert advance(slow, known, 100.0).entity.next_ping == 1900.0


def test_s11_the_notice_of_a_take_over_has_the_name_of_the_docs() -> None:
    assert e.FailoverTakenOver.name == "failover_taken_over"
