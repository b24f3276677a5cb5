"""The facts of a bill, added up over days (L4). Needs no Spark.

`cost_facts` counts the facts by day on Spark, for a window or for all time; `results` stores those of all time. This
module adds up the facts of the days of a window. `actual_cost` makes the bill of the sums.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from twinbus.backlog import STATE_SEGMENT
from twinbus.ledger import PAIRED, SYPHON_STARTED, Stage
from twinbus.money import EMPTY_PRIMARY, SESSIONS_PRIMARY, SHORT_POLL, CopyFacts

STAGES, OVERVIEW, POLLS, RUNS = "bill_stages", "bill_overview", "bill_polls", "bill_runs"
COPIES, DESTINATIONS, RECEIVERS, METERS, OPTIONS = (
    "bill_copies",
    "bill_destinations",
    "bill_receivers",
    "bill_meters",
    "bill_options",
)
FACTS: Final = (STAGES, OVERVIEW, POLLS, RUNS, COPIES, DESTINATIONS, RECEIVERS, METERS, OPTIONS)
"""The kinds of facts: names of tables below `results`."""
PASSED_STAGES: Final = (Stage.RETURN_PRIMARY, Stage.COMPLETE_BACKLOG)
SUBSCRIPTIONS: Final = "/subscriptions/"
METERED_STAGES: Final[Mapping[str, str]] = {
    "send": Stage.SEND_PRIMARY,
    "schedule": Stage.SCHEDULE_PRIMARY,
    "cancel_scheduled": Stage.CANCEL_PRIMARY,
    "ping": Stage.PING,
    "receive": Stage.RECEIVE_PRIMARY,
    "receive_deferred": Stage.RECEIVE_PRIMARY,
    "receive_empty": EMPTY_PRIMARY,
    "complete": Stage.COMPLETE_PRIMARY,
    "abandon": Stage.SETTLE_PRIMARY,
    "defer": Stage.SETTLE_PRIMARY,
    "dead_letter": Stage.SETTLE_PRIMARY,
    "release": Stage.SETTLE_PRIMARY,
    "renew_lock": Stage.RENEW_PRIMARY,
    "peek": Stage.PEEK_PRIMARY,
}
"""The stage of an operation on an entity of the primary, by its name in a meter. Others are SESSIONS_PRIMARY."""
METERED_BACKLOG_STAGES: Final[Mapping[str, str]] = {
    "send": Stage.SEND_BACKLOG,
    "receive": Stage.RECEIVE_BACKLOG,
    "receive_deferred": Stage.RECEIVE_DEFERRED,
    "receive_empty": Stage.EMPTY_RECEIVE,
    "complete": Stage.COMPLETE_BACKLOG,
    "abandon": Stage.SETTLE_BACKLOG,
    "defer": Stage.SETTLE_BACKLOG,
    "dead_letter": Stage.SETTLE_BACKLOG,
    "release": Stage.SETTLE_BACKLOG,
    "renew_lock": Stage.RENEW_BACKLOG,
    "peek": Stage.PEEK_BACKLOG,
}
_STAGE_SUMS: Final = ("units", "bytes", "messages", "large", "failed", "unsent", "calls")
_DIRECTIONS: Final = ("sent", "scheduled", "returned", "diverted")
_DESTINATION_SUMS: Final = tuple(f"{name}{kind}" for name in _DIRECTIONS for kind in ("", "_units", "_bytes"))


class FactRow(dict[str, Any]):
    """A row whose values are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class StatedOptions(NamedTuple):
    """The options that programs recorded at their start, the latest first. An older Twinbus did not record them."""

    pairs: list[Mapping[str, str]]
    syphons: list[Mapping[str, str]]


class BillFacts:
    """The facts of the days from `first` on and before `end`. `tables` has the rows of each kind of facts, by day."""

    def __init__(self, tables: Mapping[str, pa.Table], first: date = date.min, end: date = date.max) -> None:
        self._tables = tables
        self._first = first
        self._end = end

    def stages(self) -> list[FactRow]:
        """Returns, by month, stage, role and failure: units, bytes, messages and calls."""
        return _rows(self._by_month(STAGES), ("month", "stage", "role", "failure"), _STAGE_SUMS)

    def meters(self) -> list[FactRow]:
        """Returns what the meters of namespaces counted, by month, entity and operation.

        A pair records its peeks at a state queue as those at a backlog queue, and its sends to it as management calls,
        which no meter counts. So the peeks are in the backlog here, and the sends are left out.
        """
        keys = ("month", "entity", "backlog", "operation")
        found = _rows(self._by_month(METERS), keys, ("count", "units", "bytes"))
        of_states = [row for row in found if row.entity.endswith(f"/{STATE_SEGMENT}")]
        return [
            *(row for row in found if row not in of_states),
            *(FactRow(row | {"backlog": True}) for row in of_states if row.operation == "peek"),
        ]

    def destinations(self) -> list[FactRow]:
        """Returns messages, units and bytes by entity of the primary: `sent`, `sent_units`, `sent_bytes` and so on."""
        return _rows(self._days(DESTINATIONS), ("destination",), _DESTINATION_SUMS)

    def receivers(self) -> dict[str, int]:
        """Returns how many messages a pair's receivers received, by entity in lower case."""
        return {row.entity: row.messages for row in _rows(self._days(RECEIVERS), ("entity",), ("messages",))}

    def syphon_runs(self) -> list[FactRow]:
        """Returns writer, begin and end of each program that received from the backlog."""
        found = self._days(RUNS).group_by("writer").aggregate([("began", "min"), ("ended", "max")])
        rows = found.rename_columns({"began_min": "began", "ended_max": "ended"}).to_pylist()
        return [FactRow(row) for row in sorted(rows, key=lambda row: str(row["writer"]))]

    def overview(self, long_poll: float) -> FactRow:
        """Returns begin and end, and the numbers of entities, clients, backlog queues, calls and short polls.

        `long_poll` is in seconds.
        """
        days = self._days(OVERVIEW).to_pylist()
        limit = SHORT_POLL * long_poll * 1000
        short = [row["polls"] for row in self._days(POLLS).to_pylist() if row["milliseconds"] < limit]
        sets = {name: len({one for row in days for one in row[name]}) for name in ("entities", "clients", "queues")}
        return FactRow(
            began=min((row["began"] for row in days), default=None),
            ended=max((row["ended"] for row in days), default=None),
            send_calls=sum(row["send_calls"] for row in days),
            answered=any(row["answered"] for row in days),
            short_polls=sum(short),
            **sets,
        )

    def copies(self) -> tuple[dict[str, CopyFacts], int]:
        """Returns, by stage, what the entries show of diverted messages, and the number of dead letters."""
        sums: dict[str, Counter[str]] = {str(one): Counter() for one in PASSED_STAGES}
        dead = 0
        for row in self._tables[COPIES].to_pylist():
            days = [day for day in row["days"] if self._first <= day["day"] < self._end]
            names = ("stored", "doubtful", "dead", *map(str, PASSED_STAGES))
            one = Counter({name: sum(day[name] for day in days) for name in names})
            dead += one["dead"] * row["messages"]
            for passed, found in sums.items():
                for name, count in _copy_facts(one, passed).items():
                    found[name] += count * row["messages"]
        return {passed: CopyFacts(**found) for passed, found in sums.items()}, dead

    def options(self) -> StatedOptions:
        """Returns the options of pairs and syphons. Those from before the first day count, too."""
        rows = self._tables[OPTIONS].filter(pc.field("day") < self._end).sort_by([("at", "descending")]).to_pylist()
        found = [[json.loads(row["options"]) for row in rows if row["event"] == event] for event in _STARTS]
        return StatedOptions(*found)

    def _days(self, name: str) -> pa.Table:
        return self._tables[name].filter((pc.field("day") >= self._first) & (pc.field("day") < self._end))

    def _by_month(self, name: str) -> pa.Table:
        rows = self._days(name)
        return rows.append_column("month", pc.strftime(rows["day"], "%Y-%m"))


_STARTS: Final = (PAIRED, SYPHON_STARTED)


def summed(rows: pa.Table, keys: Sequence[str], sums: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the sums of these columns for each combination of keys."""
    found = rows.group_by(list(keys)).aggregate([(name, "sum") for name in sums])
    result: list[dict[str, Any]] = found.rename_columns({f"{name}_sum": name for name in sums}).to_pylist()
    return result


def _rows(rows: pa.Table, keys: Sequence[str], sums: Sequence[str]) -> list[FactRow]:
    """Returns the sums, in the order of the keys: a bill has the order of its facts, and Spark has none."""
    found = sorted(summed(rows, keys, sums), key=lambda row: [str(row[name]) for name in keys])
    return [FactRow(row) for row in found]


def _copy_facts(one: Mapping[str, int], passed: str) -> dict[str, int]:
    """Returns the fields of CopyFacts for one message id."""
    missing, more = max(one["stored"] - one[passed], 0), max(one[passed] - one["stored"], 0)
    unsure = min(more, one["doubtful"])
    left = more - unsure
    foreign = min(left, 1) if one["stored"] == 0 and one["doubtful"] == 0 else 0
    return {
        "missing": missing,
        "dead_lettered": min(missing, one["dead"]),
        "unsure": unsure,
        "foreign": foreign,
        "again": left - foreign,
    }


def metered_stage(operation: str, *, backlog: bool) -> str:
    """Returns the stage of an operation that a meter counted."""
    if backlog:
        return str(METERED_BACKLOG_STAGES.get(operation, f"{operation}_backlog"))
    return str(METERED_STAGES.get(operation, SESSIONS_PRIMARY))


def sum_of(rows: Iterable[Any], column: str) -> int:
    return sum(int(row[column] or 0) for row in rows)
