"""A real kill -9: flushed entries are on the disk. And many processes in one directory."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from random import Random

from twinbus.ledger import Ledger, balance, dead_writers, read_ledger
from twinbus.ledger.entries import Gap, Intent, Operation, SegmentHeader
from twinbus.ledger.segments import list_segments

# Prints each number after its entry is flushed. Every third operation has only an intent.
WRITING = """
import sys
from datetime import timedelta
from twinbus.ledger import Ledger, LedgerOptions, Stage
ledger = Ledger(sys.argv[1], options=LedgerOptions(segment_bytes=4096, group_interval=timedelta(milliseconds=1)))
number = 0
while True:
    for number in range(number, number + 7):
        running = ledger.begin(Stage.RETURN_PRIMARY, "contoso", "orders", [f"{sys.argv[2]}-{number}"])
        if number % 3:
            running.end()
    number += 1
    ledger.flush()
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""
LIVES = 8


def live(directory: Path, name: int, seconds: float) -> int:
    """Let the writer run for this number of seconds, then kill it. Returns how many numbers it had printed."""
    child = subprocess.Popen([sys.executable, "-c", WRITING, directory, str(name)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    timer = threading.Timer(seconds, os.kill, (child.pid, signal.SIGKILL))
    timer.start()
    told = child.stdout.read()
    timer.join()
    child.wait()
    return int(told.splitlines()[-1]) if told.endswith("\n") else 7


def test_everything_flushed_before_a_kill_is_in_the_ledger(tmp_path: Path) -> None:
    chance = Random(4)
    flushed = {name: live(tmp_path, name, chance.uniform(0, 0.2)) for name in range(LIVES)}
    begun: dict[int, set[int]] = {name: set() for name in flushed}
    for entry in read_ledger(tmp_path):
        if isinstance(entry, Intent | Operation):
            name, number = map(int, entry.ids[0].split("-"))
            begun[name].add(number)
    for name, count in flushed.items():
        assert begun[name] >= set(range(count))
        # Later ones are there as far as they have ended; an intent waits for its group.
        assert all(number % 3 == 0 for number in set(range(max(begun[name]))) - begun[name])
    # Each process sealed the segments that the killed process before it left open.
    assert len({segment.writer for segment in list_segments(tmp_path) if segment.is_open}) <= 1
    found = balance(read_ledger(tmp_path))
    assert found.unconfirmed.total() == sum(map(len, begun.values()))
    assert found.incomplete == [], "all that was recorded is there, though no writer closed"


TAKING_PART = """
import sys, threading
from twinbus.ledger import Ledger, LedgerOptions, Stage
ledger = Ledger(sys.argv[1], options=LedgerOptions(segment_bytes=4096))
def work(thread):
    for number in range(300):
        ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", [f"{sys.argv[2]}-{thread}-{number}"]).end()
        if number % 50 == 0:
            ledger.flush()
threads = [threading.Thread(target=work, args=(thread,)) for thread in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_many_processes_share_a_directory(tmp_path: Path) -> None:
    children = [subprocess.Popen([sys.executable, "-c", TAKING_PART, tmp_path, str(name)]) for name in range(4)]
    with Ledger(tmp_path) as ledger:
        ledger.state("looking_on", {})
        assert all(child.wait(60) == 0 for child in children)
    found = balance(read_ledger(tmp_path))
    assert found.delivered.total() == len(found.delivered) == 4 * 2 * 300
    assert found.incomplete == []
    writers = {entry.writer for entry in read_ledger(tmp_path) if isinstance(entry, SegmentHeader)}
    assert len(writers) == 5
    assert not any(segment.is_open for segment in list_segments(tmp_path))


# --- L2: what was reported is in the ledger --------------------------------------------------------------------------

# Reports each operation as soon as it has ended, without a flush. Every third one was in flight at a flush.
REPORTING = """
import os, sys
from datetime import timedelta
from twinbus.ledger import Ledger, LedgerOptions, Stage
slow = timedelta(minutes=1)
ledger = Ledger(sys.argv[1], options=LedgerOptions(segment_bytes=4096, group_interval=slow))
for number in range(int(sys.argv[2])):
    running = ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", f"m{number}")
    if number % 3 == 0:
        ledger.flush()
    running.end()
    os.write(1, f"{number}\\n".encode())
os._exit(0)
"""


def reported_and_delivered(directory: Path, count: int, seconds: float | None) -> tuple[set[str], set[str]]:
    command = [sys.executable, "-c", REPORTING, str(directory), str(count)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    first = child.stdout.readline()
    timer = threading.Timer(seconds, os.kill, (child.pid, signal.SIGKILL)) if seconds is not None else None
    if timer is not None:
        timer.start()
    told = first + child.stdout.read()
    child.wait()
    if timer is not None:
        timer.cancel()
    reported = {f"m{number}" for number in told.splitlines() if told.endswith("\n")}
    return reported, {message.id for message in balance(read_ledger(directory)).delivered}


def test_l2_every_operation_that_was_reported_before_a_kill_is_in_the_ledger(tmp_path: Path) -> None:
    chance = Random(6)
    for life in range(LIVES):
        reported, delivered = reported_and_delivered(tmp_path / str(life), 10**6, chance.uniform(0, 0.2))
        assert reported
        assert reported <= delivered


def test_l2_a_process_that_ends_at_once_has_written_all_its_operations(tmp_path: Path) -> None:
    reported, delivered = reported_and_delivered(tmp_path, 100, None)
    assert reported == delivered == {f"m{number}" for number in range(100)}


# Cannot write any more after the first entry, and ends with the others in memory.
FAILING = """
import os, resource, sys
from twinbus.ledger import Ledger, Stage
ledger = Ledger(sys.argv[1])
ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", "first").end()
ledger.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for number in range(10):
    ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", f"m{number}").end()
os.kill(os.getpid(), 9)
"""


# Cannot open any file, also no segment, and ends with its entries in memory.
WITHOUT_FILES = """
import os, resource, sys
from twinbus.ledger import Ledger, Stage
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
ledger = Ledger(sys.argv[1])
for number in range(10):
    ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", f"m{number}").end()
os.kill(os.getpid(), 9)
"""


def test_l1_after_a_kill_of_a_process_without_file_descriptors_the_ledger_is_known_to_be_incomplete(
    tmp_path: Path,
) -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_FILES, str(tmp_path)], check=False, stderr=subprocess.DEVNULL)
    (reason,) = balance(read_ledger(tmp_path), dead_writers(tmp_path)).incomplete
    assert "could not write" in reason


def test_l1_after_a_kill_while_the_disk_failed_the_ledger_is_known_to_be_incomplete(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FAILING, str(tmp_path)], check=False, stderr=subprocess.DEVNULL)
    (before,) = [entry for entry in read_ledger(tmp_path) if isinstance(entry, Gap)]
    assert "could not write" in before.reason
    with Ledger(tmp_path) as ledger:
        ledger.state("restored", {})
        assert ledger.flush()
        assert [entry for entry in read_ledger(tmp_path) if isinstance(entry, Gap)] == [before]
        assert not list(tmp_path.glob("*.failing")), "the entry is in a segment now"
    assert any("could not write" in reason for reason in balance(read_ledger(tmp_path)).incomplete)
