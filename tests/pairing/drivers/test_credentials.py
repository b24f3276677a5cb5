"""Credentials that are refused for good, on either side (C1)."""

from datetime import timedelta

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusError

from twinbus import BacklogUnavailableError, PairFaultedError
from twinbus.pairing.sides import CredentialRefusedError

from .conftest import KEY, World


async def test_c1_a_credential_that_every_backlog_queue_refuses_for_good_faults_the_secondary_alone(
    world: World, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinbus.pairing.sides.REFUSED_FOR_GOOD_SECONDS", 0.5)
    strings = world.primary.connection_string, world.secondary.connection_string.replace(KEY, "revoked")
    pair = await world.pair(provision="assume", keywords={"strings": strings, "retry_total": 0})
    diverting, beside = await world.sender(pair, queue), await world.sender(pair, "plain-78")
    await world.do(pair.force_failover, queue)
    with pytest.raises(BacklogUnavailableError):
        await world.send(diverting, ServiceBusMessage("refused"))
    assert pair.secondary.state == "open"
    await world.until(lambda: len(pair.backlog_queues) == 2)
    with pytest.raises(PairFaultedError, match="the secondary of this pair faulted") as raised:
        await world.send(diverting, ServiceBusMessage("refused for good"))
    assert isinstance(raised.value.cause, CredentialRefusedError)
    assert (pair.primary.state, pair.secondary.state) == ("open", "faulted")
    await world.send(beside, ServiceBusMessage("healthy", message_id=f"beside-{world.driver}"))
    assert f"beside-{world.driver}" in [one.message_id for one in await world.held("plain-78")]


async def test_c1_a_primary_that_refuses_its_credential_never_faults_and_its_entity_still_diverts(
    world: World, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinbus.pairing.sides.REFUSED_FOR_GOOD_SECONDS", 0.0)
    strings = world.primary.connection_string.replace(KEY, "revoked"), world.secondary.connection_string
    pair = await world.pair(ping_interval=timedelta(seconds=1), keywords={"strings": strings, "retry_total": 0})
    sender = await world.sender(pair, queue)
    for _ in range(3):
        with pytest.raises(ServiceBusError):
            await world.send(sender, ServiceBusMessage("refused"))
    await world.do(pair.force_failover, queue)
    await world.state(pair, queue, "unusable")
    await world.send(sender, ServiceBusMessage("kept"))
    assert (pair.primary.state, pair.secondary.state) == ("open", "open")
    assert len(await world.backlog(pair)) == 1
