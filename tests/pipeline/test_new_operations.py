"""Batches of any size make the same tables (D3): those with few lines in one pass, those with many in two."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from tests.pipeline.books import HOUR, MIDNIGHT, history, operation, segment_name, write_segments
from twinbus.ledger import Stage, encode_entry
from twinbus.pipeline import new_operations
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.parsed_batch import ParsedBatch
from twinbus.pipeline.tables import OPERATIONS, PENDING, SCHEMAS, STEPS, Tables

DAY = 24 * HOUR


def rows_of(root: Path) -> dict[str, Counter[str]]:
    """Return the rows of all tables. A list that a line does not have is null or empty."""
    found = {}
    for table in SCHEMAS:
        rows = DeltaTable(root / table).to_pyarrow_table().to_pylist()
        found[table] = Counter(repr({name: row[name] or None for name in sorted(row)}) for row in rows)
    return found


@pytest.mark.thorough
@pytest.mark.timeout(600)  # Spark is slow on a busy machine
def test_d3_large_batches_make_the_same_tables_as_small_ones(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = tmp_path / "ledger"
    write_segments(ledger, history(7), seed=7)
    ingest_ledger(spark, ledger, tmp_path / "small", most_bytes=100_000).awaitTermination()
    monkeypatch.setattr(new_operations, "_FEW_LINES", 0)
    monkeypatch.setattr(new_operations, "_TASK_LINES", 200)
    ingest_ledger(spark, ledger, tmp_path / "large", most_bytes=100_000).awaitTermination()
    assert Tables(spark, tmp_path / "large").version().number > 1
    expected = rows_of(tmp_path / "small")
    assert all(expected[table] for table in (OPERATIONS, PENDING, STEPS))
    assert rows_of(tmp_path / "large") == expected
    shutil.rmtree(tmp_path / "large" / "checkpoints")
    ingest_ledger(spark, ledger, tmp_path / "large").awaitTermination()
    assert rows_of(tmp_path / "large") == expected, "the lines were there already"


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_d5_operations_of_many_days_are_all_written_to_files_of_their_days(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    entries = [operation(Stage.SEND_PRIMARY, "a", at=MIDNIGHT + number * 37 % 100 * DAY) for number in range(300)]
    (tmp_path / "ledger" / segment_name(1)).write_text("".join(map(encode_entry, entries)))
    ingest_ledger(spark, tmp_path / "ledger", tmp_path / "tables").awaitTermination()
    tables = Tables(spark, tmp_path / "tables")
    files = tables.files(OPERATIONS, tables.version())
    assert sum(file.rows for file in files) == 300
    assert len({file.partition["day"] for file in files}) == 100
    days = Counter((row.at - MIDNIGHT) // DAY for row in tables.read(OPERATIONS).collect())
    assert days == Counter((entry.at - MIDNIGHT) // DAY for entry in entries)


@given(lines=st.integers(0, 10**9), first=st.integers(0, 3000), days=st.integers(0, 3000))
def test_d5_tasks_that_write_by_day_make_few_files(lines: int, first: int, days: int) -> None:
    rows: Any = None  # it does not look at the rows
    batch = ParsedBatch(rows, lines, 0, 0, 0, oldest=first * DAY, newest=(first + days) * DAY, ids=("a", "b"))
    tasks = batch.few_tasks(lines)
    assert tasks == 1 or 1 < tasks <= 64 // (days + 1)
    assert batch.write_tasks(lines) in (tasks, None)
