"""What a ledger says was spent (M4): the cost job's units at the prices of a table, and what it saw of the traffic.

Both are what `twinbus.money.comparing` wants. Prices and bands are the table's, the sums those of the jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from decimal import Decimal
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger.entries import OK, Metered, Stage
from twinbus.money.billing import Usage, bill, unit_price
from twinbus.money.comparing import Spent
from twinbus.money.forecast import COMPLETE_PRIMARY
from twinbus.money.prices import Prices
from twinbus.money.scenario import OutageKind, Scenario, SyphonRuns
from twinbus.pairing.paths import TRANSFER
from twinbus.pipeline.cost import KEYS, SUMS, priced
from twinbus.pipeline.jobs import JOBS, history, so_far
from twinbus.pipeline.tables import ENTRIES, Tables
from twinbus.pipeline.window import Window

# What a namespace's meter calls the operations of an application's receivers.
_METERED: Final = {"receive": str(Stage.RECEIVE_PRIMARY), "complete": COMPLETE_PRIMARY}
_SYPHONS: Final = (Stage.RECEIVE_BACKLOG, Stage.EMPTY_RECEIVE)
_SENDS: Final = (Stage.SEND_PRIMARY, Stage.SEND_BACKLOG)
_TRIED: Final = (Stage.SEND_PRIMARY, Stage.PING)


def spent(tables: Tables, prices: Prices, scenario: Scenario, window: Window | None = None) -> list[Spent]:
    """By stage. Each month has its own bands, and a price of the unit that is the mean of them."""
    rows = so_far(tables, JOBS["cost"], window)
    rows = rows.unionByName(_metered(tables, rows, window or Window())).withColumn(
        "month", F.date_format("day", "yyyy-MM")
    )
    by_month = rows.groupBy("month", "stage").agg(*(F.sum(name).alias(name) for name in SUMS)).persist()
    try:
        units = {row.month: row.units for row in by_month.groupBy("month").agg(F.sum("units").alias("units")).collect()}
        other = scenario.other_operations
        each = {
            month: unit_price(count, prices, scenario.tier, other_operations=other) for month, count in units.items()
        }
        table = [(month, float(price)) for month, price in each.items()]
        found = priced(by_month, tables.spark.createDataFrame(table, "month string, price double"))
        sums = found.groupBy("stage").agg(*(F.sum(name).alias(name) for name in (*SUMS, "cost"))).collect()
    finally:
        by_month.unpersist()
    carried = bill(
        [Usage(stage=row.stage, operations=0, units=0, bytes=row.bytes) for row in sums],
        prices,
        scenario.tier,
        bandwidth=scenario.bandwidth,
        months=Decimal(max(len(units), 1)),
    )
    return [
        Spent(
            stage=row.stage,
            calls=row.operations,
            messages=row.messages,
            units=row.units,
            bytes=row.bytes,
            vain=row.unknown + row.refused,
            cost=Decimal(row.cost) + line.cost,
        )
        for row, line in zip(sums, carried.lines, strict=True)
    ]


def _metered(tables: Tables, costs: DataFrame, window: Window) -> DataFrame:
    """Stages of the application's receivers, from the meter of a namespace, where no client tells them itself."""
    stage = F.create_map(*(F.lit(text) for pair in _METERED.items() for text in pair))[F.col("operation")]
    entries = tables.read(ENTRIES).where(window.days())
    own = entries.where((F.col("kind") == Metered.kind) & ~F.lower("entity").contains(f"/{TRANSFER}/"))
    counted = own.withColumn("stage", stage).where("stage is not null")
    nobody = counted.join(costs.select("stage").distinct(), "stage", "left_anti")
    values = {"operations": "count", "messages": "count", "units": "units", "bytes": "bytes"}
    sums = [(F.col(values[name]) if name in values else F.lit(0).cast("long")).alias(name) for name in SUMS]
    return nobody.select(*KEYS, *sums)


def observed(tables: Tables, scenario: Scenario, window: Window | None = None) -> dict[str, Any]:
    """Fields of a Scenario that the ledger tells; of `scenario` only the intervals are used."""
    window = window or Window()
    operations, _ = history(tables, tables.version(), window.days())
    sums = {(row.stage, row.ok): row for row in _sums(operations).collect()}
    if not sums:
        return {}
    began, ended = min(row.began for row in sums.values()), max(row.ended for row in sums.values())
    sent, diverted = (_messages(sums, stage) for stage in _SENDS)
    outages = _outages(so_far(tables, JOBS["incidents"], window), ended)
    syphoned = [row.began for (stage, _), row in sums.items() if stage in _SYPHONS]
    seen: dict[str, Any] = {
        "period": timedelta(milliseconds=max(ended - began, 1000)),
        "outages": len(outages),
        "sent": sent,
        "diverted": diverted,
        "rate": (sent + diverted) / max((ended - began) / 1000, 1.0),
        "outage_kind": OutageKind.ANSWERING if _tried_in_vain(sums) else OutageKind.UNREACHABLE,
        "syphons": 1 if syphoned else 0,
    }
    for field, column, stages in (
        ("entities", "destinations", _SENDS),
        ("clients", "writers", _SENDS),
        ("backlog_queues", "entities", (*_SYPHONS, Stage.SEND_BACKLOG)),
    ):
        if count := max((row[column] for (stage, _), row in sums.items() if stage in stages), default=0):
            seen[field] = count
    if carried := [sums[stage, True] for stage in _SENDS if (stage, True) in sums]:
        seen["message_size"] = carried[0].bytes // max(carried[0].messages, 1)
    if outages:
        seen["outage"] = _length(outages, scenario)
        if syphoned:
            standing = min(syphoned) < min(end for _, end in outages)
            seen["syphon"] = SyphonRuns.STANDING if standing else SyphonRuns.AFTER
    return seen


def _sums(operations: DataFrame) -> DataFrame:
    return operations.groupBy("stage", (F.col("result") == OK).alias("ok")).agg(
        F.count("*").alias("calls"),
        F.sum(F.size("ids")).alias("messages"),
        F.sum("bytes").alias("bytes"),
        F.min("at").alias("began"),
        F.max(F.coalesce("ended", "at")).alias("ended"),
        F.count_distinct("destination").alias("destinations"),
        F.count_distinct("entity").alias("entities"),
        F.count_distinct(F.substring("id", 1, 16)).alias("writers"),
    )


def _messages(sums: Mapping[tuple[str, bool], Any], stage: Stage) -> int:
    return sums[stage, True].messages if (stage, True) in sums else 0


def _tried_in_vain(sums: Mapping[tuple[str, bool], Any]) -> bool:
    return any((stage, False) in sums for stage in _TRIED)


def _outages(incidents: DataFrame, newest: int) -> list[tuple[int, int]]:
    """From a failover to its restore; those of several entities that overlap are one."""
    rows = sorted((row.began, row.restored or newest) for row in incidents.where("began is not null").collect())
    found: list[tuple[int, int]] = []
    for began, ended in rows:
        if found and began <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], ended))
        else:
            found.append((began, ended))
    return found


def _length(outages: list[tuple[int, int]], scenario: Scenario) -> timedelta:
    """The mean. The failover came after its interval, and the primary was back half a ping before it was found so."""
    mean = timedelta(milliseconds=sum(end - begin for begin, end in outages) / len(outages))
    return scenario.failover_interval + max(mean - scenario.ping_interval / 2, scenario.ping_interval / 2)
