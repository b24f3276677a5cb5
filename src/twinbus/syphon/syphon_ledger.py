"""What a syphon tells its ledger and its progress of each operation (M1): stages, ids, sizes, results.

Without a ledger only the counts are kept. It moves nothing, and decides nothing but what an outcome is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from twinbus.ledger import OK, UNKNOWN, Ledger, Move, RunningOperation, Stage, result_of_failure
from twinbus.syphon.progress import ProgressCounter
from twinbus.syphon.transport import (
    PEEK_PAGE_SIZE,
    Backlog,
    BacklogFailedError,
    Credit,
    HeldMessage,
    OutgoingMessage,
    PeekedMessage,
    SendFailedError,
)

NOT_TRIED: Final = "not_tried"
"""The result of an intent that the ledger could not take: nothing was asked of anybody."""


class SyphonLedger:
    """`primary` and `secondary` are the namespaces' names, as backlog queue paths write them (P4)."""

    def __init__(self, ledger: Ledger | None, primary: str, secondary: str, counts: ProgressCounter) -> None:
        self.counts = counts
        self._ledger = ledger
        self._primary = primary
        self._secondary = secondary

    def done(
        self,
        stage: Stage,
        queue: str,
        size: int | Sequence[int],
        seconds: float,
        result: str = OK,
        cause: str | None = None,
    ) -> None:
        """On a backlog queue: an operation for each of these sizes; one, where there are none or one for them all."""
        self.counts.operations[stage] += 1 if isinstance(size, int) else len(size) or 1
        if self._ledger is not None:
            self._ledger.done(stage, self._secondary, queue, (), size, seconds=seconds, result=result, cause=cause)

    def sending(self, path: str, messages: Sequence[OutgoingMessage]) -> RunningOperation | None:
        """The intent; `durable` before the send. LedgerUnavailableError where nothing may be sent without it."""
        self.counts.operations[Stage.RETURN_PRIMARY] += len(messages)
        if self._ledger is None:
            return None
        ids = [message.message_id for message in messages]
        sizes = [message.size for message in messages]
        return self._ledger.begin(Stage.RETURN_PRIMARY, self._primary, path, ids, sizes)

    def not_tried(self, operation: RunningOperation | None) -> None:
        if operation is not None:
            operation.end(NOT_TRIED)

    async def durable(self) -> None:
        if self._ledger is not None:
            await self._ledger.flushed()

    def sent(
        self, operation: RunningOperation | None, path: str, messages: Sequence[OutgoingMessage], now: float
    ) -> None:
        if operation is not None:
            operation.end(OK)
        self.counts.returned(path, len(messages), sum(message.size for message in messages), now)

    def failed(
        self,
        operation: RunningOperation | None,
        error: SendFailedError,
        arrived: Sequence[OutgoingMessage],
        now: float,
    ) -> None:
        if operation is not None:
            ids = [message.message_id for message in error.failed] if arrived else ()
            result, cause = result_of_failure(error.kind, refused=error.refused)
            operation.end(result, cause=cause, failed=ids)
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
    ) -> None:
        """Of those that are `lost`, for that reason, nobody knows whether they were; their delivery may be repeated.

        Told afterwards: what was delivered is completed even while the ledger cannot be written.
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
            )
        if lost:
            self.moved(Move.POSSIBLE_DUPLICATE, queue, path, lost, why)

    def moved(
        self, move: Move, queue: str, path: str | None, held: Sequence[HeldMessage], reason: str | None = None
    ) -> None:
        """Beyond one operation: dead-lettered, kept, or perhaps delivered twice."""
        match move:
            case Move.DEAD_LETTERED:
                self.counts.dead_lettered(path or "", len(held))
            case Move.KEPT:
                self.counts.kept(path or "", len(held))
            case Move.POSSIBLE_DUPLICATE:
                self.counts.possible_duplicates(path or "", len(held))
            case _:
                pass
        if self._ledger is not None:
            source, destination = f"{self._secondary}/{queue}", f"{self._primary}/{path or ''}"
            self._ledger.moved(move, [one.message_id for one in held], source, destination, reason)


T = TypeVar("T")

LOCK_LOST: Final = "lock_lost"
NOT_FOUND: Final = "message_not_found"


class MeteredBacklog:
    """Keeps the protocol of `Backlog`. The mover records completions itself, with `SyphonLedger.completed`."""

    def __init__(self, inner: Backlog, queue: str, books: SyphonLedger, now: Callable[[], float]) -> None:
        self._inner = inner
        self._queue = queue
        self._books = books
        self._now = now

    @property
    def credit(self) -> Credit:
        return self._inner.credit

    async def open(self) -> None:
        await self._inner.open()

    async def receive(self, count: int, wait: float) -> Sequence[HeldMessage]:
        await self._inner.open()
        fed = self._inner.credit is Credit.FED
        began = self._now()
        try:
            held = await self._inner.receive(count, wait)
        except BacklogFailedError as error:
            if not fed:
                self._failed(Stage.EMPTY_RECEIVE, (), began, error)
            raise
        except asyncio.CancelledError:
            # While its credit was taken back; where it still stands, `rest` tells.
            if not fed and self._inner.credit is Credit.NONE:
                self._told(Stage.EMPTY_RECEIVE, (), began)
            raise
        if held:
            self._told(Stage.RECEIVE_BACKLOG, [one.size for one in held], began)
        elif not fed:
            self._told(Stage.EMPTY_RECEIVE, (), began)
        return held

    async def receive_deferred(self, numbers: Sequence[int]) -> Sequence[HeldMessage]:
        await self._inner.open()
        began = self._now()
        held = await self._tried(Stage.RECEIVE_DEFERRED, self._inner.receive_deferred, numbers, len(numbers))
        if held:
            self._told(Stage.RECEIVE_DEFERRED, [one.size for one in held], began)
        else:
            self._told(Stage.RECEIVE_DEFERRED, (), began, NOT_FOUND)
        return held

    async def peek(self, start: int, count: int) -> Sequence[PeekedMessage]:
        await self._inner.open()
        began = self._now()
        try:
            found = await self._inner.peek(start, count)
        except BacklogFailedError as error:
            self._failed(Stage.PEEK_BACKLOG, 0, began, error)
            raise
        # One operation, by all that it carried (M2).
        self._told(Stage.PEEK_BACKLOG, sum(one.size for one in found), began)
        return found

    async def complete(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._truly_lost(await self._inner.complete(held), _is_gone)

    async def abandon(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._done(Stage.SETTLE_BACKLOG, self._inner.abandon, held)

    async def defer(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        async def defer(given: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
            return await self._truly_lost(await self._inner.defer(given), _is_deferred)

        return await self._done(Stage.SETTLE_BACKLOG, defer, held)

    async def dead_letter(self, held: Sequence[HeldMessage], reason: str, description: str) -> Sequence[HeldMessage]:
        async def bury(given: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
            return await self._truly_lost(await self._inner.dead_letter(given, reason, description), _is_gone)

        return await self._done(Stage.SETTLE_BACKLOG, bury, held)

    async def renew(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        await self._inner.open()
        return await self._done(Stage.RENEW_BACKLOG, self._inner.renew, held)

    async def rest(self) -> Sequence[HeldMessage]:
        hungry = self._inner.credit is Credit.HUNGRY
        began = self._now()
        given_back = await self._inner.rest()
        if given_back:
            self._told(Stage.RECEIVE_BACKLOG, [one.size for one in given_back], began)
            self._told(Stage.SETTLE_BACKLOG, (0,) * len(given_back), began)
        elif hungry:
            self._told(Stage.EMPTY_RECEIVE, (), began)
        return given_back

    async def close(self) -> None:
        await self.rest()
        await self._inner.close()

    async def _truly_lost(
        self, lost: Sequence[HeldMessage], is_done: Callable[[PeekedMessage | None], bool]
    ) -> Sequence[HeldMessage]:
        """Without those whose lock went because a settlement was done, though nobody answered: the queue shows it."""
        doubtful = sorted((one for one in lost if one.unanswered), key=lambda one: one.sequence_number)
        done: set[int] = set()
        page: dict[int, PeekedMessage] = {}
        shown = -1
        try:
            for one in doubtful:
                if one.sequence_number > shown:
                    seen = await self.peek(one.sequence_number, PEEK_PAGE_SIZE)
                    page = {message.sequence_number: message for message in seen}
                    shown = max(page, default=doubtful[-1].sequence_number)
                if is_done(page.get(one.sequence_number)):
                    done.add(id(one))
        except BacklogFailedError:
            return lost
        return [one for one in lost if id(one) not in done]

    # --- telling -----------------------------------------------------------------------------------------------------

    async def _done(
        self,
        stage: Stage,
        call: Callable[[Sequence[HeldMessage]], Awaitable[Sequence[HeldMessage]]],
        held: Sequence[HeldMessage],
    ) -> Sequence[HeldMessage]:
        """Of each message: done, or its lock was lost and nothing happened."""
        began = self._now()
        lost = await self._tried(stage, call, held, len(held))
        if len(lost) < len(held):
            self._told(stage, (0,) * (len(held) - len(lost)), began)
        if lost:
            self._told(stage, (0,) * len(lost), began, LOCK_LOST)
        return lost

    async def _tried(
        self, stage: Stage, call: Callable[[T], Awaitable[Sequence[HeldMessage]]], asked: T, count: int
    ) -> Sequence[HeldMessage]:
        began = self._now()
        try:
            return await call(asked)
        except BacklogFailedError as error:
            self._failed(stage, (0,) * count, began, error)
            raise

    def _told(self, stage: Stage, size: int | Sequence[int], began: float, result: str = OK) -> None:
        self._books.done(stage, self._queue, size, self._now() - began, result)

    def _failed(self, stage: Stage, size: int | Sequence[int], began: float, error: BacklogFailedError) -> None:
        result, cause = result_of_failure(error.kind, refused=error.refused)
        self._books.done(stage, self._queue, size, self._now() - began, result, cause)


def _is_gone(seen: PeekedMessage | None) -> bool:
    return seen is None


def _is_deferred(seen: PeekedMessage | None) -> bool:
    return seen is not None and seen.deferred
