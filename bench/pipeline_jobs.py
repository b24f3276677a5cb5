"""The ledger's jobs over millions of entries: reconcile and cost, on Spark and by DuckDB over the same Parquet files.

A part of `bench/pipeline.py`. DuckDB's answer must be the same.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import duckdb
from pyspark.sql import SparkSession

from bench.measuring import Figure, ProcessMeter, Spent, compared
from tests.pipeline import oracle
from twinbus.pipeline import JOBS, JUDGED, OPERATIONS, Tables, result_over_history

AIM: Final = 2.0
_AIMED_FROM: Final = 20_000_000
# Of a hundred messages ten are diverted: sent to the backlog, brought back, completed. One in 100,000 of those is lost,
# one delivered twice.
_LEDGER: Final = """
copy (
    with messages as (
        select i, md5(i::varchar) as id, 1790035200000 + (i * 259200000 // {messages}) as "at",
            'entity-' || (i % 20) as entity, i % 10 = 0 as diverted
        from range({messages}) as numbers(i)
    ), told as (
        select *,
            unnest(if(diverted, ['send_backlog', 'return_primary', 'complete_backlog'], ['send_primary'])) as stage
        from messages
    )
    select i || stage as id, true as whole, "at", "at" + 5 as ended, stage,
        if(stage like '%primary', 'contoso', 'paris') as namespace,
        if(stage like '%primary', entity, 'contoso/x-servicebus-transfer/' || (i % 10)) as entity,
        'contoso/' || entity as destination, [id] as ids, 1024::bigint as bytes, 1::bigint as units, 0.005 as seconds,
        'ok' as result, null::varchar as cause, null::varchar[] as failed,
        cast(make_timestamp("at" * 1000) as date) as day
    from told
    where not (stage = 'return_primary' and i % 1000000 = 0)
    union all
    select i || 'again', true, "at", "at" + 5, 'return_primary', 'contoso', entity,
        'contoso/' || entity, [id], 1024, 1, 0.005, 'ok', null, null, cast(make_timestamp("at" * 1000) as date)
    from messages where i % 1000000 = 500000
) to '{folder}' (format parquet, partition_by (day), compression zstd, row_group_size 500000)
"""
# Entries for every message of the above.
_PER_MESSAGE: Final = 1.2


def made(tables: Tables, entries: int) -> None:
    database = duckdb.connect()
    database.execute(f"set threads = {os.cpu_count() or 2}")
    messages = int(entries / _PER_MESSAGE)
    change = tables.change()
    with tables.storage.staging(OPERATIONS) as folder:
        Path(folder).mkdir(parents=True)
        database.execute(_LEDGER.format(messages=messages, folder=folder))
        change.added[OPERATIONS] = tables.adopted(folder, OPERATIONS)
    change.newest = 1_790_035_200_000 + 3 * 86_400_000
    tables.commit(change)


def spark_reconcile(tables: Tables) -> dict[str, int]:
    rows = result_over_history(tables, JOBS["reconcile"]).collect()
    return {name: sum(row[name] for row in rows) for name in ("messages", *JUDGED) if name != "in_flight"}


def spark_cost(tables: Tables) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, result_over_history(tables, JOBS["cost"]).collect()))


def measure(tables: Tables, entries: int, rounds: int, meter: ProcessMeter) -> dict[str, tuple[Spent, Spent]]:
    database = oracle.connect(tables.root, tables.version())
    database.execute(f"set threads = {os.cpu_count() or 2}")
    jobs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "reconcile": (lambda: spark_reconcile(tables), lambda: oracle.named(database, oracle.RECONCILE_UNREDIRECTED)),
        "cost": (lambda: spark_cost(tables), lambda: oracle.rows(database, oracle.COST)),
    }
    found = {}
    for name, (ours, theirs) in jobs.items():
        mine, other = Spent(), Spent()
        for _ in range(rounds):
            answer = mine.timed(ours, meter.cpu_seconds)
            expected = other.timed(theirs, time.process_time)
            assert answer == expected, f"{name} of {entries:,} entries: {answer} is not {expected}"
        found[name] = (mine, other)
    return found


def figures_of(
    name: str, entries: int, mine: Spent, other: Spent, before: tuple[int, float] | None
) -> Iterator[Figure]:
    size, seconds = before or (entries, mine.cpu.median)
    growth = (mine.cpu.median / seconds) / (entries / size)
    aimed = name == "reconcile" and entries >= _AIMED_FROM
    for what, ours, theirs in ((name, mine.seconds, other.seconds), ("  processor time", mine.cpu, other.cpu)):
        yield compared(what, ours, theirs, "DuckDB", most=AIM if aimed else None)
    yield Figure("  its growth beside the entries'", f"{growth:.2f}", values={"growth": growth})


def figures(spark: SparkSession, folder: Path, sizes: list[int], rounds: int) -> Iterator[Figure]:
    """Yields the figures of each number of entries. The JVM is warm."""
    meter = ProcessMeter(spark.sparkContext._gateway.proc.pid)  # type: ignore[union-attr] # there in a local session
    before: dict[str, tuple[int, float]] = {}
    for number, entries in enumerate(sizes):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            tables = Tables(spark, name)
            made(tables, entries)
            if not number:
                measure(tables, entries, 2, meter)  # not counted: the JVM still compiles
            found = measure(tables, entries, rounds, meter)
        yield Figure(f"Jobs on {entries:,} entries:")
        for job, (mine, other) in found.items():
            yield from figures_of(job, entries, mine, other, before.get(job))
            before[job] = (entries, mine.cpu.median)
        yield Figure("JVM's memory, at most so far", f"{meter.peak_rss_megabytes():,.0f} MiB")
