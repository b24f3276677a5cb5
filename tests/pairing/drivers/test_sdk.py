"""Pairs use private parts of azure-servicebus, and refuse versions that were not tested."""

import pytest
from azure.servicebus import ServiceBusMessage

from twinbus.errors import OperatorError

from .conftest import World


async def test_a_pair_on_another_version_of_the_sdk_is_refused_and_leaves_nothing_behind(
    world: World, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("7.12.3", "7.16.0", "7.150.0", "8.0.0"):
        with monkeypatch.context() as other:
            other.setattr("azure.servicebus.__version__", version)
            with pytest.raises(OperatorError, match=rf'{version} .*pip install "azure-servicebus>=7.13,<7.16"'):
                await world.pair()
    pair = await world.pair()
    await world.send(await world.sender(pair, queue), ServiceBusMessage("x", message_id="at last"))
    assert [one.message_id for one in await world.held(queue)] == ["at last"]
