"""A lower bound for the latency of one durable message: a server that does not interpret what it receives.

A thread writes the bytes of each read to the disk, and then the server answers. So the time is that of passing data to
a writer thread and of the disk, which every such server needs, without AMQP and without a queue.

    python bench/bare_server.py write|sqlite FOLDER
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self, cast

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.bare_sqlite import BareSqlite, some_rows
from bench.measuring import MIB, ProcessMeter

QUESTION: Final = bytes(1150)  # a transfer of 1 KB with its frame, and the frame that accepts it
ANSWER: Final = bytes(31)


class BareServer:
    """The server in its own process, with one client on a blocking socket."""

    def __init__(self, kind: str, folder: Path) -> None:
        folder.mkdir()
        self._process = subprocess.Popen([sys.executable, __file__, kind, str(folder)], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._socket = socket.create_connection(("127.0.0.1", int(self._process.stdout.readline())))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.meter = ProcessMeter(self._process.pid)

    def exchange(self, seconds: float, think: float) -> int:
        """Send and receive in turn. The client is busy for `think` seconds before each send, as the SDK is."""
        count, end = 0, time.perf_counter() + seconds
        while (now := time.perf_counter()) < end:
            while time.perf_counter() < now + think:
                pass
            self._socket.sendall(QUESTION)
            self._socket.recv(len(ANSWER))
            count += 1
        return count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class _Peer(asyncio.Protocol):
    def __init__(self, asked: queue.SimpleQueue[tuple[_Peer, bytes]]) -> None:
        self._asked = asked

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._asked.put((self, data))

    def answer(self) -> None:
        self._transport.write(ANSWER)


def _keeper(kind: str, folder: Path) -> Callable[[bytes], None]:
    if kind == "sqlite":
        bare, rows = BareSqlite(folder / "bare.db"), some_rows(1, len(QUESTION))
        return lambda data: bare.commit(rows)
    file = os.open(folder / "bare", os.O_RDWR | os.O_CREAT)
    os.write(file, bytes(8 * MIB))
    os.fsync(file)
    at = iter(range(sys.maxsize))

    def write(data: bytes) -> None:
        os.pwrite(file, data, next(at) % 1024 * 8192)
        os.fdatasync(file)

    return write


async def _serve(kind: str, folder: Path) -> None:
    loop, keep = asyncio.get_running_loop(), _keeper(kind, folder)
    asked: queue.SimpleQueue[tuple[_Peer, bytes]] = queue.SimpleQueue()

    def write_forever() -> None:
        while True:
            peer, data = asked.get()
            keep(data)
            loop.call_soon_threadsafe(peer.answer)

    threading.Thread(target=write_forever, daemon=True).start()
    server = await loop.create_server(lambda: _Peer(asked), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], Path(sys.argv[2])))
