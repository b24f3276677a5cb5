"""Report a pair to OpenTelemetry, if its API is installed: diverted sends, pings and the pair's events.

Names are those of OpenTelemetry's messaging conventions; a name that the conventions lack starts with `twinbus.`. The
SDK itself reports ordinary sends.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from twinbus.backlog import FailureKind

SCOPE: Final = "twinbus.pairing"
SYSTEM: Final = {"messaging.system": "servicebus"}


class Telemetry:
    """The telemetry of one pair. Every method does nothing if the API is not installed."""

    def __init__(self, pair: str) -> None:
        self._pair = pair
        self._api: tuple[Any, Any] | None = None
        try:
            from opentelemetry import metrics, trace  # noqa: PLC0415 - optional at run time
        except ImportError:
            return
        meter = metrics.get_meter(SCOPE)
        self._api = (trace, trace.get_tracer(SCOPE))
        # https://opentelemetry.io/docs/specs/semconv/messaging/messaging-metrics/
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages the backlog or a ping brought to Service Bus"
        )
        self._duration = meter.create_histogram(
            "messaging.client.operation.duration", "s", "Duration of a diverted send or a ping"
        )
        self._diverted = meter.create_counter("twinbus.diverted.messages", "{message}", "Messages the backlog took")
        self._events = meter.create_counter("twinbus.events", "{event}", "Events of the pair by name")

    def notice(self, event: str, facts: Mapping[str, str | int | float | bool]) -> None:
        """Count an event, and add it to the current span, which is that of the call that caused the event."""
        if self._api is None:
            return
        trace, _ = self._api
        attributes = {f"twinbus.{name}": value for name, value in facts.items()}
        # The counter gets only the attributes that have a small number of different values.
        counted = {"entity", "queue", "side", "cause", "kind"} & facts.keys()
        few = {f"twinbus.{name}": facts[name] for name in sorted(counted)}
        self._events.add(1, {"twinbus.pair": self._pair, "twinbus.event": event, **few})
        trace.get_current_span().add_event(f"twinbus.{event}", {"twinbus.pair": self._pair, **attributes})

    def diverted(self, entity: str, queue: str, messages: int, seconds: float) -> None:
        """Count diverted messages, and add a span for the send to the backlog as a child of the caller's span."""
        if self._api is None:
            return
        trace, tracer = self._api
        ours = {"twinbus.pair": self._pair, "twinbus.entity": entity}
        standard = _send(queue)
        span = tracer.start_span(
            f"send {queue}",
            kind=trace.SpanKind.PRODUCER,
            start_time=time.time_ns() - int(seconds * 1e9),
            attributes={**standard, **ours, **_batch(messages), "twinbus.diverted": True},
        )
        span.end()
        self._sent.add(messages, standard)
        self._duration.record(seconds, standard)
        self._diverted.add(messages, ours)

    def pinged(self, entity: str, failure: FailureKind | None, seconds: float) -> None:
        if self._api is None:
            return
        attributes = {**_send(entity), "twinbus.pair": self._pair, "twinbus.ping": True}
        if failure is not None:
            attributes["error.type"] = str(failure)
        self._sent.add(1, attributes)
        self._duration.record(seconds, attributes)


def _send(destination: str) -> dict[str, str | bool]:
    return {
        **SYSTEM,
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": destination,
    }


def _batch(messages: int) -> dict[str, int]:
    # By convention only batches have this attribute.
    return {"messaging.batch.message_count": messages} if messages > 1 else {}
