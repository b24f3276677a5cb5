"""The result tables (D7): what they have, and what they say about the ledger that they were computed from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.pipeline.books import history, write_segments
from twinbus.ledger import balance, list_segments, read_ledger
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.jobs import JOBS, result_over_history
from twinbus.pipeline.result_tables import PARTS, RESULTS, read_as_of, read_result
from twinbus.pipeline.results import write_results
from twinbus.pipeline.tables import Tables
from twinbus.pipeline.writer_states import WriterStates

pytestmark = pytest.mark.timeout(600)  # Spark is slow on a busy machine


@pytest.fixture(scope="module")
def books(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tables]:
    """A ledger with odd entries, and its tables with results."""
    folder = tmp_path_factory.mktemp("results")
    write_segments(folder / "ledger", history(3), seed=3)
    tables = Tables(spark, folder / "tables")
    ingest_ledger(spark, folder / "ledger", tables.root).awaitTermination()
    write_results(tables, WriterStates.in_ledger(folder / "ledger"))
    return folder / "ledger", tables


def counted(rows: Iterable[Mapping[str, Any]], keys: tuple[str, ...], sums: tuple[str, ...]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for row in rows:
        for name in sums:
            found[(*(row[key] for key in keys), name)] += row[name]
    return +found


def test_d7_the_result_tables_have_what_the_jobs_find_and_say_what_they_contain(books: tuple[Path, Tables]) -> None:
    ledger, tables = books
    version = tables.version()
    assert {RESULTS + part for parts in PARTS.values() for part in parts} <= version.tables.keys()

    def stored(name: str) -> list[dict[str, Any]]:
        found = read_result(tables.storage, version, name)
        assert found is not None
        rows: list[dict[str, Any]] = found.to_pylist()
        return rows

    found = balance(read_ledger(ledger, lambda _: None), WriterStates.in_ledger(ledger).dead)
    judged = counted(stored("reconcile"), (), tuple(found.sums()))
    assert judged == counted([found.sums()], (), tuple(found.sums()))
    lost = {(row["destination"], row["id"]): row["lost"] for row in stored("reconcile") if row["lost"]}
    assert lost == dict(found.lost)
    for job, keys, sums in (
        ("cost", ("day", "stage", "namespace", "entity"), ("operations", "units", "bytes", "unknown", "refused")),
        ("incidents", ("destination", "began"), ("diverted", "returned", "processes")),
        ("latency", ("destination", "day"), ("diverted", "returned", "unknown_clock")),
    ):
        expected = [row.asDict() for row in result_over_history(tables, JOBS[job]).collect()]
        assert counted(stored(job), keys, sums) == counted(expected, keys, sums)
    as_of = read_as_of(tables.storage, version)
    assert {name for parts in PARTS.values() for name in parts} == as_of.keys()
    assert {one.snapshot for one in as_of.values()} == {version.number - 1}
    (look,) = tables.segments.looks(as_of["cost"].segments)
    assert look.ledger == str(ledger)
    sizes = {one.sealed_path.name: one.path.read_bytes().rindex(b"\n") + 1 for one in list_segments(ledger)}
    assert look.segments == sizes
    assert 0 < look.looked_at <= as_of["cost"].computed_at
