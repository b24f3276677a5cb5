"""A backlog queue whose every billable operation is in the books (M1): what was asked, how long, what came of it.

A queue that could not be connected to was asked for nothing. What is done with messages is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from twinbus.ledger.entries import OK, Stage, result_of_failure
from twinbus.syphon.books import Books
from twinbus.syphon.transport import PAGE, Backlog, BacklogFailedError, Credit, Held, Peeked

T = TypeVar("T")

LOCK_LOST: Final = "lock_lost"
NOT_FOUND: Final = "message_not_found"


class BookedBacklog:
    """Keeps the protocol of `Backlog`. Completions are told by whoever knows what they were for: `Books.completed`."""

    def __init__(self, inner: Backlog, queue: str, books: Books, now: Callable[[], float]) -> None:
        self._inner = inner
        self._queue = queue
        self._books = books
        self._now = now

    @property
    def credit(self) -> Credit:
        return self._inner.credit

    async def open(self) -> None:
        await self._inner.open()

    async def receive(self, count: int, wait: float) -> Sequence[Held]:
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

    async def receive_deferred(self, numbers: Sequence[int]) -> Sequence[Held]:
        await self._inner.open()
        began = self._now()
        held = await self._tried(Stage.RECEIVE_DEFERRED, self._inner.receive_deferred, numbers, len(numbers))
        if held:
            self._told(Stage.RECEIVE_DEFERRED, [one.size for one in held], began)
        else:
            self._told(Stage.RECEIVE_DEFERRED, (), began, NOT_FOUND)
        return held

    async def peek(self, start: int, count: int) -> Sequence[Peeked]:
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

    async def complete(self, held: Sequence[Held]) -> Sequence[Held]:
        return await self._truly_lost(await self._inner.complete(held), _is_gone)

    async def abandon(self, held: Sequence[Held]) -> Sequence[Held]:
        return await self._done(Stage.SETTLE_BACKLOG, self._inner.abandon, held)

    async def defer(self, held: Sequence[Held]) -> Sequence[Held]:
        async def defer(given: Sequence[Held]) -> Sequence[Held]:
            return await self._truly_lost(await self._inner.defer(given), _is_deferred)

        return await self._done(Stage.SETTLE_BACKLOG, defer, held)

    async def dead_letter(self, held: Sequence[Held], reason: str, description: str) -> Sequence[Held]:
        async def bury(given: Sequence[Held]) -> Sequence[Held]:
            return await self._truly_lost(await self._inner.dead_letter(given, reason, description), _is_gone)

        return await self._done(Stage.SETTLE_BACKLOG, bury, held)

    async def renew(self, held: Sequence[Held]) -> Sequence[Held]:
        await self._inner.open()
        return await self._done(Stage.RENEW_BACKLOG, self._inner.renew, held)

    async def rest(self) -> Sequence[Held]:
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

    async def _truly_lost(self, lost: Sequence[Held], is_done: Callable[[Peeked | None], bool]) -> Sequence[Held]:
        """Without those whose lock went because a settlement was done, though nobody answered: the queue shows it."""
        doubtful = sorted((one for one in lost if one.unanswered), key=lambda one: one.sequence_number)
        done: set[int] = set()
        page: dict[int, Peeked] = {}
        shown = -1
        try:
            for one in doubtful:
                if one.sequence_number > shown:
                    seen = await self.peek(one.sequence_number, PAGE)
                    page = {message.sequence_number: message for message in seen}
                    shown = max(page, default=doubtful[-1].sequence_number)
                if is_done(page.get(one.sequence_number)):
                    done.add(id(one))
        except BacklogFailedError:
            return lost
        return [one for one in lost if id(one) not in done]

    # --- telling -----------------------------------------------------------------------------------------------------

    async def _done(
        self, stage: Stage, call: Callable[[Sequence[Held]], Awaitable[Sequence[Held]]], held: Sequence[Held]
    ) -> Sequence[Held]:
        """Of each message: done, or its lock was lost and nothing happened."""
        began = self._now()
        lost = await self._tried(stage, call, held, len(held))
        if len(lost) < len(held):
            self._told(stage, (0,) * (len(held) - len(lost)), began)
        if lost:
            self._told(stage, (0,) * len(lost), began, LOCK_LOST)
        return lost

    async def _tried(
        self, stage: Stage, call: Callable[[T], Awaitable[Sequence[Held]]], asked: T, count: int
    ) -> Sequence[Held]:
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


def _is_gone(seen: Peeked | None) -> bool:
    return seen is None


def _is_deferred(seen: Peeked | None) -> bool:
    return seen is not None and seen.deferred
