"""The meter: what a namespace tells Prometheus about itself (N5)."""

import asyncio
from pathlib import Path
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from twinbus.connect import RECEIVE_AND_DELETE, connect
from twinbus.message import Message
from twinbus.namespace.engine.descriptions import QueueDescription
from twinbus.namespace.server import NamespaceOptions, NamespaceServer

PING = "application/vnd.ms-servicebus-ping"


async def figures(server: NamespaceServer) -> dict[tuple[str, ...], float]:
    """Every sample by its name and label values, as a scrape sees it."""
    text = await asyncio.to_thread(lambda: urlopen(f"http://127.0.0.1:{server.port}/metrics").read().decode())
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


async def test_n5_every_operation_is_counted_by_entity_and_kind_and_gone_with_its_entity(tmp_path: Path) -> None:
    server = NamespaceServer(
        NamespaceOptions(
            name="n", file=tmp_path / "n.sqlite", tls=tmp_path / "tls", entities=(QueueDescription(path="q"),)
        )
    )
    await server.start()
    async with connect(server.connection_string) as bus:
        sender = await bus.sender("q")
        await sender.send([Message(b"one"), Message(b"two"), Message(b"", content_type=PING)])
        receiver = await bus.receiver("q", mode=RECEIVE_AND_DELETE)
        assert len(await receiver.receive(1, max_wait=10)) == 1
        counted = await figures(server)
        assert counted["twinbus_operations_total", "q", "send"] == 2
        assert counted["twinbus_operations_total", "q", "ping"] == 1
        assert counted["twinbus_operations_total", "q", "receive"] == 1
        assert counted["twinbus_operation_bytes_total", "q", "send"] > 0
        assert counted["twinbus_messages", "q", "active"] == 1
        assert counted["twinbus_bytes", "q"] > 0
        assert counted["twinbus_connections", "amqp"] == 1
        assert counted["twinbus_commit_seconds_count",] > 0
    await server.driver.delete("q")
    assert not [name for name in await figures(server) if "q" in name]
    await server.stop()
