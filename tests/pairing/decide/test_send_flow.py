"""Details of the send flow that rarely occur in the simulation: equal times, chance, error texts.

`tests/pairing/simulation` tests everything else of the send flow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageProperties
from azure.servicebus.exceptions import (
    MessagingEntityNotFoundError,
    OperationTimeoutError,
    ServiceBusConnectionError,
)

from twinbus.backlog import AliasInUseError, Endpoint, FailureKind
from twinbus.pairing import call_errors
from twinbus.pairing.decide import send_flow
from twinbus.pairing.decide.failover import FailoverPolicy
from twinbus.pairing.decide.failover_events import PrimarySendFailed
from twinbus.pairing.decide.rotation import QueueFound
from twinbus.pairing.decide.send_flow import (
    BacklogHandle,
    DivertTo,
    FlowErrors,
    QueueLeftMeanwhileError,
    SendContext,
    WaitForQueue,
    mark_whole_attempt,
    pause_before_retry,
)
from twinbus.pairing.errors import BacklogUnavailableError, QueueCause, ScheduledInBacklogError
from twinbus.pairing.message_copies import next_payload
from twinbus.pairing.pair_sides import Side
from twinbus.pairing.shared_state import SharedEntity, SharedRotation
from twinbus.sdk import LinkLimits, RetrySettings

K = FailureKind
LIMITS = LinkLimits(262_144, 262_144, PyamqpTransport)
MESSAGE = AmqpAnnotatedMessage(data_body=b"x", properties=AmqpMessageProperties(message_id="m"))
PRIMARY = Endpoint.of("one", 5671)


class Pair:
    """A pair and its driver (`send_flow.FlowPair`, `shared_state.PairDriver`) with a clock that the test sets."""

    def __init__(self, queues: int = 2, interval: float = 60.0, try_timeout: float = 10.0) -> None:
        self.time = 0.0
        self.chance = 0.0
        self.events = self
        self.published: list[tuple[object, ...]] = []
        self.answers: list[tuple[str, Exception | None]] = []
        names = tuple(f"b{index}" for index in range(queues))
        self.primary = Side("primary", PRIMARY, self.emit)
        self.secondary = Side("secondary", Endpoint.of("other", 5671), self.emit)
        self.rotation = SharedRotation(names, 30.0, self, now=self.now)
        entity = SharedEntity("orders", FailoverPolicy(failover_interval=interval), self, now=self.now)
        self.context = SendContext(
            "orders",
            entity,
            self,
            try_timeout,
            now=self.now,
            chance=lambda: self.chance,
            new_number=lambda: 6,
            errors=FlowErrors(call_errors.timed_out, partial(call_errors.entity_missing, endpoint=PRIMARY)),
        )

    def divert(self, until: float | None) -> send_flow.SendSteps[None]:
        return send_flow.divert(self.context, MESSAGE, until)

    def now(self) -> float:
        return self.time

    def notice_closed_clients(self) -> None: ...

    def refuse_unless_open(self) -> None: ...

    def backlog_answered(self, queue: str, error: Exception | None = None) -> None:
        self.answers.append((queue, error))

    def diverted(self, *facts: object) -> None:
        self.published.append(facts)

    def timer(self, due: Callable[[], object]) -> Pair:
        return self

    def arm(self, at: float) -> None: ...

    def disarm(self) -> None: ...

    def ping(self, entity: SharedEntity, episode: int) -> None: ...

    def stop_ping(self, entity: SharedEntity) -> None: ...

    def emit(self, notice: object) -> None: ...


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "until", "seconds"),
    [
        (60.0, None, 10.0),
        (60.0, 8.0, 8.0),
        (60.0, 90.0, 10.0),
        (0.0, 8.0, 4.0),
        (4.0, 8.0, 4.0),
        (8.0, 8.0, 8.0),  # the timer fires when the call has ended
        (0.0, 90.0, 10.0),
    ],
)
def test_s4_an_attempt_on_the_primary_leaves_half_of_the_time_to_the_backlog_if_it_may_divert(
    interval: float, until: float | None, seconds: float
) -> None:
    assert Pair(interval=interval).context.primary_seconds(until) == seconds


@pytest.mark.parametrize(("until", "seconds"), [(13.0, 4.0), (10.0, 5.0), (9.0, 4.0)])
def test_s4_a_timer_that_runs_already_is_the_one_that_counts(until: float, seconds: float) -> None:
    pair = Pair(interval=10.0)
    pair.context.shared.advance(PrimarySendFailed(K.TIMEOUT))
    pair.time = 5.0
    assert pair.context.primary_seconds(until) == seconds


@pytest.mark.parametrize(("queues", "seconds"), [(1, 60.0), (5, 60.0), (6, 70.0), (9, 100.0)])
def test_s6_without_a_timeout_a_call_has_time_for_every_silent_queue_and_one_more_and_at_least_a_minute(
    queues: int, seconds: float
) -> None:
    pair = Pair(queues)
    pair.time = 7.0
    assert pair.context.backlog_deadline(None) == 7.0 + seconds
    assert pair.context.backlog_deadline(8.0) == 8.0


def test_s6_no_queue_gets_a_transfer_at_the_very_end_of_the_call() -> None:
    pair = Pair()
    pair.time = 5.0
    with pytest.raises(OperationTimeoutError, match=r"^the call.* ended before the backlog had taken the message$"):
        next(pair.divert(5.0))


def test_s6_a_timeout_at_the_very_end_of_the_call_evicts_nothing_and_the_next_call_picks_any_queue() -> None:
    pair = Pair()
    steps = pair.divert(5.0)
    first = next(steps)
    assert isinstance(first, DivertTo)
    assert (first.queue, first.seconds) == ("b0", 5.0)
    pair.time, pair.chance = 5.0, 0.9
    silence = OperationTimeoutError(message="silence")
    with pytest.raises(OperationTimeoutError) as raised:
        steps.throw(silence)
    assert raised.value is silence
    assert pair.rotation.rotation.usable == ("b0", "b1")
    following = next(pair.divert(9.0))
    assert isinstance(following, DivertTo)
    assert (following.queue, following.seconds) == ("b1", 4.0)


def test_s6_a_queue_that_was_silent_for_a_whole_attempt_leaves_though_this_was_noticed_late() -> None:
    pair = Pair()
    steps = pair.divert(5.0)
    next(steps)
    pair.time = 6.0
    silence = OperationTimeoutError(message="silence")
    mark_whole_attempt(silence)
    with pytest.raises(OperationTimeoutError, match="the call's time ended in the backlog: silence"):
        steps.throw(silence)
    assert pair.rotation.rotation.usable == ("b1",)


@pytest.mark.parametrize("queues", [1, 2])
def test_s6_a_queue_that_fails_at_the_very_end_leaves_and_the_call_raises_a_timeout(queues: int) -> None:
    pair = Pair(queues)
    steps = pair.divert(5.0)
    next(steps)
    pair.time = 5.0
    with pytest.raises(OperationTimeoutError, match=r"^the call's time ended in the backlog: refused$"):
        steps.throw(ServiceBusConnectionError(message="refused"))
    assert "b0" not in pair.rotation.rotation.usable


def test_s11_a_diverted_message_is_published_with_the_seconds_it_took() -> None:
    pair = Pair()
    pair.time = 3.0
    steps = pair.divert(None)
    step = next(steps)
    assert isinstance(step, DivertTo)
    next_payload(step.diversion, LIMITS)
    pair.time = 5.5
    with pytest.raises(StopIteration):
        steps.send(None)
    assert pair.published == [("orders", "b0", 1, 2.5)]


# --- retries ---------------------------------------------------------------------------------------------------------

RETRIES = RetrySettings(2, 0.5, 10.0, True)


@pytest.mark.parametrize(
    ("kind", "tried", "left", "retryable", "pause"),
    [
        (K.TIMEOUT, 1, 9.0, True, 0.5),
        (K.TIMEOUT, 2, 9.0, True, 0.5),
        (K.TIMEOUT, 3, 9.0, True, None),
        (K.TIMEOUT, 1, 0.5, True, None),
        (K.TIMEOUT, 1, 9.0, False, None),
        (K.ENTITY_NOT_FOUND, 1, 9.0, True, None),
    ],
)
def test_s12_another_try_needs_a_retryable_error_a_retry_left_and_time_for_the_pause(
    kind: FailureKind, tried: int, left: float, retryable: bool, pause: float | None
) -> None:
    assert pause_before_retry(kind, RETRIES, tried, left, is_retryable=retryable) == pause


# --- chance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chance", "queue"), [(0.0, "b1"), (0.49, "b1"), (0.5, "b2"), (0.99, "b2")])
def test_s6_any_queue_that_was_not_tried_yet_can_be_picked(chance: float, queue: str) -> None:
    pair = Pair(3)
    pair.context.queue, pair.chance = "b0", chance
    assert pair.context.pick_queue(pair.rotation.rotation, {"b0": QueueCause("b0", K.TIMEOUT, "")}) == queue
    assert pair.context.queue == queue


# --- S6, none left ---------------------------------------------------------------------------------------------------


def none_left(queues: int = 2) -> Pair:
    pair = Pair(queues)
    for queue in pair.rotation.rotation.queues:
        pair.rotation.failed(queue, K.TIMEOUT, "")
    pair.time = 5.0
    return pair


def test_s6_with_none_left_one_call_probes_and_the_others_wait_and_use_the_queue_that_it_brought_back() -> None:
    pair = none_left()
    first, second = pair.divert(65.0), pair.divert(20.0)
    probe, waiting = next(first), next(second)
    assert isinstance(probe, DivertTo)
    assert (probe.queue, probe.seconds, probe.probe) == ("b0", 60.0, True)
    assert waiting == WaitForQueue(pair.rotation.rotation, 15.0)
    next_payload(probe.diversion, LIMITS)
    with pytest.raises(StopIteration):
        first.send(None)
    assert pair.rotation.rotation.usable == ("b0",)
    step = second.send(None)
    assert isinstance(step, DivertTo)
    assert (step.queue, step.probe) == ("b0", False)


def test_s6_a_sender_stays_on_the_queue_that_its_probe_brought_back() -> None:
    pair = none_left()
    steps = pair.divert(60.0)
    probe = next(steps)
    assert isinstance(probe, DivertTo)
    next_payload(probe.diversion, LIMITS)
    with pytest.raises(StopIteration):
        steps.send(None)
    pair.rotation.advance(QueueFound("b1"))
    pair.chance = 0.9
    following = next(pair.divert(60.0))
    assert isinstance(following, DivertTo)
    assert (probe.queue, following.queue) == ("b0", "b0")


def test_s6_when_the_probe_fails_all_that_waited_raise_and_the_next_call_waits_for_its_second() -> None:
    pair = none_left()
    first, second = pair.divert(None), pair.divert(None)
    next(first), next(second)
    pair.time = 5.25
    for call, resume in (
        (first, partial(first.throw, ConnectionResetError("x"))),
        (second, partial(second.send, None)),
    ):
        with pytest.raises(BacklogUnavailableError) as raised:
            resume()
        assert {cause.queue for cause in raised.value.causes} == {"b0", "b1"}
        call.close()
    third = pair.divert(None)
    assert next(third) == WaitForQueue(pair.rotation.rotation, 0.75)
    pair.time = 6.0
    probe = third.send(None)
    assert isinstance(probe, DivertTo)
    assert (probe.queue, probe.probe) == ("b1", True)


@pytest.mark.parametrize("error", [AliasInUseError(["x-ms-path"]), call_errors.NoTurnError("b0", 1.0), GeneratorExit()])
def test_s6_a_probe_that_says_nothing_about_its_queue_lets_the_next_call_probe(error: BaseException) -> None:
    pair = none_left()
    first = pair.divert(None)
    next(first)
    with pytest.raises(type(error)):
        first.throw(error)
    assert not pair.rotation.rotation.probing
    assert pair.rotation.rotation.failed_probes == 0


def test_s6_a_probe_that_was_not_sent_because_its_link_closed_has_accepted_nothing() -> None:
    pair = none_left()
    steps = pair.divert(60.0)
    next(steps)
    assert steps.throw(QueueLeftMeanwhileError()) == WaitForQueue(pair.rotation.rotation, 1.0)
    assert not pair.rotation.rotation.probing
    assert (pair.answers, pair.published) == ([], [])


def test_s6_a_call_whose_time_ends_while_it_waits_raises_with_the_causes() -> None:
    pair = none_left()
    first, second = pair.divert(None), pair.divert(8.0)
    next(first)
    assert next(second) == WaitForQueue(pair.rotation.rotation, 3.0)
    pair.time = 8.0
    with pytest.raises(BacklogUnavailableError):
        second.send(None)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (ConnectionResetError("reset\nby peer"), "reset"),
        (ConnectionResetError(), "ConnectionResetError"),
        (ConnectionResetError("x" * 300), "x" * 200),
    ],
)
def test_s6_the_detail_of_a_cause_is_one_line_of_at_most_200_characters(error: Exception, detail: str) -> None:
    pair = Pair(1)
    steps = pair.divert(None)
    next(steps)
    with pytest.raises(BacklogUnavailableError) as raised:
        steps.throw(error)
    assert raised.value.causes == (QueueCause("b0", K.CONNECTION_LOST, detail),)


def test_s7_a_message_that_cannot_be_diverted_blames_no_queue() -> None:
    pair = Pair()
    steps = pair.divert(None)
    next(steps)
    with pytest.raises(AliasInUseError):
        steps.throw(AliasInUseError(["x-ms-path"]))
    assert pair.rotation.rotation.usable == ("b0", "b1")
    assert pair.answers == []


def test_s12_a_call_that_had_no_turn_says_on_which_link_and_what_to_do() -> None:
    text = "other calls held the link to orders for 2.5 s: send again, or share it less"
    assert str(call_errors.NoTurnError("orders", 2.50)) == text


def test_s2_a_missing_entity_is_named_with_its_namespace() -> None:
    error = call_errors.entity_missing("orders", PRIMARY)
    assert isinstance(error, MessagingEntityNotFoundError)
    assert "no queue or topic 'orders' on one:5671" in str(error)


def test_g4_an_entity_that_returns_while_a_call_is_refused_leaves_the_cause_unknown() -> None:
    assert send_flow._unusable(Pair().context).cause is K.UNKNOWN


# --- handles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2**62 - 1])
def test_s10_a_handle_is_negative_and_fits_where_a_sequence_number_does(number: int) -> None:
    handle = BacklogHandle.of(number, "m")
    assert -(2**63) <= handle < 0
    assert handle.message_id == "m"


def test_s10_a_handle_shows_what_it_is() -> None:
    assert repr(BacklogHandle(-7)) == "BacklogHandle(-7)"
    assert BacklogHandle.of(0, "m") == -1


def test_s10_cancelling_is_refused_when_a_driver_comes_to_it() -> None:
    steps = send_flow.cannot_cancel((4,))
    with pytest.raises(ScheduledInBacklogError):
        next(steps)
