"""The long polls of the driver (Y2): one on each backlog queue that nobody is at work on.

A message that ends a poll is given back as it was, its delivery count too: moving it is the lanes' business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from twinbus.connect import Receiver
from twinbus.ledger.entries import Stage
from twinbus.syphon.books import Books
from twinbus.syphon.credentials import Place

_log = logging.getLogger(__name__)

_LONGEST_PAUSE: Final = 60.0


class Watch:
    """`hold` says on which queues; `arrived` is called once a poll ended with a message, which ends it."""

    def __init__(
        self, secondary: str, books: Books, arrived: Callable[[str], None], *, poll: float, timeout: float
    ) -> None:
        self._bus = Place.of(secondary).connect(timeout=timeout)
        self._books = books
        self._arrived = arrived
        self._poll = poll
        self._polls: dict[str, asyncio.Task[None]] = {}

    def hold(self, queues: Iterable[str]) -> None:
        for queue in queues:
            if queue not in self._polls:
                self._polls[queue] = poll = asyncio.create_task(self._watch(queue))
                poll.add_done_callback(lambda _: self._forget())

    def _forget(self) -> None:
        self._polls = {queue: poll for queue, poll in self._polls.items() if not poll.done()}

    async def rest(self) -> None:
        """Takes back all credit, and gives back what was on its way."""
        polls = list(self._polls.values())
        for poll in polls:
            poll.cancel()
        if polls:
            await asyncio.wait(polls)

    async def close(self) -> None:
        await self.rest()
        await self._bus.close()

    async def _watch(self, queue: str) -> None:
        failures = 0
        while True:
            try:
                async with await self._bus.receiver(queue, prefetch=0) as receiver:
                    failures = 0
                    while not await self._polled(queue, receiver):
                        pass
            except Exception as error:  # a credential may raise anything
                if not failures:
                    _log.warning("backlog queue %s cannot be watched, tried again: %s", queue, error)
                await asyncio.sleep(min(2.0**failures, _LONGEST_PAUSE))
                failures = min(failures + 1, 10)
            else:
                self._arrived(queue)
                return

    async def _polled(self, queue: str, receiver: Receiver) -> bool:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            found = await receiver.receive(1, self._poll)
        except asyncio.CancelledError:
            # Its credit is taken back; it was asked for all the same (M1).
            self._books.done(Stage.EMPTY_RECEIVE, queue, (), loop.time() - began)
            raise
        seconds = loop.time() - began
        if not found:
            self._books.done(Stage.EMPTY_RECEIVE, queue, (), seconds)
            return False
        self._books.done(Stage.RECEIVE_BACKLOG, queue, [len(one.raw) for one in found], seconds)
        began = loop.time()
        await receiver.release(found)
        self._books.done(Stage.SETTLE_BACKLOG, queue, (0,) * len(found), loop.time() - began)
        return True
