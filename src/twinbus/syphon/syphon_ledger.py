"""Records each operation of a syphon in two places: the syphon's ledger and its progress counters (M1).

`SyphonLedger` writes the entries; without a ledger it only counts. `MeteredBacklog` is a backlog queue that records
each of its billable requests, with duration and result. Neither of the two decides what happens to a message.

What a receive costs (Y2): a receive grants credit to the broker. Each message that arrives is charged as one receive. A
grant that ends without any message is charged as one *empty* receive. After a receive that returned messages, a part of
the credit may stay granted for the next receive. Such credit is *used*: when it ends, nothing more is charged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

from twinbus.ledger import OK, SYPHON_STARTED, UNKNOWN, Fact, Ledger, Move, RunningOperation, Stage, result_of_failure
from twinbus.syphon.broker_clock import BrokerClock
from twinbus.syphon.progress import ProgressCounter
from twinbus.syphon.transport import (
    PEEK_PAGE_SIZE,
    Backlog,
    BacklogFailedError,
    HeldMessage,
    OutgoingMessage,
    PeekedMessage,
    SendFailedError,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")

NOT_TRIED: Final = "not_tried"
"""Result of an operation whose intent could not be written to the disk, so that nothing was sent."""
CLOCK_COMPARED: Final = "clock"
"""Event of the state entry with the difference of two clocks."""
CLOCK_TOLERANCE: Final = 1.0
"""Seconds. Clocks that differ by no more than this count as equal."""
NOT_RECORDED: Final = "not_recorded"
"""Why a delivered message was not completed: its delivery could not be written to the ledger."""
LOCK_LOST: Final = "lock_lost"
NOT_FOUND: Final = "message_not_found"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class SyphonLedger:
    """Writes the ledger entries of a syphon, and updates its progress counters.

    `primary` and `secondary` are the names of the namespaces as in the paths of backlog queues (P4).
    """

    def __init__(self, ledger: Ledger | None, primary: str, secondary: str, counts: ProgressCounter) -> None:
        self.counts = counts
        self._ledger = ledger
        self._primary = primary
        self._secondary = secondary
        self._ahead: dict[str, float] = {}
        """By queue, how far the clock of this machine is ahead of the broker's, in seconds."""

    def started(self, options: Mapping[str, Fact]) -> None:
        """Record that a syphon starts, with those of its options that its cost depends on (M4)."""
        if self._ledger is not None:
            self._ledger.state(SYPHON_STARTED, options, pair=self._primary)

    def record(
        self,
        stage: Stage,
        queue: str,
        size: int | Sequence[int],
        seconds: float,
        result: str = OK,
        cause: str | None = None,
    ) -> None:
        """Record finished requests to a backlog queue.

        If `size` is a sequence, records one operation for each size in it. If `size` is an int or an empty sequence,
        records one operation.
        """
        self.counts.operations[stage] += 1 if isinstance(size, int) else len(size) or 1
        if self._ledger is not None:
            self._ledger.done(stage, self._secondary, queue, (), size, seconds=seconds, result=result, cause=cause)

    def compare_clocks(self, queue: str, clock: BrokerClock, now: float, wall: datetime) -> None:
        """Record how far the clock of this machine (`wall`) is ahead of the broker's, as a queue shows it (L5).

        Records the first difference. Records a later difference if it is more than 1 s from the last one of the same
        queue. For a queue without a record, it must be more than 1 s from the last ones of all queues. While lock
        durations are only assumed, queues may show different times: then each queue is recorded once, not each batch.
        """
        time = clock.time(now)
        if time is None:
            return
        ahead = (wall - _EPOCH) / timedelta(seconds=1) - time / 1000
        before = [self._ahead[queue]] if queue in self._ahead else self._ahead.values()
        if any(abs(ahead - one) <= CLOCK_TOLERANCE for one in before):
            self._ahead.setdefault(queue, ahead)
            return
        self._ahead[queue] = ahead
        if abs(ahead) > CLOCK_TOLERANCE:
            _log.warning(
                "the clock of this machine is %.1f s %s the clock of %s",
                abs(ahead),
                "ahead of" if ahead > 0 else "behind",
                self._secondary,
            )
        if self._ledger is not None:
            known = clock.lock_seconds is not None
            facts: dict[str, Fact] = {"ahead": round(ahead, 3), "queue": queue, "lock": clock.lock, "lock_known": known}
            self._ledger.state(CLOCK_COMPARED, facts, pair=self._primary)

    def begin_send(
        self, path: str, messages: Sequence[OutgoingMessage], broker_at: int | None = None
    ) -> RunningOperation | None:
        """Write the intent of a send to the primary. Await `flush` before the send.

        `broker_at` is the broker's time now (L5), in ms since the epoch; None if it is not known.
        Raises LedgerUnavailableError if the ledger cannot be written and its option `on_error` is "stop".
        """
        self.counts.operations[Stage.RETURN_PRIMARY] += len(messages)
        if self._ledger is None:
            return None
        ids = [message.message_id for message in messages]
        sizes = [message.size for message in messages]
        waited = () if broker_at is None else _waited(messages, broker_at)
        return self._ledger.begin(
            Stage.RETURN_PRIMARY, self._primary, path, ids, sizes, broker_at=broker_at, waited=waited
        )

    async def flush(self) -> None:
        """Return when all intents are on disk."""
        if self._ledger is not None:
            await self._ledger.flushed()

    def write(self) -> None:
        """Return when all entries are in the ledger's file, without waiting for a sync. Call it before a completion.

        If the ledger cannot be written, raises LedgerUnavailableError if its option `on_error` is "stop"; otherwise
        the entries wait in memory.
        """
        if self._ledger is not None:
            self._ledger.write()

    def send_not_tried(self, operation: RunningOperation | None) -> None:
        if operation is not None:
            operation.end(NOT_TRIED)

    def send_succeeded(
        self, operation: RunningOperation | None, path: str, messages: Sequence[OutgoingMessage], now: float
    ) -> None:
        if operation is not None:
            operation.end(OK)
        self.counts.returned(path, len(messages), sum(message.size for message in messages), now)

    def send_failed(
        self,
        operation: RunningOperation | None,
        error: SendFailedError,
        arrived: Sequence[OutgoingMessage],
        now: float,
    ) -> None:
        result, cause = result_of_failure(error.kind, refused=error.refused)
        if operation is not None:
            ids = [message.message_id for message in error.failed] if arrived else ()
            operation.end(result, cause=cause, failed=ids)
        if result == UNKNOWN:
            # These messages may have arrived, and are sent again.
            self.counts.possible_duplicates(error.path, len(error.failed))
        if arrived:
            self.counts.returned(error.path, len(arrived), sum(message.size for message in arrived), now)

    def completed(
        self,
        queue: str,
        path: str,
        messages: Sequence[OutgoingMessage],
        lost: Sequence[HeldMessage],
        why: str,
        seconds: float,
        broker_at: int | None = None,
    ) -> None:
        """Record the completion of delivered messages. The messages in `lost` may be delivered again; `why` says why.

        `broker_at` is the broker's time when the completion began (L5); it is recorded if messages are lost.

        A completion has no intent: after a crash, a delivery without a completion already means a possible duplicate.
        """
        self.counts.operations[Stage.COMPLETE_BACKLOG] += len(messages)
        if self._ledger is not None:
            self._ledger.done(
                Stage.COMPLETE_BACKLOG,
                self._secondary,
                queue,
                [message.message_id for message in messages],
                (0,) * len(messages),
                f"{self._primary}/{path}",
                seconds=seconds,
                result=UNKNOWN if lost else OK,
                cause=why if lost else None,
                failed=[one.message_id for one in lost] if len(lost) < len(messages) else (),
                broker_at=broker_at if lost else None,
            )
        if lost:
            self.moved(Move.POSSIBLE_DUPLICATE, queue, path, lost, why)

    def moved(
        self,
        move: Move,
        queue: str,
        path: str | None,
        held: Sequence[HeldMessage],
        reason: str | None = None,
        broker_at: int | None = None,
    ) -> None:
        """Record messages that are dead-lettered, left in the backlog (Y10), or possibly delivered twice.

        `broker_at` is the broker's time now (L5); give it if the messages are in the backlog now. Dead letters are
        recorded before their settlement, and counted after it.
        """
        match move:
            case Move.KEPT:
                self.counts.kept(path or "", len(held))
            case Move.POSSIBLE_DUPLICATE:
                self.counts.possible_duplicates(path or "", len(held))
            case _:
                pass
        if self._ledger is not None:
            source, destination = f"{self._secondary}/{queue}", f"{self._primary}/{path or ''}"
            ids = [one.message_id for one in held]
            self._ledger.moved(move, ids, source, destination, reason, broker_at=broker_at)


class MeteredBacklog:
    """A `Backlog` that records its requests. A failed attempt to connect is not a request.

    `complete` records nothing, because it does not know the destination: the mover calls `SyphonLedger.completed`.
    """

    def __init__(self, inner: Backlog, queue: str, ledger: SyphonLedger, now: Callable[[], float]) -> None:
        self._inner = inner
        self._queue = queue
        self._ledger = ledger
        self._now = now
        # Whether messages have arrived on the credit that is granted now.
        self._credit_used = False

    @property
    def has_credit(self) -> bool:
        return self._inner.has_credit

    async def open(self) -> None:
        await self._inner.open()

    async def receive(self, count: int, wait: float) -> Sequence[HeldMessage]:
        has_credit = self._inner.has_credit
        if not has_credit:  # otherwise the link is open
            await self._inner.open()
        used = self._credit_used = self._credit_used and has_credit
        began = self._now()
        try:
            held = await self._inner.receive(count, wait)
        except BacklogFailedError as error:
            if not used:
                self._record_failure(Stage.EMPTY_RECEIVE, (), began, error)
            raise
        except asyncio.CancelledError:
            # If the credit is still granted, `stop_receiving` records its end.
            if not used and not self._inner.has_credit:
                self._record(Stage.EMPTY_RECEIVE, (), began)
            raise
        if held:
            self._credit_used = True
            self._record(Stage.RECEIVE_BACKLOG, [one.size for one in held], began)
        elif not used:
            self._record(Stage.EMPTY_RECEIVE, (), began)
        return held

    async def receive_deferred(self, numbers: Sequence[int]) -> Sequence[HeldMessage]:
        await self._inner.open()
        began = self._now()
        held = await self._try(Stage.RECEIVE_DEFERRED, self._inner.receive_deferred, numbers, len(numbers))
        if held:
            self._record(Stage.RECEIVE_DEFERRED, [one.size for one in held], began)
        else:
            self._record(Stage.RECEIVE_DEFERRED, (), began, NOT_FOUND)
        return held

    async def peek(self, start: int, count: int) -> Sequence[PeekedMessage]:
        await self._inner.open()
        began = self._now()
        try:
            found = await self._inner.peek(start, count)
        except BacklogFailedError as error:
            self._record_failure(Stage.PEEK_BACKLOG, 0, began, error)
            raise
        # A peek is one operation. Its size is the sum of the sizes of the returned messages (M2).
        self._record(Stage.PEEK_BACKLOG, sum(one.size for one in found), began)
        return found

    async def complete(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._truly_lost(await self._inner.complete(held), _is_gone)

    async def abandon(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settle(Stage.SETTLE_BACKLOG, self._inner.abandon, held)

    async def defer(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        async def defer(given: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
            return await self._truly_lost(await self._inner.defer(given), _is_deferred)

        return await self._settle(Stage.SETTLE_BACKLOG, defer, held)

    async def dead_letter(self, held: Sequence[HeldMessage], reason: str, description: str) -> Sequence[HeldMessage]:
        async def dead_letter(given: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
            return await self._truly_lost(await self._inner.dead_letter(given, reason, description), _is_gone)

        return await self._settle(Stage.SETTLE_BACKLOG, dead_letter, held)

    async def renew(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        await self._inner.open()
        return await self._settle(Stage.RENEW_BACKLOG, self._inner.renew, held)

    async def stop_receiving(self) -> Sequence[HeldMessage]:
        unused = self._inner.has_credit and not self._credit_used
        began = self._now()
        released = await self._inner.stop_receiving()
        if released:
            self._record(Stage.RECEIVE_BACKLOG, [one.size for one in released], began)
            self._record(Stage.SETTLE_BACKLOG, (0,) * len(released), began)
        elif unused:
            self._record(Stage.EMPTY_RECEIVE, (), began)
        return released

    async def close(self) -> None:
        with suppress(BacklogFailedError):  # the broker takes the credit back with the link
            await self.stop_receiving()
        await self._inner.close()

    async def _truly_lost(
        self, lost: Sequence[HeldMessage], is_settled: Callable[[PeekedMessage | None], bool]
    ) -> Sequence[HeldMessage]:
        """Return the messages of `lost` that are not settled.

        If a settlement was carried out but not answered, the next try reports a lost lock. A peek shows whether the
        message was settled.
        """
        doubtful = sorted((one for one in lost if one.unanswered), key=lambda one: one.sequence_number)
        settled: set[int] = set()
        page: dict[int, PeekedMessage] = {}
        last_peeked = -1
        try:
            for one in doubtful:
                if one.sequence_number > last_peeked:
                    peeked = await self.peek(one.sequence_number, PEEK_PAGE_SIZE)
                    page = {message.sequence_number: message for message in peeked}
                    last_peeked = max(page, default=doubtful[-1].sequence_number)
                if is_settled(page.get(one.sequence_number)):
                    settled.add(id(one))
        except BacklogFailedError:
            return lost
        return [one for one in lost if id(one) not in settled]

    # --- recording ---------------------------------------------------------------------------------------------------

    async def _settle(
        self,
        stage: Stage,
        call: Callable[[Sequence[HeldMessage]], Awaitable[Sequence[HeldMessage]]],
        held: Sequence[HeldMessage],
    ) -> Sequence[HeldMessage]:
        """Run `call`, and record one operation for each message: with result OK, or LOCK_LOST if nothing happened."""
        began = self._now()
        lost = await self._try(stage, call, held, len(held))
        if len(lost) < len(held):
            self._record(stage, (0,) * (len(held) - len(lost)), began)
        if lost:
            self._record(stage, (0,) * len(lost), began, LOCK_LOST)
        return lost

    async def _try(
        self, stage: Stage, call: Callable[[T], Awaitable[Sequence[HeldMessage]]], argument: T, count: int
    ) -> Sequence[HeldMessage]:
        """Run `call`. If it fails, record `count` failed operations."""
        began = self._now()
        try:
            return await call(argument)
        except BacklogFailedError as error:
            self._record_failure(stage, (0,) * count, began, error)
            raise

    def _record(self, stage: Stage, size: int | Sequence[int], began: float, result: str = OK) -> None:
        self._ledger.record(stage, self._queue, size, self._now() - began, result)

    def _record_failure(self, stage: Stage, size: int | Sequence[int], began: float, error: BacklogFailedError) -> None:
        result, cause = result_of_failure(error.kind, refused=error.refused)
        self._ledger.record(stage, self._queue, size, self._now() - began, result, cause)


def _waited(messages: Sequence[OutgoingMessage], broker_at: int) -> Sequence[int]:
    """Return how long each message was in the backlog, in ms; nothing if one arrival is not known."""
    waited = [broker_at - one.enqueued for one in messages if one.enqueued is not None]
    if len(waited) != len(messages):
        return ()
    # A message that arrived within the last milliseconds may seem to arrive later than now.
    return waited if min(waited, default=0) >= 0 else [max(0, one) for one in waited]


def _is_gone(peeked: PeekedMessage | None) -> bool:
    return peeked is None


def _is_deferred(peeked: PeekedMessage | None) -> bool:
    return peeked is not None and peeked.deferred
