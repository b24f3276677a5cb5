"""A really full disk: a small file system or, where the test may not mount one, a limit on file sizes."""

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from twinbus.ledger import (
    Ledger,
    LedgerOptions,
    LedgerUnavailableError,
    Stage,
    balance,
    dead_writers,
    read_ledger,
)
from twinbus.ledger.entries import Gap, Operation

BALLAST = "ballast"
MOUNT = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KB. A file that the test can remove uses 64 KB of it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run([*MOUNT, disk], check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        (disk / BALLAST).write_bytes(b"x" * 64 * 1024)
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


def send(ledger: Ledger, number: int) -> None:
    ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", [number], 10).end()


def fill(ledger: Ledger) -> int:
    """Send until a group cannot be written. Returns the number of sends."""
    for number in range(10_000):
        send(ledger, number)
        if number % 20 == 0 and not ledger.flush():
            return number + 1
    raise AssertionError("the disk never was full")


def test_operations_go_on_and_buffered_entries_are_written_once_there_is_room(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Ledger(small_disk / "ledger") as ledger, caplog.at_level(logging.WARNING, "twinbus.ledger"):
        sent = fill(ledger)
        assert ledger.failure is not None
        assert "No space left" in ledger.failure
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        for number in range(sent, sent + 50):
            send(ledger, number)
        assert ledger.flush() is False
        assert balance(read_ledger(ledger.directory)).lost.total() == 0
        (small_disk / BALLAST).unlink()
        assert ledger.flush() is True
        assert "can be written again; 0 entries are missing" in caplog.text
    found = balance(read_ledger(ledger.directory))
    assert found.delivered.total() == sent + 50
    assert found.incomplete == []


def test_entries_beyond_the_buffer_are_missing_and_a_gap_counts_them(small_disk: Path) -> None:
    with Ledger(small_disk / "ledger", options=LedgerOptions(buffer_bytes=8192)) as ledger:
        sent = fill(ledger)
        for number in range(sent, sent + 500):
            send(ledger, number)
            if number % 50 == 0:
                ledger.flush()
        (small_disk / BALLAST).unlink()
        assert ledger.flush()
        send(ledger, sent + 500)
    entries = list(read_ledger(ledger.directory))
    gaps = [entry for entry in entries if isinstance(entry, Gap)]
    there = sum(isinstance(entry, Operation) for entry in entries)
    assert sum(gap.count for gap in gaps) == ledger.missing > 0
    assert there + ledger.missing == sent + 501
    assert all(gap.since <= gap.until and "No space left" in gap.reason for gap in gaps)
    assert f"{ledger.missing} entries are missing" in balance(entries).incomplete[0]


def test_with_stop_an_operation_is_refused_before_it_is_tried_until_there_is_room(small_disk: Path) -> None:
    with Ledger(small_disk / "ledger", options=LedgerOptions(on_error="stop")) as ledger:
        sent = 0
        with pytest.raises(LedgerUnavailableError, match="No space left"):
            sent = fill(ledger)
        with pytest.raises(LedgerUnavailableError, match=r"cannot be written: No space left.*Make room"):
            send(ledger, sent)
        with pytest.raises(LedgerUnavailableError):
            ledger.check()
        (small_disk / BALLAST).unlink()
        assert ledger.flush()
        ledger.check()
        send(ledger, sent)
        assert ledger.flush()


def test_closing_a_ledger_that_cannot_be_written_raises_or_logs(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for on_error in ("go_on", "stop"):
        ledger = Ledger(small_disk / on_error, options=LedgerOptions(on_error=on_error))
        (small_disk / "more").write_bytes(b"x" * 30_000)
        try:
            fill(ledger)
        except LedgerUnavailableError:
            assert on_error == "stop"
        caplog.clear()
        if on_error == "stop":
            with pytest.raises(LedgerUnavailableError, match="No space left"):
                ledger.close()
        else:
            ledger.close()
        assert "closed, but not everything is in" in caplog.text


@pytest.mark.parametrize("durability", ["process", "lazy"])
def test_at_a_file_size_limit_the_next_segment_is_opened(tmp_path: Path, durability: str) -> None:
    program = (
        "import resource, sys; from twinbus.ledger import Ledger, LedgerOptions, Stage\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "ledger = Ledger(sys.argv[1], options=LedgerOptions(durability=sys.argv[2]))\n"
        "for n in range(300):\n"
        "    ledger.begin(Stage.SEND_PRIMARY, 'contoso', 'orders', [n]).end()\n"
        "    if not ledger.flush(): print(ledger.failure)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), durability]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    # With "process", the entry itself finds the limit, and the flush after it opens the next segment.
    assert set(done.stdout.splitlines()) == ({"File too large"} if durability == "lazy" else set())
    assert "cannot be written: File too large" in done.stderr
    assert balance(read_ledger(tmp_path)).delivered.total() == 300


def test_a_directory_that_cannot_be_made_raises_or_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with Ledger(tmp_path / "file" / "ledger") as ledger:
        assert "cannot be made" in caplog.text
        send(ledger, 1)
        assert ledger.flush() is False
    with pytest.raises(LedgerUnavailableError, match="Not a directory"):
        Ledger(tmp_path / "file" / "ledger", options=LedgerOptions(on_error="stop"))


KILLED = """
import os, signal, sys
from pathlib import Path
from twinbus.ledger import Ledger, LedgerOptions, Stage
disk, durability, room = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if not room:
    with (disk / "more").open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            pass
ledger = Ledger(disk / "ledger", options=LedgerOptions(durability=durability))
for number in range(10_000):
    ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", [number], 10).end()
    if number % 20 == 0 and not ledger.flush():
        break
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("room", [1, 0], ids=["room at first", "never any room"])
@pytest.mark.parametrize("durability", ["process", "lazy"])
def test_l1_a_writer_that_was_killed_while_it_could_not_write_leaves_a_ledger_that_is_not_whole(
    small_disk: Path, durability: str, room: int
) -> None:
    """Its last entries were in memory, and it could not write how many. Its segment was sealed when a write failed."""
    directory = small_disk / "ledger"
    command = [sys.executable, "-c", KILLED, str(small_disk), durability, str(room)]
    killed = subprocess.run(command, check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    (dead,) = dead_writers(directory)
    before = balance(read_ledger(directory), {dead})
    assert any("could not write" in reason for reason in before.incomplete)
    # The next writer reports it in a segment, and removes the mark.
    for file in small_disk.iterdir():
        if file.is_file():
            file.unlink()
    with Ledger(directory) as ledger:
        send(ledger, 1)
    assert {path.suffix for path in directory.iterdir()} == {".jsonl"}
    after = balance(read_ledger(directory), dead_writers(directory))
    assert any("could not write" in reason for reason in after.incomplete)


def test_l1_a_writer_that_could_write_again_has_no_mark(small_disk: Path) -> None:
    directory = small_disk / "ledger"
    with Ledger(directory) as ledger:
        fill(ledger)
        assert dead_writers(directory) == set()
        assert [entry for entry in read_ledger(directory) if isinstance(entry, Gap)] != []
        (small_disk / BALLAST).unlink()
        assert ledger.flush()
        assert [entry for entry in read_ledger(directory) if isinstance(entry, Gap)] == []
    assert {path.suffix for path in directory.iterdir()} == {".jsonl"}
    assert balance(read_ledger(directory)).incomplete == []
