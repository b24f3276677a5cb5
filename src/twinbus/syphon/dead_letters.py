"""Lists and resubmits the dead letters of the backlog queues (Y6).

To resubmit a dead letter, a copy is sent to the backlog queue first, then the ledger records the copy and its move, and
then the dead letter is completed. After a crash between these steps the message exists twice, with the same message id,
and is never lost.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Self

from twinbus.backlog import failure_kind, was_refused
from twinbus.connect import Management, ReceivedMessage, Receiver, Sender, ServiceBusConnection, ServiceBusError
from twinbus.errors import OperatorError, RetryError
from twinbus.ledger import OK, UNKNOWN, Ledger, LedgerUnavailableError, Move, Stage, id_text, result_of_failure
from twinbus.message import MessageId
from twinbus.syphon.syphon_ledger import NOT_TRIED
from twinbus.syphon.translation import destination_of, resubmittable
from twinbus.syphon.transport import PEEK_PAGE_SIZE

_RECEIVE_SIZE: Final = 100
# Unwanted dead letters stay locked, so they are not delivered again. If none arrives in this time, none is left.
_WAIT_SECONDS: Final = 2.0
_SUB_QUEUE: Final = "/$DeadLetterQueue"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter of a backlog queue.

    `destination` is None if the message names no destination. `enqueued_time` is when the backlog enqueued the message.
    """

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


DeadLetterFilter = Callable[[DeadLetter], bool]


@dataclass(slots=True)
class DeadLetterCensus:
    """Counts the dead letters that `wanted` selects.

    `last` has for each queue the number of selected dead letters, and the sequence number of the last one.
    """

    wanted: DeadLetterFilter
    last: dict[str, tuple[int, int]] = field(default_factory=dict)
    destinations: Counter[str | None] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.destinations.total()

    def count(self, letter: DeadLetter) -> None:
        self.destinations[letter.destination] += 1
        self.last[letter.queue] = (self.last.get(letter.queue, (0, 0))[0] + 1, letter.sequence_number)


class NotResubmittedError(RetryError):
    """Not all wanted messages were resubmitted: `done` of them are in the backlog, `left` are still dead letters."""

    def __init__(self, done: int, left: int, cause: BaseException | None) -> None:
        why = f": {cause}" if cause is not None else ": another receiver has them, or they are gone"
        super().__init__(f"{done} were resubmitted, {left} were not{why}")
        self.done = done
        self.left = left


class DeadLetters:
    """The dead letters of some backlog queues. At most one page or batch of messages is in memory at a time.

    The caller closes the connection to the secondary, and the ledger. `primary` and `secondary` are the names of the
    namespaces in the ledger.
    """

    def __init__(
        self,
        connection: ServiceBusConnection,
        queues: Sequence[str],
        *,
        primary: str = "",
        secondary: str = "",
        ledger: Ledger | None = None,
    ) -> None:
        self._connection = connection
        self._queues = tuple(queues)
        self._primary = primary
        self._secondary = secondary
        self._ledger = ledger

    async def found(self, after: tuple[str, int] | None = None) -> AsyncIterator[DeadLetter]:
        """Yield all dead letters, queue by queue, without locking them.

        `after` is a queue and a sequence number: yields only the dead letters after that number, and the next queues.
        """
        if after is not None and after[0] not in self._queues:
            raise OperatorError(
                f"{after[0]!r} is none of the backlog queues", f"Give one of {', '.join(self._queues)}."
            )
        start = 0
        for queue in self._queues:
            if after is not None:
                if queue != after[0]:
                    continue
                start, after = after[1] + 1, None
            management = self._connection.management(queue, address=queue + _SUB_QUEUE)
            try:
                while page := await self._peek(management, queue, start):
                    for message in page:
                        yield DeadLetter.of(queue, message)
                    start = (page[-1].sequence_number or 0) + 1
            finally:
                await management.close()
            start = 0

    async def census(self, wanted: DeadLetterFilter) -> DeadLetterCensus:
        census = DeadLetterCensus(wanted)
        async for letter in self.found():
            if wanted(letter):
                census.count(letter)
        return census

    async def resubmit(
        self, census: DeadLetterCensus, *, to: str | None = None, tell: Callable[[DeadLetter], None] | None = None
    ) -> int:
        """Resubmit the dead letters of the census to their backlog queues; returns the number of resubmitted messages.

        `to` replaces the destination of the messages. Messages that become dead letters after the census are not
        resubmitted. So a message that this call resubmits, and that is dead-lettered again, is resubmitted only once.
        Calls `tell` for each resubmitted dead letter. Raises NotResubmittedError if not all dead letters of the census
        are in the backlog again.
        """
        done = 0

        def resubmitted(letter: DeadLetter) -> None:
            nonlocal done
            done += 1
            if tell is not None:
                tell(letter)

        for queue, (count, last) in census.last.items():
            try:
                await self._resubmit(queue, count, last, census.wanted, to, resubmitted)
            except ServiceBusError as error:
                raise NotResubmittedError(done, census.total - done, error) from error
        if done < census.total:
            raise NotResubmittedError(done, census.total - done, None)
        return done

    async def _resubmit(
        self,
        queue: str,
        left: int,
        last: int,
        wanted: DeadLetterFilter,
        to: str | None,
        resubmitted: Callable[[DeadLetter], None],
    ) -> None:
        """Resubmit `left` wanted dead letters of one queue, up to the sequence number `last`.

        The service decides in which order it delivers dead letters. Unwanted dead letters stay locked until the end, so
        that they are not delivered again, and are then released. Of each unwanted one, only the delivery id is stored.
        """
        unwanted, highest, link = array("I"), -1, None
        async with (
            await self._connection.sender(queue) as sender,
            await self._connection.receiver(queue, dead_letter=True, prefetch=0) as receiver,
        ):
            try:
                while left and (batch := await self._receive(receiver)):
                    if batch[0].link is not link:  # a new link: the locks of the old link's deliveries have ended
                        unwanted, link = array("I"), batch[0].link
                    by_destination: dict[str, list[ReceivedMessage]] = {}
                    numbers: list[int] = []
                    for message in batch:
                        letter = DeadLetter.of(queue, message)
                        if letter.sequence_number <= last and wanted(letter):
                            by_destination.setdefault(letter.destination or "", []).append(message)
                        else:
                            unwanted.append(message.delivery_id)
                            numbers.append(letter.sequence_number)
                    if numbers and max(numbers) <= highest:  # unwanted ones come again, because their locks have ended
                        break
                    highest = max([highest, *numbers])
                    for path, part in by_destination.items():
                        await self._move(sender, receiver, part, path, to)
                        left -= len(part)
                        for message in part:
                            resubmitted(DeadLetter.of(queue, message))
            finally:
                # `give_back` releases nothing if the link is gone, because the broker has then released the messages.
                began = time.monotonic()
                if given_back := receiver.give_back(unwanted):
                    self._record(Stage.SETTLE_BACKLOG, queue, (0,) * given_back, began)

    async def _move(
        self, sender: Sender, receiver: Receiver, messages: Sequence[ReceivedMessage], path: str, to: str | None
    ) -> None:
        copies = [resubmittable(message.raw, to) for message in messages]
        ids = [message.message_id for message in messages]
        ledger, queue = self._ledger, sender.entity
        old_destination, destination = (f"{self._primary}/{one}" for one in (path, to or path))
        if ledger is None:
            await sender.send(copies)
            await receiver.complete(messages)
            return
        operation = ledger.begin(
            Stage.RESUBMIT_BACKLOG, self._secondary, queue, ids, [len(copy) for copy in copies], destination
        )
        try:
            await ledger.flushed()
            await sender.send(copies)
        except LedgerUnavailableError:
            operation.end(NOT_TRIED)
            raise
        except ServiceBusError as error:
            operation.end(UNKNOWN, cause=type(error).__name__)
            raise
        operation.end(OK)
        if old_destination == destination:
            ledger.moved(Move.RESUBMITTED, ids, f"{self._secondary}/{queue}{_SUB_QUEUE}", destination, op=operation.id)
        else:
            ledger.moved(Move.REDIRECTED, ids, old_destination, destination, op=operation.id)
        # The copy and its move are in the ledger before the dead letter is completed (L1). If the program is killed
        # in between, the dead letter is a further copy.
        ledger.write()
        completion = ledger.begin(Stage.COMPLETE_BACKLOG, self._secondary, queue, ids, (0,) * len(ids), destination)
        try:
            await receiver.complete(messages)
        except ServiceBusError as error:
            completion.end(UNKNOWN, cause=type(error).__name__)
            raise
        completion.end(OK)

    # --- requests, recorded in the ledger (M1) -----------------------------------------------------------------------

    async def _peek(self, management: Management, queue: str, start: int) -> list[ReceivedMessage]:
        began = time.monotonic()
        try:
            page = await management.peek(start, PEEK_PAGE_SIZE)
        except ServiceBusError as error:
            self._record(Stage.PEEK_BACKLOG, queue, 0, began, error)
            raise
        self._record(Stage.PEEK_BACKLOG, queue, sum(len(message.raw) for message in page), began)
        return page

    async def _receive(self, receiver: Receiver) -> list[ReceivedMessage]:
        began = time.monotonic()
        try:
            batch = await receiver.receive(_RECEIVE_SIZE, _WAIT_SECONDS)
        except ServiceBusError as error:
            self._record(Stage.EMPTY_RECEIVE, receiver.entity, (), began, error)
            raise
        stage = Stage.RECEIVE_BACKLOG if batch else Stage.EMPTY_RECEIVE
        self._record(stage, receiver.entity, [len(message.raw) for message in batch], began)
        return batch

    def _record(
        self, stage: Stage, queue: str, size: int | Sequence[int], began: float, error: ServiceBusError | None = None
    ) -> None:
        if self._ledger is not None:
            result, cause = OK, None
            if error is not None:
                result, cause = result_of_failure(failure_kind(error), refused=was_refused(error))
            seconds = time.monotonic() - began
            self._ledger.done(stage, self._secondary, queue, (), size, seconds=seconds, result=result, cause=cause)
