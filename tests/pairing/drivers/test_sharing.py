"""Several sync pairs of the same two namespaces in one process share what they learn (P3)."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from prometheus_client import REGISTRY

from twinbus import (
    BacklogUnavailableError,
    Pair,
    PairClosedError,
    PairFaultedError,
    PairingRefusedError,
    SendAvailabilityOptions,
    pair_connection_strings,
)
from twinbus.ledger import Closed, State, read_ledger
from twinbus.testing import LocalNamespace

from .conftest import World, state_of

Make = Callable[..., Pair]


@pytest.fixture
def world(primary: LocalNamespace, secondary: LocalNamespace) -> World:
    return World("sync", primary, secondary)


@pytest.fixture
def make(primary: LocalNamespace, secondary: LocalNamespace, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes pairs with equal options, and closes them."""
    usual = SendAvailabilityOptions(
        backlog_queue_count=1,
        failover_interval=timedelta(0),
        ping_interval=timedelta(seconds=1),
        ping_jitter=0.0,
        probation=timedelta(hours=1),
        primary_name=f"shared-{abs(hash(request.node.name)) % 10**6}",
    )
    with ExitStack() as stack:

        def made(**given: Any) -> Pair:
            strings = (primary.connection_string, secondary.connection_string)
            pair = pair_connection_strings(*strings, options=replace(usual, **given), retry_total=0)
            return stack.enter_context(pair)

        yield made


async def test_p3_the_same_pair_again_shares_entity_states_and_rotation_and_keeps_its_own_clients(
    world: World, make: Make, queue: str
) -> None:
    one, other = make(ping_interval=timedelta(minutes=1)), make(ping_interval=timedelta(minutes=1))
    heard: list[str] = []
    other.on("*", lambda notice: heard.append(notice.name))
    first, second = one.get_queue_sender(queue), other.get_queue_sender(queue.upper())
    one.force_failover(queue)
    assert state_of(other, queue) == "failed_over"
    await world.send(second, ServiceBusMessage("x", message_id="by the other"))
    assert [message.message_id for message in await world.backlog(one)] == ["by the other"]
    assert one.entities()[0].diverted == 1
    world.secondary.faults.set("internal-error", entity=one.backlog_queues[0], points=["send"])
    with pytest.raises(BacklogUnavailableError):
        await world.send(first, ServiceBusMessage("kept"))
    assert other.backlog_queues == one.backlog_queues == ()
    assert one._primary_client is not other._primary_client
    await world.until(lambda: heard == ["failover_engaged", "backlog_queue_left"])


@pytest.mark.parametrize("closes", [0, 1])
async def test_p3_closing_one_leaves_the_other_working_with_its_pings(
    world: World, make: Make, queue: str, closes: int
) -> None:
    pairs = [make(), make()]
    senders = [pair.get_queue_sender(queue) for pair in pairs]
    for sender in senders:
        await world.send(sender, ServiceBusMessage("x"))
    world.primary.faults.set("detach", entity=queue, points=["send", "attach"])
    await world.send(senders[0], ServiceBusMessage("x", message_id="during"))
    await world.do(pairs[closes].close)
    left, closed = pairs[1 - closes], senders[closes]
    with pytest.raises(PairClosedError):
        await world.send(closed, ServiceBusMessage("x"))
    assert [one.state for one in pairs[closes].entities()] == ["closed"]
    assert state_of(left, queue) == "failed_over"
    await world.send(senders[1 - closes], ServiceBusMessage("x", message_id="after"))
    assert {one.message_id for one in await world.backlog(left)} == {"during", "after"}
    world.primary.faults.clear()
    # Pings go on, though the pair that sent them may be the one that closed.
    await world.state(left, queue, "on_trial")
    await world.send(senders[1 - closes], ServiceBusMessage("x"))
    assert state_of(left, queue) == "healthy"


async def test_p3_the_last_pair_closes_what_is_shared_and_they_can_be_made_again(
    world: World, make: Make, queue: str, tmp_path: Path
) -> None:
    one, other = make(ledger=tmp_path), make(ledger=tmp_path)
    assert one._state.ledger is other._state.ledger
    await world.do(one.force_failover, queue)
    name = str(one.options.primary_name)
    await world.do(one.close)
    shown = {"pair": name, "entity": queue, "state": "failed_over"}
    assert REGISTRY.get_sample_value("twinbus_pair_entity_state", shown) == 1.0
    assert not [entry for entry in read_ledger(tmp_path) if isinstance(entry, Closed)]
    await world.do(other.close)
    assert REGISTRY.get_sample_value("twinbus_pair_entity_state", shown) is None
    entries = list(read_ledger(tmp_path))
    assert isinstance(entries[-1], Closed)
    assert [entry.event for entry in entries if isinstance(entry, State)].count("failover_engaged") == 1
    again = make()
    assert state_of(again, queue) == "unknown"
    assert again._state._shared is not one._state._shared


async def test_p3_a_pair_whose_secondary_faulted_goes_on_with_its_primary_beside_and_after_the_other(
    world: World, make: Make, queue: str
) -> None:
    one, other = make(), make()
    sender, beside = one.get_queue_sender(queue), other.get_queue_sender(queue)
    one.secondary.fault(RuntimeError("told by a test"))
    for each in (sender, beside):
        await world.send(each, ServiceBusMessage("x"))
    other.force_failover(queue)
    await world.send(beside, ServiceBusMessage("x"))
    with pytest.raises(PairFaultedError):
        await world.send(sender, ServiceBusMessage("x"))
    await world.do(other.close)
    one.force_restore(queue)
    await world.send(sender, ServiceBusMessage("x"))


async def test_p3_contradicting_options_are_refused(make: Make) -> None:
    make()
    with pytest.raises(PairingRefusedError, match="with other options"):
        make(ping_interval=timedelta(seconds=2))


async def test_p3_pairs_that_close_at_the_same_time_close_what_they_share_once(
    world: World, make: Make, queue: str
) -> None:
    pairs = [make() for _ in range(4)]
    for pair in pairs:
        await world.send(pair.get_queue_sender(queue), ServiceBusMessage("x"))
    threads = [threading.Thread(target=pair.close) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        await world.do(thread.join)
    assert pairs[0]._state._shared.is_closed
    assert make().backlog_queues
