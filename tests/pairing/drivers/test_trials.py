"""Restores that do not hold (S14): a queue that is full, and links that open but carry nothing, under load."""

import asyncio
import contextlib
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage

from twinbus.backlog import FailureKind
from twinbus.testing import LocalNamespace

from .conftest import BRIEF, World, config, set_stored_size, state_of

QUEUE_BYTES = 1024 * 1024 * 1024
"""The default size of a queue."""
ROOM = 1000
"""Bytes: enough for pings, too few for a message of `BODY`."""
BODY = b"x" * 4000
ENOUGH = 60.0
"""Seconds for pings, one and two seconds after a failover, on a busy machine."""


class Load:
    """Three senders that send until told to stop, and what became of their messages."""

    def __init__(self, world: World, pair: Any, queue: str) -> None:
        self._world, self._pair, self._queue = world, pair, queue
        self._running = True
        self.sent: list[str] = []
        self.errors: list[Exception] = []
        self.heard: list[Any] = []
        pair.on("*", self.heard.append)

    def events(self, name: str) -> list[Any]:
        return [one for one in self.heard if one.name == name]

    async def _send(self, number: int) -> None:
        sender = await self._world.sender(self._pair, self._queue)
        for count in range(1_000_000):
            if not self._running:
                return
            message_id = f"{number}-{count}"
            try:
                await self._world.send(sender, ServiceBusMessage(BODY, message_id=message_id))
                self.sent.append(message_id)
            except Exception as error:
                self.errors.append(error)
            await asyncio.sleep(0.1)

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        async with asyncio.TaskGroup() as senders:
            for number in range(3):
                senders.create_task(self._send(number))
            try:
                yield
            finally:
                self._running = False


def fill(primary: LocalNamespace, file: Path, queue: str) -> None:
    """Make a queue believe that it is full but for a few bytes."""
    primary.kill()
    set_stored_size(file, queue, QUEUE_BYTES - ROOM)
    primary.start()


@pytest.mark.parametrize("ping", ["message", pytest.param("link", marks=pytest.mark.thorough)])
async def test_s14_a_full_queue_under_load_fails_over_seldom_and_no_error_reaches_a_caller(
    world: World, tmp_path: Path, ping: str
) -> None:
    with LocalNamespace("full", data=tmp_path, config=config("full", 1)) as full:
        queue, world.primary = "plain-0", full
        await asyncio.to_thread(fill, full, tmp_path / "full.sqlite", queue)
        pair = await world.pair(ping=ping, ping_interval=timedelta(seconds=1))
        load = Load(world, pair, queue)
        async with load.running():
            await world.until(lambda: bool(load.events("trial_failed")), ENOUGH)
        assert load.errors == []
        assert [one.ping_interval for one in load.events("trial_failed")] == [2.0]
        causes = [one.cause for one in load.events("failover_engaged")]
        assert causes == [FailureKind.QUOTA_EXCEEDED] * 2
        assert load.events("trial_passed") == []
        assert await world.held(queue) == []
        assert Counter(one.message_id for one in await world.backlog(pair)) == Counter(load.sent)
        await world.do(pair.close)


async def test_s14_links_that_open_but_carry_nothing_fail_over_seldom_and_the_trial_passes_when_they_carry_again(
    world: World, queue: str
) -> None:
    world.try_timeout = BRIEF
    pair = await world.pair(ping="link", ping_interval=timedelta(seconds=1))
    load = Load(world, pair, queue)
    world.primary.faults.set("black-hole", entity=queue, points=["send"])
    async with load.running():
        # The event `failover_engaged` follows `trial_failed`.
        await world.until(lambda: len(load.events("failover_engaged")) >= 2, ENOUGH)
        # All three senders wait for a silent link: they fail the trial once, not three times.
        assert [one.ping_interval for one in load.events("trial_failed")] == [2.0]
        assert len(load.events("failover_engaged")) == 2
        world.primary.faults.clear()
        await world.until(lambda: bool(load.events("trial_passed")), ENOUGH)
        assert state_of(pair, queue) == "healthy"
    assert load.errors == []
    stored = {one.message_id for one in await world.backlog(pair)} | {one.message_id for one in await world.held(queue)}
    assert stored >= set(load.sent)
    await world.do(pair.force_failover, queue)
    assert pair._state.entity(queue).entity.ping_interval == 1.0


async def test_s14_entering_a_sender_on_trial_neither_fails_nor_ends_it(world: World, queue: str) -> None:
    world.try_timeout = BRIEF
    pair = await world.pair(failover_interval=timedelta(minutes=1))
    await world.do(pair.force_failover, queue)
    await world.do(pair.force_restore, queue)
    assert state_of(pair, queue) == "on_trial"
    sender = await world.sender(pair, queue)
    world.primary.faults.set("internal-error", entity=queue)
    enter = sender.__aenter__ if world.driver == "aio" else sender.__enter__
    await world.do(enter)
    await world.do(sender.create_message_batch)
    assert state_of(pair, queue) == "on_trial"
    world.primary.faults.clear()
    await world.do(enter)
    assert state_of(pair, queue) == "on_trial"
    await world.send(sender, ServiceBusMessage("x"))
    assert state_of(pair, queue) == "healthy"


async def test_s14_server_busy_on_trial_reaches_the_caller_and_leaves_the_trial_open(world: World, queue: str) -> None:
    pair = await world.pair(keywords={"retry_total": 0})
    await world.do(pair.force_failover, queue)
    await world.do(pair.force_restore, queue)
    sender = await world.sender(pair, queue)
    world.primary.faults.set("server-busy", entity=queue)
    with pytest.raises(Exception, match=r"(?i)busy"):
        await world.send(sender, ServiceBusMessage("x"))
    assert state_of(pair, queue) == "on_trial"
