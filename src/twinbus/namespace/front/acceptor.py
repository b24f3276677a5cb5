"""Accepts the connections of one port, and refuses those that the process has no room for.

The event loops can accept connections, but not when file descriptors run out: asyncio logs an error every second, and
uvloop closes the new connections, or the listening socket for good, without a word. So this module accepts. When
accepting fails it waits and tries again, and logs once for each time that descriptors run out.

Some descriptors are kept in reserve: for files of the namespace, and to tell peers why they are refused.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from typing import Final

from twinbus.amqp.limits import LimitExceededError
from twinbus.namespace.front.port import PortConnection
from twinbus.namespace.front.site import Site
from twinbus.namespace.front.turns import Turns, UnauthenticatedReader

_log = logging.getLogger(__name__)

# Descriptors that are not given to connections, at most a quarter of all, and how many of those tell refusals.
_RESERVE: Final = 64
_MOST_REFUSED: Final = 16
# Accepted in one turn of the loop, so that a flood of connections does not hold up the connections there are.
_AT_ONCE: Final = 64
_TRY_AGAIN_SECONDS: Final = 0.25
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts from a listening socket until it is closed."""

    def __init__(self, site: Site, listener: socket.socket) -> None:
        self._site = site
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._turns = Turns()
        self._timer: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self._refused: set[PortConnection] = set()
        self._is_exhausted = False
        self._is_closed = False
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept no more. Connections that were accepted go on."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _listen(self) -> None:
        self._timer = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._rest(error)
                return
            self._begin(accepted)

    def _begin(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # Descriptors are given out from the lowest, so the number of a new one is about the number of all.
        if most != resource.RLIM_INFINITY and accepted.fileno() >= most - min(_RESERVE, most // 4):
            refusal: LimitExceededError | None = self._exhausted()
        else:
            self._recovered()
            refusal = self._site.resources.make_room()
            if refusal is not None:
                self._site.refuse(refusal)
        connection = PortConnection(self._site, refusal)
        if refusal is not None:
            self._refused = {one for one in self._refused if not one.gone.done()}
            if len(self._refused) >= _MOST_REFUSED:
                accepted.close()
                return
            self._refused.add(connection)
        task = self._loop.create_task(self._open(connection, accepted))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: PortConnection, accepted: socket.socket) -> None:
        try:
            reader = UnauthenticatedReader(connection, self._turns)
            await self._loop.connect_accepted_socket(lambda: reader, accepted)
        except OSError as error:  # the peer left meanwhile
            _log.info("a connection was not opened: %s", error)
            accepted.close()
            self._refused.discard(connection)

    def _rest(self, error: OSError) -> None:
        """Accepting failed: try again a little later, because the listening socket stays ready all the time."""
        if error.errno in _EXHAUSTED:
            self._exhausted()
        else:
            _log.error("accepting failed: %s", error, extra={"namespace": self._site.name})
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(_TRY_AGAIN_SECONDS, self._listen)

    def _exhausted(self) -> LimitExceededError:
        """Counts that descriptors have run out, and logs it the first time."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        exceeded = LimitExceededError(
            "file-descriptors",
            f"This server has no file descriptors left for connections: it may have {most} "
            "(ulimit -n). Close connections that are not needed, or raise that limit and start it again.",
        )
        self._site.resources.refuse(exceeded, self._site.name, log=not self._is_exhausted)
        self._is_exhausted = True
        return exceeded

    def _recovered(self) -> None:
        if self._is_exhausted:
            self._is_exhausted = False
            _log.info("file descriptors are free again", extra={"namespace": self._site.name})
