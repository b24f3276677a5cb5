"""A pair's own syphon on real servers, with both drivers: `enable_syphon`, Y1, Y3, S11, C1, C2, C3."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from azure.core.credentials import AccessToken, AzureNamedKeyCredential
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient
from typer.testing import CliRunner

from twinbus import BacklogUnavailableError, SendAvailabilityOptions, aio, pair_connection_strings, pair_namespaces
from twinbus.backlog import backlog_queue_paths
from twinbus.cli.main import app
from twinbus.connect import MessageState, ReceivedMessage, connect, make_sas_token
from twinbus.errors import OptionError
from twinbus.ledger import Intent, Operation, Role, SegmentHeader, Stage, balance, read_ledger
from twinbus.message import Message
from twinbus.pairing import SharedState, StateLocation
from twinbus.pairing.pair_sides import OTHER_SIDE_SECONDS, OtherSideLostError
from twinbus.pairing.sync import pair as plain_pair
from twinbus.syphon import SyphonOptions, embedded
from twinbus.syphon.plan import RetryPolicy
from twinbus.syphon.plan.destinations import DestinationStatus
from twinbus.testing import LocalNamespaces

ENOUGH = 30
SOON = 20.0
KEY = "SAS_KEY_VALUE"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def namespaces() -> Iterator[LocalNamespaces]:
    queues = [{"name": f"orders-{number}"} for number in range(ENOUGH)]
    claims = {"RootManageSharedAccessKey": ["Manage"], "app": ["Send", "Listen"]}
    rules = [{"name": name, "claims": given, "primary_key": KEY} for name, given in claims.items()]
    primary = {"name": "primary", "queues": queues, "authorization_rules": rules}
    config = {"namespaces": [primary, {"name": "secondary", "authorization_rules": rules}]}
    with LocalNamespaces("primary", "secondary", memory=True, config=config) as found:
        yield found


class Tokens:
    """A TokenCredential whose tokens are SAS tokens: a local namespace can verify no other tokens."""

    def __init__(self, host: str) -> None:
        self._host = host

    def get_token(self, *_scopes: str, **_: Any) -> AccessToken:
        until = int(time.time()) + 3600
        return AccessToken(make_sas_token(f"sb://{self._host}/", "app", KEY, until), until)


class AioTokens(Tokens):
    async def get_token(self, *scopes: str, **keywords: Any) -> AccessToken:  # type: ignore[override] # as the SDK's
        return super().get_token(*scopes, **keywords)

    async def close(self) -> None: ...


class World:
    """Pairs of one driver, and functions that read the primary."""

    def __init__(self, driver: str, namespaces: LocalNamespaces) -> None:
        self.driver = driver
        self.namespaces = namespaces
        number = next(_numbers)
        self.queue = f"orders-{number % ENOUGH}"
        self.name = f"home-{number}"
        self.stack = AsyncExitStack()

    async def do(self, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if self.driver == "aio":
            result = call(*arguments, **keywords)
            return await result if inspect.isawaitable(result) else result
        return await asyncio.to_thread(call, *arguments, **keywords)

    def options(self, **given: Any) -> SendAvailabilityOptions:
        usual: dict[str, Any] = {
            "backlog_queue_count": 2,
            "primary_name": self.name,
            "enable_syphon": True,
            "try_timeout": timedelta(seconds=5),
        }
        return SendAvailabilityOptions(**{**usual, **given})

    async def pair(self, **given: Any) -> Any:
        make = aio.pair_connection_strings if self.driver == "aio" else pair_connection_strings
        strings = [self.namespaces[name].connection_string for name in ("primary", "secondary")]
        return await self.kept(await self.do(make, *strings, options=self.options(**given)))

    async def pair_of_clients(self, credential: str, **given: Any) -> Any:
        client = AioServiceBusClient if self.driver == "aio" else ServiceBusClient
        made: list[Any] = []
        for name in ("primary", "secondary"):
            host = f"localhost:{self.namespaces[name].port}"
            one = client(host, self.credential(credential, host), use_tls=False)
            self.stack.push_async_callback(self.do, one.close)
            made.append(one)
        make: Any = aio.pair_namespaces if self.driver == "aio" else pair_namespaces
        return await self.kept(await self.do(make, *made, options=self.options(**given)))

    def credential(self, kind: str, host: str) -> Any:
        """A rule's key; or, as "token", a TokenCredential."""
        if kind != "token":
            return AzureNamedKeyCredential(kind, KEY)
        return AioTokens(host) if self.driver == "aio" else Tokens(host)

    async def kept(self, pair: Any) -> Any:
        self.stack.push_async_callback(self.do, pair.close)
        return pair

    async def divert(self, pair: Any, *ids: str) -> None:
        pair.force_failover(self.queue)
        sender = await self.do(pair.get_queue_sender, self.queue)
        for one in ids:
            await self.do(sender.send_messages, ServiceBusMessage("x", message_id=one, session_id="s"))
        await self.do(sender.close)

    async def put_aside(self, queue: str) -> None:
        """Wait until a syphon has had the only message of a backlog queue, and deferred it."""
        async with connect(self.namespaces["secondary"].connection_string, timeout=10) as bus:
            backlog = bus.management(queue)
            states: list[MessageState] = []
            async with asyncio.timeout(SOON):
                while states != [MessageState.DEFERRED]:
                    states = [one.state for one in await backlog.peek(0, 10)]

    async def arrived(self) -> list[ReceivedMessage]:
        async with connect(self.namespaces["primary"].connection_string, timeout=10) as bus:
            return await bus.management(self.queue).peek(0, 100)

    async def brought(self, count: int) -> list[ReceivedMessage]:
        found: list[ReceivedMessage] = []
        async with asyncio.timeout(SOON):
            while len(found) < count:
                found = await self.arrived()
        return found

    async def until(self, holds: Callable[[], bool], seconds: float = SOON) -> None:
        async with asyncio.timeout(seconds):
            while not holds():  # noqa: ASYNC110 - it happens in threads and other processes
                await asyncio.sleep(0.02)


@pytest.fixture(params=["sync", "aio"])
async def world(request: pytest.FixtureRequest, namespaces: LocalNamespaces) -> AsyncIterator[World]:
    made = World(request.param, namespaces)
    async with made.stack:
        yield made


async def test_y1_y3_s11_what_a_pair_diverted_comes_home_and_the_pair_tells(world: World) -> None:
    pair = await world.pair()
    told: list[Any] = []
    pair.on("backlog_drained", told.append)
    assert pair.syphon.state == "running"
    await world.divert(pair, "1", "2")
    await world.until(lambda: sum(notice.moved for notice in told) == 2)
    found = await world.arrived()
    assert sorted(str(one.message_id) for one in found) == ["1", "2"]
    assert {one.session_id for one in found} == {"s"}
    assert {notice.queue for notice in told} <= set(pair.backlog_queues)


async def test_y1_a_backlog_queue_that_the_pair_makes_later_is_found_by_its_syphon_at_once(world: World) -> None:
    first, later = backlog_queue_paths(world.name, 2)
    faults = world.namespaces["secondary"].faults
    faults.set("internal-error", entity=later, points=["http"])
    pair = await world.pair()
    running = pair.syphon._running
    await world.until(lambda: running._syphon is not None and running._syphon.queues == (first,))
    assert pair.backlog_queues == (first,)
    faults.clear()
    # Without the pair's report, the next search would come in a minute. The pair's own next try may be 10 s away.
    await world.until(lambda: running._syphon.queues == (first, later), seconds=45.0)


async def test_m1_after_an_outage_the_ledger_of_a_pair_with_its_syphon_balances(world: World, tmp_path: Path) -> None:
    short = {"failover_interval": timedelta(0), "ping_interval": timedelta(seconds=1)}
    pair = await world.pair(ledger=tmp_path, **short)
    restored: list[Any] = []
    pair.on("restored", restored.append)
    sender = await world.do(pair.get_queue_sender, world.queue)
    await world.do(sender.send_messages, ServiceBusMessage("x", message_id="before"))
    faults = world.namespaces["primary"].faults
    faults.set("internal-error", entity=world.queue)
    for number in range(20):
        await world.do(sender.send_messages, ServiceBusMessage("x", message_id=str(number)))
    faults.clear()
    await world.until(lambda: bool(restored))
    await world.do(sender.send_messages, ServiceBusMessage("x", message_id="after"))
    await world.brought(22)
    await world.do(pair.close)
    checked = await asyncio.to_thread(CliRunner().invoke, app, ["ledger", "check", str(tmp_path)])
    assert checked.exit_code == 0, checked.output
    found = balance(read_ledger(tmp_path))
    assert not found.incomplete
    assert (found.accepted.total(), found.delivered.total(), found.duplicated.total()) == (22, 22, 0)
    written = {entry.role for entry in read_ledger(tmp_path) if isinstance(entry, SegmentHeader)}
    assert written == {Role.CLIENT, Role.SYPHON}
    stages = {entry.stage for entry in read_ledger(tmp_path) if isinstance(entry, Operation | Intent)}
    assert {Stage.SEND_BACKLOG, Stage.RECEIVE_BACKLOG, Stage.RETURN_PRIMARY, Stage.COMPLETE_BACKLOG} <= stages


NEVER = RetryPolicy(first_pause=3600.0, longest_pause=3600.0)


async def test_y12_the_pairs_syphon_sends_to_a_restored_entity_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "SyphonOptions", partial(SyphonOptions, retry_policy=NEVER))
    pair = await world.pair()
    primary = world.namespaces["primary"]
    primary.faults.set("internal-error", entity=world.queue, points=["send"])
    await world.divert(pair, "waits")
    put_aside = pair.syphon._running
    await world.until(lambda: any(one.failures for one in statuses(put_aside)))
    primary.faults.clear()
    # Without the wake-up, the next try would come in half an hour or later.
    await world.do(pair.force_restore, world.queue)
    assert [one.message_id for one in await world.brought(1)] == ["waits"]
    # S14: the delivery of the pair's own syphon ended the trial.
    await world.until(lambda: pair.entities()[0].state == "healthy")


async def test_s15_the_pairs_syphon_delivers_nothing_to_a_held_entity_until_it_is_released(world: World) -> None:
    pair = await world.pair(backlog_queue_count=1)
    await world.do(lambda: pair.force_failover(world.queue, hold=True))
    sender = await world.do(pair.get_queue_sender, world.queue)
    await world.do(sender.send_messages, ServiceBusMessage("x", message_id="held"))
    await world.put_aside(pair.backlog_queues[0])
    assert await world.arrived() == []
    await world.do(pair.force_restore, world.queue)
    assert [one.message_id for one in await world.brought(1)] == ["held"]


@pytest.mark.thorough
async def test_s15_the_pairs_syphon_delivers_nothing_to_an_entity_that_an_operator_holds_in_the_shared_state(
    world: World, tmp_path: Path
) -> None:
    pair = await world.pair(backlog_queue_count=1, state=tmp_path)
    operator = SharedState(StateLocation.of(tmp_path, world.name))
    # The pair is healthy and looks no more; only its syphon does.
    await operator.hold(world.queue)
    await world.divert(pair, "held")
    await world.put_aside(pair.backlog_queues[0])
    assert await world.arrived() == []
    await operator.release(world.queue)
    assert [one.message_id for one in await world.brought(1)] == ["held"]
    await operator.close()


def statuses(running: Any) -> tuple[DestinationStatus, ...]:
    return () if running._syphon is None else running._syphon._context.destinations.statuses()


async def test_s14_a_delivery_of_the_pairs_syphon_that_fails_on_trial_engages_failover_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "SyphonOptions", partial(SyphonOptions, retry_policy=NEVER))
    pair = await world.pair()
    told: list[Any] = []
    pair.on("trial_failed", told.append)
    world.namespaces["primary"].faults.set("internal-error", entity=world.queue, points=["send"])
    await world.divert(pair, "waits")
    await world.until(lambda: any(one.failures for one in statuses(pair.syphon._running)))
    await world.do(pair.force_restore, world.queue)
    await world.until(lambda: bool(told))
    assert pair.entities()[0].state == "failed_over"
    world.namespaces["primary"].faults.clear()


async def test_s6_a_backlog_queue_that_the_pairs_syphon_uses_returns_to_the_rotation(world: World) -> None:
    pair = await world.pair(probation=timedelta(hours=1), backlog_queue_count=1)
    await world.until(lambda: pair.syphon.state == "running")
    [queue] = pair.backlog_queues
    world.namespaces["secondary"].faults.set("internal-error", entity=queue, points=["send"])
    with pytest.raises(BacklogUnavailableError):
        await world.divert(pair, "kept")
    assert pair.backlog_queues == ()
    world.namespaces["secondary"].faults.clear()
    # Not from this pair: nothing but its syphon notices.
    text = world.namespaces["secondary"].connection_string
    async with connect(text, timeout=10) as bus, await bus.sender(queue) as sender:
        await sender.send([Message(b"", message_id="foreign")])
    await world.until(lambda: pair.backlog_queues == (queue,))


async def test_s9_a_body_that_was_stored_compressed_comes_home_as_it_was(world: World) -> None:
    pair = await world.pair()
    pair.force_failover(world.queue)
    sender = await world.do(pair.get_queue_sender, world.queue)
    body = b"compressible " * 20_154  # fits the primary, and with its aliases no backlog queue
    await world.do(sender.send_messages, ServiceBusMessage(body, message_id="large", session_id="s" * 100))
    (found,) = await world.brought(1)
    assert found.body == body
    assert found.session_id == "s" * 100
    assert not found.application_properties


async def test_s10_what_was_scheduled_while_failed_over_is_scheduled_on_the_primary(world: World) -> None:
    pair = await world.pair()
    pair.force_failover(world.queue)
    sender = await world.do(pair.get_queue_sender, world.queue)
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    (handle,) = await world.do(sender.schedule_messages, ServiceBusMessage("x", message_id="later"), due)
    assert handle < 0
    (found,) = await world.brought(1)
    assert (found.message_id, found.state, found.scheduled_enqueue_time) == ("later", MessageState.SCHEDULED, due)


async def test_y7_the_pairs_option_deducts_the_time_spent_in_the_backlog(world: World) -> None:
    pair = await world.pair(enable_syphon=False)
    pair.force_failover(world.queue)
    sender = await world.do(pair.get_queue_sender, world.queue)
    await world.do(sender.send_messages, ServiceBusMessage("x", message_id="1", time_to_live=timedelta(seconds=100)))
    await world.do(pair.close)
    pair = await world.pair(ttl="absolute")
    (found,) = await world.brought(1)
    left = found.time_to_live
    assert left is not None
    assert left < timedelta(seconds=100)


async def test_y1_a_pair_without_the_option_has_no_syphon(world: World) -> None:
    pair = await world.pair(enable_syphon=False)
    assert pair.syphon is None


@pytest.mark.parametrize("credential", ["RootManageSharedAccessKey", "app", "token"])
async def test_y1_the_syphon_uses_the_credentials_of_the_callers_clients(world: World, credential: str) -> None:
    pair = await world.pair(enable_syphon=False)
    await world.do(pair.close)
    pair = await world.pair_of_clients(credential, provision="assume")
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    pair.on("backlog_drained", lambda _: loop.call_soon_threadsafe(told.set))
    await world.divert(pair, "1")
    async with asyncio.timeout(SOON):
        await told.wait()
    assert [one.message_id for one in await world.arrived()] == ["1"]


async def test_c2_one_side_gone_the_other_is_faulted_and_the_syphon_stops(world: World) -> None:
    # Each case takes five seconds, so each driver tests only one side.
    ends, how = ("primary", "close") if world.driver == "sync" else ("secondary", "fault")
    pair = await world.pair()
    gone, left = (pair.primary, pair.secondary) if ends == "primary" else (pair.secondary, pair.primary)
    await world.do(getattr(gone, how), *([RuntimeError("broken")] if how == "fault" else []))
    assert left.state == "open"
    await world.until(lambda: left.state == "faulted", OTHER_SIDE_SECONDS + 5)
    assert isinstance(left.cause, OtherSideLostError)
    assert ends in str(left.cause)
    # The side is faulted first; then, in the pair's own thread, the syphon is stopped.
    await world.until(lambda: pair.syphon.state == "stopped")


async def test_c3_a_closed_pair_leaves_no_thread_and_no_task_of_its_syphon(world: World) -> None:
    before = asyncio.all_tasks()
    pair = await world.pair()
    await world.divert(pair, "1")
    await world.do(pair.close)
    assert pair.syphon.state == "stopped"
    assert not [one.name for one in threading.enumerate() if one.name.startswith("twinbus-syphon")]
    left = [task for task in asyncio.all_tasks() - before if "syphon" in repr(task.get_coro())]
    assert not left
    again = await world.pair()
    assert again.syphon.state == "running"


async def test_a_syphon_whose_task_died_says_that_it_failed(namespaces: LocalNamespaces) -> None:
    world = World("aio", namespaces)
    async with world.stack:
        pair = await world.pair()
        await asyncio.sleep(0)
        pair.syphon._task.cancel()
        await pair.syphon.ended()
        assert pair.syphon.state == "failed"


async def test_y1_a_pair_whose_secondary_is_away_starts_and_its_syphon_goes_on_trying() -> None:
    nobody = "Endpoint=sb://localhost:1;SharedAccessKeyName=a;SharedAccessKey=b;UseDevelopmentEmulator=true;"
    other = nobody.replace(":1;", ":2;")
    options = SendAvailabilityOptions(enable_syphon=True, provision="assume", try_timeout=timedelta(seconds=1))
    async with aio.pair_connection_strings(nobody, other, options=options) as pair:
        assert pair.syphon is not None
        assert pair.syphon.state == "running"
    assert pair.syphon.state == "stopped"


def test_a_pair_made_below_the_public_functions_says_that_no_syphon_was_given(namespaces: LocalNamespaces) -> None:
    strings = [namespaces[name].connection_string for name in ("primary", "secondary")]
    options = SendAvailabilityOptions(enable_syphon=True, provision="assume", primary_name="below")
    with pytest.raises(OptionError, match="enable_syphon"):
        plain_pair.pair_connection_strings(*strings, options=options)
