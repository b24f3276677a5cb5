"""A stream is started again if Spark ended it because its Python process started slowly, and for no other reason.

Spark's query is replaced here, because a test cannot make a Python process start slowly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from pyspark.sql.streaming.query import StreamingQuery

from twinbus.pipeline.session import start_query

SLOW = "[STREAM_FAILED] … terminated with exception: Python worker failed to connect back. SQLSTATE: XXKST"


@dataclass
class Played:
    """A query that reports `messages` one after the other, and then has ended if there is an error."""

    ended_by: str | None
    messages: list[str] = field(default_factory=lambda: ["Initializing StreamExecution", "Initializing sources"])

    @property
    def isActive(self) -> bool:  # noqa: N802  # Spark's name
        return bool(self.messages) or self.ended_by is None

    @property
    def status(self) -> dict[str, Any]:
        return {"message": self.messages.pop(0) if self.messages else "Waiting for data to arrive"}

    def exception(self) -> str | None:
        return self.ended_by


@pytest.mark.parametrize(
    ("ends", "used"),
    [
        ([None], 1),
        ([SLOW, SLOW, None], 3),
        (["a disk is full", None], 1),
        ([SLOW] * 20, 6),
    ],
)
def test_a_query_is_started_again_while_its_python_was_too_slow(ends: list[str | None], used: int) -> None:
    queries = [Played(end) for end in ends]
    left = iter(queries)
    assert start_query(lambda: cast("StreamingQuery", next(left))) is cast("object", queries[used - 1])
    assert len(list(left)) == len(ends) - used
