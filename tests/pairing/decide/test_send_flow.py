"""Of a sender's calls what worlds hardly come to: instants that fall together, chance, the words of errors.

All else of them: `tests/pairing/simulation`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import cast

import pytest
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageProperties
from azure.servicebus.exceptions import OperationTimeoutError, ServiceBusConnectionError

from twinbus.backlog import Endpoint, FailureKind
from twinbus.pairing import calls
from twinbus.pairing.decide.failover import FailoverPolicy, PrimarySendFailed
from twinbus.pairing.errors import BacklogUnavailableError, QueueCause, ScheduledInBacklogError
from twinbus.pairing.events import EventPublisher
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.pair_sides import Side
from twinbus.pairing.shared_state import SharedEntity, SharedRotation
from twinbus.sdk import LinkLimits

K = FailureKind
LIMITS = LinkLimits(262_144, 262_144, PyamqpTransport)
MESSAGE = AmqpAnnotatedMessage(data_body=b"x", properties=AmqpMessageProperties(message_id="m"))


class Pair:
    """A pair and its driver (calls.Shared, entity.Driver), on whose clock nothing happens by itself."""

    def __init__(self, queues: int = 2, interval: float = 60.0, try_timeout: float = 10.0) -> None:
        self.time = 0.0
        self.chance = 0.0
        self.options = SendAvailabilityOptions(try_timeout=timedelta(seconds=try_timeout))
        self.events = cast(EventPublisher, self)
        self.told: list[tuple[object, ...]] = []
        names = tuple(f"b{index}" for index in range(queues))
        one, other = Endpoint.of("one", 5671), Endpoint.of("other", 5671)
        self.primary, self.secondary = Side("primary", one, self.emit), Side("secondary", other, self.emit)
        self.rotation = SharedRotation(names, 30.0, self, now=self.now)
        cell = SharedEntity("orders", FailoverPolicy(failover_interval=interval), self, now=self.now)
        self.place = calls.SendContext("orders", cell, self, now=self.now, chance=lambda: self.chance)

    def now(self) -> float:
        return self.time

    def notice_closed_clients(self) -> None: ...

    def backlog_answered(self, queue: str, error: Exception | None = None) -> None: ...

    def diverted(self, *facts: object) -> None:
        self.told.append(facts)

    def timer(self, due: Callable[[], object]) -> Pair:
        return self

    def arm(self, at: float) -> None: ...

    def disarm(self) -> None: ...

    def ping(self, cell: SharedEntity, episode: int) -> None: ...

    def stop_ping(self, cell: SharedEntity) -> None: ...

    def emit(self, notice: object) -> None: ...


# --- its time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "until", "seconds"),
    [
        (60.0, None, 10.0),
        (60.0, 8.0, 8.0),
        (60.0, 90.0, 10.0),
        (0.0, 8.0, 4.0),
        (4.0, 8.0, 4.0),
        (8.0, 8.0, 8.0),  # the timer fires when the call is over
        (0.0, 90.0, 10.0),
    ],
)
def test_s4_an_attempt_on_the_primary_leaves_half_of_the_time_to_the_backlog_where_it_may_divert(
    interval: float, until: float | None, seconds: float
) -> None:
    pair = Pair(interval=interval)
    assert pair.place.primary_seconds(until) == seconds


@pytest.mark.parametrize(("until", "seconds"), [(13.0, 4.0), (10.0, 5.0), (9.0, 4.0)])
def test_s4_a_timer_that_runs_already_is_the_one_that_counts(until: float, seconds: float) -> None:
    pair = Pair(interval=10.0)
    pair.place.cell.advance(PrimarySendFailed(K.TIMEOUT))
    pair.time = 5.0
    assert pair.place.primary_seconds(until) == seconds


@pytest.mark.parametrize(("queues", "seconds"), [(1, 60.0), (5, 60.0), (6, 70.0), (9, 100.0)])
def test_s6_without_a_time_out_a_call_has_time_for_every_silent_queue_and_one_more_a_minute_at_least(
    queues: int, seconds: float
) -> None:
    pair = Pair(queues)
    pair.time = 7.0
    assert pair.place.end_in_backlog(None) == 7.0 + seconds
    assert pair.place.end_in_backlog(8.0) == 8.0


def test_s6_no_queue_is_asked_when_the_time_is_over_to_the_instant() -> None:
    pair = Pair()
    pair.time = 5.0
    with pytest.raises(OperationTimeoutError, match=r"^the call.* ended before the backlog had taken the message$"):
        next(calls.divert(pair.place, [MESSAGE], 5.0))


def test_s6_a_time_out_at_the_very_end_of_the_call_evicts_nothing_and_the_next_call_picks_anew() -> None:
    pair = Pair()
    steps = calls.divert(pair.place, [MESSAGE], 5.0)
    assert next(steps) == calls.LimitsOf("b0", 5.0)
    pair.time, pair.chance = 5.0, 0.9
    silence = OperationTimeoutError(message="silence")
    with pytest.raises(OperationTimeoutError) as raised:
        steps.throw(silence)
    assert raised.value is silence
    assert pair.rotation.rotation.usable == ("b0", "b1")
    assert next(calls.divert(pair.place, [MESSAGE], 9.0)) == calls.LimitsOf("b1", 4.0)


@pytest.mark.parametrize("queues", [1, 2])
def test_s6_a_queue_that_fails_at_the_very_end_leaves_and_the_call_says_that_its_time_ended(queues: int) -> None:
    pair = Pair(queues)
    steps = calls.divert(pair.place, [MESSAGE], 5.0)
    next(steps)
    pair.time = 5.0
    with pytest.raises(OperationTimeoutError, match=r"^the call's time ended in the backlog: refused$"):
        steps.throw(ServiceBusConnectionError(message="refused"))
    assert "b0" not in pair.rotation.rotation.usable


def test_s11_a_diverted_message_is_told_with_the_seconds_it_took() -> None:
    pair = Pair()
    pair.time = 3.0
    steps = calls.divert(pair.place, [MESSAGE], None)
    next(steps)
    assert isinstance(steps.send(LIMITS), calls.ToBacklog)
    pair.time = 5.5
    with pytest.raises(StopIteration):
        steps.send(None)
    assert pair.told == [("orders", "b0", 1, 2.5)]


# --- chance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chance", "queue"), [(0.0, "b1"), (0.49, "b1"), (0.5, "b2"), (0.99, "b2")])
def test_s6_of_queues_not_tried_yet_any_is_picked(chance: float, queue: str) -> None:
    pair = Pair(3)
    pair.place.queue, pair.chance = "b0", chance
    assert pair.place.pick({"b0": QueueCause("b0", K.TIMEOUT, "")}) == queue
    assert pair.place.queue == queue


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (ConnectionResetError("reset\nby peer"), "reset"),
        (ConnectionResetError(), "ConnectionResetError"),
        (ConnectionResetError("x" * 300), "x" * 200),
    ],
)
def test_s6_a_cause_is_told_in_one_line_of_at_most_200_characters(error: Exception, detail: str) -> None:
    pair = Pair(1)
    steps = calls.divert(pair.place, [MESSAGE], None)
    next(steps)
    with pytest.raises(BacklogUnavailableError) as raised:
        steps.throw(error)
    assert raised.value.causes == (QueueCause("b0", K.CONNECTION_LOST, detail),)


def test_s12_a_call_that_had_no_turn_says_on_which_link_and_what_to_do() -> None:
    told = "other calls held the link to orders for 2.5 s: send again, or share it less"
    assert str(calls.NoTurnError("orders", 2.50)) == told


def test_g4_an_entity_that_comes_back_while_a_call_is_refused_leaves_the_cause_unknown() -> None:
    assert calls._unusable(Pair().place).cause is K.UNKNOWN


def test_s10_a_handle_says_what_it_is_and_fits_where_a_sequence_number_does() -> None:
    handles = [calls.BacklogHandle.new("m") for _ in range(100)]
    assert all(-(2**63) <= handle < 0 for handle in handles)
    assert repr(calls.BacklogHandle(-7)) == "BacklogHandle(-7)"


def test_s10_a_negative_number_was_never_the_primarys_whatever_its_type() -> None:
    assert calls.in_backlog([-3, 0, 1, calls.BacklogHandle(-7)]) == [-3, -7]
    assert calls.in_backlog(-3) == [-3]


def test_s10_cancelling_is_refused_when_a_driver_comes_to_it() -> None:
    steps = calls.cannot_cancel((4,))
    with pytest.raises(ScheduledInBacklogError):
        next(steps)
