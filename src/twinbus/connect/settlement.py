"""Settlement: the outcomes of received messages, on a link and on `$management`, and the peer's confirmations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from twinbus.amqp import ACCEPTED, RELEASED, DeliveryState, Error, Modified, Rejected
from twinbus.connect.errors import ServiceBusError, ServiceBusInternalError, error_for
from twinbus.connect.received_message import ReceivedMessage
from twinbus.values import Condition

_NAMED_IN_TEXT: Final = 10  # sequence numbers in an error's text; `failed` has all messages


@dataclass(frozen=True, slots=True)
class SettlementOutcome:
    """A requested outcome. `state` is for a link, `status` and `extra` for `$management`, if the link has ended."""

    verb: str
    state: DeliveryState
    status: str
    extra: Mapping[str, object] = field(default_factory=dict)


COMPLETE: Final = SettlementOutcome("complete", ACCEPTED, "completed")
# `$management` has no release. The message is abandoned instead, and its delivery count rises.
RELEASE: Final = SettlementOutcome("release", RELEASED, "abandoned")


def abandon_outcome(properties: Mapping[str, Any] | None) -> SettlementOutcome:
    return SettlementOutcome("abandon", Modified(True, False, _fields(properties)), "abandoned", _modified(properties))


def defer_outcome(properties: Mapping[str, Any] | None) -> SettlementOutcome:
    # "defered" is the service's spelling.
    return SettlementOutcome("defer", Modified(True, True, _fields(properties)), "defered", _modified(properties))


def dead_letter_outcome(
    reason: str | None, description: str | None, properties: Mapping[str, Any] | None
) -> SettlementOutcome:
    info = {"DeadLetterReason": reason, "DeadLetterErrorDescription": description}
    given = {name: text for name, text in info.items() if text is not None}
    state = Rejected(Error(Condition.DEAD_LETTER.value, description, {**given, **(properties or {})}))
    extra = {"deadletter-reason": reason, "deadletter-description": description, **_modified(properties)}
    return SettlementOutcome("dead_letter", state, "suspended", extra)


def _fields(properties: Mapping[str, Any] | None) -> dict[Any, Any] | None:
    return dict(properties) if properties else None


def _modified(properties: Mapping[str, Any] | None) -> dict[str, object]:
    return {"properties-to-modify": dict(properties)} if properties else {}


def settlement_refusal(answer: DeliveryState | None, requested: DeliveryState, entity: str) -> ServiceBusError | None:
    """Return the error if the peer refused a settlement, or None if the peer confirmed it.

    Some peers confirm a dead-lettering with the same error that we sent as its reason.
    """
    if answer is None or type(answer) is type(requested):
        error = answer.error if isinstance(answer, Rejected) else None
        if error is None or error.condition == Condition.DEAD_LETTER:
            return None
        return error_for(error.condition, error.description, entity=entity)
    if isinstance(answer, Rejected) and answer.error is not None:
        return error_for(answer.error.condition, answer.error.description, entity=entity)
    return ServiceBusInternalError(f"the service answered with {type(answer).__name__}", entity=entity)


class SettlementProgress:
    """Progress of one call that settles messages. `future` is done when each message is confirmed or has failed."""

    __slots__ = ("_unconfirmed", "failures", "future", "requested")

    def __init__(self, requested: DeliveryState, future: asyncio.Future[None]) -> None:
        self.requested = requested
        self.future = future
        self.failures: list[tuple[ReceivedMessage, ServiceBusError]] = []
        self._unconfirmed: dict[int, ReceivedMessage] = {}

    def expect(self, messages: Mapping[int, ReceivedMessage]) -> None:
        """Add messages, by delivery id, that need an answer before `future` is done."""
        self._unconfirmed = dict(messages)

    @property
    def unfinished(self) -> list[ReceivedMessage]:
        return [message for message, _ in self.failures] + list(self._unconfirmed.values())

    def answered(self, delivery_id: int, error: ServiceBusError | None) -> None:
        message = self._unconfirmed.pop(delivery_id)
        if error is None:
            message.is_settled = True
        else:
            message.link = None  # The delivery has ended on the link. The message's lock token may still be valid.
            self.failures.append((message, error))
        if not self._unconfirmed and not self.future.done():
            self.future.set_result(None)

    def fail(self, error: ServiceBusError) -> None:
        """The link has ended: fail the unconfirmed messages with `error`. The service may have settled them."""
        self.failures += [(message, error) for message in self._unconfirmed.values()]
        self._unconfirmed = {}
        if not self.future.done():
            self.future.set_result(None)


def settlement_error(
    verb: str, failures: Sequence[tuple[ReceivedMessage, ServiceBusError]], total: int
) -> ServiceBusError:
    """Return one error for all failed messages. Its class is that of the first message's error.

    The error's text names sequence numbers of the failed messages.
    """
    messages = [message for message, _ in failures]
    numbers = ", ".join(str(message.sequence_number) for message in messages[:_NAMED_IN_TEXT])
    more = "…" if len(messages) > _NAMED_IN_TEXT else ""
    first = failures[0][1]
    text = f"{verb} failed for {len(messages)} of {total} (sequence number {numbers}{more}): {first.description}"
    return type(first)(text, condition=first.condition, entity=first.entity, failed=messages)
