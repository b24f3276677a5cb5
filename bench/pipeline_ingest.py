"""Ingest of a ledger with Spark, and the same work with DuckDB. A part of `bench/pipeline.py`.

The work: parse the lines, drop repeated lines, pair intents with outcomes, write Parquet files by day, and write the
table `steps`, sorted by the hash of the message id. DuckDB does it twice, the second time without `steps`. Spark also
writes the logs of the tables, and reads the rejected lines again. DuckDB runs in a process of its own, so that its
memory can be measured: `python bench/pipeline_ingest.py LEDGER FOLDER [steps]` runs it once.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import duckdb
from pyspark.sql import SparkSession

from bench.measuring import Figure, PeakMeter, ProcessMeter, ProcessTree, Samples, Spent, compared
from bench.pipeline_ledgers import make_ledger
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.tables import ENTRIES, OPERATIONS, PENDING, STEPS, Tables, column_types

AIM: Final = 3.0
_AIMED_FROM: Final = 10_000_000
_TYPES: Final = {
    "string": "varchar",
    "long": "bigint",
    "double": "double",
    "array<string>": "varchar[]",
    "array<long>": "bigint[]",
    "map<string,string>": "map(varchar, varchar)",
}
_COPY: Final = "(format parquet, compression zstd, partition_by (day), overwrite_or_ignore)"
_DAY: Final = 'cast(make_timestamp("at" * 1000) as date)'
_HALVES: Final = "kind in ('intent', 'outcome')"
_OPERATIONS: Final = f"""
copy (
    with one as (select *, true as whole, "at" + round(seconds * 1000)::bigint as ended from fresh
                 where kind = 'operation'),
    two as (
        select intent.* replace (outcome.seconds as seconds, outcome.result as result, outcome.cause as cause,
            outcome.failed as failed), false as whole, outcome."at" as ended
        from fresh intent join fresh outcome on intent.id = outcome.id
        where intent.kind = 'intent' and outcome.kind = 'outcome')
    select id, whole, "at", ended, stage, namespace, entity,
        lower(coalesce(nullif(destination, ''), namespace || '/' || entity)) as destination, ids, bytes, units, seconds,
        result, cause, failed, count, broker_at, waited, {_DAY} as day
    from (from one union all from two)
) to '{{folder}}/operations' {_COPY}
"""  # noqa: S608  # of parts that are written here
_PENDING: Final = f"""
copy (
    select * from fresh where {_HALVES} and id not in (
        select id from fresh where {_HALVES} group by id having count(*) = 2)
) to '{{folder}}/pending.parquet' (format parquet, compression zstd)
"""  # noqa: S608
_ENTRIES: Final = f"""
copy (select *, {_DAY} as day from fresh where kind not in ('operation', 'intent', 'outcome'))
to '{{folder}}/entries' {_COPY}
"""  # noqa: S608


_STEPS: Final = """
copy (
    with operations as (select *, unnest(ids) as message from '{folder}/operations/*/*.parquet'),
    moves as (select *, unnest(ids) as message from '{folder}/entries/*/*.parquet' where kind = 'movement')
    select left(md5(message), 4) as prefix, message as id, "at", ended, stage, null as move, namespace, entity,
        null as source, destination,
        case when coalesce(len(failed), 0) = 0 or list_contains(failed, message) then result else 'ok' end as result,
        cause, null as reason, broker_at, id as entry
    from operations
    union all
    select left(md5(message), 4), message, "at", null, stage, move, namespace, entity, source, lower(destination),
        result, cause, reason, broker_at, id
    from moves
    order by 1, 2, 3
) to '{folder}/steps.parquet' (format parquet, compression zstd)
"""


# --- DuckDB ----------------------------------------------------------------------------------------------------------


def by_duckdb(ledger: Path, folder: Path, *, with_steps: bool) -> dict[str, Any]:
    """Does the work once, with or without the table `steps`.

    Returns seconds, processor time and memory at the peak (MiB), and the rows of each table.
    """
    columns = {name: _TYPES[kind] for name, kind in column_types(PENDING).items()}
    began, used = time.perf_counter(), time.process_time()
    database = duckdb.connect()
    database.execute(f"set threads = {os.cpu_count() or 2}; set preserve_insertion_order = false")
    database.execute(
        f"""create temp table fresh as select distinct on (kind, id) *
            from read_json('{ledger}/*.jsonl', format = 'newline_delimited', ignore_errors = true, columns = {columns})
            where kind is not null"""  # noqa: S608
    )
    for statement in (_OPERATIONS, _PENDING, _ENTRIES, *([_STEPS] if with_steps else [])):
        database.execute(statement.format(folder=folder))
    spent = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - used}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    files = {OPERATIONS: "operations/*/*.parquet", PENDING: "pending.parquet", ENTRIES: "entries/*/*.parquet"}
    files |= {STEPS: "steps.parquet"} if with_steps else {}
    rows = {
        table: database.execute(f"select count(*) from '{folder}/{path}'").fetchall()[0][0]  # noqa: S608
        for table, path in files.items()
    }
    return {**spent, "peak": peak, "rows": rows}


def _in_own_process(ledger: Path, folder: Path, spent: IngestSpent, *, with_steps: bool) -> dict[str, int]:
    """Does the work once. Returns the rows of each table."""
    command = [sys.executable, __file__, str(ledger), str(folder), *(["steps"] if with_steps else [])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    for what in ("seconds", "cpu", "peak"):
        getattr(spent, what).values.append(found[what])
    rows: dict[str, int] = found["rows"]
    return rows


# --- Spark -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class IngestSpent(Spent):
    peak: Samples = field(default_factory=Samples)
    """MiB."""


@dataclass(slots=True)
class SparkSpent(IngestSpent):
    jvm_cpu: Samples = field(default_factory=Samples)
    python_peak: Samples = field(default_factory=Samples)
    """MiB of the driver and of all Python processes of Spark."""


def by_spark(spark: SparkSession, ledger: Path, root: Path, spent: SparkSpent) -> dict[str, int]:
    """Does the work once. Returns the rows of each table."""
    jvm = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr] # there in a local session
    meter, workers = ProcessMeter(jvm), ProcessTree(jvm)
    began, used, own, python = time.perf_counter(), meter.cpu_seconds(), time.process_time(), workers.cpu_seconds()
    with PeakMeter(lambda: workers.rss_megabytes() + ProcessMeter(os.getpid()).rss_megabytes()) as peak:
        ingest_ledger(spark, ledger, root).awaitTermination()
    spent.seconds.values.append(time.perf_counter() - began)
    spent.jvm_cpu.values.append(meter.cpu_seconds() - used)
    in_python = time.process_time() - own + workers.cpu_seconds() - python
    spent.cpu.values.append(spent.jvm_cpu.values[-1] + in_python)
    spent.peak.values.append(meter.peak_rss_megabytes())
    spent.python_peak.values.append(peak.most)
    tables = Tables(spark, root)
    version = tables.version()
    written = (OPERATIONS, PENDING, ENTRIES, STEPS)
    return {table: sum(file.rows for file in tables.files(table, version)) for table in written}


def measure(
    spark: SparkSession, folder: Path, lines: int, rounds: int
) -> tuple[SparkSpent, IngestSpent, IngestSpent, int]:
    """Returns what Spark, DuckDB, and DuckDB without steps took, and the bytes of the ledger.

    All must make the same rows.
    """
    ledger = folder / f"ledger-{lines}"
    size = make_ledger(ledger, lines)
    ours, theirs, without_steps = SparkSpent(), IngestSpent(), IngestSpent()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            found = by_spark(spark, ledger, Path(name) / "tables", ours)
        for spent in (theirs, without_steps):
            with tempfile.TemporaryDirectory(dir=folder) as name:
                peer = _in_own_process(ledger, Path(name), spent, with_steps=spent is theirs)
            made = {table: found[table] for table in peer}
            assert made == peer, f"{lines:,} lines: {made} is not {peer}"
    return ours, theirs, without_steps, size


def figures(spark: SparkSession, folder: Path, sizes: list[int], rounds: int) -> Iterator[Figure]:
    """Yields the figures of each number of lines. The JVM is warm."""
    measure(spark, folder / "warm", min(sizes[0], 1_000_000), 1)  # not counted: the JVM still compiles
    before: tuple[int, float] | None = None
    for lines in sizes:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            ours, theirs, without_steps, size = measure(spark, Path(name), lines, rounds)
        yield Figure(f"Ingest of {lines:,} lines ({size / 2**20:,.0f} MiB):")
        aimed = lines >= _AIMED_FROM
        for what, one, other in (("seconds", ours.seconds, theirs.seconds), ("processor time", ours.cpu, theirs.cpu)):
            yield compared(what, one, other, "DuckDB", most=AIM if aimed else None, pattern="{:.1f}")
        yield compared("  beside DuckDB without steps", ours.cpu, without_steps.cpu, "DuckDB", pattern="{:.1f}")
        jvm, python = ours.jvm_cpu.median, ours.cpu.median - ours.jvm_cpu.median
        yield Figure("  of it JVM; Python", f"{jvm:.1f} s; {python:.1f} s", values={"jvm": ours.jvm_cpu.values})
        memory = f"JVM {ours.peak.median:,.0f}, Python {ours.python_peak.median:,.0f} MiB"
        yield Figure(
            "memory at the peak", memory, f"DuckDB {theirs.peak.median:,.0f} MiB", values={"jvm": ours.peak.values}
        )
        if before is not None:
            growth = (ours.cpu.median / before[1]) / (lines / before[0])
            yield Figure("growth of processor time beside the lines'", f"{growth:.2f}", values={"growth": growth})
        before = (lines, ours.cpu.median)


if __name__ == "__main__":
    print(json.dumps(by_duckdb(Path(sys.argv[1]), Path(sys.argv[2]), with_steps="steps" in sys.argv[3:])))
