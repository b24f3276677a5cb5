"""What a pump asks of a transport: a backlog queue under peek-lock, a destination on the primary, the translation back.

`native` and `sdk` keep these protocols; one suite of contract tests holds both. When something is asked, and what
follows from a failure, is decided in `plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Final, Literal, NamedTuple, Protocol

from twinbus.backlog import FailureKind
from twinbus.errors import OperatorError, RetryError
from twinbus.message import MessageId

PEEK_PAGE_SIZE: Final = 250
"""Messages that are peeked at a time: what the service answers with at most."""
TimeToLive = Literal["restart", "absolute"]
"""Y7: begins anew on the primary, or the time spent in the backlog is deducted."""


class HeldMessage(Protocol):
    """A message of a backlog queue under lock. `size` is that of the encoded message."""

    @property
    def sequence_number(self) -> int: ...

    @property
    def message_id(self) -> MessageId | None: ...

    @property
    def size(self) -> int: ...

    @property
    def locked_until(self) -> datetime:
        """By the broker's clock; moved on by a renewal."""

    @property
    def enqueued_time(self) -> datetime: ...

    @property
    def unanswered(self) -> bool:
        """A settlement of it was asked for and not answered: that its lock is gone now may come of that."""


class OutgoingMessage(NamedTuple):
    """A message as it was meant, ready for its destination. `content` is for the transport that made it alone."""

    path: str
    message_id: MessageId | None
    size: int
    content: Any
    held: HeldMessage


@dataclass(frozen=True, slots=True)
class PeekedMessage:
    """A message looked at without a lock. `path` is None where it names no destination that can be read."""

    sequence_number: int
    deferred: bool
    path: str | None
    message_id: MessageId | None
    size: int
    enqueued_time: datetime


class Credit(Enum):
    """What receives have asked a broker for and is not ended yet. A grant that ends hungry is an empty receive (Y2)."""

    NONE = "none"
    HUNGRY = "hungry"  # it has brought nothing
    FED = "fed"  # it has brought messages: those are charged, its end is not


class Backlog(Protocol):
    """One backlog queue. BacklogFailedError where the queue did not answer, whatever the call.

    Settlements and renewals return those whose lock was lost; the rest is done, and confirmed by the broker.
    """

    @property
    def credit(self) -> Credit: ...

    async def open(self) -> None:
        """Connects, unless it is connected: the queue is there, and lets itself be received from. Asks for nothing."""

    async def receive(self, count: int, wait: float) -> Sequence[HeldMessage]:
        """One long poll: as many as are there, up to `count`, as soon as there is one; none after `wait` seconds.

        Between calls at most `count` of the last call are on their way: the caller has room for them.
        """

    async def receive_deferred(self, numbers: Sequence[int]) -> Sequence[HeldMessage]:
        """Those still there; what is gone or locked by another is left out."""

    async def peek(self, start: int, count: int) -> Sequence[PeekedMessage]:
        """From that sequence number on, in order; fewer than `count` does not mean that there are no more."""

    async def complete(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]: ...

    async def abandon(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]: ...

    async def defer(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]: ...

    async def dead_letter(
        self, held: Sequence[HeldMessage], reason: str, description: str
    ) -> Sequence[HeldMessage]: ...

    async def renew(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]: ...

    async def rest(self) -> Sequence[HeldMessage]:
        """No more messages until the next `receive`; what was on its way is given back, and returned. Those held stay
        held.
        """

    async def close(self) -> None:
        """Gives back what was never handed out. Never raises for a peer that does not answer."""


class Destination(Protocol):
    """One entity of the primary."""

    async def send(self, messages: Sequence[OutgoingMessage]) -> None:
        """Returns when all are accepted; SendFailedError names those that may not be."""

    async def close(self) -> None: ...


class Transport(Protocol):
    """Both namespaces. Backlogs and destinations are made at once, and connect with their first use."""

    def backlog(self, queue: str) -> Backlog: ...

    def destination(self, path: str) -> Destination: ...

    def restore(self, held: HeldMessage, ttl: TimeToLive, now: datetime) -> OutgoingMessage:
        """S7 turned back. NeverDeliverableError (Y6, or expired with ttl="absolute"); CannotCarryError (Y10)."""

    async def close(self) -> None:
        """Everything that was made of it too."""


# --- errors ----------------------------------------------------------------------------------------------------------


class NeverDeliverableError(OperatorError):
    """Y6: no destination can ever take this message. It is dead-lettered with reason and description.

    `path` is where it was meant to go, as far as that can be read.
    """

    def __init__(self, reason: str, description: str, path: str | None = None) -> None:
        super().__init__(f"{reason}: {description}", "`twinbus deadletter resubmit` brings it back once mended.")
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
    """`failed` are those that may not have arrived; some of them may have, all the same, unless it was `refused`: the
    service said no to them, or was never asked.
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
    """The backlog queue did not do what was asked; of what was asked, some may be done, unless it was `refused`."""

    def __init__(self, queue: str, kind: FailureKind, detail: str = "", *, refused: bool = False) -> None:
        super().__init__(f"backlog queue {queue}: {kind}{f' ({detail})' if detail else ''}")
        self.queue = queue
        self.kind = kind
        self.detail = detail
        self.refused = refused
