"""Parallel queries on the tables: the number of shuffle partitions, and what a failure cancels."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from twinbus.pipeline.tables import OPERATIONS, PENDING, TablePart, Tables, TablesVersion

PARTITIONS = "spark.sql.adaptive.coalescePartitions.initialPartitionNum"


@pytest.fixture
def tables(spark: SparkSession, tmp_path: Path) -> Tables:
    """Tables of 40 MB, by the length of their files."""
    made = Tables(spark, tmp_path)
    folder = tmp_path / OPERATIONS / "part"
    folder.mkdir(parents=True)
    with (folder / "one.parquet").open("wb") as file:
        file.truncate(40 * 1024 * 1024)
    made.commit(TablesVersion().having(OPERATIONS, [TablePart(f"{OPERATIONS}/part")]))
    return made


@pytest.mark.thorough
def test_parallel_queries_have_the_partitions_of_all_tables(tables: Tables) -> None:
    with tables.parallel_queries() as pool:
        pool.submit(tables.set_partitions, tables.version(), PENDING).result()
        assert tables.spark.conf.get(PARTITIONS) == "10"
    tables.set_partitions(tables.version(), PENDING)
    assert tables.spark.conf.get(PARTITIONS) == "2"


def test_when_a_query_fails_those_that_have_not_started_never_do(tables: Tables) -> None:
    go_on, asked = threading.Event(), list[Future[bool]]()

    def ask() -> None:
        with tables.parallel_queries() as pool:
            asked.extend(pool.submit(go_on.wait) for _ in range(10))
            raise LookupError

    try:
        with pytest.raises(LookupError):
            ask()
        assert [one.cancelled() for one in asked[-5:]] == [True] * 5
    finally:
        go_on.set()
