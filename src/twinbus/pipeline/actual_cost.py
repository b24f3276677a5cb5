"""The actual cost of the operations in a ledger (M4), and the values of a scenario that the ledger shows.

`twinbus.money` compares the actual cost with a forecast. The units come from the job `cost`, the prices from a price
table.
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
from twinbus.pipeline.tables import ENTRIES, Tables
from twinbus.pipeline.time_window import TimeWindow
from twinbus.syphon import NOT_TRIED

# The stages of operations of an application's receivers, by the name of the operation in a namespace's meter.
_METERED: Final = {"receive": str(Stage.RECEIVE_PRIMARY), "complete": str(Stage.COMPLETE_PRIMARY)}
_SYPHON_STAGES: Final = (Stage.RECEIVE_BACKLOG, Stage.EMPTY_RECEIVE)
_SEND_STAGES: Final = (Stage.SEND_PRIMARY, Stage.SEND_BACKLOG)
# Results of operations for which no request was sent, so that they certainly did not happen.
_UNSENT_RESULTS: Final = (
    NOT_TRIED,
    FailureKind.CONNECTION_LOST,
    FailureKind.DETACHED,
    FailureKind.TIMEOUT,
    FailureKind.DNS,
    FailureKind.CERTIFICATE,
    FailureKind.TOKEN_UNAVAILABLE,
)
_SUCCEEDED, _FAILED, _UNSENT = "succeeded", "failed", "unsent"
"""How a call ended. `unsent`: there was no connection, so that no request was sent."""


class ActualCost:
    """The actual cost of a ledger: of all its days, or of each whole day (UTC) that overlaps a time window."""

    def __init__(self, tables: Tables, window: TimeWindow | None = None, *, outages: bool = True) -> None:
        """`outages`: whether to read the incidents too, which the method `scenario` needs."""
        self._tables = tables
        self._window = window or TimeWindow()
        with tables.parallel_queries() as pool:
            sums, costs, metered = (pool.submit(one) for one in (self._by_stage, self._costs, self._metered))
            incidents = pool.submit(self._incidents) if outages else None
            self._sums = sums.result()
            self._monthly = self._by_month(costs.result(), metered.result())
            self._failovers = None if incidents is None else incidents.result()

    def __bool__(self) -> bool:
        return bool(self._sums)

    def spent(self, prices: Prices, scenario: Scenario) -> list[StageSpending]:
        """Returns units and cost by stage.

        The price bands start again with each month. All units of a month have the same price: the mean of that month.
        """
        units, totals = Counter[str](), dict[str, _StageTotal]()
        for month, _, count, _ in self._monthly:
            units[month] += count
        other = scenario.other_operations
        each = {
            month: unit_price(count, prices, scenario.tier, other_operations=other) for month, count in units.items()
        }
        for month, stage, count, size in self._monthly:
            totals[stage] = totals.get(stage, _StageTotal()).plus(count, size, count * each[month])
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
                failed_units=self._sum(stage, "units", _FAILED),
                unsent_units=self._sum(stage, "units", _UNSENT),
                cost=total.cost + line.cost,
            )
            for (stage, total), line in zip(totals.items(), carried.lines, strict=True)
        ]

    def scenario(self, asked: Scenario) -> dict[str, Any]:
        """Returns values for the fields of a Scenario that can be computed from the ledger, by field name.

        Of `asked`, only the failover interval and the ping interval are used.
        """
        began, ended = min(row.began for row in self._sums), max(row.ended for row in self._sums)
        seconds = max((ended - began) / 1000, 1.0)
        sent, diverted = (self._sum(stage, "messages") for stage in _SEND_STAGES)
        calls = sum(self._sum(stage, "calls") for stage in _SEND_STAGES)
        syphoned = [row.began for row in self._sums if row.stage in _SYPHON_STAGES]
        outages = self._outages(ended)
        seen: dict[str, Any] = {
            "period": timedelta(seconds=seconds),
            "outages": len(outages),
            "sent": sent,
            "diverted": diverted,
            "rate": (sent + diverted) / seconds,
            "batch": max(1, round((sent + diverted) / max(calls, 1))),
            "outage_kind": OutageKind.ANSWERING if self._sum(Stage.PING, "calls", _FAILED) else OutageKind.UNREACHABLE,
            "syphons": 1 if syphoned else 0,
        }
        for field, column in (("entities", "destinations"), ("clients", "writers")):
            if count := max((row[column] for row in self._sums if row.stage in _SEND_STAGES), default=0):
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
        rows = operations.groupBy(_month(), _stage().alias("stage"), _ending().alias("ending")).agg(
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

    def _sum(self, stage: str, column: str, ending: str = _SUCCEEDED) -> int:
        return sum(int(row[column]) for row in self._sums if (row.stage, row.ending) == (stage, ending))

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

    def _by_month(self, costs: Sequence[Row], metered: Sequence[Row]) -> list[tuple[str, str, int, int]]:
        """Returns tuples of month, stage, units and bytes from the job `cost`, without requests that were not sent.

        If the ledger has no operations of the application's receivers, those from the meter of a namespace are used.
        """
        unsent = {(row.month, row.stage): row for row in self._sums if row.ending == _UNSENT}
        found = []
        for month, stage, units, size in costs:
            less = unsent.get((month, stage))
            found.append((month, stage, units - (less.units if less else 0), size - (less.bytes if less else 0)))
        recorded = {stage for _, stage, _, _ in found}
        for row in metered:
            if _METERED[row.operation] not in recorded:
                found.append((row.month, _METERED[row.operation], row.units, row.bytes))
        return found

    def _outages(self, newest: int) -> list[tuple[int, int]]:
        """Returns begin and end of each outage. Failovers that overlap in time are one outage."""
        assert self._failovers is not None, "made with outages=False"
        found: list[tuple[int, int]] = []
        for began, ended in sorted((row.began, row.restored or newest) for row in self._failovers):
            if found and began <= found[-1][1]:
                found[-1] = (found[-1][0], max(found[-1][1], ended))
            else:
                found.append((began, ended))
        return found


class _StageTotal(NamedTuple):
    units: int = 0
    bytes: int = 0
    cost: Decimal = Decimal(0)

    def plus(self, units: int, size: int, cost: Decimal) -> _StageTotal:
        return _StageTotal(self.units + units, self.bytes + size, self.cost + cost)


def _units_and_bytes() -> tuple[Column, Column]:
    return F.sum("units").alias("units"), F.sum("bytes").alias("bytes")


def _month() -> Column:
    return F.date_format("day", "yyyy-MM").alias("month")


def _ending() -> Column:
    """Returns how a call ended. An unknown result counts as failed."""
    result = F.col("result")
    unsent = result.isin(*map(str, _UNSENT_RESULTS))
    return F.when(result == OK, F.lit(_SUCCEEDED)).when(unsent, F.lit(_UNSENT)).otherwise(F.lit(_FAILED))


def _stage() -> Column:
    """Returns the stage; for empty receives that are not on a backlog queue, EMPTY_PRIMARY."""
    polled = (F.col("stage") != str(Stage.EMPTY_RECEIVE)) | _in_backlog()
    return F.when(polled, F.col("stage")).otherwise(F.lit(EMPTY_PRIMARY))


def _in_backlog() -> Column:
    return F.lower("entity").contains(f"/{TRANSFER_SEGMENT}/")


def _length(outages: list[tuple[int, int]], asked: Scenario) -> timedelta:
    """Returns the mean length of an outage.

    An outage begins one failover interval before the failover. It ends on average half a ping interval before the first
    ping that succeeds.
    """
    mean = timedelta(milliseconds=sum(end - begin for begin, end in outages) / len(outages))
    return asked.failover_interval + max(mean - asked.ping_interval / 2, asked.ping_interval / 2)
