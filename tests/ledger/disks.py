"""Disks in trouble."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def hanging_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """One that does not answer within the block; the event tells that it was asked."""
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
