"""Accepts the connections of one port, and reads in turns from connections that have not authenticated.

Accepting. The event loops can accept connections, but they fail when file descriptors run out: asyncio logs an error
every second; uvloop closes new connections, or closes the listening socket forever, without a message. So `Listener`
calls `accept` itself. When `accept` fails, `Listener` waits and tries again. It logs one message each time that
descriptors run out. Some descriptors stay reserved, for files of the namespace and for connections that are refused
with a reason.

Reading. Connections without an accepted token are read in turns, so that many such connections do not slow down the
connections with a token. Each turn handles one piece of at most 4 KB. The next piece is read only after the piece was
handled. While pieces wait, they get half of the event loop's time, in slots of about 2 ms, so that other connections
and the threads of the store continue. At most one HTTP request is answered in a slot. The connection that has sent the
fewest bytes gets the next turn: so a client that puts its token, which takes about 2 KB, does not wait for peers that
send more bytes. After its token was accepted, a connection is read without turns. (An HTTP connection sends its token
with a request; the rest of that request is still read in turns.)
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import time
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Final, cast

from twinbus.amqp import KIB, LimitExceededError
from twinbus.namespace.front.accepted_connection import AcceptedConnection
from twinbus.namespace.front.context import NamespaceContext, SharedPort

_log = logging.getLogger(__name__)

# Descriptors that are not given to connections (at most a quarter of all), and how many of these may be used for
# connections that are refused.
_RESERVED: Final = 64
_MAX_REFUSED: Final = 16
# The most connections that are accepted in one turn of the event loop. The limit keeps many new connections from
# delaying the existing connections.
_ACCEPT_AT_ONCE: Final = 64
_RETRY_SECONDS: Final = 0.25
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PIECE: Final = 4 * KIB
_SLOT_SECONDS: Final = 0.002

Turn = Callable[[], bool]
"""A function that handles one piece. It returns True if no other piece may be handled in this slot."""


class Listener:
    """Accepts connections on a listening socket until `close` is called."""

    def __init__(self, namespace: NamespaceContext, listening: socket.socket, shared: SharedPort | None = None) -> None:
        """On a `shared` port, `namespace` counts what belongs to no namespace yet."""
        self._namespace = namespace
        self._shared = shared
        self._socket = listening
        self._loop = asyncio.get_running_loop()
        self._turns = FairTurns()
        self._timer: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._refused: set[AcceptedConnection] = set()
        self._is_exhausted = False
        self._is_closed = False
        listening.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Stop accepting. Accepted connections continue."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _listen(self) -> None:
        self._timer = None
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._retry_later(error)
                return
            self._begin(accepted)

    def _begin(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # The system assigns the lowest free descriptor, so the number of a new descriptor is about the number of
        # descriptors in use.
        if most != resource.RLIM_INFINITY and accepted.fileno() >= most - min(_RESERVED, most // 4):
            refusal: LimitExceededError | None = self._exhausted()
        else:
            self._recovered()
            refusal = self._namespace.resources.make_room()
            if refusal is not None:
                self._namespace.limit_exceeded(refusal)
        connection = AcceptedConnection(self._namespace, refusal, self._shared)
        if refusal is not None:
            self._refused = {one for one in self._refused if not one.gone.done()}
            if len(self._refused) >= _MAX_REFUSED:
                accepted.close()
                return
            self._refused.add(connection)
        task = self._loop.create_task(self._open(connection, accepted))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: AcceptedConnection, accepted: socket.socket) -> None:
        try:
            reader = UnauthenticatedReader(connection, self._turns)
            await self._loop.connect_accepted_socket(lambda: reader, accepted)
        except OSError as error:  # the peer closed the connection before it was opened here
            _log.info("a connection was not opened: %s", error)
            accepted.close()
            self._refused.discard(connection)

    def _retry_later(self, error: OSError) -> None:
        """Stop accepting for `_RETRY_SECONDS`.

        While accepting fails, the listening socket stays readable. Without the pause, the event loop would try again in
        every turn.
        """
        if error.errno in _EXHAUSTED:
            self._exhausted()
        else:
            _log.error("accepting failed: %s", error, extra={"namespace": self._namespace.name})
        self._loop.remove_reader(self._socket)
        self._timer = self._loop.call_later(_RETRY_SECONDS, self._listen)

    def _exhausted(self) -> LimitExceededError:
        """Count a refusal for lack of file descriptors, and return the error. Logs only the first such refusal."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        exceeded = LimitExceededError(
            "file-descriptors",
            f"This server has no file descriptors left for connections: it may have {most} "
            "(ulimit -n). Close connections that are not needed, or raise that limit and start it again.",
        )
        self._namespace.resources.refuse(exceeded, self._namespace.name, log=not self._is_exhausted)
        self._is_exhausted = True
        return exceeded

    def _recovered(self) -> None:
        if self._is_exhausted:
            self._is_exhausted = False
            _log.info("file descriptors are free again", extra={"namespace": self._namespace.name})


class FairTurns:
    """The queue of pieces of one port that wait to be handled."""

    def __init__(self) -> None:
        # All connections share one buffer, because it is filled and emptied within one call of the event loop.
        self.buffer: Final = bytearray(_PIECE)
        self._waiting: list[tuple[int, int, Turn]] = []
        self._numbers = count()
        self._is_scheduled = False

    def add(self, turn: Turn, received: int) -> None:
        """Add a piece to the queue. `turn` handles the piece. `received` counts all bytes that its peer has sent."""
        heappush(self._waiting, (received, next(self._numbers), turn))
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            while self._waiting and time.perf_counter() < began + _SLOT_SECONDS:
                if heappop(self._waiting)[2]():
                    break
        finally:
            self._is_scheduled = bool(self._waiting)
            if self._is_scheduled:
                pause = max(_SLOT_SECONDS, time.perf_counter() - began)
                asyncio.get_running_loop().call_later(pause, self._run)


class UnauthenticatedReader(asyncio.BufferedProtocol):
    """Reads the bytes of a connection in turns, until the connection has authenticated."""

    def __init__(self, connection: AcceptedConnection, turns: FairTurns) -> None:
        self._connection = connection
        self._turns = turns
        self._piece = b""
        self._received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connection.connection_made(transport)
        self._connection.stream.wait_for_turn = self._wait_for_turn

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._turns.buffer

    def buffer_updated(self, size: int) -> None:
        stream = self._connection.stream
        if stream.is_discarding:
            stream.discard(size)
            return
        self._piece = bytes(memoryview(self._turns.buffer)[:size])
        self._received += size
        stream.pause_reading("turn")
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
            # An error in one connection closes only that connection, as it does in the event loop.
            _log.exception("a connection failed and is closed")
            self._transport.abort()
        if self._connection.is_authenticated and not self._transport.is_closing():
            self._transport.set_protocol(self._connection)
        self._connection.stream.resume_reading("turn")
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
