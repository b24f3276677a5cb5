"""The parsed lines of one batch, and what the ingest has to know about them before it writes them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import Movement
from twinbus.pipeline.operation_rows import DAY_MILLISECONDS, LAST_DAY
from twinbus.pipeline.packed_rows import Hashes
from twinbus.pipeline.table_log import DataFile

_TASK_ROWS: Final = 250_000
_FEW_ROWS: Final = 50_000
_MOST_FILES: Final = 64
# A longer limit of a text may be cut off in the log.
_WHOLE_LIMIT: Final = 31


@dataclass(frozen=True, slots=True)
class ParsedBatch:
    """The parsed lines of one batch."""

    rows: DataFrame
    """The columns are those of the source `ledger`."""
    lines: int
    """Lines of operations. They are packed."""
    others: int
    """Entries that are no operations."""
    moved: int
    """The message ids of movements."""
    rejected: int
    """Lines that are not entries."""
    oldest: int
    newest: int
    """Times of the oldest and the newest entry."""
    ids: tuple[str, str]
    """The least and the greatest id of the entries."""
    keys: Hashes = field(default_factory=lambda: np.zeros(0, np.int64))
    """A hash of kind and id of each line of an operation, sorted."""

    @property
    def days(self) -> tuple[int, int]:
        """The first and the last day, as days since 1970."""
        first, last = (min(max(at // DAY_MILLISECONDS, 0), LAST_DAY) for at in (self.oldest, self.newest))
        return first, last

    def may_be_in(self, file: DataFile) -> bool:
        """Returns whether a file of operations or entries may have a line of this batch.

        A line that was written twice has the same id and the same time both times. The outcome of an operation has the
        time at which the operation ended.
        """
        least, greatest = file.limits.get("id", self.ids)
        if len(greatest) <= _WHOLE_LIMIT and (greatest < self.ids[0] or self.ids[1] < least):
            return False
        if "at" not in file.limits:
            return True
        began, ended = file.limits["at"], file.limits.get("ended", file.limits["at"])
        return bool(min(began[0], ended[0]) <= self.newest and self.oldest <= max(began[1], ended[1]))

    def write_tasks(self, rows: int) -> int | None:
        """Returns how many tasks write so many rows, without a shuffle. Each task writes a file for each of its days.

        Returns None if that could be too many files.
        """
        tasks = max(min(2, math.ceil(rows / _FEW_ROWS)), math.ceil(rows / _TASK_ROWS), 1)
        first, last = self.days
        return tasks if tasks * (last - first + 1) <= _MOST_FILES else None

    def few_tasks(self, rows: int) -> int:
        """Returns how many tasks write so many rows by day, without too many files. It is at least one."""
        first, last = self.days
        return self.write_tasks(rows) or max(_MOST_FILES // (last - first + 1), 1)


def measured(rows: DataFrame) -> ParsedBatch:
    """Returns what is known about parsed lines. Spark computes them once if they are cached."""
    limits = F.col("packed_limits")
    ends = {
        name: F.coalesce(limits[name], F.col(own))
        for name, own in (("oldest", "at"), ("newest", "at"), ("least", "id"), ("greatest", "id"))
    }
    found = rows.agg(
        F.coalesce(F.sum(limits["rows"]), F.lit(0)),
        F.count("kind"),
        F.coalesce(F.sum(moved_messages()), F.lit(0)),
        F.count("problem"),
        F.min(ends["oldest"]),
        F.max(ends["newest"]),
        F.min(ends["least"]),
        F.max(ends["greatest"]),
        F.collect_list("packed_keys"),
    ).first()
    assert found is not None, "an aggregate without keys has a row"
    lines, others, moved, rejected, oldest, newest, least, greatest, packed = found
    keys = np.sort(np.frombuffer(b"".join(packed), np.int64))
    return ParsedBatch(
        rows, lines, others, moved, rejected, oldest or 0, newest or 0, (least or "", greatest or ""), keys
    )


def moved_messages() -> Column:
    """Returns the number of message ids of a movement; null for other entries."""
    return F.when((F.col("kind") == Movement.kind) & F.col("ids").isNotNull(), F.size("ids"))
