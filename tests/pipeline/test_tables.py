"""Parallel queries on the tables: the number of shuffle partitions, and what a failure cancels."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from twinbus.errors import OperatorError
from twinbus.pipeline.checkpoints import has_file_system
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.table_log import DataFile
from twinbus.pipeline.table_storage import OLD_FORMAT, SNAPSHOTS, TableStorage
from twinbus.pipeline.tables import OPERATIONS, PENDING, Tables

PARTITIONS = "spark.sql.adaptive.coalescePartitions.initialPartitionNum"


@pytest.fixture
def tables(spark: SparkSession, tmp_path: Path) -> Tables:
    """Tables of 40 MB, by the length of their files."""
    made = Tables(spark, tmp_path)
    change = made.change()
    change.added[OPERATIONS] = [DataFile("one.parquet", 40 * 1024 * 1024, 1, {"day": "2026-09-22"}, "{}")]
    made.commit(change)
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


def test_d5_rebuilding_removes_the_tables_and_nothing_else(tables: Tables, tmp_path: Path) -> None:
    for name in ("results", "checkpoints", "tallies-cost", "notes"):
        (tmp_path / name).mkdir()
    tables.remove()
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "notes"}
    (tmp_path / "results").mkdir()
    tables.remove()
    assert (tmp_path / "results").exists(), "without tables, the folder is somebody else's"


@pytest.mark.thorough
@pytest.mark.parametrize("is_old", [False, True], ids=["tables", "tables of the old format"])
def test_d5_a_removal_for_rebuilding_that_dies_at_any_step_can_be_repeated(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    if is_old:
        tables.storage.remove(SNAPSHOTS)
        (tmp_path / OLD_FORMAT).write_text("{}")
    remove, count = TableStorage.remove, len([*tmp_path.iterdir()]) - 1  # without the lock
    for step in range(count):
        root, removed = tmp_path.with_name(f"{tmp_path.name}-{step}"), list[str]()
        shutil.copytree(tmp_path, root)

        def die(storage: TableStorage, name: str, removed: list[str] = removed, step: int = step) -> None:
            if len(removed) == step:
                raise InterruptedError
            removed.append(name)
            remove(storage, name)

        with monkeypatch.context() as patch:
            patch.setattr(TableStorage, "remove", die)
            with pytest.raises(InterruptedError):
                Tables(tables.spark, root).remove()
        Tables(tables.spark, root).remove()
        assert [path.name for path in root.iterdir()] == [".lock"], removed


def test_l7_a_table_that_is_gone_is_not_started_again_without_its_rows(tables: Tables, tmp_path: Path) -> None:
    (tmp_path / OPERATIONS).rename(tmp_path / "elsewhere")
    with pytest.raises(OperatorError, match=r"the table operations in .* is gone"), tables.locked():
        pass
    assert not (tmp_path / OPERATIONS).exists()


def test_d5_the_lock_leaves_results_alone_that_another_process_is_writing(tables: Tables) -> None:
    with tables.storage.staging("results/cost") as theirs, tables.storage.staging(OPERATIONS) as left:
        for folder in (theirs, left):
            Path(folder).mkdir(parents=True)
        with tables.locked():
            pass
        assert (Path(theirs).exists(), Path(left).exists()) == (True, False)


def test_d6_a_checkpoint_url_without_a_file_system_of_spark_is_refused_before_anything_starts(
    spark: SparkSession, tmp_path: Path
) -> None:
    (tmp_path / "ledger").mkdir()
    for url in ("s3://bucket/checkpoints", "abfss://container/checkpoints"):
        with pytest.raises(OperatorError, match=f"Spark has no file system for {url.partition('/')[0]}//"):
            ingest_ledger(spark, tmp_path / "ledger", tmp_path / "tables", checkpoints=url)
    assert not (tmp_path / "tables").exists()
    assert has_file_system(spark, "file")
