"""What could never be delivered, brought back once it is mended (Y6): dead letters of the backlog queues, told and
resubmitted. A copy goes into the backlog queue first, and only then the dead letter is completed: a crash between the
two repeats the message under its own id, and never loses it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

from twinbus.connect import ReceivedMessage, Receiver, Sender, ServiceBusConnection
from twinbus.connect.errors import ServiceBusError
from twinbus.connect.settling import RELEASE
from twinbus.errors import OperatorError, RetryError
from twinbus.ledger import OK, UNKNOWN, Ledger, Move, Stage
from twinbus.ledger.encoding import id_text
from twinbus.message import MessageId
from twinbus.syphon.translation import destination_of, resubmittable

PAGE: Final = 250
_BATCH: Final = 100
# Locked ones that are not meant are held until the end: after so long without a message there is none left.
_WAIT_SECONDS: Final = 2.0
_SUB_QUEUE: Final = "/$DeadLetterQueue"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """`destination` is None where it names none. `enqueued_time` is when the backlog took it."""

    queue: str
    sequence_number: int
    message_id: MessageId | None
    destination: str | None
    reason: str | None
    description: str | None
    enqueued_time: datetime
    size: int

    @property
    def id(self) -> str:
        """The message id as the ledger writes it."""
        return id_text(self.message_id)

    @classmethod
    def of(cls, queue: str, message: ReceivedMessage) -> Self:
        return cls(
            queue,
            message.sequence_number or 0,
            message.message_id,
            destination_of(message.raw),
            message.dead_letter_reason,
            message.dead_letter_error_description,
            message.enqueued_time or datetime.fromtimestamp(0, UTC),
            len(message.raw),
        )


class NotResubmittedError(RetryError):
    """Some that were asked for are still dead letters; those in `done` are back in the backlog."""

    def __init__(self, done: Sequence[DeadLetter], left: int, cause: BaseException | None) -> None:
        why = f": {cause}" if cause is not None else ": another receiver has them, or they are gone"
        super().__init__(f"{len(done)} were resubmitted, {left} were not{why}")
        self.done = tuple(done)
        self.left = left


class DeadLetters:
    """Of these backlog queues. The connection to the secondary and the ledger stay the caller's.

    `primary` and `secondary` are the namespaces' names for the ledger.
    """

    def __init__(
        self,
        bus: ServiceBusConnection,
        queues: Sequence[str],
        *,
        primary: str = "",
        secondary: str = "",
        ledger: Ledger | None = None,
    ) -> None:
        self._bus = bus
        self._queues = tuple(queues)
        self._primary = primary
        self._secondary = secondary
        self._ledger = ledger

    async def found(self, after: tuple[str, int] | None = None) -> AsyncIterator[DeadLetter]:
        """All, queue by queue in their order; `after` goes on behind this number of this queue. Nothing is locked."""
        if after is not None and after[0] not in self._queues:
            raise OperatorError(f"{after[0]!r} is none of the backlog queues", f"They are {', '.join(self._queues)}.")
        start = 0
        for queue in self._queues:
            if after is not None:
                if queue != after[0]:
                    continue
                start, after = after[1] + 1, None
            management = self._bus.management(queue, address=queue + _SUB_QUEUE)
            try:
                while page := await management.peek(start, PAGE):
                    for message in page:
                        yield DeadLetter.of(queue, message)
                    start = (page[-1].sequence_number or 0) + 1
            finally:
                await management.close()
            start = 0

    async def resubmit(
        self,
        letters: Sequence[DeadLetter],
        *,
        to: str | None = None,
        tell: Callable[[DeadLetter], None] | None = None,
    ) -> list[DeadLetter]:
        """Back into their backlog queues, for `to` where it is given. NotResubmittedError where not all are."""
        done: list[DeadLetter] = []

        def resubmitted(letter: DeadLetter) -> None:
            done.append(letter)
            if tell is not None:
                tell(letter)

        for queue in self._queues:
            wanted = {letter.sequence_number: letter for letter in letters if letter.queue == queue}
            if wanted:
                try:
                    await self._resubmit(queue, wanted, to, resubmitted)
                except ServiceBusError as error:
                    raise NotResubmittedError(done, len(letters) - len(done), error) from error
        if len(done) < len(letters):
            raise NotResubmittedError(done, len(letters) - len(done), None)
        return done

    async def _resubmit(
        self, queue: str, wanted: dict[int, DeadLetter], to: str | None, resubmitted: Callable[[DeadLetter], None]
    ) -> None:
        """The service hands out dead letters in its own order: the others are held meanwhile, and released after."""
        others: dict[int, ReceivedMessage] = {}
        async with (
            await self._bus.sender(queue) as sender,
            await self._bus.receiver(queue, dead_letter=True, prefetch=0) as receiver,
        ):
            try:
                while wanted and (batch := await receiver.receive(_BATCH, _WAIT_SECONDS)):
                    meant = [message for message in batch if message.sequence_number in wanted]
                    rest = {message.sequence_number or 0: message for message in batch if message not in meant}
                    going_round = rest.keys() & others.keys()
                    others |= rest
                    if going_round:  # their locks have ended meanwhile
                        break
                    for path, part in _by_destination(meant).items():
                        await self._moved(sender, receiver, part, path, to)
                        for message in part:
                            resubmitted(wanted.pop(message.sequence_number or 0))
            finally:
                # What is no longer ours to release is with somebody else already.
                await receiver.settle(list(others.values()), RELEASE)

    async def _moved(
        self, sender: Sender, receiver: Receiver, messages: Sequence[ReceivedMessage], path: str, to: str | None
    ) -> None:
        copies = [resubmittable(message.raw, to) for message in messages]
        ids = [message.message_id for message in messages]
        sizes = [len(copy) for copy in copies]
        ledger, queue = self._ledger, sender.entity
        was, now = (f"{self._primary}/{one}" for one in (path, to or path))
        if ledger is None:
            await sender.send(copies)
            await receiver.complete(messages)
            return
        operation = ledger.begin(Stage.RESUBMIT_BACKLOG, self._secondary, queue, ids, sizes, now)
        await ledger.flushed()
        try:
            await sender.send(copies)
        except ServiceBusError as error:
            operation.end(UNKNOWN, cause=type(error).__name__)
            raise
        operation.end(OK)
        completion = ledger.begin(Stage.COMPLETE_BACKLOG, self._secondary, queue, ids, sizes, now)
        try:
            await receiver.complete(messages)
        except ServiceBusError as error:
            completion.end(UNKNOWN, cause=type(error).__name__)
            raise
        completion.end(OK)
        if was == now:
            ledger.moved(Move.RESUBMITTED, ids, f"{self._secondary}/{queue}{_SUB_QUEUE}", now, op=operation.id)
        else:
            ledger.moved(Move.REDIRECTED, ids, was, now, op=operation.id)


def _by_destination(messages: Sequence[ReceivedMessage]) -> dict[str, list[ReceivedMessage]]:
    found: dict[str, list[ReceivedMessage]] = {}
    for message in messages:
        found.setdefault(destination_of(message.raw) or "", []).append(message)
    return found
