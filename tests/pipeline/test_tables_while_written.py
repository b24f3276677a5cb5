"""Other tools read the tables while the pipeline commits, and the driver is killed between two commits (D5).

What the tables must have is counted from the lines of the ledger.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import duckdb
import polars
import pyarrow.compute
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from pyspark.sql import SparkSession

from tests.pipeline.books import HOUR, MIDNIGHT, halves, movement, operation, segment_name, writer
from tests.pipeline.committing import FACT_STEPS, STEPS, mark, run
from tests.pipeline.delta_scan import DeltaScan, is_made
from tests.pipeline.driver_processes import LONG, kill, process, until
from tests.tiers import Tier, budget, current_tier
from twinbus.ledger import Closed, Entry, Move, Role, SegmentHeader, Stage, encode_entry
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.message_steps import MOST_RUNS
from twinbus.pipeline.run import PipelineRun
from twinbus.pipeline.tables import Tables
from twinbus.storage_location import StorageLocation

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]
_PAUSE = 0.2
TABLES = ("operations", "pending", "entries", "steps")


def segments(directory: Path, count: int) -> None:
    """Write segments that each become a batch. The outcome of one operation is in the segment after that of its intent.

    The times are on two days.
    """
    directory.mkdir()
    outcome: list[Entry] = []
    for number in range(count):
        name, at = segment_name(number).removesuffix("-0.jsonl"), MIDNIGHT + (number % 2) * 24 * HOUR
        intent, ended = halves(operation(Stage.RETURN_PRIMARY, f"halves-{number}", at=at, by=number))
        entries: list[Entry] = [
            SegmentHeader(
                at=at, id=f"{writer(number)}-h", writer=name, role=Role.CLIENT, host="host", pid=7, version="1",
                segment=0,
            ),
            operation(Stage.SEND_BACKLOG, f"a-{number}", "often", at=at, by=number),
            operation(Stage.SEND_PRIMARY, f"b-{number}", at=at + 1, by=number),
            intent,
            *outcome,
            movement(Move.KEPT, f"a-{number}", at=at + 2),
            Closed(at=at + 3, id=f"{writer(number)}-c", writer=name),
        ]  # fmt: skip
        outcome = [ended]
        (directory / segment_name(number)).write_text("".join(map(encode_entry, entries)))


def expected(batches: int) -> dict[str, int]:
    """Return the number of rows of each table after so many batches."""
    ended = max(0, batches - 1)
    return {
        "operations": 2 * batches + ended,
        "pending": min(1, batches),
        "entries": 3 * batches,
        "steps": 4 * batches + ended,
    }


# --- readers ----------------------------------------------------------------------------------------------------------


def by_polars(root: Path, table: str, version: int | None) -> int:
    return polars.read_delta(str(root / table), version=version, columns=["id"]).height


def by_deltalake(root: Path, table: str, version: int | None) -> int:
    return int(DeltaTable(root / table, version=version).to_pyarrow_table(columns=["id"]).num_rows)


def by_duckdb(root: Path, table: str, version: int | None) -> int:
    rows = DeltaTable(root / table, version=version).to_pyarrow_dataset()
    return len(duckdb.connect().from_arrow(rows).project("id").fetchall())


Count = Callable[[Path, str, int | None], int]


def rows_of(root: Path | StorageLocation, table: str, version: int | None) -> list[dict[str, Any]]:
    """Return the rows of a table at a version.

    Not with Polars if the table is at a URL: in Azure, it would not use the account key of the environment.
    """
    if isinstance(root, Path):
        return polars.read_delta(str(root / table), version=version).to_dicts()
    found: list[dict[str, Any]] = DeltaTable(str(root / table), version=version).to_pyarrow_table().to_pylist()
    return found


def snapshot(root: Path | StorageLocation) -> tuple[int, dict[str, int]]:
    """Return the number and the versions of the last snapshot."""
    rows = polars.DataFrame(rows_of(root, "snapshots", None))
    last = rows.filter(polars.col("snapshot") == polars.col("snapshot").max())
    return last["snapshot"][0], dict(last.select("table_name", "version").iter_rows())


def read_on(root: Path, count: Count, ended: threading.Event) -> int:
    """Read the tables again and again, and check what they have. Returns the number of snapshots that were read."""
    known, totals = set[int](), {table: {expected(one)[table] for one in range(5000)} for table in TABLES}
    while True:
        is_last = ended.is_set()
        try:
            number, versions = snapshot(root)
        except TableNotFoundError:
            continue
        assert {table: count(root, table, versions[table]) for table in TABLES} == expected(number)
        for table in TABLES:
            assert count(root, table, None) in totals[table], "a table shows a part of a batch"
        known.add(number)
        if is_last:
            return len(known)
        ended.wait(_PAUSE)  # three readers without a pause would take the processors from the pipeline


@pytest.mark.parametrize("commits", [budget(5, 50, 1000)])
def test_d5_other_tools_read_whole_batches_and_agreeing_totals_while_the_pipeline_commits(
    spark: SparkSession, tmp_path: Path, commits: int
) -> None:
    ledger, tables, made = tmp_path / "ledger", Tables(spark, tmp_path / "tables"), tmp_path / "made"
    segments(made, commits)
    ledger.mkdir()
    (made / segment_name(0)).rename(ledger / segment_name(0))
    ingest_ledger(spark, ledger, tables.root).awaitTermination()
    planned = tables.read("operations")
    early = DeltaTable(tables.root / "operations").to_pyarrow_dataset()
    for file in made.iterdir():
        file.rename(ledger / file.name)
    ended = threading.Event()
    with ExitStack() as stack:
        counts: list[Count] = [by_polars, by_deltalake, by_duckdb]
        if current_tier() is Tier.SOAK or is_made():  # to make its environment needs PyPI
            counts.append(stack.enter_context(DeltaScan()).count)
        pool = stack.enter_context(ThreadPoolExecutor())
        readers = [pool.submit(read_on, tables.root, count, ended) for count in counts]
        try:
            ingest_ledger(spark, ledger, tables.root, most_bytes=1).awaitTermination()
        finally:
            ended.set()
        assert all(reader.result() > 1 for reader in readers)
    number, versions = snapshot(tables.root)
    assert number == commits
    assert (planned.count(), early.count_rows()) == (2, 2), "what was planned before all merges is still read"
    files = DeltaTable(tables.root / "operations").file_uris()
    assert len(files) < 2 * 16 + 2 or commits < 32, "small files are merged"
    often = DeltaTable(tables.root / "steps", version=versions["steps"])
    assert len(often.file_uris()) <= MOST_RUNS


# --- results ----------------------------------------------------------------------------------------------------------

Total = Callable[[Path, str, int, str], int]
TOTALS = {
    ("results/cost", "operations"): 3,
    ("results/cost", "messages"): 4,
    ("results/reconcile", "accepted"): 3,
    ("results/latency", "diverted"): 2,
    ("results/incidents", "diverted"): 2,
}
"""The sums of columns after one batch. Each batch adds the same."""


def total_by_polars(root: Path, table: str, version: int, column: str) -> int:
    return int(polars.read_delta(str(root / table), version=version, columns=[column])[column].sum())


def total_by_deltalake(root: Path, table: str, version: int, column: str) -> int:
    rows = DeltaTable(root / table, version=version).to_pyarrow_table(columns=[column])
    return int(pyarrow.compute.sum(rows[column]).as_py())


def total_by_duckdb(root: Path, table: str, version: int, column: str) -> int:
    rows = DeltaTable(root / table, version=version).to_pyarrow_dataset()
    ((total,),) = duckdb.connect().from_arrow(rows).sum(column).fetchall()
    return int(total)


def read_results_on(root: Path, total: Total, ended: threading.Event) -> int:
    """Read the results again and again, and check that they agree. Returns the number of snapshots that were read."""
    known = set[int]()
    while True:
        is_last = ended.is_set()
        number, versions = snapshot(root)
        found = {(table, column): total(root, table, versions[table], column) for table, column in TOTALS}
        assert found == {name: number * each for name, each in TOTALS.items()}
        stated = rows_of(root, "results/as_of", versions["results/as_of"])
        assert {(row["snapshot"], row["segments"]) for row in stated} == {(number, versions["segments"])}
        assert by_polars(root, "operations", versions["operations"]) == expected(number)["operations"]
        known.add(number)
        if is_last:
            return len(known)
        ended.wait(_PAUSE)


def test_d5_other_tools_read_results_that_agree_with_their_tables_while_a_run_commits(
    spark: SparkSession, tmp_path: Path
) -> None:
    ledger, root, made, batches = tmp_path / "ledger", tmp_path / "tables", tmp_path / "made", budget(3, 6, 100)
    segments(made, batches)
    ledger.mkdir()
    (made / segment_name(0)).rename(ledger / segment_name(0))
    PipelineRun(spark, ledger, root).start().awaitTermination()
    for file in made.iterdir():
        file.rename(ledger / file.name)
    ended = threading.Event()
    with ThreadPoolExecutor() as pool:
        totals: list[Total] = [total_by_polars, total_by_deltalake, total_by_duckdb]
        readers = [pool.submit(read_results_on, root, total, ended) for total in totals]
        try:
            PipelineRun(spark, ledger, root).start(most_bytes=1).awaitTermination()
        finally:
            ended.set()
        assert all(reader.result() > 1 for reader in readers)
    assert snapshot(root)[0] == batches


# --- kills ------------------------------------------------------------------------------------------------------------

BATCHES = 2
FIRST_BATCH = (1, STEPS - 2)
"""Steps of the first batch, which makes the tables: after the first commit, and before the commit of snapshots."""
LATER_BATCH = sorted({*range(0, STEPS, budget(6, 6, 1)), STEPS - 2, STEPS - 1})
"""Steps of the second batch."""
FACTS = range(STEPS + budget(FACT_STEPS - 2, FACT_STEPS - 2, 0), STEPS + FACT_STEPS, budget(2, 2, 1))
"""Steps of the commit after the second batch: it has the facts of the bill and the timeline."""


def test_d5_kill_9_of_the_driver_between_any_two_commits_repeats_nothing_and_loses_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    """One driver that has stopped at steps of the second batch, of the first, and after both, each in other tables."""
    ledger, log, first = tmp_path / "ledger", tmp_path / "driver.log", tmp_path / "first"
    segments(tmp_path / "made", BATCHES)
    ledger.mkdir()
    shutil.copy(tmp_path / "made" / segment_name(0), ledger)
    PipelineRun(spark, ledger, first).start().awaitTermination()
    shutil.copy(tmp_path / "made" / segment_name(1), ledger)
    seen_before = {str(tmp_path / f"new-{step}"): 0 for step in FIRST_BATCH}
    steps = dict(zip(seen_before, FIRST_BATCH, strict=True))
    for step in (*LATER_BATCH, *FACTS):
        copied = str(copy_of(first, tmp_path / f"known-{step}"))
        steps[copied] = step
        seen_before[copied] = BATCHES if step >= STEPS - 1 else 1
    command = [sys.executable, "-m", "tests.pipeline.committing", str(ledger), str(tmp_path), json.dumps(steps)]
    with process(*command, log=log) as driver:
        until(lambda: all(mark(tmp_path, root).exists() for root in steps), driver, log, 4 * LONG)
        kill(driver)
    said = [json.loads(line) for file in ledger.iterdir() for line in file.read_text().splitlines()]
    for root, batches in seen_before.items():
        seen = read_snapshot(Path(root))
        assert {table: len(seen[table]) for table in TABLES} == expected(batches)
        if steps[root] in FACTS:
            run(PipelineRun(spark, ledger, Path(root)))
            check_facts(Path(root), said)
        else:
            PipelineRun(spark, ledger, Path(root)).start(most_bytes=1).awaitTermination()
        check(Path(root), said, snapshots=BATCHES + (steps[root] in FACTS))
        check_results(Path(root), said)


def copy_of(tables: Path, root: Path) -> Path:
    """Copy tables. Their stream gets another id, because one driver cannot run two streams of one id."""
    shutil.copytree(tables, root)
    (metadata,) = (root / "checkpoints").glob("*/metadata")
    metadata.write_text(json.dumps({"id": str(uuid4())}))
    metadata.with_name(".metadata.crc").unlink()
    return root


def read_snapshot(root: Path | StorageLocation) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each table at the last snapshot; no rows if there is none."""
    try:
        _, versions = snapshot(root)
    except (TableNotFoundError, FileNotFoundError):
        return {table: [] for table in TABLES}
    return {table: rows_of(root, table, version) for table, version in versions.items()}


def check(root: Path | StorageLocation, said: list[dict[str, Any]], snapshots: int = BATCHES) -> None:
    number, versions = snapshot(root)
    assert number == snapshots
    assert versions == {table: DeltaTable(str(root / table)).version() for table in versions}, "no table is ahead"
    found = read_snapshot(root)
    ended = {line["id"] for line in said if line["kind"] == "outcome"}
    done = [line for line in said if line["kind"] == "operation" or (line["kind"] == "intent" and line["id"] in ended)]
    begun = [line["id"] for line in said if line["kind"] == "intent" and line["id"] not in ended]
    others = [line for line in said if line["kind"] not in ("operation", "intent", "outcome")]
    moved = [line for line in others if line["kind"] == "movement"]
    assert Counter(row["id"] for row in found["operations"]) == Counter(line["id"] for line in done)
    assert [row["id"] for row in found["pending"]] == begun
    assert Counter(row["id"] for row in found["entries"]) == Counter(line["id"] for line in others)
    steps = Counter((row["entry"], row["id"]) for row in found["steps"])
    assert steps == Counter((line["id"], message) for line in (*done, *moved) for message in line["ids"])
    sums = {name: sum(row[name] for row in found["tallies-cost"]) for name in ("operations", "messages", "bytes")}
    assert sums == {
        "operations": len(done),
        "messages": sum(len(line["ids"]) for line in done),
        "bytes": sum(line["bytes"] for line in done),
    }


def check_results(root: Path | StorageLocation, said: list[dict[str, Any]]) -> None:
    """Check the results against the lines of the ledger: each operation and each message counts once."""
    found = read_snapshot(root)
    begun = [line for line in said if line["kind"] in ("operation", "intent")]
    assert sum(row["operations"] for row in found["results/cost"]) == len(begun)
    diverted = [id_ for line in begun for id_ in line["ids"] if line["stage"] == "send_backlog"]
    assert sum(row["diverted"] for row in found["results/latency"]) == len(diverted)
    assert {row["snapshot"] for row in found["results/as_of"]} == {BATCHES}
    assert sum(row["diverted"] for row in found["results/incidents"]) == len(diverted)
    sent = [id_ for line in begun for id_ in line["ids"] if line["stage"] in ("send_backlog", "send_primary")]
    assert sum(row["accepted"] for row in found["results/reconcile"]) == len(sent)


def check_facts(root: Path, said: list[dict[str, Any]]) -> None:
    """Check the facts of the bill, and the timeline, against the lines of the ledger."""
    found = read_snapshot(root)
    ended = {line["id"] for line in said if line["kind"] == "outcome"} | {
        line["id"] for line in said if line["kind"] == "operation"
    }
    for stage, column in (("send_backlog", "diverted"), ("send_primary", "direct"), ("return_primary", "returned")):
        begun = [line for line in said if line["kind"] in ("operation", "intent") and line["stage"] == stage]
        messages = sum(len(line["ids"]) for line in begun if line["id"] in ended)
        assert sum(row["messages"] for row in found["results/bill_stages"] if row["stage"] == stage) == messages
        assert sum(row[column] for row in found["results/timeline"]) == messages
