"""The protocols of a transport: a backlog queue under peek-lock, a destination on the primary, translation of messages.

`native_transport` and `sdk_transport` implement these protocols; the same contract tests run on both. `plan` decides
when a call is made and what to do after a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, Protocol

from twinbus.backlog import FailureKind
from twinbus.errors import OperatorError, RetryError
from twinbus.message import MessageId

PEEK_PAGE_SIZE: Final = 250
"""The most messages that the service returns for one peek."""
TimeToLive = Literal["restart", "absolute"]
"""Y7. `restart`: the time to live starts again on the primary. `absolute`: the time in the backlog is deducted."""


class HeldMessage(Protocol):
    """A message of a backlog queue, locked by this syphon. `size` is the size of the encoded message, in bytes."""

    @property
    def sequence_number(self) -> int: ...

    @property
    def message_id(self) -> MessageId | None: ...

    @property
    def size(self) -> int: ...

    @property
    def locked_until(self) -> datetime:
        """When the lock ends, by the broker's clock. A renewal changes this value."""

    @property
    def enqueued_time(self) -> datetime: ...

    @property
    def unanswered(self) -> bool:
        """Whether a settlement of this message was requested and not answered.

        If so, a lost lock may mean that the settlement was carried out.
        """


class OutgoingMessage(NamedTuple):
    """A message as its sender sent it, ready for its destination.

    Only the transport that made the object reads `content`.
    """

    path: str
    message_id: MessageId | None
    size: int
    content: Any
    held: HeldMessage
    enqueued: int | None = None
    """When the message arrived in the backlog by the broker's clock, in ms since the epoch; None if it is not known."""


@dataclass(frozen=True, slots=True)
class PeekedMessage:
    """A message of a backlog queue, read without locking it. `path` is the destination; None if it is not readable."""

    sequence_number: int
    deferred: bool
    path: str | None
    message_id: MessageId | None
    size: int
    enqueued_time: datetime
    scheduled: bool = False
    """Whether the message becomes available at a later time."""


class Backlog(Protocol):
    """One backlog queue. Every method except `close` raises BacklogFailedError if the queue did not answer.

    Methods that settle or renew return the messages whose lock was lost; the broker has confirmed the other messages.
    """

    @property
    def has_credit(self) -> bool:
        """Whether the broker may deliver messages now: a receive waits, was cancelled, or has left credit."""

    async def open(self) -> None:
        """Connect if not connected. This checks that the queue exists and permits receiving; it requests no message.

        Other methods connect too if necessary. A caller that calls `open` first knows that a failure of the next method
        was the failure of a request, not of the connecting.
        """

    async def receive(self, count: int, wait: float) -> Sequence[HeldMessage]:
        """Make one long poll: return up to `count` messages as soon as one is there, or none after `wait` seconds.

        After a receive that returned messages, the broker may deliver up to `count` more messages, which the next call
        returns.
        """

    async def receive_deferred(self, numbers: Sequence[int]) -> Sequence[HeldMessage]:
        """Lock and return deferred messages, except those that do not exist or that another receiver has locked."""

    async def peek(self, start: int, count: int) -> Sequence[PeekedMessage]:
        """Return up to `count` messages from the sequence number `start` on, in order, without locking them.

        Only an empty result means that there are no more messages.
        """

    async def complete(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]: ...

    async def abandon(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]: ...

    async def defer(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]: ...

    async def dead_letter(
        self, held: Sequence[HeldMessage], reason: str, description: str
    ) -> Sequence[HeldMessage]: ...

    async def renew(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]: ...

    async def stop_receiving(self) -> Sequence[HeldMessage]:
        """Take back the credit until the next `receive`. Release and return the messages that no `receive` returned.

        Messages that a `receive` returned stay locked and can still be settled.
        """

    async def close(self) -> None:
        """Release the messages that no `receive` returned. Does not raise an error if the broker does not answer."""


class Destination(Protocol):
    """One entity of the primary."""

    async def send(self, messages: Sequence[OutgoingMessage]) -> None:
        """Return when all messages are accepted. SendFailedError names the messages that were perhaps not accepted."""

    async def close(self) -> None: ...


class Transport(Protocol):
    """Access to both namespaces. Backlogs and destinations connect at their first use."""

    def backlog(self, queue: str) -> Backlog: ...

    def destination(self, path: str) -> Destination: ...

    def restore(self, held: HeldMessage, ttl: TimeToLive, now: datetime) -> OutgoingMessage:
        """Return the message as it was before the diversion (S7). `now` is the time by the broker's clock (L5).

        Raises NeverDeliverableError (Y6, or expired with ttl="absolute") or CannotCarryError (Y10).
        """

    async def close(self) -> None:
        """Close all backlogs and destinations of this transport."""


# --- errors ----------------------------------------------------------------------------------------------------------


class NeverDeliverableError(OperatorError):
    """Y6: no destination can ever accept this message. The syphon dead-letters it with `reason` and `description`.

    `path` is the destination of the message; None if it cannot be read.
    """

    def __init__(self, reason: str, description: str, path: str | None = None) -> None:
        super().__init__(f"{reason}: {description}", "Mend it, then run `twinbus deadletter resubmit`.")
        self.reason = reason
        self.description = description
        self.path = path


class CannotCarryError(OperatorError):
    """Y10: this transport would change the message, so the message stays in the backlog. `path` is its destination."""

    def __init__(self, description: str, path: str | None = None) -> None:
        super().__init__(description, "Use --transport native for it.")
        self.description = description
        self.path = path


class SendFailedError(RetryError):
    """A send failed. `failed` has the messages that perhaps did not arrive.

    If `refused` is True, none of these arrived: the service refused the request, or the request was never sent.
    """

    def __init__(
        self,
        path: str,
        kind: FailureKind,
        failed: Sequence[OutgoingMessage],
        detail: str = "",
        *,
        refused: bool = False,
    ) -> None:
        super().__init__(f"{path}: {kind}{f' ({detail})' if detail else ''}: {len(failed)} messages were not confirmed")
        self.path = path
        self.kind = kind
        self.failed = tuple(failed)
        self.detail = detail
        self.refused = refused


class BacklogFailedError(RetryError):
    """The backlog queue did not confirm a request. If `refused` is True, no part of the request was carried out."""

    def __init__(self, queue: str, kind: FailureKind, detail: str = "", *, refused: bool = False) -> None:
        super().__init__(f"backlog queue {queue}: {kind}{f' ({detail})' if detail else ''}")
        self.queue = queue
        self.kind = kind
        self.detail = detail
        self.refused = refused
