"""The job `cost`: operations, billable units and bytes by stage, entity and day (M1, M2); stored by hour.

No prices: see `actual_cost`.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import OK, UNKNOWN
from twinbus.pipeline.result_tables import COST_KEYS, COST_SUMS
from twinbus.pipeline.time_window import TimeWindow, hour_of

RESULT: Final = "day date, stage string, namespace string, entity string, " + ", ".join(
    f"{sum_} long" for sum_ in COST_SUMS
)
TALLIES: Final = f"hour long, {RESULT}"
STORED: Final = TALLIES


def tally(operations: DataFrame, entries: DataFrame) -> DataFrame:
    """Returns one row per operation, whatever its result is: a refused operation is charged, too."""
    result = F.col("result")
    refused = (result != OK) & (result != UNKNOWN) & (F.coalesce(F.size("failed"), F.lit(0)) <= 0)
    return operations.select(
        hour_of("at").alias("hour"),
        "day",
        "stage",
        F.lower("namespace").alias("namespace"),
        F.lower("entity").alias("entity"),
        F.lit(1).cast("long").alias("operations"),
        F.size("ids").cast("long").alias("messages"),
        "units",
        "bytes",
        (result == UNKNOWN).cast("long").alias("unknown"),
        refused.cast("long").alias("refused"),
    )


def merge(tallies: DataFrame) -> DataFrame:
    return _summed(tallies, "hour", *COST_KEYS)


def summarize(sums: DataFrame, window: TimeWindow, newest: int) -> DataFrame:
    """Returns the sums of each whole day (UTC) that overlaps the window."""
    return _summed(sums.where(window.days()), *COST_KEYS)


def stored(sums: DataFrame, newest: int) -> DataFrame:
    """Returns the sums of each hour, by the begin of the operations."""
    return sums.select("hour", *COST_KEYS, *COST_SUMS)


def _summed(rows: DataFrame, *keys: str) -> DataFrame:
    return rows.groupBy(*keys).agg(*(F.sum(name).alias(name) for name in COST_SUMS))
