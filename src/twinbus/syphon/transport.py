"""What a pump needs from a transport: a backlog queue under peek-lock, a destination on the primary, translation back.

`native_transport` and `sdk_transport` implement these protocols; one suite of contract tests runs over both. `plan`
decides when a call is made and what follows from a failure.
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
"""Messages of one peek: the service returns no more."""
TimeToLive = Literal["restart", "absolute"]
"""Y7. `restart`: the time to live starts again on the primary. `absolute`: the time in the backlog is deducted."""


class HeldMessage(Protocol):
    """A message of a backlog queue under lock. `size` is that of the encoded message, in bytes."""

    @property
    def sequence_number(self) -> int: ...

    @property
    def message_id(self) -> MessageId | None: ...

    @property
    def size(self) -> int: ...

    @property
    def locked_until(self) -> datetime:
        """End of the lock by the broker's clock. A renewal moves it."""

    @property
    def enqueued_time(self) -> datetime: ...

    @property
    def unanswered(self) -> bool:
        """Whether a settlement was requested and not answered. If so, a lost lock may mean that it was carried out."""


class OutgoingMessage(NamedTuple):
    """A message as its sender meant it, ready for its destination. Only the transport that made it reads `content`."""

    path: str
    message_id: MessageId | None
    size: int
    content: Any
    held: HeldMessage


@dataclass(frozen=True, slots=True)
class PeekedMessage:
    """A message read without a lock. `path` is None if it names no readable destination."""

    sequence_number: int
    deferred: bool
    path: str | None
    message_id: MessageId | None
    size: int
    enqueued_time: datetime


class Backlog(Protocol):
    """One backlog queue. Every call but `close` raises BacklogFailedError if the queue did not answer.

    Settlements and renewals return the messages whose lock was lost; the broker has confirmed the others.
    """

    @property
    def has_credit(self) -> bool:
        """Whether the broker may send messages now: a receive waits, was cancelled, or left credit for the next."""

    async def open(self) -> None:
        """Connect, unless connected: checks that the queue exists and may be received from. Requests no message.

        Other calls connect too if they have to. A caller that opens first knows that a failure after it was a request.
        """

    async def receive(self, count: int, wait: float) -> Sequence[HeldMessage]:
        """One long poll: returns up to `count` messages as soon as there is one, and none after `wait` seconds.

        After a receive that returned messages, at most `count` more may be on their way for the next call.
        """

    async def receive_deferred(self, numbers: Sequence[int]) -> Sequence[HeldMessage]:
        """Lock deferred messages. Leaves out those that are gone or that another receiver has locked."""

    async def peek(self, start: int, count: int) -> Sequence[PeekedMessage]:
        """Messages from this sequence number on, in order. Only an empty result means that there are no more."""

    async def complete(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]: ...

    async def abandon(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]: ...

    async def defer(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]: ...

    async def dead_letter(
        self, held: Sequence[HeldMessage], reason: str, description: str
    ) -> Sequence[HeldMessage]: ...

    async def renew(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]: ...

    async def stop_receiving(self) -> Sequence[HeldMessage]:
        """Take back the credit until the next `receive`. Releases the messages that were on their way and returns them.

        Messages that were handed out stay locked and can still be settled.
        """

    async def close(self) -> None:
        """Release what was never handed out. Does not raise if the peer does not answer."""


class Destination(Protocol):
    """One entity of the primary."""

    async def send(self, messages: Sequence[OutgoingMessage]) -> None:
        """Return when all are accepted. SendFailedError names those that may not be."""

    async def close(self) -> None: ...


class Transport(Protocol):
    """Both namespaces. Backlogs and destinations connect with their first use."""

    def backlog(self, queue: str) -> Backlog: ...

    def destination(self, path: str) -> Destination: ...

    def restore(self, held: HeldMessage, ttl: TimeToLive, now: datetime) -> OutgoingMessage:
        """The message as it was before it was diverted (S7).

        Raises NeverDeliverableError (Y6, or expired with ttl="absolute") or CannotCarryError (Y10).
        """

    async def close(self) -> None:
        """Close everything that was made from it."""


# --- errors ----------------------------------------------------------------------------------------------------------


class NeverDeliverableError(OperatorError):
    """Y6: no destination can ever take this message. The syphon dead-letters it with `reason` and `description`.

    `path` is its destination if that can be read.
    """

    def __init__(self, reason: str, description: str, path: str | None = None) -> None:
        super().__init__(f"{reason}: {description}", "Mend it, then run `twinbus deadletter resubmit`.")
        self.reason = reason
        self.description = description
        self.path = path


class CannotCarryError(OperatorError):
    """Y10: this transport would change the message for `path`. It stays in the backlog."""

    def __init__(self, description: str, path: str | None = None) -> None:
        super().__init__(description, "Use --transport native for it.")
        self.description = description
        self.path = path


class SendFailedError(RetryError):
    """`failed` are the messages that may not have arrived.

    If `refused`, none of them arrived: the service refused them, or the request never left.
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
    """The backlog queue did not confirm a request. If `refused`, no part of it was carried out."""

    def __init__(self, queue: str, kind: FailureKind, detail: str = "", *, refused: bool = False) -> None:
        super().__init__(f"backlog queue {queue}: {kind}{f' ({detail})' if detail else ''}")
        self.queue = queue
        self.kind = kind
        self.detail = detail
        self.refused = refused
