"""Reading a ledger's directory: every entry of every segment, open ones too.

A torn last line is what a crash leaves, and is passed over; anything else that is no entry is a problem, and is told.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from twinbus.ledger.encoding import decode
from twinbus.ledger.entries import Entry
from twinbus.ledger.errors import EntryError, LedgerUnreadableError
from twinbus.ledger.segments import Segment, segments


@dataclass(frozen=True, slots=True)
class Problem:
    """A line, counted from 1, that is no entry."""

    file: Path
    line: int
    cause: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.cause}"


def read_ledger(directory: str | os.PathLike[str], problem: Callable[[Problem], None] | None = None) -> Iterator[Entry]:
    """Segment by segment, each in the order it was written. Without `problem`: LedgerUnreadableError at the first."""
    for segment in segments(Path(directory)):
        yield from _read(segment, problem or _raise)


def _read(segment: Segment, problem: Callable[[Problem], None]) -> Iterator[Entry]:
    try:
        path = segment.path
        file = path.open("rb")
    except FileNotFoundError:
        # Sealed since it was listed, or removed for the budget.
        path = segment.sealed_path
        try:
            file = path.open("rb")
        except FileNotFoundError:
            problem(Problem(path, 0, "removed while the ledger was read"))
            return
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decode(line)
            except EntryError as error:
                problem(Problem(path, number, str(error)))


def _raise(problem: Problem) -> None:
    raise LedgerUnreadableError(problem.file, problem.line, problem.cause)
