"""Disks that fail, for tests of the ledger."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def hanging_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Make syncs of the disk wait until the block ends. The event is set when the first sync waits."""
    answers, asked = threading.Event(), threading.Event()
    fsync = os.fsync

    def hanging(number: int) -> None:
        asked.set()
        answers.wait()
        fsync(number)

    monkeypatch.setattr(os, "fsync", hanging)
    try:
        yield asked
    finally:
        answers.set()
