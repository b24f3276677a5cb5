"""Questions to Spark from several threads: how finely they are divided, and how they end."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from twinbus.pipeline.tables import OPERATIONS, PENDING, TablePart, Tables, TablesVersion, parallel_queries

PIECES = "spark.sql.adaptive.coalescePartitions.initialPartitionNum"


@pytest.fixture
def tables(spark: SparkSession, tmp_path: Path) -> Tables:
    """Of 40 MB, as far as their length goes."""
    made = Tables(spark, tmp_path)
    folder = tmp_path / OPERATIONS / "part"
    folder.mkdir(parents=True)
    with (folder / "one.parquet").open("wb") as file:
        file.truncate(40 * 1024 * 1024)
    made.commit(TablesVersion().having(OPERATIONS, [TablePart(f"{OPERATIONS}/part")]))
    return made


@pytest.mark.thorough
def test_what_is_asked_at_once_has_pieces_for_all_tables_whoever_asks_meanwhile(tables: Tables) -> None:
    with parallel_queries(tables) as pool:
        pool.submit(tables.divide, tables.version(), PENDING).result()
        assert tables.spark.conf.get(PIECES) == "10"
    tables.divide(tables.version(), PENDING)
    assert tables.spark.conf.get(PIECES) == "2"


def test_when_one_fails_those_that_have_not_begun_never_do(tables: Tables) -> None:
    go_on, asked = threading.Event(), list[Future[bool]]()

    def ask() -> None:
        with parallel_queries(tables) as pool:
            asked.extend(pool.submit(go_on.wait) for _ in range(10))
            raise LookupError

    try:
        with pytest.raises(LookupError):
            ask()
        assert [one.cancelled() for one in asked[-5:]] == [True] * 5
    finally:
        go_on.set()
