"""Several pairs of the same two namespaces in one process share what they learn (P3).

Each test runs with pairs of both drivers. `Home` says where a pair lives: in threads, in the test's event loop, or in
an event loop of a thread of its own.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from prometheus_client import REGISTRY

from twinbus import (
    BacklogUnavailableError,
    PairClosedError,
    PairFaultedError,
    PairingRefusedError,
    SendAvailabilityOptions,
    aio,
    pair_connection_strings,
)
from twinbus.ledger import Closed, State, read_ledger
from twinbus.pairing.pair_sides import PairForkedError
from twinbus.pairing.state_folder import FolderState
from twinbus.testing import LocalNamespace

from .conftest import World, state_of

MINUTE = timedelta(minutes=1)
NO_RETRIES = {"retry_total": 0}


class Home:
    """Where a pair lives. `do` calls a function there, and awaits its result there."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.loop = asyncio.get_running_loop()
        if kind == "loop":
            self.loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
            self._thread.start()

    async def do(self, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if self.kind == "sync":
            return await asyncio.to_thread(call, *arguments, **keywords)

        async def called() -> Any:
            result = call(*arguments, **keywords)
            return await result if inspect.isawaitable(result) else result

        if self.kind == "aio":
            return await called()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called(), self.loop))

    async def close(self) -> None:
        """Close the loop of a thread of its own, with all that still runs in it."""
        if self.kind == "loop" and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
            await asyncio.to_thread(self._thread.join)
            self.loop.close()


class Member:
    """One of the pairs, and where it lives."""

    def __init__(self, pair: Any, home: Home) -> None:
        self.pair = pair
        self.home = home
        self.do = home.do

    async def sender(self, queue: str) -> Any:
        return await self.do(self.pair.get_queue_sender, queue)

    async def send(self, sender: Any, name: str) -> None:
        await self.do(sender.send_messages, ServiceBusMessage("x", message_id=name))

    async def close(self) -> None:
        if not self.home.loop.is_closed():
            await self.do(self.pair.close)


Make = Callable[..., Awaitable[Member]]
KINDS = [
    pytest.param(kinds, id="-".join(kinds), marks=[pytest.mark.thorough] if thorough else [])
    for kinds, thorough in [
        (("sync", "sync"), False),
        (("aio", "aio"), False),
        (("aio", "loop"), True),
        (("loop", "loop"), True),
        (("sync", "aio"), True),
        (("aio", "sync"), True),
        (("loop", "sync"), True),
    ]
]
both_drivers = pytest.mark.parametrize("kinds", KINDS)


@pytest.fixture
def world(primary: LocalNamespace, secondary: LocalNamespace) -> World:
    return World("aio", primary, secondary)


@pytest.fixture
async def make(
    primary: LocalNamespace, secondary: LocalNamespace, request: pytest.FixtureRequest
) -> AsyncIterator[Make]:
    """Makes pairs with equal options, and closes them."""
    usual = SendAvailabilityOptions(
        backlog_queue_count=1,
        failover_interval=timedelta(0),
        ping_interval=timedelta(seconds=1),
        ping_jitter=0.0,
        probation=timedelta(hours=1),
        primary_name=f"shared-{abs(hash(request.node.name)) % 10**6}",
    )
    async with AsyncExitStack() as stack:

        async def made(kind: str, *, entered: bool = True, keywords: Any = NO_RETRIES, **given: Any) -> Member:
            strings = (primary.connection_string, secondary.connection_string)
            home = Home(kind)
            stack.push_async_callback(home.close)
            pairing = pair_connection_strings if kind == "sync" else aio.pair_connection_strings
            options = replace(usual, **given)
            if kind == "sync" or entered:
                pair = await home.do(pairing, *strings, options=options, **keywords)
            else:
                pair = pairing(*strings, options=options, **keywords)
            member = Member(pair, home)
            stack.push_async_callback(member.close)
            return member

        yield made


@both_drivers
async def test_p3_the_same_pair_again_shares_entity_states_and_rotation_and_keeps_its_own_clients(
    world: World, make: Make, queue: str, kinds: tuple[str, str]
) -> None:
    one, other = [await make(kind, ping_interval=MINUTE) for kind in kinds]
    heard: list[tuple[str, object]] = []

    def hear(notice: Any) -> None:
        heard.append((notice.name, other.home.kind == "sync" or asyncio.get_running_loop() is other.home.loop))

    other.pair.on("*", hear)
    first, second = await one.sender(queue), await other.sender(queue.upper())
    await one.do(one.pair.force_failover, queue)
    assert state_of(other.pair, queue) == "failed_over"
    await other.send(second, "by the other")
    assert [message.message_id for message in await world.backlog(one.pair)] == ["by the other"]
    assert one.pair.entities()[0].diverted == 1
    world.secondary.faults.set("internal-error", entity=one.pair.backlog_queues[0], points=["send"])
    with pytest.raises(BacklogUnavailableError):
        await one.send(first, "kept")
    assert other.pair.backlog_queues == one.pair.backlog_queues == ()
    assert one.pair._primary_client is not other.pair._primary_client
    # The callbacks of an asyncio pair run in its own event loop.
    await world.until(lambda: heard == [("failover_engaged", True), ("backlog_queue_left", True)])


@pytest.mark.parametrize("closes", [0, pytest.param(1, marks=pytest.mark.thorough)])
@both_drivers
async def test_p3_closing_one_leaves_the_other_working_with_its_pings(
    world: World, make: Make, queue: str, kinds: tuple[str, str], closes: int
) -> None:
    members = [await make(kind) for kind in kinds]
    senders = [await member.sender(queue) for member in members]
    for member, sender in zip(members, senders, strict=True):
        await member.send(sender, "before")
    world.primary.faults.set("detach", entity=queue, points=["send", "attach"])
    await members[0].send(senders[0], "during")
    await members[closes].close()
    left, going_on = members[1 - closes], senders[1 - closes]
    with pytest.raises(PairClosedError):
        await members[closes].send(senders[closes], "refused")
    assert [one.state for one in members[closes].pair.entities()] == ["closed"]
    assert state_of(left.pair, queue) == "failed_over"
    await left.send(going_on, "after")
    assert {one.message_id for one in await world.backlog(left.pair)} == {"during", "after"}
    world.primary.faults.clear()
    # Pings go on, though the pair that sent them may be the one that closed.
    await world.state(left.pair, queue, "on_trial")
    await left.send(going_on, "trial")
    assert state_of(left.pair, queue) == "healthy"


@both_drivers
async def test_p3_the_last_pair_closes_what_is_shared_and_they_can_be_made_again(
    world: World, make: Make, queue: str, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    one, other = [await make(kind, ledger=tmp_path) for kind in kinds]
    assert one.pair._state.ledger is other.pair._state.ledger
    await one.do(one.pair.force_failover, queue)
    shown = {"pair": str(one.pair.options.primary_name), "entity": queue, "state": "failed_over"}
    await one.close()
    assert REGISTRY.get_sample_value("twinbus_pair_entity_state", shown) == 1.0
    assert not [entry for entry in read_ledger(tmp_path) if isinstance(entry, Closed)]
    await other.close()
    assert REGISTRY.get_sample_value("twinbus_pair_entity_state", shown) is None
    entries = list(read_ledger(tmp_path))
    assert isinstance(entries[-1], Closed)
    assert [entry.event for entry in entries if isinstance(entry, State)].count("failover_engaged") == 1
    again = await make(kinds[0])
    assert state_of(again.pair, queue) == "unknown"
    assert again.pair._state._shared is not one.pair._state._shared


@both_drivers
async def test_p3_a_pair_whose_secondary_faulted_goes_on_with_its_primary_beside_and_after_the_other(
    make: Make, queue: str, kinds: tuple[str, str]
) -> None:
    one, other = [await make(kind) for kind in kinds]
    sender, beside = await one.sender(queue), await other.sender(queue)
    await one.do(one.pair.secondary.fault, RuntimeError("told by a test"))
    await one.send(sender, "x")
    await other.send(beside, "x")
    await other.do(other.pair.force_failover, queue)
    await other.send(beside, "x")
    with pytest.raises(PairFaultedError):
        await one.send(sender, "x")
    await other.close()
    await one.do(one.pair.force_restore, queue)
    await one.send(sender, "x")


@both_drivers
async def test_s5_p3_a_call_that_pauses_before_its_next_try_is_woken_by_a_failover_of_the_other_pair(
    world: World, make: Make, queue: str, kinds: tuple[str, str]
) -> None:
    """The SDK would pause for a minute: only the failover ends this pause."""
    options = {"ping_interval": MINUTE, "try_timeout": 5 * MINUTE, "failover_interval": 5 * MINUTE}
    one, other = [await make(kind, keywords={"retry_backoff_factor": 60}, **options) for kind in kinds]
    sender = await one.sender(queue)
    await one.send(sender, "before")
    world.primary.faults.set("detach", entity=queue, points=["send", "attach"])
    pausing = asyncio.create_task(one.send(sender, "diverted"))
    await world.until(lambda: bool(sender._entity.on_reroute))
    await other.do(other.pair.force_failover, queue)
    await asyncio.wait_for(pausing, 20)
    assert [message.message_id for message in await world.backlog(one.pair)] == ["diverted"]


# --- event loops that end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pinging", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["between pings", "during a ping"]
)
@pytest.mark.parametrize("kind", ["aio", pytest.param("sync", marks=pytest.mark.thorough)])
async def test_p3_an_event_loop_that_is_closed_under_its_pair_leaves_the_pings_to_the_other(
    world: World, make: Make, queue: str, kind: str, pinging: bool
) -> None:
    first = await make("loop", try_timeout=timedelta(seconds=1), ping="message")
    other = await make(kind, try_timeout=timedelta(seconds=1), ping="message")
    sender = await other.sender(queue)
    world.primary.faults.set("black-hole" if pinging else "detach", entity=queue, points=["send"])
    await first.do(first.pair.force_failover, queue)
    if pinging:
        await world.until(lambda: any(fault["hits"] for fault in world.primary.faults.list()))
    await first.home.close()
    world.primary.faults.clear()
    await world.state(other.pair, queue, "on_trial")
    await other.send(sender, "home")
    assert [one.message_id for one in await world.held(queue)] == ["home"]
    # The pair of the closed loop can still be closed, and the other one goes on.
    await first.pair.close()
    await other.send(sender, "after")


@pytest.mark.thorough
async def test_p3_a_pair_in_a_new_loop_goes_on_where_the_loop_of_the_first_was_closed(
    world: World, make: Make, queue: str
) -> None:
    first = await make("loop")
    world.primary.faults.set("detach", entity=queue, points=["send", "attach"])
    await first.send(await first.sender(queue), "diverted")
    await first.home.close()
    other = await make("loop")
    assert state_of(other.pair, queue) == "failed_over"
    world.primary.faults.clear()
    await world.state(other.pair, queue, "on_trial")
    await first.pair.close()


async def test_p3_s16_a_pair_that_closes_after_the_loops_of_all_others_were_closed_writes_the_shared_state(
    make: Make, queue: str, tmp_path: Path
) -> None:
    lost = await make("loop", state=str(tmp_path))
    last = await make("sync", state=str(tmp_path))
    await lost.home.close()
    # The second hold waits for a second after the first one.
    for entity in (queue, f"{queue}-2"):
        await last.do(last.pair.force_failover, entity, hold=True)
    await last.close()
    await lost.pair.close()
    assert sorted(FolderState(tmp_path, last.pair.options.primary_name).read().state.holds) == [queue, f"{queue}-2"]


# --- pairs that are only made, refused, and closed together ----------------------------------------------------------


async def test_p3_asyncio_pairs_made_before_the_first_is_paired_share_and_an_unused_one_closes_nothing(
    world: World, make: Make, queue: str
) -> None:
    one, unused, other = [await make("aio", entered=False) for _ in range(3)]
    early = other.pair.get_queue_sender(queue)
    async with one.pair:
        await one.do(one.pair.force_failover, queue)
        await unused.pair.close()
        with pytest.raises(PairClosedError):
            await unused.pair
        # The first send of the other pair is also its pairing.
        await other.send(early, "diverted")
        assert [message.message_id for message in await world.backlog(one.pair)] == ["diverted"]
    assert state_of(other.pair, queue) == "failed_over"
    await world.state(other.pair, queue, "on_trial")
    await other.send(early, "home")


@pytest.mark.thorough
async def test_p3_what_is_shared_outlives_its_members_as_long_as_a_made_pair_uses_it(
    world: World, make: Make, queue: str, tmp_path: Path
) -> None:
    one, later = await make("aio", ledger=tmp_path), await make("aio", entered=False, ledger=tmp_path)
    await one.do(one.pair.force_failover, queue)
    await one.close()
    assert state_of(later.pair, queue) == "failed_over"
    await later.pair
    # The ping that became due while no pair was paired is sent at once.
    await world.state(later.pair, queue, "on_trial")
    await later.close()
    entries = list(read_ledger(tmp_path))
    assert isinstance(entries[-1], Closed)


@pytest.mark.thorough
async def test_p3_l1_a_pair_that_is_dropped_unpaired_leaves_no_ledger_open(
    world: World, primary: LocalNamespace, secondary: LocalNamespace, make: Make, tmp_path: Path
) -> None:
    one = await make("aio", ledger=tmp_path)
    dropped = aio.pair_connection_strings(
        primary.connection_string, secondary.connection_string, options=one.pair.options
    )
    assert dropped._state._shared is one.pair._state._shared
    await one.close()
    assert not [entry for entry in read_ledger(tmp_path) if isinstance(entry, Closed)], "the other pair may use it"
    del dropped
    gc.collect()
    await world.until(lambda: any(isinstance(entry, Closed) for entry in read_ledger(tmp_path)))


async def test_p3_a_pair_dropped_before_its_first_use_is_in_nobodys_way(make: Make, tmp_path: Path) -> None:
    options = (await make("aio", entered=False, ledger=tmp_path)).pair.options
    dropped = aio.pair_connection_strings(
        "Endpoint=sb://a.example/;SharedAccessKeyName=k;SharedAccessKey=c2VjcmV0",
        "Endpoint=sb://b.example/;SharedAccessKeyName=k;SharedAccessKey=c2VjcmV0",
        options=options,
    )
    shared = dropped._state._shared
    assert shared.made
    del dropped
    gc.collect()
    assert not shared.made


@pytest.mark.parametrize("kind", ["sync", "aio"])
async def test_p3_contradicting_options_are_refused(make: Make, kind: str) -> None:
    await make(kind)
    for other in ("sync", "aio"):
        with pytest.raises(PairingRefusedError, match="with other options"):
            await make(other, ping_interval=timedelta(seconds=2))


@pytest.mark.parametrize("kinds", [("sync",) * 4, ("loop",) * 4, ("aio", "loop", "sync", "aio")])
async def test_p3_pairs_that_close_at_the_same_time_close_what_they_share_once(
    make: Make, queue: str, kinds: tuple[str, ...]
) -> None:
    members = [await make(kind) for kind in kinds]
    for member in members:
        await member.send(await member.sender(queue), "x")
    await members[0].do(members[0].pair.force_failover, queue)
    await asyncio.gather(*(member.close() for member in members))
    shared = members[0].pair._state._shared
    assert shared.is_closed
    assert not shared.members
    assert not shared.drivers
    assert (await make("sync")).pair.backlog_queues


async def test_p3_s13_an_unused_pair_that_shares_with_a_used_one_is_refused_in_the_child_of_a_fork(
    make: Make,
) -> None:
    await make("sync")
    unused = await make("aio", entered=False)
    reading, writing = os.pipe()
    if os.fork() == 0:
        # Only this thread exists here: no code of pytest may run.
        try:
            asyncio.new_event_loop().run_until_complete(unused.pair._entered())
        except PairForkedError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        assert "belongs to the parent process" in told.read()
    await unused.pair
