"""The two sides of a pair, open, closed or faulted: C1, C2."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage

from twinbus import (
    PairClosedError,
    PairFaultedError,
    PairingRefusedError,
    SendAvailabilityOptions,
    aio,
    pair_namespaces,
)
from twinbus.pairing import pair_state
from twinbus.pairing.pair_sides import OTHER_SIDE_SECONDS, ClientLostError, OtherSideLostError

from .conftest import World, clients

ASSUMED = SendAvailabilityOptions(provision="assume", backlog_queue_count=1)
LONG = timedelta(minutes=1)


async def test_c1_a_side_that_faults_refuses_with_its_cause(world: World, queue: str) -> None:
    pair = await world.pair()
    sender = await world.sender(pair, queue)
    pair.primary.fault(RuntimeError("told to"))
    assert (pair.primary.state, pair.secondary.state) == ("faulted", "open")
    with pytest.raises(PairFaultedError, match="told to"):
        pair.get_queue_sender(queue)
    with pytest.raises(PairFaultedError, match="told to"):
        await world.send(sender, ServiceBusMessage("refused"))


async def test_c1_a_client_closed_behind_the_pairs_back_counts_as_closed(world: World, queue: str) -> None:
    primary, secondary = clients(world)
    make = aio.pair_namespaces if world.driver == "aio" else pair_namespaces
    pair = await world.do(make, primary, secondary, options=ASSUMED)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("x"))
    await world.do(primary.close)
    with pytest.raises(PairClosedError):
        await world.send(sender, ServiceBusMessage("refused"))
    assert pair.primary.state == "closed"
    await world.do(pair.close)
    await world.do(secondary.close)


def lose(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a client unusable, as a caller's client may become: it makes no more senders, although it is not closed."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("this client is no good any more")

    monkeypatch.setattr(client, "get_queue_sender", refuse)


async def test_c1_a_primary_whose_client_cannot_be_recovered_faults(
    world: World, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await world.pair()
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("x", message_id="before"))
    lose(pair._primary_client, monkeypatch)
    with pytest.raises(RuntimeError, match="no good"):
        pair.get_queue_sender("what is wrong here may be the name alone")
    assert pair.primary.state == "open"
    # After the restore the sender needs another link.
    await world.do(pair.force_failover, queue)
    await world.do(pair.force_restore, queue)
    with pytest.raises(PairFaultedError, match="no good") as raised:
        await world.send(sender, ServiceBusMessage("refused"))
    assert isinstance(raised.value.cause, ClientLostError)
    assert (pair.primary.state, pair.secondary.state) == ("faulted", "open")
    assert [one.message_id for one in await world.held(queue)] == ["before"]


async def test_c1_a_secondary_whose_client_cannot_be_recovered_faults_and_the_primary_goes_on(
    world: World, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await world.pair()
    sender = await world.sender(pair, queue)
    lose(pair._secondary_client, monkeypatch)
    await world.do(pair.force_failover, queue)
    with pytest.raises(PairFaultedError, match="the secondary of this pair faulted") as raised:
        await world.send(sender, ServiceBusMessage("refused"))
    assert isinstance(raised.value.cause, ClientLostError)
    assert (pair.primary.state, pair.secondary.state) == ("open", "faulted")
    await world.do(pair.force_restore, queue)
    await world.send(sender, ServiceBusMessage("x", message_id="direct"))
    assert [one.message_id for one in await world.held(queue)] == ["direct"]


async def test_p3_a_secondary_bound_to_one_entity_is_refused_when_it_is_paired(world: World) -> None:
    bound = f"{world.secondary.connection_string}EntityPath=orders"
    with pytest.raises(PairingRefusedError, match="EntityPath"):
        await world.pair(keywords={"strings": (world.primary.connection_string, bound)})


async def test_c3_a_call_that_waits_for_its_turn_on_a_backlog_link_is_told_that_the_pair_closed(
    world: World, queue: str
) -> None:
    pair = await world.pair(backlog_queue_count=1, try_timeout=LONG)
    first, second = await world.sender(pair, queue), await world.sender(pair, queue)
    await world.do(pair.force_failover, queue)
    # The opening of the link gets no answer, and closing the pair cannot end the opening immediately.
    world.secondary.faults.set("black-hole")
    opening = asyncio.create_task(world.send(first, ServiceBusMessage("x"), timeout=4.0))
    await asyncio.wait([opening], timeout=0.3)
    waiting = asyncio.create_task(world.send(second, ServiceBusMessage("x"), timeout=3.0))
    await asyncio.wait([waiting], timeout=0.3)
    await world.do(pair.close)
    for task in (waiting, opening):
        with pytest.raises(PairClosedError):
            await task


class RunningSyphon:
    state = "running"

    def start(self) -> None:
        self.state = "running"

    def stop(self) -> None:
        self.state = "stopped"

    def ended(self) -> None:
        assert self.state == "stopped"


async def test_c2_where_the_syphon_runs_the_side_left_open_faults_after_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert OTHER_SIDE_SECONDS == 5.0
    monkeypatch.setattr(pair_state, "OTHER_SIDE_SECONDS", 0.5)
    pair = await world.pair()
    pair._state.syphon = RunningSyphon()
    heard: dict[str, float] = {}
    pair.on("*", lambda notice: heard.update({notice.name: notice.at}))
    await world.do(pair.primary.close)
    await world.until(lambda: "faulted" in heard)
    assert heard["faulted"] - heard["closed"] >= 0.5
    assert pair.secondary.state == "faulted"
    assert isinstance(pair.secondary.cause, OtherSideLostError)
    assert pair.syphon.state == "stopped"
