"""Disks that fail, for tests of the ledger."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def hanging_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Make syncs of the disk wait until the block ends. The event is set when the first sync waits."""
    answers, asked = threading.Event(), threading.Event()

    def hanging(sync: Callable[[int], None]) -> Callable[[int], None]:
        def wait(number: int) -> None:
            asked.set()
            answers.wait()
            sync(number)

        return wait

    monkeypatch.setattr(os, "fsync", hanging(os.fsync))
    monkeypatch.setattr(os, "fdatasync", hanging(os.fdatasync))
    try:
        yield asked
    finally:
        answers.set()
