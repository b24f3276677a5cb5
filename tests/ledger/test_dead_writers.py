"""Which writers are dead, and what is sealed in their name (L1)."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest

from twinbus.ledger import (
    Ended,
    Ledger,
    LedgerOptions,
    SegmentHeader,
    Stage,
    balance,
    dead_writers,
    encode_entry,
    group_writer,
    list_segments,
    read_ledger,
    unfinished_writers,
)
from twinbus.ledger.dead_writers import own_host

MINUTE = 60.0
# Prints its name once its first segment is there, then does what it is told.
WRITING = """
import os, sys
from twinbus.ledger import Ledger, Stage
ledger = Ledger(sys.argv[1])
ledger.begin(Stage.SEND_BACKLOG, "contoso", "queue", ["a"], destination="contoso/orders")
ledger.flush()
print(ledger.writer, flush=True)
if sys.stdin.readline() == "close\\n":
    ledger.close()
    print("closed", flush=True)
    sys.stdin.readline()
os.kill(os.getpid(), 9)
"""

# Forks while its writer opens a file, before or after the rename; then it is killed, and the child lives on.
FORKING = """
import errno, os, sys
from twinbus.ledger import Ledger, Stage
rename, directory, what, when = os.rename, *sys.argv[1:]

def say(line):
    sys.stdout.write(line + "\\n")
    sys.stdout.flush()

def full(file, data):
    raise OSError(errno.ENOSPC, "No space left on device")

def forking(old, new):
    if not str(new).endswith(what):
        return rename(old, new)
    if when == "after":
        rename(old, new)
    if os.fork() == 0:
        say("child" if ledger.writer != name else "no writer of its own")
        sys.stdin.read()
        os._exit(0)
    if when == "before":
        rename(old, new)
    os.rename = rename

ledger = Ledger(directory)
name = ledger.writer
os.rename = forking
if what == ".failing":
    os.write = full
ledger.state("restored", {})
say(name)
os.kill(os.getpid(), 9)
"""


class Writer:
    """A writer in a process of its own."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-c", WRITING, str(directory)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.name = self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("close\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "closed\n"


def test_l1_a_writer_is_dead_as_soon_as_its_process_was_killed(tmp_path: Path) -> None:
    one, other = Writer(tmp_path), Writer(tmp_path)
    assert dead_writers(tmp_path) == frozenset()
    one.kill()
    assert dead_writers(tmp_path) == {one.name}
    assert dead_writers(tmp_path, now=0.0) == {one.name}, "the lock proves it: no silence is needed"
    other.kill()
    assert dead_writers(tmp_path) == {one.name, other.name}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", [".jsonl.open", ".failing"])
def test_l1_a_killed_writer_is_dead_though_it_forked_while_it_opened_a_file(
    tmp_path: Path, what: str, when: str
) -> None:
    command = [sys.executable, "-c", FORKING, str(tmp_path), what, when]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = {process.stdout.readline().strip() for _ in range(2)}
        assert "child" in said
        (name,) = said - {"child"}
        assert process.wait(60) == -signal.SIGKILL
        assert dead_writers(tmp_path) == {name}
        process.communicate("")


def test_l1_a_fork_while_a_reader_looks_at_a_segment_does_not_keep_the_segment_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path)
    writer.kill()
    waiting, end = os.pipe()
    fstat, children = os.fstat, []

    def forking(file: int) -> os.stat_result:
        monkeypatch.setattr(os, "fstat", fstat)
        if (child := os.fork()) == 0:
            os.close(end)
            os.read(waiting, 1)
            os._exit(0)
        children.append(child)
        return fstat(file)

    monkeypatch.setattr(os, "fstat", forking)
    assert dead_writers(tmp_path) == {writer.name}
    (segment,) = list_segments(tmp_path)
    with segment.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(end)
    (child,) = children
    os.waitpid(child, 0)
    os.close(waiting)


def test_l1_a_writer_that_was_closed_is_dead_though_its_process_lives(tmp_path: Path) -> None:
    one = Writer(tmp_path)
    one.close()
    assert dead_writers(tmp_path, now=0.0) == {one.name}
    one.kill()


def test_l1_whoever_seals_the_segment_of_a_dead_writer_appends_an_ended_entry(tmp_path: Path) -> None:
    dead = Writer(tmp_path)
    dead.kill()
    with Ledger(tmp_path) as ledger:
        ledger.state("restored", {})
        assert ledger.flush()
        (ended,) = [entry for entry in read_ledger(tmp_path) if isinstance(entry, Ended)]
        assert (ended.writer, ended.by, ended.segment) == (dead.name, ledger.writer, 0)
        assert not next(one for one in list_segments(tmp_path) if one.writer == dead.name).is_open
        assert dead_writers(tmp_path, now=0.0) == {dead.name}, "also where no lock can be looked at"


def test_l1_a_seal_that_was_interrupted_is_repeated_under_the_same_id(tmp_path: Path) -> None:
    dead = Writer(tmp_path)
    dead.kill()
    with Ledger(tmp_path) as ledger:
        ledger.state("restored", {})
        assert ledger.flush()
    (segment,) = [one for one in list_segments(tmp_path) if one.writer == dead.name]
    # As if that process had ended between its line and the rename.
    segment.path.rename(segment.path.with_name(segment.path.name + ".open"))
    with Ledger(tmp_path) as ledger:
        ledger.state("restored", {})
    ended = [entry for entry in read_ledger(tmp_path) if isinstance(entry, Ended)]
    assert len({entry.id for entry in ended}) == 1 < len(ended)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A ledger whose one segment, still open, came from another host."""
    with Ledger(tmp_path) as ledger:
        ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", ["a"]).end()
        assert ledger.flush()
        (segment,) = list_segments(tmp_path)
        content = segment.path.read_bytes()
    (sealed,) = list_segments(tmp_path)
    sealed.path.unlink()
    path = tmp_path / segment.path.name.replace(f"client-{own_host()}-", "client-elsewhere-")
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("is_open", [True, False])
def test_l1_a_writer_of_another_host_is_dead_after_a_time_of_silence(elsewhere: Path, is_open: bool) -> None:
    path = elsewhere if is_open else elsewhere.rename(elsewhere.with_suffix(""))
    os.utime(path, (1000.0, 1000.0))
    (segment,) = list_segments(path.parent)
    assert dead_writers(path.parent, now=1000.0 + 14 * MINUTE) == frozenset()
    assert dead_writers(path.parent, now=1000.0 + 16 * MINUTE) == {segment.writer}
    assert dead_writers(path.parent, now=1000.0 + 2 * MINUTE, silence=timedelta(minutes=1)) == {segment.writer}


def test_l1_a_writer_that_goes_on_after_it_was_taken_for_dead_is_not_dead(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.state("restored", {})
        assert ledger.flush()
        (segment,) = list_segments(tmp_path)
        sealed = segment.path.rename(segment.sealed_path)
        with sealed.open("a") as file:
            file.write(encode_entry(Ended(at=1, id="x-ended-0", writer=ledger.writer, by="x", segment=0)))
        assert dead_writers(tmp_path) == {ledger.writer}
        ledger.state("restored", {})
        assert ledger.flush()
        assert dead_writers(tmp_path) == frozenset()
    headers = [entry.segment for entry in read_ledger(tmp_path) if isinstance(entry, SegmentHeader)]
    assert max(headers) > 0


def test_l1_a_writer_between_two_segments_is_not_dead_until_it_was_silent(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.state("restored", {})
        assert ledger.flush()
        (segment,) = list_segments(tmp_path)
        segment.path.rename(segment.sealed_path)
        assert dead_writers(tmp_path) == frozenset()
        os.utime(segment.sealed_path, (0.0, 0.0))
        assert dead_writers(tmp_path) == {ledger.writer}


@pytest.mark.parametrize("durability", [pytest.param("process", marks=pytest.mark.thorough), "lazy"])
def test_l1_an_idle_writer_is_not_dead_however_long_it_is_idle(
    tmp_path: Path, durability: Literal["process", "lazy"]
) -> None:
    """Its segment reaches its age and is sealed. Nothing is written after that."""
    options = LedgerOptions(durability=durability, segment_age=timedelta(seconds=1))
    with Ledger(tmp_path, options=options) as ledger:
        ledger.state("restored", {})
        while all(segment.is_open for segment in list_segments(tmp_path)):
            time.sleep(0.05)
        for segment in list_segments(tmp_path):
            os.utime(segment.path, (0.0, 0.0))
        assert dead_writers(tmp_path) == frozenset()
        found = balance(read_ledger(tmp_path), dead_writers(tmp_path))
        assert (found.at_work, found.incomplete) == ([ledger.writer], [])
        for _ in range(3):  # each is a reason to look at the age of the segment
            assert ledger.flush()
        assert len(list(list_segments(tmp_path))) == 2, "an open segment without entries has no age"
        assert unfinished_writers(tmp_path) == frozenset(), "its next segment is here"
        copy = tmp_path / "copy"
        copy.mkdir()
        for segment in list_segments(tmp_path):
            if not segment.is_open:
                (copy / segment.path.name).write_bytes(segment.path.read_bytes())
        assert unfinished_writers(copy) == {ledger.writer}
    assert unfinished_writers(tmp_path) == frozenset()
    assert dead_writers(tmp_path) == {ledger.writer}


def test_l1_an_idle_writer_renews_the_time_of_its_segment_for_readers_on_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_writer, "RENEW_SECONDS", 0.02)
    with Ledger(tmp_path) as ledger:
        ledger.state("restored", {})
        assert ledger.flush()
        (segment,) = list_segments(tmp_path)
        content = segment.path.read_bytes()
        os.utime(segment.path, (0.0, 0.0))
        while segment.path.stat().st_mtime == 0.0:
            time.sleep(0.01)
        assert segment.path.read_bytes() == content


@pytest.mark.parametrize("ahead", [0.0, 20 * MINUTE])
def test_l1_l5_a_reader_with_a_wrong_clock_takes_no_live_writer_for_dead(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """Silence is measured by the clock of the file system, which sets the times of the segments."""
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + ahead)
    assert dead_writers(elsewhere.parent) == frozenset()
    os.utime(elsewhere, (true_time() - 16 * MINUTE,) * 2)
    (segment,) = list_segments(elsewhere.parent)
    assert dead_writers(elsewhere.parent) == {segment.writer}
    assert list(elsewhere.parent.iterdir()) == [elsewhere], "nothing is left there"
