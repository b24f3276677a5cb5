"""Connections without an accepted token take turns, so that a flood of them does not hold up the others.

Such a connection is read in small pieces. Each piece waits for its turn, and the peer is not read again before it was
handled. While pieces wait, half of the event loop's time goes to them, about 2 ms at a time, so that other connections
and the threads of the store go on. One HTTP request at most is answered in such a time. The connection that sent least
so far comes first: a client that puts its token, which takes about 2 KB, is not behind peers that send more. The
connection is read directly once a token was accepted, over HTTP from the piece after that request on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Final, cast

from twinbus.amqp.limits import KIB
from twinbus.namespace.front.port import PortConnection

_log = logging.getLogger(__name__)

_PIECE: Final = 4 * KIB
_SECONDS: Final = 0.002

Turn = Callable[[], bool]
"""Runs one piece. Returns True if no other piece may run in this turn of the event loop."""


class Turns:
    """The pieces that wait, of one event loop."""

    def __init__(self) -> None:
        # Filled and emptied within one call of the event loop, so one is enough.
        self.buffer: Final = bytearray(_PIECE)
        self._waiting: list[tuple[int, int, Turn]] = []
        self._numbers = count()
        self._is_scheduled = False

    def add(self, turn: Turn, received: int) -> None:
        """Have `turn` called when it is due. `received` is what its connection sent so far, in bytes."""
        heappush(self._waiting, (received, next(self._numbers), turn))
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            while self._waiting and time.perf_counter() < began + _SECONDS:
                if heappop(self._waiting)[2]():
                    break
        finally:
            self._is_scheduled = bool(self._waiting)
            if self._is_scheduled:
                pause = max(_SECONDS, time.perf_counter() - began)
                asyncio.get_running_loop().call_later(pause, self._run)


class UnauthenticatedReader(asyncio.BufferedProtocol):
    """Reads for a connection until it has authenticated."""

    def __init__(self, connection: PortConnection, turns: Turns) -> None:
        self._connection = connection
        self._turns = turns
        self._piece = b""
        self._received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connection.connection_made(transport)
        self._connection.channel.turns = self._wait_for_turn

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._turns.buffer

    def buffer_updated(self, size: int) -> None:
        channel = self._connection.channel
        if channel.is_refused:
            channel.discard(size)
            return
        self._piece = bytes(memoryview(self._turns.buffer)[:size])
        self._received += size
        channel.pause_reading("turn")
        self._turns.add(self._take_turn, self._received)

    def eof_received(self) -> bool:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._piece = b""
        self._connection.connection_lost(error)

    def _take_turn(self) -> bool:
        piece, self._piece = self._piece, b""
        if not piece:
            return False  # the connection is gone
        try:
            self._connection.data_received(piece)
        except Exception:
            # As an event loop does it: one connection's trouble is the end of that connection only.
            _log.exception("a connection failed and is closed")
            self._transport.abort()
        if self._connection.is_authenticated and not self._transport.is_closing():
            self._transport.set_protocol(self._connection)
        self._connection.channel.resume_reading("turn")
        return self._connection.is_answering

    def _wait_for_turn(self, call: Callable[[], None]) -> None:
        if self._connection.is_authenticated:
            call()
            return

        def turn() -> bool:
            if not self._transport.is_closing():
                call()
            return self._connection.is_answering

        self._turns.add(turn, self._received)
