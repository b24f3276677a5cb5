"""The result tables: their names, and which snapshot each of them was computed from (D7). Needs no Spark.

`results` writes them; `twinbus.answers` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import pyarrow as pa
from deltalake.exceptions import DeltaError

from twinbus.pipeline.snapshots import TablesVersion
from twinbus.pipeline.table_log import TableLog
from twinbus.pipeline.table_storage import TableStorage

RESULTS_FOLDER: Final = "results"
RESULTS: Final = f"{RESULTS_FOLDER}/"
"""Prefix of the tables that hold what a job found last."""
INCOMPLETE, CLOCKS, AS_OF = "incomplete", "clocks", "as_of"
PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "reconcile": ("reconcile", INCOMPLETE),
    "cost": ("cost",),
    "incidents": ("incidents",),
    "latency": ("latency", CLOCKS),
}
"""The tables, below `results`, that each result needs."""
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
    """Names of the writers that were dead, by their locks and their last lines."""
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
    # A query gives texts as views, which Arrow cannot sort or group.
    kinds = [pa.string() if field.type == pa.string_view() else field.type for field in found.schema]
    return found.cast(pa.schema([pa.field(name, kind) for name, kind in zip(found.column_names, kinds, strict=True)]))
