"""The ledger's jobs over millions of entries: reconcile and cost, on Spark and by DuckDB over the same Parquet files.

    python bench/pipeline.py [--entries 1_000_000 5_000_000 20_000_000 100_000_000] [--rounds 3] [--folder DIR] [--json]

Prints seconds, processor time, growth, the JVM's memory and the ratio to DuckDB, whose answer must be the same. A
hundred million entries take 2 GB of the disk.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import duckdb

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.measuring import Figure, ProcessMeter, Samples, ratios, show, write_json
from tests.pipeline import oracle
from twinbus.pipeline import JOBS, JUDGED, OPERATIONS, Tables, result_over_history
from twinbus.pipeline.session import session

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


@dataclass(slots=True)
class Spent:
    """Seconds and processor time of one job with one engine, for every round."""

    seconds: Samples = field(default_factory=Samples)
    cpu: Samples = field(default_factory=Samples)

    def timed(self, call: Callable[[], Any], cpu: Callable[[], float]) -> Any:
        start, used = time.perf_counter(), cpu()
        answer = call()
        self.seconds.values.append(time.perf_counter() - start)
        self.cpu.values.append(cpu() - used)
        return answer


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
        ratio = ratios(ours, theirs)
        yield Figure(
            what,
            f"{ours.told('{:.2f}')} s",
            f"DuckDB {theirs.told('{:.2f}')} s",
            ratio.told("{:.2f}"),
            f"≤ {AIM:g}" if aimed else "",
            ratio.median <= AIM if aimed else None,
            {"ours": ours.values, "duckdb": theirs.values},
        )
    yield Figure("  its growth beside the entries'", f"{growth:.2f}", values={"growth": growth})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, nargs="+", default=[1_000_000, 5_000_000, 20_000_000, 100_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for the files; on the disk that is to be measured")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    spark = session("bench")
    meter = ProcessMeter(spark.sparkContext._gateway.proc.pid)  # type: ignore[union-attr] # there in a local session
    figures: list[Figure] = []
    before: dict[str, tuple[int, float]] = {}
    for number, entries in enumerate(asked.entries):
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            tables = Tables(spark, folder)
            start = time.perf_counter()
            made(tables, entries)
            print(f"{entries:,} entries made in {time.perf_counter() - start:.0f} s", file=sys.stderr)
            if not number:
                measure(tables, entries, 2, meter)  # not counted: the JVM still compiles
            found = measure(tables, entries, asked.rounds, meter)
        figures.append(Figure(f"{entries:,} entries:"))
        for name, (mine, other) in found.items():
            figures += figures_of(name, entries, mine, other, before.get(name))
            before[name] = (entries, mine.cpu.median)
        figures.append(Figure("JVM's memory, at most so far", f"{meter.peak_rss_megabytes():,.0f} MiB"))
    notes = [f"{os.cpu_count()} cores; the same answers in every round", "growth 1: linear, in processor time"]
    write_json(figures, notes) if asked.json else show("Ledger jobs", figures, notes)


if __name__ == "__main__":
    main()
