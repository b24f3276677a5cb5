"""Drills and forced failovers (S11) of topics."""

from datetime import timedelta
from functools import partial

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient

from twinbus import SendAvailabilityOptions
from twinbus.pairing.drill import DrillMoment, run_drill
from twinbus.testing import LocalNamespace

from .conftest import World, state_of

TOPIC = "topic-3"


async def test_s11_a_drill_of_a_topic_diverts_restores_by_a_ping_and_its_subscription_sees_nothing_else(
    primary: LocalNamespace, secondary: LocalNamespace
) -> None:
    options = SendAvailabilityOptions(
        backlog_queue_count=1, ping_interval=timedelta(seconds=1), ping_jitter=0.0, primary_name="drilled"
    )
    told: list[DrillMoment] = []
    async with (
        ServiceBusClient.from_connection_string(primary.connection_string) as one,
        ServiceBusClient.from_connection_string(secondary.connection_string) as other,
    ):
        drill = await run_drill(one, other, TOPIC, messages=2, options=options, leave=False, tell=told.append)
        async with one.get_subscription_receiver(TOPIC, "all", max_wait_time=1) as receiver:
            seen = [str(message) async for message in receiver]
    assert drill.as_meant, told
    assert "2 of 2 diverted messages taken back out of the backlog" in [moment.what for moment in told]
    # Neither the ping nor a diverted message was received.
    assert seen == ["drill, before"] * 2 + ["drill, after"] * 2


async def test_s11_a_topic_is_forced_over_and_back_through_its_own_sender(world: World) -> None:
    topic = f"topic-{('sync', 'aio').index(world.driver) + 4}"
    pair = await world.pair()
    sender = pair.get_topic_sender(topic)
    await world.do(pair.force_failover, topic)
    await world.send(sender, ServiceBusMessage("x", message_id="diverted"))
    assert [one.message_id for one in await world.backlog(pair)] == ["diverted"]
    assert state_of(pair, topic) == "failed_over"
    await world.do(pair.force_restore, topic)
    await world.send(sender, ServiceBusMessage("x", message_id="direct"))
    receiver = pair.get_subscription_receiver(topic, "all", max_wait_time=5)
    assert [one.message_id for one in await world.do(receiver.receive_messages)] == ["direct"]
    await world.do(receiver.close)


# --- S15 -------------------------------------------------------------------------------------------------------------


async def test_s15_what_can_be_no_entity_is_neither_held_nor_restored(world: World) -> None:
    pair = await world.pair()
    for entity in ("", "/", "x" * 300):
        with pytest.raises(ValueError, match="no path of a queue or topic"):
            await world.do(partial(pair.force_failover, entity, hold=True))
        with pytest.raises(ValueError, match="no path of a queue or topic"):
            await world.do(pair.force_restore, entity)
    assert pair.entities() == ()


async def test_s15_a_hold_of_all_entities_includes_those_that_are_used_later_and_ends_with_force_restore(
    world: World, queue: str
) -> None:
    pair = await world.pair(ping_interval=timedelta(seconds=1))
    heard: list[str] = []
    pair.on("*", lambda notice: heard.append(notice.name))
    sender, beside = await world.sender(pair, queue), "beside-it"
    await world.do(lambda: pair.force_failover(hold=True))
    late = await world.sender(pair, beside)
    for number, one in enumerate((sender, late)):
        await world.send(one, ServiceBusMessage("x", message_id=f"held {number}"))
    assert (state_of(pair, queue), state_of(pair, beside)) == ("held", "held")
    assert {one.message_id for one in await world.backlog(pair)} == {"held 0", "held 1"}
    await world.until(lambda: heard.count("failover_held") == 2)
    await world.do(pair.force_restore)
    await world.send(sender, ServiceBusMessage("x", message_id=f"after {world.driver}"))
    assert f"after {world.driver}" in [one.message_id for one in await world.held(queue)]
    assert (state_of(pair, queue), state_of(pair, beside)) == ("healthy", "on_trial")
    assert state_of(pair, "another") == "unknown"
    await world.sender(pair, "another")
    assert state_of(pair, "another") == "healthy"
