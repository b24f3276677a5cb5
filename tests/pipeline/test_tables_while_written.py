"""Other tools read the tables while the pipeline commits (D5).

What the tables must have is counted from the lines of the ledger.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import polars
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from pyspark.sql import SparkSession

from tests.pipeline.books import HOUR, MIDNIGHT, halves, movement, operation, segment_name, writer
from tests.tiers import budget
from twinbus.ledger import Closed, Entry, Move, Role, SegmentHeader, Stage, encode_entry
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.message_steps import MOST_RUNS
from twinbus.pipeline.tables import Tables

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(budget(1800, 1800, 7200))]
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


def snapshot(root: Path) -> tuple[int, dict[str, int]]:
    """Return the number and the versions of the last snapshot."""
    rows = polars.read_delta(str(root / "snapshots"))
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
    with ThreadPoolExecutor() as pool:
        readers = [pool.submit(read_on, tables.root, count, ended) for count in (by_polars, by_deltalake, by_duckdb)]
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
