"""The meter: what a namespace reports to Prometheus and to the ledger (N5)."""

import asyncio
import shutil
from collections import Counter
from pathlib import Path
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from twinbus.connect import RECEIVE_AND_DELETE, connect
from twinbus.ledger import UNIT_BYTES, Metered, SegmentHeader, balance, list_segments, read_ledger
from twinbus.message import Message
from twinbus.namespace.engine.descriptions import QueueDescription
from twinbus.namespace.server import NamespaceOptions, NamespaceServer
from twinbus.testing import LocalNamespace

PING = "application/vnd.ms-servicebus-ping"


async def figures(server: NamespaceServer) -> dict[tuple[str, ...], float]:
    """Return every sample of a scrape by its name and label values."""
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
    await server.runtime.delete("q")
    assert not [name for name in await figures(server) if "q" in name]
    await server.stop()


Sums = dict[tuple[str, str], list[int]]


def metered(directory: Path) -> Sums:
    """Count, bytes and units by entity and operation."""
    sums: Sums = {}
    for entry in read_ledger(directory):
        if isinstance(entry, Metered):
            sum_ = sums.setdefault((entry.entity, entry.operation), [0, 0, 0])
            for index, value in enumerate((entry.count, entry.bytes, entry.units)):
                sum_[index] += value
    return sums


async def test_n5_m2_every_operation_is_in_the_ledger_with_its_bytes_and_units(tmp_path: Path) -> None:
    server = NamespaceServer(
        NamespaceOptions(
            name="n",
            file=tmp_path / "n.sqlite",
            tls=tmp_path / "tls",
            entities=(QueueDescription(path="q"), QueueDescription(path="gone")),
            ledger=tmp_path / "ledger",
        )
    )
    await server.start()
    async with connect(server.connection_string) as bus:
        sender = await bus.sender("q")
        await sender.send([Message(b"one"), Message(b"x" * UNIT_BYTES), Message(b"", content_type=PING)])
        await (await bus.sender("gone")).send([Message(b"three")])
        async with await bus.receiver("q") as receiver:
            received = [message for _ in range(2) for message in await receiver.receive(1, max_wait=10)]
            await receiver.complete(received)
        async with await bus.receiver("q", mode=RECEIVE_AND_DELETE) as receiver:
            assert await receiver.receive(1, max_wait=0.05) == []
        shown = await figures(server)
    # Deleted within the interval: its counted operations must still reach the ledger.
    await server.runtime.delete("gone")
    await server.stop()
    sums = metered(tmp_path / "ledger")
    assert sums["q", "send"][0] == 2
    assert sums["q", "send"][2] == 3
    assert sums["q", "ping"][::2] == [1, 1]
    assert sums["q", "receive"][::2] == [2, 3]
    assert sums["q", "complete"] == [2, 0, 2]
    assert sums["q", "receive_empty"] == [1, 0, 1]
    assert sums["gone", "send"][0] == 1
    for (entity, operation), (count, size, _) in sums.items():
        assert shown["twinbus_operations_total", entity, operation] <= count
        assert shown["twinbus_operation_bytes_total", entity, operation] <= size
    entries = [entry for entry in read_ledger(tmp_path / "ledger") if isinstance(entry, Metered)]
    assert {entry.namespace for entry in entries} == {"n"}
    assert all(entry.since <= entry.until for entry in entries)
    assert not any(segment.is_open for segment in list_segments(tmp_path / "ledger"))


async def test_n5_what_was_metered_and_flushed_survives_kill_9(tmp_path: Path) -> None:
    directory = tmp_path / "ledger"
    config = {"namespaces": [{"name": "n", "ledger": str(directory), "queues": [{"name": "q"}]}]}
    with LocalNamespace("n", config=config) as server:
        for life in (1, 2):
            async with asyncio.timeout(60), connect(server.connection_string) as bus:
                sender = await bus.sender("q")
                await sender.send([Message(b"x")] * 10)
                while not directory.exists() or metered(directory).get(("q", "send"), [0])[0] < 10 * life:  # noqa: ASYNC110 - another process writes it
                    await asyncio.sleep(0.05)
            server.kill()
            assert metered(directory)["q", "send"][::2] == [10 * life, 10 * life]
            server.start()
    assert metered(directory)["q", "send"][0] == 20
    writers = Counter(entry.writer for entry in read_ledger(directory) if isinstance(entry, SegmentHeader))
    assert len(writers) == 2


async def test_l7_n5_a_namespace_goes_on_and_logs_it_when_the_folder_of_its_ledger_is_gone(tmp_path: Path) -> None:
    directory = tmp_path / "ledger"
    config = {"namespaces": [{"name": "n", "ledger": str(directory), "queues": [{"name": "q"}]}]}
    with LocalNamespace("n", memory=True, config=config) as server:
        async with asyncio.timeout(60), connect(server.connection_string) as bus:
            sender = await bus.sender("q")
            # Lines of a second time show that those of the first were written, synced and checked. If the folder were
            # removed before the check, the writer would write the first lines again, and nothing would be missing.
            while len({entry.until for entry in read_ledger(directory) if isinstance(entry, Metered)}) < 2:
                await sender.send([Message(b"x")])
                await asyncio.sleep(0.05)
            shutil.rmtree(directory)
            while "removed or replaced" not in server.log.read_text():
                await sender.send([Message(b"x")])
                await asyncio.sleep(0.05)
            directory.mkdir()
            while ("q", "send") not in metered(directory):
                await sender.send([Message(b"x")])
                await asyncio.sleep(0.05)
        assert server.stop() == 0
    assert balance(read_ledger(directory)).unmetered, "the first segment is gone"
