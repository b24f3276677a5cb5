"""A signal handler may use a ledger though it interrupted a write of the same thread."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Self

import pytest

from twinbus.ledger import Ledger, LedgerOptions, LedgerUnavailableError, Stage, balance, list_segments, read_ledger
from twinbus.ledger.entries import Closed


def send(ledger: Ledger, id_: str) -> None:
    ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", [id_], 10).end()


def test_a_signal_handler_may_record_an_entry_while_a_segment_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def interrupted(*names: Path) -> None:
        rename(*names)
        monkeypatch.setattr(os, "rename", rename)
        signal.raise_signal(signal.SIGUSR1)

    with Ledger(tmp_path) as ledger:
        before = signal.signal(signal.SIGUSR1, lambda *_: send(ledger, "inner"))
        try:
            monkeypatch.setattr(os, "rename", interrupted)
            send(ledger, "outer")
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert ledger.flush()
        assert ledger.failure is None
        assert [segment.number for segment in list_segments(tmp_path) if segment.is_open] == [1]
    found = balance(read_ledger(tmp_path))
    assert {message.id for message in found.delivered} == {"inner", "outer"}
    assert found.incomplete == []


@contextlib.contextmanager
def interrupted_write(monkeypatch: pytest.MonkeyPatch, handler: Callable[[], object]) -> Iterator[None]:
    """Call `handler` in a signal handler that interrupts the next write to a file."""
    write = os.write

    def interrupted(file: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        signal.raise_signal(signal.SIGUSR1)
        return write(file, data)

    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        monkeypatch.setattr(os, "write", interrupted)
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("on_error", ["go_on", "stop"])
def test_a_flush_in_a_signal_handler_that_interrupted_a_write_fails_and_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: Literal["go_on", "stop"]
) -> None:
    said: list[object] = []

    def flush() -> None:
        try:
            said.append(ledger.flush(None))
        except LedgerUnavailableError as error:
            said.append(error.cause)

    with Ledger(tmp_path, options=LedgerOptions(on_error=on_error)) as ledger:
        send(ledger, "first")
        assert ledger.flush()
        with interrupted_write(monkeypatch, flush):
            send(ledger, "second")
        assert said == [False if on_error == "go_on" else "a signal handler interrupted a write of the same thread"]
        assert ledger.flush(), "afterwards all is well"
        assert ledger.failure is None
    assert balance(read_ledger(tmp_path)).delivered.total() == 2


@pytest.mark.parametrize("on_error", ["go_on", "stop"])
def test_a_close_in_a_signal_handler_that_interrupted_a_write_does_not_wait_and_the_next_close_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    on_error: Literal["go_on", "stop"],
) -> None:
    ledger = Ledger(tmp_path, options=LedgerOptions(on_error=on_error))
    send(ledger, "first")
    with interrupted_write(monkeypatch, lambda: ledger.close(None)):
        send(ledger, "second")
    if on_error == "stop":
        with pytest.raises(LedgerUnavailableError, match="it was closed"):
            ledger.check()
    ledger.close()
    assert not any(segment.is_open for segment in list_segments(tmp_path))
    assert [entry for entry in read_ledger(tmp_path) if isinstance(entry, Closed)]
    assert balance(read_ledger(tmp_path)).delivered.total() == 2
    assert caplog.text == ""


def test_a_program_that_ends_in_a_signal_handler_which_interrupted_a_write_has_closed_its_ledger(
    tmp_path: Path,
) -> None:
    program = """
import os, signal, sys
from twinbus.ledger import Ledger, Stage
write = os.write
def interrupted(file, data):
    os.write = write
    signal.raise_signal(signal.SIGTERM)
    return write(file, data)
def ends(*_):
    ledger.close()
    sys.exit(3)
ledger = Ledger(sys.argv[1])
signal.signal(signal.SIGTERM, ends)
ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", ["a"]).end()
os.write = interrupted
ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", ["b"]).end()
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert not any(segment.is_open for segment in list_segments(tmp_path))
    assert balance(read_ledger(tmp_path)).delivered.total() == 2


class InterruptedAt:
    """While it is entered, calls `handler` in a signal handler at the n-th line of the ledger's or threading's code."""

    def __init__(self, nth: int, handler: Callable[[], object]) -> None:
        self.left = nth
        self._handler = handler

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGUSR1, lambda *_: self._handler())
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, self._before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if "/twinbus/ledger/" not in name and not name.endswith("/threading.py"):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)
        return self._trace


def interrupted_everywhere(directory: Path, handler: Callable[[Ledger], object]) -> Iterator[Ledger]:
    """Yield one ledger for each line that a send runs, after a signal handler has run at this line."""
    for nth in itertools.count(1):
        with Ledger(directory / str(nth)) as ledger:
            with InterruptedAt(nth, partial(handler, ledger)) as interrupted:
                send(ledger, "outer")
            if interrupted.left > 0:
                return
            yield ledger


@pytest.mark.thorough
def test_a_signal_handler_may_record_an_entry_at_each_line_of_a_send(tmp_path: Path) -> None:
    for number, ledger in enumerate(interrupted_everywhere(tmp_path, lambda ledger: send(ledger, "inner")), 1):
        assert ledger.flush()
        name = f"twinbus-ledger-{ledger.writer.rpartition('-')[2]}"
        assert [thread.name for thread in threading.enumerate()].count(name) == 1
        ledger.close()
        found = balance(read_ledger(ledger.directory))
        assert {message.id for message in found.delivered} == {"inner", "outer"}, number
        assert found.incomplete == [], number
    assert number > 50


@pytest.mark.thorough
@pytest.mark.parametrize("call", [Ledger.flush, Ledger.close])
def test_a_signal_handler_may_flush_or_close_at_each_line_of_a_send(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: Callable[[Ledger], object]
) -> None:
    ledgers = 0
    for ledger in interrupted_everywhere(tmp_path, call):
        ledgers += 1
        ledger.close()
    # The thread of a ledger that was closed before its first entry seals the segment of this entry later.
    deadline = time.monotonic() + 30
    while list(tmp_path.glob("*/*.open")):
        assert time.monotonic() < deadline, "a segment stays open"
        time.sleep(0.005)
    assert "has not answered" not in caplog.text
    assert "not everything is in" not in caplog.text
    assert ledgers > 50
