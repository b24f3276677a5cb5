"""A pair in OpenTelemetry, where its API is installed: the messaging conventions for what they know, `twinbus.*` else.

What an ordinary send shows is the SDK's own: here are only diverted sends, pings and the pair's events.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from twinbus.backlog import FailureKind

SCOPE: Final = "twinbus.pairing"
SYSTEM: Final = {"messaging.system": "servicebus"}


class Telemetry:
    """Of one pair. Without the API installed every method does nothing; without an SDK the API does nothing."""

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

    def told(self, event: str, said: Mapping[str, str | int | float | bool]) -> None:
        """Counted, and noted on the span of whoever's call brought it about."""
        if self._api is None:
            return
        trace, _ = self._api
        attributes = {f"twinbus.{name}": value for name, value in said.items()}
        named = {"entity", "queue", "side", "cause", "kind"} & said.keys()
        few = {f"twinbus.{name}": said[name] for name in sorted(named)}
        self._events.add(1, {"twinbus.pair": self._pair, "twinbus.event": event, **few})
        trace.get_current_span().add_event(f"twinbus.{event}", {"twinbus.pair": self._pair, **attributes})

    def diverted(self, entity: str, queue: str, messages: int, seconds: float) -> None:
        """A span of its own for the send to the backlog, under the caller's."""
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
    # The convention wants it on batches only.
    return {"messaging.batch.message_count": messages} if messages > 1 else {}
