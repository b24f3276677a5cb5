"""Reads the result tables of one snapshot, and answers from them: for all time, or for a window of whole hours (D7).

The answers are those of the jobs on Spark: `twinbus.pipeline.reconcile`, `cost`, `incidents` and `latency`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import pyarrow as pa

from twinbus.answers.window import HourWindow
from twinbus.errors import OperatorError
from twinbus.ledger import BALANCE_SUMS, LISTED_SUMS
from twinbus.pipeline.actual_cost import ActualCost
from twinbus.pipeline.bill_facts import FACTS, BillFacts, FactRow
from twinbus.pipeline.ingested_segments import IngestedLedger, IngestedSegments
from twinbus.pipeline.report_data import Timeline, WriterClock
from twinbus.pipeline.result_tables import (
    CLOCKS,
    COST_KEYS,
    COST_SUMS,
    INCOMPLETE,
    JUDGED,
    LATENCY_SHARES,
    PARTS,
    TIMELINE,
    AsOf,
    read_as_of,
    read_result,
)
from twinbus.pipeline.snapshots import Snapshots
from twinbus.pipeline.table_storage import TableStorage
from twinbus.pipeline.timeline_buckets import BUCKETS, COUNTS, timeline_of, width_for

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BalanceAnswer:
    """The balance of a window."""

    sums: Mapping[str, int]
    """Number of messages for each word of the balance, and `in_flight`."""
    listed: Mapping[str, Sequence[tuple[tuple[str, str], int]]]
    """For the words in LISTED_SUMS: destination, id and number of copies of each message, sorted."""
    by_destination: Sequence[Row]
    """The sums of each destination."""


class Results:
    """The result tables of the last snapshot in a storage. Tables are read when they are needed."""

    def __init__(self, storage: TableStorage) -> None:
        self.storage = storage
        self.version = Snapshots(storage).last()
        self._as_of = read_as_of(storage, self.version)
        self._read = cache(self._read_once)

    def as_of(self, name: str) -> AsOf | None:
        """Returns what a result was computed from: the oldest of the tables that it needs. None if one is missing."""
        found = [self._as_of.get(part) for part in PARTS[name]]
        known = [one for one in found if one is not None]
        return min(known, key=lambda one: one.snapshot) if len(known) == len(found) else None

    def ledgers(self, as_of: AsOf) -> list[IngestedLedger]:
        """Returns what a result has of each ledger."""
        return [] if as_of.segments is None else IngestedSegments(self.storage).ledgers(as_of.segments)

    def _read_once(self, name: str, sql: str = "select * from rows") -> pa.Table:
        """Returns what a query finds in a result table.

        The queries filter and add up: Arrow can do the same, but loads pandas for it if that is installed.
        """
        found = read_result(self.storage, self.version, name, sql)
        if found is None:
            raise OperatorError(
                f"the table results/{name} in {self.storage.location} is gone",
                f"Compute the results again: twinbus pipeline run LEDGER {self.storage.location}",
            )
        return found

    def _rows(self, name: str, columns: str, inside: str, rest: str = "") -> list[Row]:
        """Returns the rows of a result table that fulfil a condition. `rest` groups and sorts them."""
        sql = f"select {columns} from rows where {inside} {rest}"  # noqa: S608 - names of columns, numbers and dates only
        found: list[Row] = self._read(name, sql).to_pylist()
        return found

    # --- answers -----------------------------------------------------------------------------------------------------

    def balance(self, window: HourWindow) -> BalanceAnswer:
        """Returns the balance of the messages that were accepted in the window, and of those never accepted."""
        since, until = window.limits
        inside = (
            f"(first_accepted < {until} and last_accepted >= {since})"
            f" or (first_accepted is null and last >= {since} and last < {until})"
        )
        # A message without an acceptance may have been accepted before the window, so it may still be explained.
        is_open = f"{window.since is not None} and id is not null and accepted = 0"
        in_flight = f"sum(case when {is_open} then unknown + unconfirmed else in_flight end) as in_flight"
        sums = ", ".join(f"sum({name}) as {name}" for name in BALANCE_SUMS)
        found = self._rows("reconcile", f"destination, {sums}, {in_flight}", inside, "group by destination")
        named = self._rows(
            "reconcile",
            f"destination, id, {', '.join(LISTED_SUMS)}",
            f"id is not null and ({inside})",
            "order by destination, id",
        )
        listed = {
            name: [((row["destination"], row["id"]), row[name]) for row in named if row[name]] for name in LISTED_SUMS
        }
        return BalanceAnswer({name: sum(row[name] for row in found) for name in JUDGED}, listed, found)

    def incomplete(self) -> list[str]:
        """Returns the reasons why the ledger does not have everything."""
        return [str(reason) for reason in self._read(INCOMPLETE)["reason"].to_pylist()]

    def cost(self, window: HourWindow) -> list[Row]:
        """Returns operations, units and bytes by day, stage and entity, of each day that overlaps the window."""
        first, end = window.days()
        keys, sums = ", ".join(COST_KEYS), ", ".join(f"sum({name}) as {name}" for name in COST_SUMS)
        inside = f"day >= date '{first}' and day < date '{end}'"
        return self._rows("cost", f"{keys}, {sums}", inside, f"group by {keys} order by {keys}")

    def incidents(self, window: HourWindow) -> list[Row]:
        """Returns the incidents that began in the window."""
        since, until = window.limits
        inside = f"at >= {since} and at < {until}"
        rows = self._rows("incidents", "*", inside, "order by began nulls first, destination")
        return [{name: value for name, value in row.items() if name != "at"} for row in rows]

    def latency(self, window: HourWindow) -> list[Row]:
        """Returns the distribution of the latency in seconds, by destination and day of the diversion."""
        by_day: dict[tuple[Any, str], Histogram] = {}
        for row in self._latency_hours(window):
            by_day.setdefault((row["day"], row["destination"]), Histogram()).add(row)
        return [
            {"destination": destination, "day": day, **found.distribution()}
            for (day, destination), found in sorted(by_day.items(), key=lambda one: one[0])
        ]

    def spread(self, window: HourWindow) -> Histogram:
        """Returns the latencies of all destinations and days together."""
        found = Histogram()
        for row in self._latency_hours(window):
            found.add(row)
        return found

    def clocks(self) -> list[WriterClock]:
        """Returns the writers whose clocks differ from the broker's (L5)."""
        return [WriterClock(row["writer"], row["least"], row["most"]) for row in self._read(CLOCKS).to_pylist()]

    def actual_cost(self, window: HourWindow, long_poll: timedelta | None = None) -> ActualCost:
        """Returns the cost of each whole day that overlaps the window. `long_poll` replaces what syphons recorded."""
        facts = BillFacts({name: self._read(name) for name in FACTS}, *window.days())
        incidents = [FactRow(row) for row in self.incidents(window.whole_days())]
        return ActualCost(facts, incidents, self.incomplete(), self.clocks(), long_poll=long_poll)

    def timeline(self, window: HourWindow) -> Timeline | None:
        """Returns messages and the depth of the backlog over time; None if nothing happened in the window."""
        since, until = window.limits
        inside = f"bucket >= {since} and bucket < {until}"
        (span,) = self._rows(TIMELINE, 'min("first") as begin, max("last") as last', inside)
        first, last = span["begin"], span["last"]
        if first is None:
            return None
        width = width_for(first, last, BUCKETS)
        before = first - first % width - width  # the extra bucket, with all earlier changes of the depth
        # The remainder of a negative number is negative in SQL.
        rounded = f"greatest(bucket - (bucket % {width} + {width}) % {width}, {before})"
        merged = f"case when bucket < {since} then {before} else {rounded} end"
        sums = ", ".join(f'sum("{name}") as "{name}"' for name in COUNTS)
        until_end = f"bucket < {min(until, last - last % width + width)}"
        rows = self._rows(TIMELINE, f"{merged} as merged, {sums}", until_end, "group by merged")
        return timeline_of({row["merged"]: row for row in rows}, first, last, width)

    def _latency_hours(self, window: HourWindow) -> list[Row]:
        since, until = window.limits
        return self._rows("latency", "*", f"hour >= {since} and hour < {until}")


class Histogram:
    """Latencies that were added up from the hours of the table `latency`."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        """How many messages have each latency, in milliseconds."""
        self._sums: Counter[str] = Counter()

    def add(self, row: Row) -> None:
        for name in ("diverted", "returned", "unknown_clock", "total"):
            self._sums[name] += row[name]
        for value, count in zip(row["milliseconds"], row["counts"], strict=True):
            self.counts[value] += count

    def distribution(self) -> Row:
        """Returns the numbers of messages, and mean and percentiles in seconds; None without a latency."""
        values = sorted(self.counts.items())
        count = self.counts.total()
        return {
            "diverted": self._sums["diverted"],
            "returned": self._sums["returned"],
            "mean": self._sums["total"] / count / 1000 if count else None,
            "least": values[0][0] / 1000 if values else None,
            **{name: percentile(values, share) for name, share in LATENCY_SHARES.items()},
            "most": values[-1][0] / 1000 if values else None,
            "unknown_clock": self._sums["unknown_clock"],
        }


def percentile(values: Sequence[tuple[int, int]], share: float) -> float | None:
    """Returns a percentile in seconds of sorted milliseconds with their counts, as Spark's `percentile` does it.

    Between two values it is interpolated.
    """
    count = sum(number for _, number in values)
    if not count:
        return None
    place = (count - 1) * share
    lower, higher = math.floor(place), math.ceil(place)
    low, high = _value_at(values, lower) / 1000, _value_at(values, higher) / 1000
    return low if lower == higher or low == high else (higher - place) * low + (place - lower) * high


def _value_at(values: Sequence[tuple[int, int]], place: int) -> int:
    for value, count in values:
        place -= count
        if place < 0:
            return value
    raise IndexError(place)
