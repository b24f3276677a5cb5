"""Ingests the sealed ledger into tables, as `twinbus ledger ingest` and its jobs do, and reads a queue as a stream.

What the tables must hold follows from the segments' lines, which are read here as plain JSON.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from azure.servicebus import ServiceBusClient, ServiceBusMessage
from pyspark.sql import DataFrame, SparkSession

from tests.formats.sets import packed, write_expected
from twinbus.pipeline import JOBS, Tables, follow_jobs, ingest_ledger, write_results
from twinbus.pipeline.servicebus import ServiceBusDataSource
from twinbus.pipeline.session import session
from twinbus.testing import LocalNamespace

QUEUE = "events"
READ = 3
"""The number of messages that the stream has read and committed."""

_HEADER = {"v": 1, "kind": "header", "at": 1_790_000_000_000, "writer": "client-elsewhere-1-00000000000000aa"}
_HEADER |= {"role": "client", "host": "elsewhere", "pid": 1, "version": "0", "segment": 0}
_INTENT = {"v": 1, "kind": "intent", "at": 1_790_000_000_001, "stage": "send_primary", "namespace": "contoso"}
_INTENT |= {"entity": "orders", "bytes": 9, "units": 1}
_OUTCOME = {"v": 1, "kind": "outcome", "at": 1_790_000_000_002, "seconds": 0.001, "result": "ok"}
ADDED = (
    (
        json.dumps({**_HEADER, "id": "00000000000000aa-segment-0"}),
        json.dumps({**_INTENT, "id": "00000000000000aa-1", "ids": ["ends in the next batch"]}),
        json.dumps({**_INTENT, "id": "00000000000000aa-2", "ids": ["never ends"]}),
        "no entry",
    ),
    (
        json.dumps({**_HEADER, "id": "00000000000000aa-segment-1", "segment": 1}),
        json.dumps({**_OUTCOME, "id": "00000000000000aa-1"}),
    ),
)
"""Lines of one more writer, in the first and in the second batch."""


def make(folder: Path, work: Path, sealed: Path) -> None:
    """Write `tables` and `servicebus-checkpoint` into `folder`."""
    spark = session("formats")
    try:
        _tables(spark, folder, work, sealed)
        _checkpoint(spark, folder, work)
    finally:
        spark.stop()


def _tables(spark: SparkSession, folder: Path, work: Path, sealed: Path) -> None:
    """Ingest two batches, so that the tables have several parts. The jobs follow both, and write their results."""
    ledger, tables, added = work / "ledger-ingested", work / "tables", work / "ledger-added"
    for made in (ledger, added):
        made.mkdir()
    files = sorted(sealed.iterdir())
    batches = [files[::2], files[1::2]]
    for number, (batch, lines) in enumerate(zip(batches, ADDED, strict=True)):
        file = added / f"client-elsewhere-1-00000000000000aa-{number}.jsonl"
        file.write_text("".join(f"{line}\n" for line in lines))
        batch.append(file)
    for batch in batches:
        for file in batch:
            shutil.copy(file, ledger)
        ingest_ledger(spark, ledger, tables, extend=follow_jobs(tuple(JOBS))).awaitTermination()
    write_results(Tables(spark, tables))
    (checkpoint,) = (tables / "checkpoints").iterdir()
    checkpoint.rename(checkpoint.with_name("ledger"))
    packed(tables, folder / "tables.tar.xz")
    packed(ledger, folder / "tables-ledger.tar.xz")
    write_expected(folder / "tables.json", _of_lines([file for batch in batches for file in batch]))


def _of_lines(files: list[Path]) -> dict[str, Any]:
    """Return the ids of each table, and the operations, units and bytes of each stage, from the lines."""
    found = [(file, line) for file in files for line in enumerate(file.read_text().splitlines(), 1)]
    lines = [json.loads(line) for _, (_, line) in found if line.startswith("{")]
    by_kind: dict[str, list[str]] = {}
    for line in lines:
        by_kind.setdefault(line["kind"], []).append(line["id"])
    ended = set(by_kind.get("outcome", ()))
    begun = [line for line in lines if line["kind"] in ("operation", "intent")]
    cost: dict[str, Counter[str]] = {}
    for line in begun:
        cost.setdefault(line["stage"], Counter()).update(operations=1, units=line["units"], bytes=line["bytes"])
    halves = ("intent", "outcome")
    others = sorted([line["kind"], line["id"]] for line in lines if line["kind"] not in (*halves, "operation"))
    return {
        "operations": sorted(line["id"] for line in begun if line["kind"] == "operation" or line["id"] in ended),
        "pending": sorted(line["id"] for line in begun if line["kind"] == "intent" and line["id"] not in ended),
        "entries": others,
        "problems": [[file.name, number] for file, (number, line) in found if not line.startswith("{")],
        "cost": cost,
    }


def _checkpoint(spark: SparkSession, folder: Path, work: Path) -> None:
    spark.dataSource.register(ServiceBusDataSource)
    config = {"namespaces": [{"name": "primary", "queues": [{"name": QUEUE}]}]}
    with LocalNamespace(memory=True, config=config) as namespace:
        with (
            ServiceBusClient.from_connection_string(namespace.connection_string) as client,
            client.get_queue_sender(QUEUE) as sender,
        ):
            for number in range(READ):
                sender.send_messages(ServiceBusMessage(str(number), message_id=str(number)))
        options = {"connectionString": namespace.connection_string, "entity": QUEUE}
        stream = spark.readStream.format("servicebus").options(**options).load()
        checkpoint = work / "servicebus-checkpoint"
        writer = stream.writeStream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        writer.foreachBatch(_read).start().awaitTermination()
    packed(checkpoint, folder / "servicebus-checkpoint.tar.xz")
    write_expected(folder / "servicebus-checkpoint.json", {"through": READ, "queue": QUEUE})


def _read(rows: DataFrame, _: int) -> None:
    assert rows.count() == READ
