"""HttpConnection on a real port, and on a stream that only records."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter

from tests.namespace.front.bare_namespace import BORN, start_runtime
from twinbus.clock import SystemClock
from twinbus.connect import make_sas_token
from twinbus.namespace.engine.descriptions import AuthorizationRule
from twinbus.namespace.faults import Faults
from twinbus.namespace.front.http_connection import HttpConnection
from twinbus.namespace.front.http_handler import HttpHandler
from twinbus.namespace.front.sas_verifier import DEFAULT_KEY, DEFAULT_KEY_NAME, SasVerifier, default_rule
from twinbus.namespace.own_names import OwnNames
from twinbus.namespace.runtime import NamespaceRuntime

NAMES = OwnNames(5672)
TOKEN = make_sas_token("sb://localhost/", DEFAULT_KEY_NAME, DEFAULT_KEY, BORN // 1000 + 3600)

Result = TypeVar("Result")


def handler(runtime: NamespaceRuntime, *rules: AuthorizationRule, names: OwnNames = NAMES) -> HttpHandler:
    registry = CollectorRegistry()
    Counter("sends", "Messages sent.", registry=registry).inc()
    verifier = SasVerifier([default_rule(), *rules], names)
    return HttpHandler("primary", runtime, verifier, Faults(SystemClock()), registry)


class RecordingStream:
    """A byte stream that records what is written to it."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = False
        self.is_full = False
        self.paused_for: set[str] = set()
        self.waiting: list[Callable[[], None]] = []

    def when_room(self, call: Callable[[], None]) -> None:
        self.waiting.append(call)

    def take_turn(self, call: Callable[[], None]) -> None:
        call()

    def pause_reading(self, reason: str) -> None:
        self.paused_for.add(reason)

    def resume_reading(self, reason: str) -> None:
        self.paused_for.discard(reason)

    def write(self, parts: list[bytes]) -> None:
        assert not self.closed, "written after it was closed"
        self.written += b"".join(parts)

    def close(self) -> None:
        self.closed = True


async def converse(
    http: HttpHandler,
    *chunks: bytes,
    end: bool = True,
    loopback: bool = True,
    meanwhile: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> RecordingStream:
    """Pass the chunks to a connection, wait for all responses, then end the stream.

    `meanwhile` is called when half of the chunks were passed, and awaited before the others.
    """
    stream = RecordingStream()
    connection = HttpConnection(http, stream, NAMES, peer_is_loopback=loopback)
    for number, chunk in enumerate(chunks):
        if meanwhile is not None and number == len(chunks) // 2:
            await meanwhile()
        connection.data_received(chunk)
    await settle()
    if end and not stream.closed:
        connection.eof_received()
        await settle()
    connection.connection_lost()
    return stream


async def settle() -> None:
    """Wait until all other tasks are done."""
    while others := asyncio.all_tasks() - {cast(asyncio.Task[Any], asyncio.current_task())}:
        await asyncio.wait(others)


class _Protocol(asyncio.Protocol):
    is_full = False

    def __init__(self, http: HttpHandler, names: OwnNames) -> None:
        self._http = http
        self._names = names

    def when_room(self, call: Callable[[], None]) -> None:
        raise AssertionError("this stream is never full")

    def take_turn(self, call: Callable[[], None]) -> None:
        call()

    def pause_reading(self, reason: str) -> None:
        self._transport.pause_reading()

    def resume_reading(self, reason: str) -> None:
        self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connection = HttpConnection(self._http, self, self._names, peer_is_loopback=True)

    def write(self, parts: list[bytes]) -> None:
        self._transport.writelines(parts)

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._connection.data_received(data)

    def eof_received(self) -> bool:
        self._connection.eof_received()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.connection_lost()


@dataclass
class Served:
    """A namespace on a port, with an event loop in its own thread."""

    runtime: NamespaceRuntime
    port: int
    loop: asyncio.AbstractEventLoop

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the namespace's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


@contextmanager
def served(tls: ssl.SSLContext) -> Iterator[Served]:
    """Serve an empty namespace over HTTPS on a port of this machine."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)

    async def start() -> tuple[NamespaceRuntime, asyncio.Server]:
        runtime = await start_runtime(NamespaceRuntime)
        listener = socket.create_server(("127.0.0.1", 0))
        names = OwnNames(listener.getsockname()[1])
        http = handler(runtime, names=names)
        return runtime, await loop.create_server(lambda: _Protocol(http, names), sock=listener, ssl=tls)

    async def stop(runtime: NamespaceRuntime, server: asyncio.Server) -> None:
        server.close()
        await settle()
        await runtime.close()

    thread.start()
    try:
        runtime, server = asyncio.run_coroutine_threadsafe(start(), loop).result()
        namespace = Served(runtime, server.sockets[0].getsockname()[1], loop)
        yield namespace
        namespace.call(stop(runtime, server))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
