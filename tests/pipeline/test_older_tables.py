"""Tables and stream checkpoints that earlier versions wrote: Spark reads them, and streams continue from them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

from tests.formats.sets import expected, sets_with, unpacked
from tests.pipeline.queues import new_queue
from twinbus.cli.main import app
from twinbus.ledger import Ledger, Stage
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.jobs import JOBS, current_result, follow_jobs, is_followed, result_over_history
from twinbus.pipeline.tables import ENTRIES, OPERATIONS, PENDING, PROBLEMS, Tables
from twinbus.testing import LocalNamespace

pytestmark = pytest.mark.timeout(180)


OLD = [one for one in sets_with("tables.tar.xz") if one.id == "set1"]
"""Tables behind `current.json`."""
DELTA = [one for one in sets_with("tables.tar.xz") if one.id != "set1"]


@pytest.mark.thorough
@pytest.mark.parametrize("found", DELTA)
def test_d3_older_tables_are_read_and_their_stream_resumes(spark: SparkSession, found: Path, tmp_path: Path) -> None:
    root, ledger = opened(found, tmp_path)
    said, tables = expected(found / "tables.json"), Tables(spark, root)
    assert is_followed(JOBS["cost"], tables.version())
    assert not is_followed(JOBS["reconcile"], tables.version()), "its tallies have another format now"
    with Ledger(ledger) as writer:
        writer.begin(Stage.SEND_PRIMARY, "contoso", "orders", "new", 1).end()
    query = ingest_ledger(spark, ledger, root, extend=follow_jobs(("cost", "reconcile")))
    query.awaitTermination()
    assert sum(progress["numInputRows"] for progress in query.recentProgress) == 3, "header, operation, closed"
    prefix = writer.writer.rpartition("-")[2]
    said["operations"] = sorted([*said["operations"], f"{prefix}-0"])
    said["entries"] += [["header", f"{prefix}-segment-0"], ["closed", f"{prefix}-closed"]]
    for name in ("operations", "units", "bytes"):
        said["cost"]["send_primary"][name] += 1
    assert is_followed(JOBS["cost"], tables.version()), "the sums come from the tallies of all batches"
    check(tables, said)
    assert is_followed(JOBS["reconcile"], tables.version()), "its tallies were made again from the history"
    rows = [run(tables, JOBS["reconcile"]).collect() for run in (current_result, result_over_history)]
    assert sorted(map(str, rows[0])) == sorted(map(str, rows[1])) != []


@pytest.mark.thorough
@pytest.mark.parametrize("found", OLD)
def test_d5_tables_of_the_old_format_are_refused_and_one_command_makes_them_again(
    spark: SparkSession, found: Path, tmp_path: Path
) -> None:
    root, ledger = opened(found, tmp_path)
    (root / "notes.txt").write_text("of the user")
    for verb in (["ingest", str(ledger), str(root)], ["cost", str(root)], ["reconcile", str(root), "--ledger", ledger]):
        done = CliRunner().invoke(app, ["ledger", *map(str, verb)])
        assert done.exit_code == 1
        assert f"the tables in {root} have the format of an earlier version" in done.output.replace("\n", " ")
        assert "--rebuild" in done.output
    assert (root / "current.json").exists(), "a refusal changes nothing"
    done = CliRunner().invoke(app, ["ledger", "ingest", str(ledger), str(root), "--rebuild"])
    assert done.exit_code == 0, done.output
    assert not (root / "current.json").exists()
    assert (root / "notes.txt").exists()
    check(Tables(spark, root), expected(found / "tables.json"))


@pytest.mark.parametrize("found", OLD)
def test_l7_a_stream_whose_tables_are_gone_does_not_start_new_ones_in_the_middle_of_the_ledger(
    spark: SparkSession, found: Path, tmp_path: Path
) -> None:
    root, ledger = opened(found, tmp_path)
    (root / "current.json").unlink()
    left = sorted(root.glob("**/*.parquet"))
    with Ledger(ledger) as writer:
        writer.begin(Stage.SEND_PRIMARY, "contoso", "orders", "new", 1).end()
    with pytest.raises(StreamingQueryException, match="are gone, but the checkpoint of their stream is there"):
        ingest_ledger(spark, ledger, root).awaitTermination()
    assert not (root / "snapshots").exists()
    assert sorted(root.glob("**/*.parquet")) == left != []


def opened(found: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Return a copy of the tables, and of the ledger from which they were made."""
    root, ledger = (unpacked(found / f"{name}.tar.xz", tmp_path) for name in ("tables", "tables-ledger"))
    # Where a ledger's checkpoint is follows from the ledger's path.
    key = hashlib.sha256(str(ledger).encode()).hexdigest()[:16]
    (root / "checkpoints" / "ledger").rename(root / "checkpoints" / key)
    return root, ledger


def check(tables: Tables, said: dict[str, Any]) -> None:
    assert ids(tables.read(OPERATIONS)) == said["operations"]
    assert ids(tables.read(PENDING)) == said["pending"]
    entries = tables.read(ENTRIES).select("kind", "id").collect()
    assert sorted(map(list, entries)) == sorted(said["entries"])
    problems = tables.read(PROBLEMS).select("file", "line").collect()
    assert sorted([Path(row.file).name, row.line] for row in problems) == said["problems"]
    sums = current_result(tables, JOBS["cost"]).groupBy("stage").sum("operations", "units", "bytes").collect()
    assert {row[0]: dict(zip(("operations", "units", "bytes"), row[1:], strict=True)) for row in sums} == said["cost"]


def ids(rows: DataFrame) -> list[str]:
    return sorted(row.id for row in rows.select("id").collect())


@pytest.mark.thorough
@pytest.mark.parametrize("found", sets_with("servicebus-checkpoint.tar.xz"))
def test_d1_a_stream_resumes_from_an_older_checkpoint_of_the_servicebus_source(
    spark: SparkSession, namespace: LocalNamespace, found: Path, tmp_path: Path
) -> None:
    """The numbers of a new queue start with 1, as in the old queue: only messages after the offset are read."""
    checkpoint = unpacked(found / "servicebus-checkpoint.tar.xz", tmp_path)
    through = expected(found / "servicebus-checkpoint.json")["through"]
    queue = new_queue(namespace, f"older-{found.name}")
    with (
        ServiceBusClient.from_connection_string(namespace.connection_string) as client,
        client.get_queue_sender(queue) as sender,
    ):
        for number in range(1, through + 3):
            sender.send_messages(ServiceBusMessage(b"", message_id=str(number)))
    read: list[int] = []
    options = {"connectionString": namespace.connection_string, "entity": queue}
    stream = spark.readStream.format("servicebus").options(**options).load()
    writer = stream.writeStream.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    writer.foreachBatch(lambda rows, _: read.extend(row.sequence_number for row in rows.collect()))
    writer.start().awaitTermination()
    assert sorted(read) == [through + 1, through + 2]
