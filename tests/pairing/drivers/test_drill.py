"""Drills and forced failovers (S11) of topics."""

from datetime import timedelta

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
