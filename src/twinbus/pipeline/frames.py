"""How Spark keeps rows of a batch, and moves packed rows to tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it


@contextmanager
def cached(rows: DataFrame) -> Iterator[DataFrame]:
    """Yields the rows. Spark computes them once and keeps them until the end of the block."""
    kept = rows.persist()
    try:
        yield kept
    finally:
        kept.unpersist()


def in_places(parts: Sequence[DataFrame], tasks: int) -> DataFrame:
    """Returns packed rows of several parts, with all rows of a place in the task of this number."""
    together = reduce(DataFrame.unionAll, parts)
    return together.repartitionById(tasks, F.col("place")) if tasks > 1 else together.coalesce(1)
