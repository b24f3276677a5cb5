"""The result tables: names and columns, and which snapshot each of them was computed from (D7). Needs no Spark.

`results` writes them; `twinbus.answers` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import pyarrow as pa
from deltalake.exceptions import DeltaError

from twinbus.ledger import BALANCE_SUMS
from twinbus.pipeline.bill_facts import FACTS
from twinbus.pipeline.snapshots import TablesVersion
from twinbus.pipeline.table_log import TableLog
from twinbus.pipeline.table_storage import TableStorage

RESULTS_FOLDER: Final = "results"
RESULTS: Final = f"{RESULTS_FOLDER}/"
"""Prefix of the tables that hold what a job found last."""
INCOMPLETE, CLOCKS, TIMELINE, AS_OF = "incomplete", "clocks", "timeline", "as_of"
_BILL: Final = (*FACTS, "incidents", INCOMPLETE, CLOCKS)
PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "reconcile": ("reconcile", INCOMPLETE),
    "cost": ("cost",),
    "incidents": ("incidents",),
    "latency": ("latency", CLOCKS),
    "bill": _BILL,
    "report": (*_BILL, "reconcile", "latency", TIMELINE),
}
"""The tables, below `results`, that each answer needs: of verbs, of the bill of `cost actual`, and of the report."""
JUDGED: Final = (*BALANCE_SUMS, "in_flight")
"""The sums of messages in `reconcile`."""
COST_KEYS: Final = ("day", "stage", "namespace", "entity")
COST_SUMS: Final = ("operations", "messages", "units", "bytes", "unknown", "refused")
LATENCY_SHARES: Final = {"p50": 0.5, "p75": 0.75, "p90": 0.9, "p99": 0.99}
"""The percentiles of an answer about latency."""
SMALL_SCHEMAS: Final[Mapping[str, pa.Schema]] = {
    INCOMPLETE: pa.schema([("reason", pa.string())]),
    CLOCKS: pa.schema([("writer", pa.string()), ("least", pa.float64()), ("most", pa.float64())]),
    AS_OF: pa.schema(
        [
            ("result", pa.string()),
            ("snapshot", pa.int64()),
            ("segments", pa.int64()),
            ("computed_at", pa.int64()),
            ("newest", pa.int64()),
            ("silence", pa.float64()),
            ("dead", pa.list_(pa.string())),
            ("undecided", pa.list_(pa.string())),
        ]
    ),
}
"""Schemas of the tables that Spark does not write."""


@dataclass(frozen=True, slots=True)
class AsOf:
    """What a result was computed from."""

    snapshot: int
    """Number of the snapshot of the tables."""
    segments: int | None
    """Version of the table `segments` in this snapshot; None if an earlier version made the tables."""
    computed_at: int
    """Milliseconds since the epoch."""
    newest: int
    """Time of the newest entry."""
    silence: float
    """A writer that no lock shows counts as dead after these seconds without an entry."""
    dead: tuple[str, ...] = ()
    """Names of the writers that the result takes for dead."""
    undecided: tuple[str, ...] = ()
    """Names of the writers of which only the time since their last entry shows whether they are dead."""

    def as_row(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def read_as_of(storage: TableStorage, version: TablesVersion) -> dict[str, AsOf]:
    """Returns what each result of a snapshot was computed from. Results that cannot be read are left out."""
    rows = read_result(storage, version, AS_OF)
    if rows is None:
        return {}
    return {
        row.pop("result"): AsOf(**{**row, "dead": tuple(row["dead"]), "undecided": tuple(row["undecided"])})
        for row in rows.to_pylist()
    }


def read_result(
    storage: TableStorage, version: TablesVersion, name: str, sql: str = "select * from rows"
) -> pa.Table | None:
    """Returns what a query finds in a result table of a snapshot; None if there is no such table.

    The query names the table `rows`.
    """
    number = version.tables.get(RESULTS + name)
    if number is None:
        return None
    try:
        found = TableLog(storage, RESULTS + name).query(sql, number)
    except DeltaError:  # somebody removed the table, or this version of it
        return None
    return found.cast(pa.schema([field.with_type(_without_views(field.type)) for field in found.schema]))


def _without_views(kind: pa.DataType) -> pa.DataType:
    """Returns the type with plain texts: a query gives texts as views, which Arrow can neither sort nor filter."""
    if kind == pa.string_view():
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_views(kind.value_type)))
    return kind
