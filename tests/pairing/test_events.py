"""How a pair publishes its events (S11): callbacks, log lines, Prometheus and OpenTelemetry."""

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from twinbus.backlog import FailureKind
from twinbus.pairing.decide.backlog_watch import QueueStatus
from twinbus.pairing.decide.failover import Entity, EntityMode, FailoverPolicy
from twinbus.pairing.decide.failover_events import (
    DrillCause,
    FailoverEngaged,
    FailoverHeld,
    FailoverTakenOver,
    PrimaryUnusable,
    Restored,
    TrialFailed,
    TrialPassed,
)
from twinbus.pairing.decide.rotation import QueueLeft, QueueReturned, Rotation
from twinbus.pairing.events import (
    EVENTS,
    BacklogDrained,
    BacklogQueueGone,
    BacklogQueueUnsafe,
    BacklogUnattended,
    EventPublisher,
    Notice,
    SecondaryUnreachable,
    SideClosed,
    SideFaulted,
    UnknownEventError,
)

ENGAGED = FailoverEngaged("orders", 10.0, 1, FailureKind.TIMEOUT)
RESTORED = Restored("orders", 75.5, 1, 65.5, 7, False)
NOTICES: tuple[Notice, ...] = (
    ENGAGED,
    RESTORED,
    PrimaryUnusable("orders", 70.0, 1, FailureKind.ENTITY_NOT_FOUND),
    FailoverHeld("orders", 20.0, 1),
    FailoverTakenOver("orders", 20.0, 1, 35.5),
    TrialPassed("orders", 78.0, 1, 2.5),
    TrialFailed("orders", 78.0, 1, FailureKind.QUOTA_EXCEEDED, 120.0),
    QueueLeft("contoso/x-servicebus-transfer/3", 12.0, FailureKind.QUOTA_EXCEEDED, 9),
    QueueReturned("contoso/x-servicebus-transfer/3", 42.0),
    BacklogDrained("contoso/x-servicebus-transfer/3", 80.0, 7),
    BacklogUnattended("contoso/x-servicebus-transfer/3", 1900.0, "orders", 1850.5),
    SecondaryUnreachable("contoso:5671", 1.0, FailureKind.DNS, 10),
    BacklogQueueGone("contoso/x-servicebus-transfer/3", 13.0, "unauthorized"),
    BacklogQueueUnsafe("contoso/x-servicebus-transfer/3", 2.0, "status", "Disabled", "nobody can use it"),
    SideFaulted("secondary", 90.0, "the credential was refused"),
    SideClosed("primary", 91.0),
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def events(registry: CollectorRegistry) -> Iterator[EventPublisher]:
    made = EventPublisher("contoso", threaded=True, registry=registry)
    yield made
    made.close()


def shown(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


# --- callbacks -------------------------------------------------------------------------------------------------------


def test_s11_every_event_reaches_its_callback_and_the_one_for_all(events: EventPublisher) -> None:
    named: list[Notice] = []
    everything: list[Notice] = []
    for event in EVENTS:
        events.on(event, named.append)
    events.on("*", everything.append)
    for notice in NOTICES:
        events.emit(notice)
    events.close()
    assert named == list(NOTICES)
    assert everything == list(NOTICES)
    assert {notice.name for notice in NOTICES} == set(EVENTS)


def test_s11_the_events_of_the_clause_are_there() -> None:
    assert {"failover_engaged", "restored", "backlog_drained", "primary_unusable"} <= set(EVENTS)


def test_a_callback_that_raises_is_logged_and_the_next_is_called(
    events: EventPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[Notice] = []

    def broken(_: Notice) -> None:
        raise RuntimeError("from the callback")

    events.on("restored", broken)
    events.on("restored", called.append)
    events.emit(RESTORED)
    events.close()
    assert called == [RESTORED]
    assert "from the callback" in caplog.text


def test_a_callback_that_waits_holds_up_nobody_and_the_order_stays(events: EventPublisher) -> None:
    gate, order = threading.Event(), list[str]()

    def slow(notice: Notice) -> None:
        assert gate.wait(10)
        order.append(notice.name)

    events.on("*", slow)
    events.emit(ENGAGED)
    events.emit(RESTORED)
    assert order == []
    gate.set()
    events.close()
    assert order == ["failover_engaged", "restored"]


def test_a_callback_for_which_no_thread_can_be_started_is_called_with_the_next(
    events: EventPublisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[Notice] = []
    events.on("*", called.append)

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refused)
        events.emit(NOTICES[0])
    assert "with those of the next event: can't start new thread" in caplog.text
    events.emit(NOTICES[1])
    events.close()
    assert called == list(NOTICES[:2])


def test_a_callback_may_close_the_events_it_is_called_by(events: EventPublisher) -> None:
    closed = threading.Event()

    def close(_: Notice) -> None:
        events.close()
        closed.set()

    events.on("restored", close)
    events.emit(RESTORED)
    assert closed.wait(10)


def test_c3_closing_ends_the_thread_of_the_callbacks(events: EventPublisher) -> None:
    events.on("restored", lambda _: None)
    events.emit(RESTORED)
    assert any("twinbus-events-contoso" in thread.name for thread in threading.enumerate())
    events.close()
    assert not any("twinbus-events-contoso" in thread.name for thread in threading.enumerate())


def test_a_callback_can_be_taken_off_again(events: EventPublisher) -> None:
    called: list[Notice] = []
    off = events.on("restored", called.append)
    off()
    off()
    events.emit(RESTORED)
    events.close()
    assert called == []


def test_s11_a_callback_that_is_registered_later_hears_the_pairings_own_notices_once_and_in_order(
    events: EventPublisher,
) -> None:
    unsafe = BacklogQueueUnsafe("contoso/x-servicebus-transfer/3", 2.0, "status", "Disabled", "nobody can use it")
    unreachable = SecondaryUnreachable("contoso:5671", 3.0, FailureKind.DNS, 10)
    before, named, everything, other = list[Notice](), list[Notice](), list[Notice](), list[Notice]()
    events.on("backlog_queue_unsafe", before.append)
    events.emit(RESTORED)
    events.emit_of_pairing(unsafe)
    events.emit_of_pairing(unreachable)
    events.on("secondary_unreachable", named.append)
    events.on("*", everything.append)
    events.on("restored", other.append)
    events.emit(RESTORED)
    events.close()
    assert before == [unsafe]
    assert named == [unreachable]
    assert everything == [unsafe, unreachable, RESTORED]
    assert other == [RESTORED]


async def test_s11_in_an_event_loop_a_notice_of_the_pairing_comes_after_the_registration_unless_it_was_taken_back(
    registry: CollectorRegistry,
) -> None:
    events = EventPublisher("contoso", threaded=False, registry=registry)
    unreachable = SecondaryUnreachable("contoso:5671", 3.0, FailureKind.DNS, 10)
    events.emit_of_pairing(unreachable)
    plain, called = list[Notice](), asyncio.Queue[Notice]()
    events.on("secondary_unreachable", called.put)
    events.on("secondary_unreachable", plain.append)()
    assert called.empty()
    assert await called.get() == unreachable
    assert plain == []
    events.close()


def test_s13_the_child_of_a_fork_takes_no_lock_that_a_thread_of_the_parent_held(events: EventPublisher) -> None:
    called = list[Notice]()
    with events._registering, events._runner._lock:  # type: ignore[union-attr] # the runner with a thread
        events.forked()
        events.on("restored", called.append)
        events.emit(RESTORED)
        events.close()
    assert called == [RESTORED]


def test_an_event_that_does_not_exist_is_refused_with_those_that_do(events: EventPublisher) -> None:
    with pytest.raises(UnknownEventError, match="failover_engaged"):
        events.on("failover", print)


async def test_in_an_event_loop_a_coroutine_function_is_awaited_and_may_raise(
    registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    events = EventPublisher("contoso", threaded=False, registry=registry)
    called: asyncio.Queue[Notice] = asyncio.Queue()

    async def broken(_: Notice) -> None:
        await asyncio.sleep(0)
        raise RuntimeError("from the coroutine")

    events.on("restored", broken)
    events.on("restored", called.put)
    events.emit(RESTORED)
    assert await asyncio.wait_for(called.get(), 10) == RESTORED
    for _ in range(5):
        await asyncio.sleep(0)
    assert "from the coroutine" in caplog.text
    events.close()


def test_a_coroutine_function_is_refused_where_there_is_no_loop(events: EventPublisher) -> None:
    async def callback(_: Notice) -> None: ...

    with pytest.raises(TypeError, match=r"twinbus\.aio"):
        events.on("restored", callback)


# --- log -------------------------------------------------------------------------------------------------------------


def test_every_event_is_a_log_line_with_its_facts_as_fields(
    events: EventPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "twinbus.pairing")
    for notice in NOTICES:
        events.emit(notice)
    lines = {record.getMessage().split()[0]: record for record in caplog.records}
    assert set(lines) == set(EVENTS)
    engaged: Any = lines["failover_engaged"]
    assert engaged.getMessage() == "failover_engaged entity=orders episode=1 cause=timeout"
    assert (engaged.pair, engaged.entity, engaged.cause) == ("contoso", "orders", "timeout")
    assert lines["primary_unusable"].levelno == logging.ERROR


# --- Prometheus ------------------------------------------------------------------------------------------------------


def test_what_happened_is_counted(events: EventPublisher, registry: CollectorRegistry) -> None:
    for notice in (*NOTICES, FailoverEngaged("orders", 100.0, 2, DrillCause.FORCED)):
        events.emit(notice)
    events.diverted("orders", "contoso/x-servicebus-transfer/3", 5, 0.01)
    events.diverted("orders", "contoso/x-servicebus-transfer/3", 2, 0.01)
    events.pinged("orders", FailureKind.TIMEOUT, 1.0)
    events.pinged("orders", None, 0.1)
    lines = shown(registry)
    for line in (
        'twinbus_pair_failovers_total{cause="timeout",entity="orders",pair="contoso"} 1.0',
        'twinbus_pair_failovers_total{cause="forced",entity="orders",pair="contoso"} 1.0',
        'twinbus_pair_restores_total{entity="orders",forced="false",pair="contoso"} 1.0',
        'twinbus_pair_outage_seconds_total{entity="orders",pair="contoso"} 65.5',
        'twinbus_pair_trials_total{entity="orders",outcome="passed",pair="contoso"} 1.0',
        'twinbus_pair_trials_total{entity="orders",outcome="failed",pair="contoso"} 1.0',
        'twinbus_pair_unusable_total{entity="orders",pair="contoso"} 1.0',
        'twinbus_pair_diverted_messages_total{entity="orders",pair="contoso"} 7.0',
        'twinbus_pair_pings_total{entity="orders",outcome="timeout",pair="contoso"} 1.0',
        'twinbus_pair_pings_total{entity="orders",outcome="succeeded",pair="contoso"} 1.0',
        'twinbus_pair_backlog_queues_left_total{cause="quota_exceeded",pair="contoso",'
        'queue="contoso/x-servicebus-transfer/3"} 1.0',
    ):
        assert line in lines


def test_gauges_show_the_pair_as_it_is_now_and_nothing_once_it_is_closed(
    events: EventPublisher, registry: CollectorRegistry
) -> None:
    entities = [Entity("orders", FailoverPolicy(), 0.0)]
    rotation = Rotation(("a", "b"), 30.0)
    watches = [QueueStatus("a", oldest_age=75.0, unattended=True), QueueStatus("b", empty=True)]
    events.watch(lambda: entities, lambda: rotation, lambda: watches)
    state = 'twinbus_pair_entity_state{entity="orders",pair="contoso",state="%s"} %.1f'
    assert state % ("healthy", 1) in shown(registry)
    entities[0] = Entity("orders", FailoverPolicy(), 0.0, EntityMode.FAILED_OVER)
    lines = shown(registry)
    assert state % ("healthy", 0) in lines
    assert state % ("failed_over", 1) in lines
    assert 'twinbus_pair_backlog_queues{pair="contoso"} 2.0' in lines
    assert 'twinbus_pair_backlog_queues_usable{pair="contoso"} 2.0' in lines
    backlog = ("oldest_seconds", "a", 75), ("oldest_seconds", "b", 0), ("unattended", "a", 1), ("unattended", "b", 0)
    for name, queue, value in backlog:
        assert f'twinbus_backlog_{name}{{pair="contoso",queue="{queue}"}} {value:.1f}' in lines
    events.close()
    assert not [line for line in shown(registry) if "entity_state" in line or "{pair" in line]


def test_two_pairs_share_a_registry(registry: CollectorRegistry) -> None:
    pairs = [EventPublisher(name, threaded=True, registry=registry) for name in ("contoso", "fabrikam")]
    for pair in pairs:
        pair.emit(ENGAGED)
        pair.close()
    assert len([line for line in shown(registry) if line.startswith("twinbus_pair_failovers_total")]) == 2


# --- OpenTelemetry ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def telemetry() -> tuple[InMemorySpanExporter, InMemoryMetricReader]:
    """Providers can be set once in a process."""
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([reader]))
    return exporter, reader


def measured(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_a_diverted_send_is_a_producer_span_with_the_conventions_attributes(
    telemetry: tuple[InMemorySpanExporter, InMemoryMetricReader], events: EventPublisher
) -> None:
    exporter, reader = telemetry
    exporter.clear()
    with trace.get_tracer("caller").start_as_current_span("checkout") as caller:
        events.emit(ENGAGED)
        events.diverted("orders", "contoso/x-servicebus-transfer/3", 5, 0.25)
    events.pinged("orders", FailureKind.TIMEOUT, 1.0)
    sent, checkout = exporter.get_finished_spans()
    assert sent.name == "send contoso/x-servicebus-transfer/3"
    assert sent.kind is trace.SpanKind.PRODUCER
    assert sent.parent is not None
    assert sent.parent.span_id == caller.get_span_context().span_id
    assert dict(sent.attributes or {}) == {
        "messaging.system": "servicebus",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "contoso/x-servicebus-transfer/3",
        "messaging.batch.message_count": 5,
        "twinbus.pair": "contoso",
        "twinbus.entity": "orders",
        "twinbus.diverted": True,
    }
    assert [event.name for event in checkout.events] == ["twinbus.failover_engaged"]
    points = measured(reader)
    assert [point.value for point in points["twinbus.diverted.messages"]] == [5]
    assert sum(point.value for point in points["messaging.client.sent.messages"]) == 6
    failed = [p.attributes.get("error.type") for p in points["messaging.client.operation.duration"]]
    assert "timeout" in failed


def test_without_opentelemetry_a_pair_announces_as_ever() -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None
from twinbus.pairing.events import EventPublisher
from twinbus.pairing.decide.failover_events import FailoverEngaged, DrillCause
events = EventPublisher("contoso", threaded=True)
events.emit(FailoverEngaged("orders", 1.0, 1, DrillCause.FORCED))
events.diverted("orders", "q", 1, 0.1)
events.pinged("orders", None, 0.1)
events.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "failover_engaged" in done.stderr
    assert "Traceback" not in done.stderr
