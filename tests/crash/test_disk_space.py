"""Disk space of shared bodies is freed when the last subscription completes the message, also over a kill."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import apsw
import pytest

from tests.crash.inspection import check_file
from twinbus.connect import RECEIVE_AND_DELETE, connect
from twinbus.message import Message
from twinbus.testing import LocalNamespace

pytestmark = pytest.mark.usefixtures("compiled")

NAMES = ("a", "b", "c")
MESSAGES, BYTES = 200, 20_000
TIMEOUT = 30.0
CONFIG = {
    "namespaces": [{"name": "primary", "topics": [{"name": "t", "subscriptions": [{"name": name} for name in NAMES]}]}]
}


async def publish(connection_string: str) -> None:
    async with connect(connection_string, timeout=TIMEOUT) as bus:
        sender = await bus.sender("t")
        for number in range(0, MESSAGES, 10):
            await sender.send([Message(b"." * BYTES, message_id=f"{number + index}") for index in range(10)])


async def consume(connection_string: str, name: str, count: int) -> None:
    where = f"t/Subscriptions/{name}"
    async with (
        connect(connection_string, timeout=TIMEOUT) as bus,
        await bus.receiver(where, mode=RECEIVE_AND_DELETE, prefetch=0) as receiver,
    ):
        while count:
            count -= len(await receiver.receive(count, TIMEOUT))


def used(data: Path, scratch: Path) -> int:
    """Return the bytes of the used pages of a copy of the store."""
    scratch.mkdir()
    for file in data.glob("primary.sqlite*"):
        shutil.copy(file, scratch / file.name)
    connection = apsw.Connection(str(scratch / "primary.sqlite"))
    try:
        pages = int(connection.pragma("page_count")) - int(connection.pragma("freelist_count"))
        return pages * int(connection.pragma("page_size"))
    finally:
        connection.close()
        shutil.rmtree(scratch)


def size(data: Path) -> int:
    return (data / "primary.sqlite").stat().st_size


@pytest.mark.thorough
@pytest.mark.timeout(300)
async def test_the_space_of_a_body_is_freed_with_its_last_copy_and_used_again(tmp_path: Path) -> None:
    data, copy = tmp_path / "data", tmp_path / "copy"
    namespace = LocalNamespace(data=data, config=CONFIG, log_level="warning")

    async def killed() -> tuple[tuple[int, int, int], int]:
        """Kill and restart the server. Returns what its store held, and the bytes of its pages."""
        await asyncio.to_thread(namespace.kill)
        found = check_file(data, copy), used(data, copy)
        await asyncio.to_thread(namespace.start)
        return found

    await asyncio.to_thread(namespace.start)
    try:
        await publish(namespace.connection_string)
        rows, taken = await killed()
        assert rows == (3 * MESSAGES, 3 * MESSAGES, MESSAGES)
        assert taken < 2 * MESSAGES * BYTES, "each body is there once"
        for name in ("a", "b"):
            await consume(namespace.connection_string, name, MESSAGES)
        rows, taken = await killed()
        assert rows == (MESSAGES, MESSAGES, MESSAGES)
        assert taken > MESSAGES * BYTES
        await consume(namespace.connection_string, "c", MESSAGES)
        rows, taken = await killed()
        assert rows == (0, 0, 0)
        assert taken < MESSAGES * BYTES // 10, "what the bodies took is free"
        whole = size(data)
        await publish(namespace.connection_string)
        assert await asyncio.to_thread(namespace.stop) == 0
        assert size(data) <= whole, "what was free is used again"
    finally:
        await asyncio.to_thread(namespace.close)
