"""Processes that share failovers and holds (S15, S16), with both drivers and both places of the state.

A test plays several processes with pairs that are closed one after the other, or writes to the state without a pair:
pairs of the same namespaces in one process would share their entities anyway (P3).
"""

from __future__ import annotations

import asyncio
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient
from azure.servicebus.aio.management import ServiceBusAdministrationClient as AioAdministrationClient

from twinbus.backlog import FailureKind, state_queue_path
from twinbus.pairing import AioAdministration, state_sharing
from twinbus.pairing.aio import state_access as aio_state_access
from twinbus.pairing.decide.known_state import (
    EVERY_ENTITY,
    FailoverRecord,
    HoldRecord,
    KnownState,
    ReleaseRecord,
    StateChange,
)
from twinbus.pairing.state_folder import FolderState
from twinbus.pairing.state_queue import STATE_PROPERTIES, state_messages, state_of_messages
from twinbus.pairing.sync import state_access as sync_state_access

from .conftest import World, state_of

SOON_PINGED = timedelta(seconds=1)


class Place:
    """Where the state is, and access to it without a pair."""

    def __init__(self, world: World, state: str, name: str) -> None:
        self.world = world
        self.state = state
        self.name = name
        self.queue = state_queue_path(name)

    async def pair(self, **options: Any) -> Any:
        """Return a pair with this state. Its clients do not retry, so that a failing call fails at once."""
        keywords = {"retry_total": 0}
        return await self.world.pair(state=self.state, primary_name=self.name, keywords=keywords, **options)

    async def read(self) -> KnownState:
        if self.state != "secondary":
            try:
                return FolderState(self.state, self.name).read().state
            except FileNotFoundError:
                return KnownState()
        async with self._client() as client, client.get_queue_receiver(self.queue) as receiver:
            return state_of_messages(await receiver.peek_messages(200)).state

    async def write(self, *changes: StateChange) -> None:
        if self.state != "secondary":
            FolderState(self.state, self.name).write(changes)
            return
        await self.create()
        async with self._client() as client, client.get_queue_sender(self.queue) as sender:
            for message in state_messages(changes):
                await sender.send_messages(message)

    async def create(self) -> None:
        text = self.world.secondary.connection_string
        async with AioAdministration.from_connection_string(text) as administration:
            client: AioAdministrationClient = administration.client
            queues = [one.name async for one in client.list_queues(**await self._trust(administration))]
            if self.queue not in queues:
                await administration.request(client.create_queue, self.queue, **STATE_PROPERTIES)

    async def _trust(self, administration: AioAdministration) -> dict[str, Any]:
        return {"connection_verify": await asyncio.to_thread(administration._authority.file)}

    async def until(self, holds: Any) -> None:
        async with asyncio.timeout(15):
            while not holds(await self.read()):  # noqa: ASYNC110 - it happens in another process
                await asyncio.sleep(0.05)

    def _client(self) -> AioServiceBusClient:
        return AioServiceBusClient.from_connection_string(self.world.secondary.connection_string)


@pytest.fixture(params=["folder", pytest.param("secondary", marks=pytest.mark.thorough)])
def place(
    request: pytest.FixtureRequest, world: World, queue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Place:
    for module in (state_sharing, sync_state_access, aio_state_access):
        monkeypatch.setattr(module, "LOOK_SECONDS", 10.0)  # on a busy machine, a look may take longer than 1 s
    state = str(tmp_path / "state") if request.param == "folder" else "secondary"
    return Place(world, state, f"shared-{world.driver}-{request.param}-{os.getpid()}-{queue}")


def failed_over(entity: str, *, ping_in: float = 60.0, age: float = 0.0, interval: float = 60.0) -> FailoverRecord:
    now = time.time()
    kind = FailureKind.CONNECTION_LOST
    return FailoverRecord(entity, kind, now - 30, now + ping_in, interval, 0, now - age, "another")


def message(name: str) -> ServiceBusMessage:
    return ServiceBusMessage("x", message_id=name)


# --- S16 -------------------------------------------------------------------------------------------------------------


async def test_s16_a_new_process_diverts_its_first_call_if_an_earlier_process_failed_over(
    place: Place, world: World, queue: str
) -> None:
    first = await place.pair()
    world.primary.faults.set("internal-error", entity=queue)
    await world.send(await world.sender(first, queue), message("one"))
    await world.do(first.close)
    known = (await place.read()).failovers[queue]
    assert (known.entity, known.cause.value, known.ping_interval) == (queue, "internal", 60.0)
    world.primary.faults.clear()
    heard: list[str] = []
    second = await place.pair(failover_interval=timedelta(minutes=1))
    second.on("*", lambda notice: heard.append(notice.name))
    await world.send(await world.sender(second, queue), message("two"))
    # The primary works, but no ping has shown it yet.
    assert state_of(second, queue) == "failed_over"
    assert [one.message_id for one in await world.backlog(second)].count("two") == 1
    await world.until(lambda: "failover_taken_over" in heard)


async def test_s16_a_ping_that_is_due_is_sent_at_once_and_its_restore_clears_the_state(
    place: Place, world: World, queue: str
) -> None:
    await place.write(failed_over(queue, ping_in=-1.0))
    pair = await place.pair()
    sender = await world.sender(pair, queue)
    await world.send(sender, message("one"))
    await world.state(pair, queue, "on_trial")
    await place.until(lambda state: not state.failovers)
    await world.send(sender, message("two"))
    assert "two" in [one.message_id for one in await world.held(queue)]


@pytest.mark.thorough
async def test_s16_a_state_that_is_too_old_counts_as_healthy(place: Place, world: World, queue: str) -> None:
    await place.write(failed_over(queue, age=200.0))
    pair = await place.pair()
    await world.send(await world.sender(pair, queue), message("one"))
    assert state_of(pair, queue) == "healthy"
    assert "one" in [one.message_id for one in await world.held(queue)]


@pytest.mark.thorough
async def test_s16_an_entity_whose_first_sender_comes_later_is_taken_over_too(
    place: Place, world: World, queue: str
) -> None:
    await place.write(failed_over(queue))
    pair = await place.pair()
    await world.send(await world.sender(pair, "beside-it"), message("beside"))
    await world.sender(pair, queue)
    assert (state_of(pair, "beside-it"), state_of(pair, queue)) == ("healthy", "failed_over")


@pytest.mark.thorough
async def test_s16_each_ping_moves_the_schedule_for_other_processes(place: Place, world: World, queue: str) -> None:
    pair = await place.pair(ping_interval=SOON_PINGED)
    world.primary.faults.set("internal-error", entity=queue)
    await world.send(await world.sender(pair, queue), message("one"))
    await place.until(lambda state: queue in state.failovers)
    first = (await place.read()).failovers[queue]
    await place.until(lambda state: state.failovers[queue].next_ping_at > first.next_ping_at)
    later = (await place.read()).failovers[queue]
    assert (later.writer, round(later.engaged_at, 1)) == (first.writer, round(first.engaged_at, 1))


@pytest.mark.thorough
async def test_s16_a_healthy_pair_writes_nothing(place: Place, world: World, queue: str) -> None:
    pair = await place.pair()
    await world.send(await world.sender(pair, queue), message("one"))
    await world.do(pair.force_failover, queue)
    await world.do(pair.force_restore, queue)
    await world.do(pair.close)
    state = await place.read()
    assert (dict(state.failovers), dict(state.holds)) == ({}, {})


@pytest.mark.thorough
async def test_s16_without_the_listen_right_the_pair_warns_once_and_works_unshared(
    world: World, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(world, "secondary", f"unshared-{world.driver}-{queue}")
    await world.do((await place.pair()).close)
    await place.write(failed_over(queue))
    strings = (
        world.primary.connection_string,
        world.secondary.connection_string.replace("RootManageSharedAccessKey", "writer"),
    )
    pair = await world.pair(
        state="secondary",
        primary_name=place.name,
        provision="assume",
        keywords={"strings": strings, "retry_total": 0},
        ping_interval=SOON_PINGED,
    )
    sender = await world.sender(pair, queue)
    await world.send(sender, message("one"))
    assert state_of(pair, queue) == "healthy"
    world.primary.faults.set("internal-error", entity=queue)
    await world.send(sender, message("two"))
    assert state_of(pair, queue) == "failed_over"
    world.primary.faults.clear()
    await world.state(pair, queue, "on_trial")
    warnings = [one.getMessage() for one in caplog.records if "share" in one.getMessage()]
    assert [("Listen right" in text) for text in warnings] == [True]


@pytest.mark.thorough
async def test_s16_a_state_in_a_folder_that_cannot_be_made_leaves_the_pair_as_it_would_be_without(
    world: World, queue: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    pair = await world.pair(state=str(tmp_path / "file"), keywords={"retry_total": 0})
    world.primary.faults.set("internal-error", entity=queue)
    await world.send(await world.sender(pair, queue), message("one"))
    assert state_of(pair, queue) == "failed_over"
    await world.do(pair.close)


# --- S15 -------------------------------------------------------------------------------------------------------------


async def test_s15_a_hold_is_seen_by_a_new_process_and_its_release_ends_it_there(
    place: Place, world: World, queue: str
) -> None:
    operator = await place.pair()
    await world.do(lambda: operator.force_failover(queue, hold=True))
    await place.until(lambda state: state.hold_of(queue) is not None)
    await world.do(operator.close)
    pair = await place.pair(ping_interval=SOON_PINGED)
    sender = await world.sender(pair, queue)
    await world.send(sender, message("held"))
    assert state_of(pair, queue) == "held"
    assert await world.held(queue) == []
    await place.write(ReleaseRecord(queue, time.time(), "operator"))
    await world.state(pair, queue, "on_trial")
    await world.send(sender, message("released"))
    assert [one.message_id for one in await world.held(queue)] == ["released"]


@pytest.mark.thorough
async def test_s15_a_hold_of_all_entities_is_shared_and_one_entity_can_be_released(
    place: Place, world: World, queue: str
) -> None:
    operator = await place.pair()
    await world.do(lambda: operator.force_failover(hold=True))
    await world.do(operator.force_restore, "beside-it")
    await place.until(lambda state: state.holds.get(EVERY_ENTITY) and "beside-it" in state.released)
    await world.do(operator.close)
    pair = await place.pair()
    held, free = await world.sender(pair, queue), await world.sender(pair, "beside-it")
    await world.send(held, message("held"))
    await world.send(free, message("free"))
    assert (state_of(pair, queue), state_of(pair, "beside-it")) == ("held", "healthy")
    await world.do(pair.force_restore)
    await place.until(lambda state: not state.holds)
    await world.do(pair.close)
    again = await place.pair()
    await world.send(await world.sender(again, queue), message("free"))
    assert state_of(again, queue) == "healthy"


@pytest.mark.thorough
async def test_s15_an_entity_that_another_process_releases_from_a_hold_of_all_is_not_held_when_it_is_used_first(
    place: Place, world: World
) -> None:
    pair = await place.pair(ping_interval=SOON_PINGED)
    await world.do(lambda: pair.force_failover(hold=True))
    await place.until(lambda state: EVERY_ENTITY in state.holds)
    assert pair._state.is_held("beside-it")
    await place.write(ReleaseRecord("beside-it", time.time(), "operator"))
    await world.until(lambda: "beside-it" in pair._state.sharing.known.released)
    # The pair's own syphon delivers to it, and its first sender does not divert.
    assert not pair._state.is_held("beside-it")
    await world.sender(pair, "beside-it")
    assert state_of(pair, "beside-it") == "healthy"
    assert pair._state.is_held("another")


@pytest.mark.thorough
async def test_s15_a_ping_that_succeeds_holds_an_entity_that_an_operator_holds_meanwhile(
    place: Place, world: World, queue: str
) -> None:
    pair = await place.pair(ping_interval=SOON_PINGED)
    world.primary.faults.set("internal-error", entity=queue)
    await world.send(await world.sender(pair, queue), message("one"))
    await place.until(lambda state: queue in state.failovers)
    await place.write(HoldRecord(queue, time.time(), "operator"))
    world.primary.faults.clear()
    await world.state(pair, queue, "held")
    assert (await place.read()).hold_of(queue) is not None


@pytest.mark.thorough
async def test_s15_a_state_that_cannot_be_read_ends_no_hold(world: World, queue: str, tmp_path: Path) -> None:
    place = Place(world, str(tmp_path / "state"), f"shared-{world.driver}-{queue}")
    await place.write(HoldRecord(EVERY_ENTITY, time.time(), "operator"))
    pair = await place.pair(ping_interval=SOON_PINGED)
    await world.sender(pair, queue)
    folder = tmp_path / "state" / place.name
    (folder / "holds.json").write_text("no state")
    await world.state(pair, queue, "held")
    looked: list[bool] = []
    pair._state.sharing._look(lambda _: looked.append(True), lambda *_: looked.append(False))
    await world.until(lambda: looked == [True])
    folder.rename(tmp_path / "moved")
    pair._state.sharing._look(lambda _: looked.append(True), lambda *_: looked.append(False))
    await world.until(lambda: looked == [True, False])
    assert state_of(pair, queue) == "held"
    (tmp_path / "moved").rename(folder)
    await place.write(ReleaseRecord(EVERY_ENTITY, time.time(), "operator"))
    await world.state(pair, queue, "on_trial")
