"""L1 and L2: a writer is killed at each call of the operating system: in a write, a sync, a rename, a fork's child.

So it dies with a torn line, between two segments, and while it seals the segment of the writer that died before it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ledger.killed_writer import MODES
from tests.tiers import budget
from twinbus.ledger import LineProblem, SegmentHeader, balance, dead_writers, read_ledger

STEP = budget(9, 1)
"""Every call, or one in so many."""


CASES = [
    *(pytest.param("process", mode) for mode in MODES),
    *(pytest.param("lazy", mode, marks=pytest.mark.thorough) for mode in MODES),
]


@pytest.mark.parametrize(("durability", "mode"), CASES)
def test_l1_l2_a_writer_killed_at_any_call_has_written_every_operation_that_ended(
    tmp_path: Path, durability: str, mode: str
) -> None:
    directory, told = tmp_path / "ledger", tmp_path / "told"
    told.mkdir()
    arguments = map(str, (directory, told, durability, mode, 1, STEP))
    command = [sys.executable, "-m", "tests.ledger.killed_writer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    print(f"{done.stdout.strip()} calls")
    assert int(done.stdout) > STEP, "some writers were killed"
    safe = {line for file in told.iterdir() for line in file.read_text().split()}
    dead = dead_writers(directory)
    problems: list[LineProblem] = []
    entries = list(read_ledger(directory, problems.append))
    assert problems == []
    assert {message.id for message in balance(entries).delivered} >= safe
    writers = {entry.writer for entry in entries if isinstance(entry, SegmentHeader)}
    assert writers == dead, "every writer has ended"
