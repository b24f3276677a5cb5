"""What a ledger says was spent (M4): the cost job's units at the prices of a table, and what it saw of the traffic.

Both are what `twinbus.money.forecast_vs_actual` wants. Prices and bands are the table's, the sums those of the jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple

from pyspark.sql import Column, Row
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.backlog import TRANSFER_SEGMENT, FailureKind
from twinbus.ledger import OK, Metered, Stage
from twinbus.money import (
    EMPTY_PRIMARY,
    OutageKind,
    Prices,
    Scenario,
    StageSpending,
    SyphonRuns,
    Usage,
    bill,
    unit_price,
)
from twinbus.pipeline.jobs import JOBS, current_result, read_history
from twinbus.pipeline.tables import ENTRIES, Tables, parallel_queries
from twinbus.pipeline.time_window import TimeWindow
from twinbus.syphon import NOT_TRIED

# What a namespace's meter calls the operations of an application's receivers.
_METERED: Final = {"receive": str(Stage.RECEIVE_PRIMARY), "complete": str(Stage.COMPLETE_PRIMARY)}
_SYPHONS: Final = (Stage.RECEIVE_BACKLOG, Stage.EMPTY_RECEIVE)
_SENDS: Final = (Stage.SEND_PRIMARY, Stage.SEND_BACKLOG)
# As a result, not as the cause of an unknown one: surely nothing happened, and no service said so.
_UNHEARD: Final = (
    NOT_TRIED,
    FailureKind.CONNECTION_LOST,
    FailureKind.DETACHED,
    FailureKind.TIMEOUT,
    FailureKind.DNS,
    FailureKind.CERTIFICATE,
    FailureKind.TOKEN_UNAVAILABLE,
)
_WELL, _VAIN, _UNSENT = "well", "vain", "unsent"
"""How a call went; `unsent`: it was intended, and found no connection to be made on, so that nobody was asked."""


class ActualCost:
    """A ledger in tables, or the whole days of it that a window touches."""

    def __init__(self, tables: Tables, window: TimeWindow | None = None, *, outages: bool = True) -> None:
        """`outages`: whether `scenario` will be asked for."""
        self._tables = tables
        self._window = window or TimeWindow()
        with parallel_queries(tables) as pool:
            sums, costs, metered = (pool.submit(one) for one in (self._by_stage, self._costs, self._metered))
            incidents = pool.submit(self._incidents) if outages else None
            self._sums = sums.result()
            self._monthly = self._told(costs.result(), metered.result())
            self._failovers = None if incidents is None else incidents.result()

    def __bool__(self) -> bool:
        return bool(self._sums)

    def spent(self, prices: Prices, scenario: Scenario) -> list[StageSpending]:
        """By stage. Each month has its own bands, and a price of the unit that is the mean of them."""
        units, totals = Counter[str](), dict[str, _Total]()
        for month, _, count, _ in self._monthly:
            units[month] += count
        other = scenario.other_operations
        each = {
            month: unit_price(count, prices, scenario.tier, other_operations=other) for month, count in units.items()
        }
        for month, stage, count, size in self._monthly:
            totals[stage] = totals.get(stage, _Total()).plus(count, size, count * each[month])
        carried = bill(
            [Usage(stage=stage, operations=0, units=0, bytes=total.bytes) for stage, total in totals.items()],
            prices,
            scenario.tier,
            bandwidth=scenario.bandwidth,
            months=Decimal(max(len(units), 1)),
        )
        return [
            StageSpending(
                stage=stage,
                messages=self._sum(stage, "messages"),
                units=total.units,
                failed_units=self._sum(stage, "units", _VAIN),
                unsent_units=self._sum(stage, "units", _UNSENT),
                cost=total.cost + line.cost,
            )
            for (stage, total), line in zip(totals.items(), carried.lines, strict=True)
        ]

    def scenario(self, asked: Scenario) -> dict[str, Any]:
        """Fields of a Scenario that the ledger tells; of the one asked for only the intervals are used."""
        began, ended = min(row.began for row in self._sums), max(row.ended for row in self._sums)
        seconds = max((ended - began) / 1000, 1.0)
        sent, diverted = (self._sum(stage, "messages") for stage in _SENDS)
        calls = sum(self._sum(stage, "calls") for stage in _SENDS)
        syphoned = [row.began for row in self._sums if row.stage in _SYPHONS]
        outages = self._outages(ended)
        seen: dict[str, Any] = {
            "period": timedelta(seconds=seconds),
            "outages": len(outages),
            "sent": sent,
            "diverted": diverted,
            "rate": (sent + diverted) / seconds,
            "batch": max(1, round((sent + diverted) / max(calls, 1))),
            "outage_kind": OutageKind.ANSWERING if self._sum(Stage.PING, "calls", _VAIN) else OutageKind.UNREACHABLE,
            "syphons": 1 if syphoned else 0,
        }
        for field, column in (("entities", "destinations"), ("clients", "writers")):
            if count := max((row[column] for row in self._sums if row.stage in _SENDS), default=0):
                seen[field] = count
        if queues := {queue for row in self._sums for queue in row.queues}:
            seen["backlog_queues"] = len(queues)
        if sent:
            seen["message_size"] = self._sum(Stage.SEND_PRIMARY, "bytes") // sent
        if outages:
            seen["outage"] = _length(outages, asked)
            if syphoned:
                standing = min(syphoned) < outages[0][1]
                seen["syphon"] = SyphonRuns.STANDING if standing else SyphonRuns.AFTER
        return seen

    def _by_stage(self) -> list[Row]:
        operations, _ = read_history(self._tables, self._tables.version(), self._window.days())
        rows = operations.groupBy(_month(), _stage().alias("stage"), _how().alias("how")).agg(
            F.count("*").alias("calls"),
            F.sum(F.size("ids")).alias("messages"),
            F.sum("units").alias("units"),
            F.sum("bytes").alias("bytes"),
            F.min("at").alias("began"),
            F.max(F.coalesce("ended", "at")).alias("ended"),
            F.count_distinct("destination").alias("destinations"),
            F.collect_set(F.when(_in_backlog(), F.lower("entity"))).alias("queues"),
            F.count_distinct(F.substring("id", 1, 16)).alias("writers"),
        )
        return rows.collect()

    def _sum(self, stage: str, column: str, how: str = _WELL) -> int:
        return sum(int(row[column]) for row in self._sums if (row.stage, row.how) == (stage, how))

    def _costs(self) -> list[Row]:
        costs = current_result(self._tables, JOBS["cost"], self._window)
        return costs.groupBy(_month(), _stage().alias("stage")).agg(*_units_and_bytes()).collect()

    def _metered(self) -> list[Row]:
        entries = self._tables.read(ENTRIES).where(self._window.days())
        own = entries.where((F.col("kind") == Metered.kind) & F.col("operation").isin(*_METERED) & ~_in_backlog())
        return own.groupBy(_month(), "operation").agg(*_units_and_bytes()).collect()

    def _incidents(self) -> list[Row]:
        incidents = current_result(self._tables, JOBS["incidents"], self._window)
        return incidents.where("began is not null").select("began", "restored").collect()

    def _told(self, costs: Sequence[Row], metered: Sequence[Row]) -> list[tuple[str, str, int, int]]:
        """Units and bytes by month and stage: the cost job's, less what was never sent.

        Where no client tells what the application's receivers did, a namespace's meter may.
        """
        unsent = {(row.month, row.stage): row for row in self._sums if row.how == _UNSENT}
        found = []
        for month, stage, units, size in costs:
            less = unsent.get((month, stage))
            found.append((month, stage, units - (less.units if less else 0), size - (less.bytes if less else 0)))
        told = {stage for _, stage, _, _ in found}
        for row in metered:
            if _METERED[row.operation] not in told:
                found.append((row.month, _METERED[row.operation], row.units, row.bytes))
        return found

    def _outages(self, newest: int) -> list[tuple[int, int]]:
        """From a failover to its restore; those of several entities that overlap are one."""
        assert self._failovers is not None, "they were not asked for"
        found: list[tuple[int, int]] = []
        for began, ended in sorted((row.began, row.restored or newest) for row in self._failovers):
            if found and began <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], ended))
            else:
                found.append((began, ended))
        return found


class _Total(NamedTuple):
    """Of a stage."""

    units: int = 0
    bytes: int = 0
    cost: Decimal = Decimal(0)

    def plus(self, units: int, size: int, cost: Decimal) -> _Total:
        return _Total(self.units + units, self.bytes + size, self.cost + cost)


def _units_and_bytes() -> tuple[Column, Column]:
    return F.sum("units").alias("units"), F.sum("bytes").alias("bytes")


def _month() -> Column:
    return F.date_format("day", "yyyy-MM").alias("month")


def _how() -> Column:
    """Unknown is in vain too."""
    result = F.col("result")
    unsent = result.isin(*map(str, _UNHEARD))
    return F.when(result == OK, F.lit(_WELL)).when(unsent, F.lit(_UNSENT)).otherwise(F.lit(_VAIN))


def _stage() -> Column:
    """A receiver of the application that finds nothing is none of a syphon's polls."""
    polled = (F.col("stage") != str(Stage.EMPTY_RECEIVE)) | _in_backlog()
    return F.when(polled, F.col("stage")).otherwise(F.lit(EMPTY_PRIMARY))


def _in_backlog() -> Column:
    return F.lower("entity").contains(f"/{TRANSFER_SEGMENT}/")


def _length(outages: list[tuple[int, int]], asked: Scenario) -> timedelta:
    """The mean. The failover came after its interval, and the primary was back half a ping before it was found so."""
    mean = timedelta(milliseconds=sum(end - begin for begin, end in outages) / len(outages))
    return asked.failover_interval + max(mean - asked.ping_interval / 2, asked.ping_interval / 2)
