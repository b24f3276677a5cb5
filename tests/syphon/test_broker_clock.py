"""L5: the broker's time follows from the messages of a backlog queue, whatever this machine's clock shows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.syphon.broker_clock import BrokerClock

START = datetime(2026, 1, 1, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Delivery(NamedTuple):
    """A message as this machine sees it. Times are seconds; the monotonic clock is 0 at the broker's time START."""

    delivered: float
    waited: float
    buffered: float

    @property
    def seen(self) -> float:
        return self.delivered + self.buffered


def instant(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def observe(clock: BrokerClock, one: Delivery, lock: float) -> None:
    clock.observe(instant(one.delivered + lock), instant(one.delivered - one.waited), one.seen)


DELIVERIES = st.lists(
    st.builds(Delivery, st.floats(0, 200), st.floats(0, 86_400), st.floats(0, 5)), min_size=1, max_size=8
).map(lambda found: sorted(found, key=lambda one: one.seen))
LOCKS = st.floats(5, 300)


@given(DELIVERIES, LOCKS, st.floats(0, 60))
def test_l5_with_a_known_lock_duration_the_time_is_late_by_the_shortest_wait_in_the_receiver(
    deliveries: list[Delivery], lock: float, later: float
) -> None:
    clock = BrokerClock(lock)
    for one in deliveries:
        observe(clock, one, lock)
    now = deliveries[-1].seen + later
    expected = now - min(one.buffered for one in deliveries)
    assert clock.time(now) == pytest.approx((instant(expected) - EPOCH) / timedelta(milliseconds=1), abs=2)
    assert abs(clock.earliest(now, START) - instant(expected)) < timedelta(milliseconds=2)
    assert abs(clock.latest(now, START) - instant(expected)) < timedelta(milliseconds=2)


@given(DELIVERIES, LOCKS, st.floats(-100_000, 100_000))
def test_l5_with_an_unknown_lock_duration_no_message_expires_before_its_time(
    deliveries: list[Delivery], lock: float, ahead: float
) -> None:
    clock = BrokerClock()
    for one in deliveries:
        observe(clock, one, lock)
        assert clock.earliest(one.seen, instant(one.seen + ahead)) <= instant(one.seen + 0.001)
        # The message itself has arrived by now.
        assert clock.earliest(one.seen, START) >= instant(one.delivered - one.waited - 0.001)


def test_l5_a_message_that_arrives_while_a_pump_waits_shows_the_lock_duration() -> None:
    clock = BrokerClock()
    observe(clock, Delivery(0, waited=3600, buffered=0), 20)
    assert clock.lock == 60
    observe(clock, Delivery(10, waited=0, buffered=0), 20)
    assert clock.lock == 20
    assert clock.time(11.0) == (instant(11) - EPOCH) / timedelta(milliseconds=1)


@pytest.mark.parametrize("ahead", [-1200, 0, 1200])
def test_l5_locks_of_an_unknown_duration_are_renewed_by_the_nearer_end(ahead: float) -> None:
    clock = BrokerClock()
    observe(clock, Delivery(0, waited=3600, buffered=0), 20)
    # Right clocks show a lock of 20 s. With a wrong clock the minute of P5 is assumed.
    assert instant(20) - clock.latest(0.0, instant(ahead)) == timedelta(seconds=20 if ahead == 0 else 60)


def test_l5_the_time_follows_a_clock_of_the_broker_that_was_set_back() -> None:
    clock = BrokerClock(60)
    observe(clock, Delivery(0, 0, 0), 60)
    for after in (100.0, 400.0, 800.0, 1200.0):  # seconds of the monotonic clock; the broker's clock lacks 10 s
        clock.observe(instant(after - 10 + 60), instant(after - 10), after)
    assert clock.time(1200.0) == (instant(1190) - EPOCH) / timedelta(milliseconds=1)


@pytest.mark.parametrize(
    ("locked_until", "enqueued"),
    [(EPOCH, EPOCH), (EPOCH, START), (START, EPOCH), (datetime.max.replace(tzinfo=UTC), START)],
)
def test_l5_a_message_without_both_times_is_passed_over(locked_until: datetime, enqueued: datetime) -> None:
    clock = BrokerClock()
    clock.observe(locked_until, enqueued, 0.0)
    assert clock.time(0.0) is None
    assert clock.earliest(0.0, START) == clock.latest(0.0, START) == START
