"""The data of one report as plain values. `report_queries` computes the values; `twinbus.report` makes a page of them.

This module does not import pyspark, so `twinbus.report` can be imported without Spark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from twinbus.money import CostResult

_MINUTE, _HOUR, _DAY = 60_000, 3_600_000, 86_400_000
BUCKET_WIDTHS: Final = (
    *(1000 * seconds for seconds in (1, 2, 5, 10, 15, 30)),
    *(_MINUTE * minutes for minutes in (1, 2, 5, 10, 15, 30)),
    *(_HOUR * hours for hours in (1, 2, 3, 6, 12)),
    *(_DAY * days for days in (1, 2, 7, 30, 365)),
)
"""Widths of time buckets in milliseconds: 1, 2, 5, 10, 15 or 30 seconds or minutes, and similar round numbers."""
LATENCY_EDGES: Final = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 20, 30, 45),
    *(60 * minutes for minutes in (1, 2, 3, 5, 10, 15, 20, 30)),
    *(3600 * hours for hours in (1, 2, 4, 8, 24, 48, 168)),
)
"""Upper edges of the latency histogram in seconds."""

MOST_INCIDENTS: Final = 200
MOST_ENTITIES: Final = 25
MOST_IDS: Final = 100
MOST_REASONS: Final = 25
MOST_DAYS: Final = 50
"""How many rows of each kind a page shows."""
WORST: Final = ("lost", "unknown", "duplicated", "dead_lettered", "in_backlog", "accepted")
"""The entities with most of these come first."""

RowValues = Mapping[str, Any]
"""One row of a result, by column name."""


@dataclass(frozen=True, slots=True)
class TopRows:
    """The first rows of a result, and the number of all its rows."""

    rows: Sequence[RowValues]
    total: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Message counts per time bucket. Every list has one number for each bucket."""

    start: int
    """Start of the first bucket, in milliseconds since the epoch."""
    width: int
    """Length of a bucket in milliseconds."""
    counts: Mapping[str, Sequence[int]]
    """Messages by what happened to them: `direct`, `diverted`, `returned` and `failed`."""
    waiting: Sequence[int]
    """Diverted messages that had not returned to the primary when the bucket ended."""


@dataclass(frozen=True, slots=True)
class WriterClock:
    """How far the clock of a writer is ahead of the broker's, in seconds; negative if it is behind (L5).

    If the clock was set while the writer ran, `least` and `most` are the smallest and the largest difference. If not,
    `least` is the difference, and `most` is None.
    """

    writer: str
    least: float
    most: float | None = None

    @property
    def was_set(self) -> bool:
        return self.most is not None


@dataclass(frozen=True, slots=True)
class ReportData:
    sums: Mapping[str, int]
    """Number of messages for each word of the balance: `accepted`, `delivered`, `lost` and so on."""
    listed: Mapping[str, TopRows]
    """The message ids, for the words of the balance whose messages are listed: `lost`, `unknown` and so on."""
    incomplete: TopRows
    """Reasons why the ledger does not hold everything."""
    incidents: TopRows
    entities: TopRows
    timeline: Timeline | None
    """None if nothing happened in the time window."""
    spread: RowValues
    """Latency of all diverted messages together: percentiles, and `counts` between the LATENCY_EDGES."""
    latency: TopRows
    """Latency by entity and day."""
    cost: CostResult
    """The bill, and the forecast beside it."""
    clocks: Sequence[WriterClock] = ()
    """The writers whose clocks differ from the broker's by more than 1 s."""
