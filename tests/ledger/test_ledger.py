"""The ledger: what reaches the disk from threads, tasks and forks, and when a program ends."""

import asyncio
import errno
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from twinbus.ledger import (
    Entry,
    Ledger,
    LedgerOptions,
    LedgerUnavailableError,
    Move,
    Role,
    Stage,
    balance,
    dead_writers,
    group_writer,
    read_ledger,
)
from twinbus.ledger.entries import (
    UNIT_BYTES,
    Closed,
    Gap,
    Intent,
    Metered,
    Movement,
    Operation,
    Outcome,
    SegmentHeader,
    State,
)
from twinbus.ledger.options import LedgerOptionError
from twinbus.ledger.running_operation import NOTIFY_EVERY
from twinbus.ledger.segments import list_segments

from .disks import hanging_disk


def entries_in(directory: Path) -> list[Entry]:
    return [entry for entry in read_ledger(directory) if not isinstance(entry, SegmentHeader | Closed)]


def send(ledger: Ledger, *ids: object) -> None:
    """Record a send. A single id is passed as a text, as a paired sender does."""
    given: Sequence[object] = ids[0] if len(ids) == 1 and isinstance(ids[0], str) else ids
    ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", given, 10).end()


Durability = Literal["process", "lazy"]


@pytest.fixture(params=["process", "lazy"])
def durability(request: pytest.FixtureRequest) -> Durability:
    found: Durability = request.param
    return found


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


def test_an_operation_that_has_ended_is_one_line(tmp_path: Path) -> None:
    before = int(time.time() * 1000)
    with Ledger(tmp_path) as ledger:
        running = ledger.begin(Stage.SEND_BACKLOG, "paris", "contoso/x/0", ("a", 7), [10, 70_000], "contoso/orders")
        running.end("unknown", cause="timeout", failed=(7,))
        running.end("ok")
    (entry,) = entries_in(tmp_path)
    assert isinstance(entry, Operation)
    assert before <= entry.at <= time.time() * 1000
    assert entry.seconds >= 0
    assert entry == Operation(
        at=entry.at, id=running.id, stage=Stage.SEND_BACKLOG, namespace="paris", entity="contoso/x/0",
        destination="contoso/orders", ids=("a", "ulong:7"), bytes=70_010, units=3, seconds=entry.seconds,
        result="unknown", cause="timeout", failed=("ulong:7",),
    )  # fmt: skip


def test_an_operation_in_flight_at_a_flush_is_an_intent_and_later_an_outcome(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        running = ledger.begin(Stage.RETURN_PRIMARY, "contoso", "orders", ["a"], 10)
        assert ledger.flush()
        (intent,) = entries_in(tmp_path)
        assert isinstance(intent, Intent)
        running.end("server_busy")
        assert ledger.flush()
        _, outcome = entries_in(tmp_path)
    assert isinstance(outcome, Outcome)
    assert outcome.id == intent.id == running.id
    assert outcome.result == "server_busy"
    assert outcome.at >= intent.at


def test_a_receive_is_recorded_when_it_is_over_with_its_duration(tmp_path: Path) -> None:
    with Ledger(tmp_path, Role.SYPHON) as ledger:
        operation_id = ledger.done(Stage.EMPTY_RECEIVE, "paris", "contoso/x/0", seconds=900.0)
    (entry,) = entries_in(tmp_path)
    assert isinstance(entry, Operation)
    assert entry.id == operation_id
    assert (entry.stage, entry.units, entry.result) == (Stage.EMPTY_RECEIVE, 1, "ok")
    assert entry.seconds == pytest.approx(900, abs=1)
    assert entry.at < (time.time() - 890) * 1000


def test_l4_an_operation_without_ids_records_how_many_messages_it_had(tmp_path: Path) -> None:
    with Ledger(tmp_path, Role.SYPHON) as ledger:
        ledger.done(Stage.RECEIVE_BACKLOG, "paris", "contoso/x/0", (), [130_000, 100], seconds=0.1)
        ledger.done(Stage.PEEK_BACKLOG, "paris", "contoso/x/0", (), 130_100, seconds=0.1)
        ledger.done(Stage.EMPTY_RECEIVE, "paris", "contoso/x/0", (), (), seconds=0.1)
        ledger.done(Stage.COMPLETE_BACKLOG, "paris", "contoso/x/0", ["a"], [0], seconds=0.1)
    found = [entry for entry in entries_in(tmp_path) if isinstance(entry, Operation)]
    assert [(entry.units, entry.count) for entry in found] == [(3, 2), (2, None), (1, None), (1, None)]


def test_states_movements_and_meters_are_recorded(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        ledger.state("restored", {"entity": "orders", "messages": 3}, pair="contoso")
        ledger.moved(Move.DEAD_LETTERED, ["a", b"b"], "paris/q", "contoso/orders", "too large", "op-1")
        ledger.metered("paris", "q", "send", 5, 100, 6, 1000, 2000)
    state, movement, metered = entries_in(tmp_path)
    assert isinstance(state, State)
    assert (state.event, state.pair, state.facts) == ("restored", "contoso", {"entity": "orders", "messages": 3})
    assert isinstance(movement, Movement)
    assert (movement.move, movement.ids) == (Move.DEAD_LETTERED, ("a", "binary:62"))
    assert (movement.source, movement.destination, movement.reason) == ("paris/q", "contoso/orders", "too large")
    assert isinstance(metered, Metered)
    assert (metered.operation, metered.count, metered.bytes, metered.units) == ("send", 5, 100, 6)
    assert len({entry.id for entry in (state, movement, metered)}) == 3


def test_operations_of_many_threads_are_each_written_once_whenever_the_writer_takes_the_queue(
    tmp_path: Path, durability: Durability
) -> None:
    count, workers = 2000, 4
    interval = timedelta(milliseconds=1)
    options = LedgerOptions(durability=durability, group_interval=interval, segment_bytes=64 * 1024)
    with Ledger(tmp_path, options=options) as ledger:

        def work(name: int) -> None:
            for number in range(count):
                send(ledger, f"{name}-{number}")

        threads = [threading.Thread(target=work, args=(name,)) for name in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    entries = entries_in(tmp_path)
    wholes = {entry.id for entry in entries if isinstance(entry, Operation)}
    intents = {entry.id for entry in entries if isinstance(entry, Intent)}
    outcomes = {entry.id for entry in entries if isinstance(entry, Outcome)}
    assert intents == outcomes
    assert not wholes & intents
    assert len(wholes) + len(intents) * 2 == len(entries)
    ids = Counter(name for entry in entries if isinstance(entry, Intent | Operation) for name in entry.ids)
    assert ids == Counter(f"{name}-{number}" for name in range(workers) for number in range(count))


async def test_tasks_flush_together_and_a_cancelled_one_does_not_disturb_the_others(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        waiting = []
        for number in range(20):
            ledger.begin(Stage.RETURN_PRIMARY, "contoso", "orders", [number])
            waiting.append(asyncio.create_task(ledger.flushed()))
        await asyncio.sleep(0)
        waiting[3].cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [result is True for number, result in enumerate(results) if number != 3] == [True] * 19
        assert len(entries_in(tmp_path)) == 20


def test_the_last_entry_of_a_closed_writer_says_so_and_only_then_is_the_ledger_complete(tmp_path: Path) -> None:
    with Ledger(tmp_path, options=LedgerOptions(durability="lazy")) as ledger:
        send(ledger, "a")
        ledger.flush()
        (reason,) = balance(read_ledger(tmp_path)).incomplete
        assert reason.startswith(f"{ledger.writer} may have ended without closing")
    *_, last = read_ledger(tmp_path)
    assert isinstance(last, Closed)
    assert last.writer == ledger.writer
    assert balance(read_ledger(tmp_path)).incomplete == []


def test_two_ledgers_in_one_directory_write_separate_segments(tmp_path: Path) -> None:
    with Ledger(tmp_path) as one, Ledger(tmp_path, Role.SYPHON) as other:
        send(one, "a")
        send(other, "b")
        assert one.flush()
        assert other.flush()
        assert len(list(list_segments(tmp_path))) == 2
        assert all(segment.is_open for segment in list_segments(tmp_path))
    assert balance(read_ledger(tmp_path)).delivered.total() == 2
    assert not any(segment.is_open for segment in list_segments(tmp_path))


def test_a_ledger_without_entries_makes_no_file_and_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with Ledger(tmp_path) as ledger:
        assert threading.active_count() == before
        assert ledger.flush()
    assert list(tmp_path.iterdir()) == []
    until(lambda: threading.active_count() == before)


def test_an_idle_ledger_seals_its_segment_at_its_age_and_opens_another_for_the_next_entries(tmp_path: Path) -> None:
    with Ledger(tmp_path, options=LedgerOptions(segment_age=timedelta(seconds=1))) as ledger:
        send(ledger, "a")
        assert ledger.flush()
        until(lambda: [segment.is_open for segment in list_segments(tmp_path)] == [False, True])
        send(ledger, "b")
        assert ledger.flush()
        assert [segment.is_open for segment in list_segments(tmp_path)] == [False, True]


def test_entries_wait_while_no_thread_can_be_started_and_are_written_when_one_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Ledger(tmp_path) as ledger:
        with monkeypatch.context() as limited:
            limited.setattr(threading.Thread, "start", refuse)
            send(ledger, "first")
            assert ledger.flush() is False
        send(ledger, "second")
    found = [entry.ids for entry in entries_in(tmp_path) if isinstance(entry, Operation | Intent)]
    assert found == [("first",), ("second",)]


def test_a_garbage_collected_ledger_writes_what_is_queued_and_ends_its_thread(
    tmp_path: Path, durability: Durability
) -> None:
    ledger = Ledger(tmp_path, options=LedgerOptions(durability=durability))
    name = ledger.writer.rpartition("-")[2]
    send(ledger, "a")
    del ledger
    gc.collect()
    until(lambda: not any(name in thread.name for thread in threading.enumerate()))
    assert len(entries_in(tmp_path)) == 1
    assert not any(segment.is_open for segment in list_segments(tmp_path))


def test_entries_after_closing_are_refused_or_logged_and_never_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path)
    running = ledger.begin(Stage.PING, "contoso", "orders")
    ledger.flush()
    ledger.close()
    ledger.close()
    with caplog.at_level(logging.ERROR, "twinbus.ledger"):
        running.end()
    assert "after closing" in caplog.text
    assert ledger.flush() is False
    stopping = Ledger(tmp_path, options=LedgerOptions(on_error="stop"))
    stopping.close()
    with pytest.raises(LedgerUnavailableError, match="closed"):
        send(stopping, "a")
    with pytest.raises(LedgerUnavailableError, match="closed"):
        stopping.flush()


def test_an_entry_that_cannot_be_encoded_is_reported_as_a_gap_and_the_others_are_written(
    tmp_path: Path, durability: Durability, caplog: pytest.LogCaptureFixture
) -> None:
    options = LedgerOptions(durability=durability)
    with Ledger(tmp_path, options=options) as ledger, caplog.at_level(logging.ERROR, "twinbus.ledger"):
        send(ledger, "a")
        ledger.begin(Stage.PING, "contoso", "orders", (), object()).end()  # type: ignore[arg-type] # that is the point
        send(ledger, "b")
    assert ledger.missing == 1
    found = balance(read_ledger(tmp_path))
    assert found.delivered.total() == 2
    assert "1 entries are missing" in found.incomplete[0]
    assert "cannot be encoded" in caplog.text


# --- the ends of processes -------------------------------------------------------------------------------------------


def test_the_child_of_a_fork_writes_segments_of_its_own(tmp_path: Path, durability: Durability) -> None:
    with Ledger(tmp_path, options=LedgerOptions(durability=durability)) as ledger:
        send(ledger, "before")
        shared = ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", ["shared"])
        ledger.flush()
        send(ledger, "queued")
        child = os.fork()
        if child == 0:
            try:
                shared.end("unknown")
                send(ledger, "child")
                ledger.flush()
                ledger.close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        shared.end()
        send(ledger, "after")
    headers = [entry for entry in read_ledger(tmp_path) if isinstance(entry, SegmentHeader)]
    assert len({header.pid for header in headers}) == 2
    found = balance(read_ledger(tmp_path))
    names = ("before", "shared", "queued", "child", "after")
    assert found.delivered == Counter({("contoso/orders", name): 1 for name in names})


def test_a_program_that_ends_without_closing_has_written_everything(tmp_path: Path) -> None:
    program = (
        "import sys; from twinbus.ledger import Ledger, Stage\n"
        "ledger = Ledger(sys.argv[1])\n"
        "for n in range(500): ledger.begin(Stage.SEND_PRIMARY, 'contoso', 'orders', [n]).end()\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert balance(read_ledger(tmp_path)).delivered.total() == 500
    assert not any(segment.is_open for segment in list_segments(tmp_path))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_error": "panic"}, "on_error is 'panic'"),
        ({"durability": "eternal"}, "durability is 'eternal'; it must be process or lazy"),
        ({"group_interval": timedelta(0)}, "group_interval"),
        ({"segment_age": 60}, "segment_age is 60"),
        ({"segment_bytes": 10}, "segment_bytes is 10; it must be an integer from 4096"),
        ({"budget_bytes": 64 * 1024 * 1024}, "budget_bytes"),
        ({"buffer_bytes": True}, "buffer_bytes is True"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name_value_and_range(options: dict[str, object], says: str) -> None:
    with pytest.raises(LedgerOptionError, match=says):
        LedgerOptions(**options)  # type: ignore[arg-type] # wrong on purpose


@pytest.mark.parametrize(
    ("ids", "size", "recorded"),
    [
        ("a", 10, (("a",), 10, 1)),
        ("a", True, (("a",), 1, 1)),
        ("a", UNIT_BYTES, (("a",), UNIT_BYTES, 1)),
        ("a", UNIT_BYTES + 1, (("a",), UNIT_BYTES + 1, 2)),
        ("a", [UNIT_BYTES + 1], (("a",), UNIT_BYTES + 1, 2)),
        (["a", "b"], 10, (("a", "b"), 10, 2)),
        (["a", "b"], [UNIT_BYTES + 1, 1], (("a", "b"), UNIT_BYTES + 2, 3)),
        ((), 0, ((), 0, 1)),
    ],
)
def test_m2_an_operation_has_its_ids_its_size_and_its_units(
    tmp_path: Path, ids: Sequence[object], size: int | Sequence[int], recorded: tuple[tuple[str, ...], int, int]
) -> None:
    with Ledger(tmp_path) as ledger:
        operation = ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", ids, size)
        if isinstance(ids, list):
            ids.append("of the caller's next")
        operation.end()
    (entry,) = entries_in(tmp_path)
    assert isinstance(entry, Operation)
    assert (entry.ids, entry.bytes, entry.units) == recorded


def test_ids_that_are_not_a_sequence_are_refused_at_once(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger, pytest.raises(TypeError):
        ledger.begin(Stage.PING, "contoso", "orders", 7)  # type: ignore[arg-type] # that is the point


@pytest.mark.parametrize("id_", ["a", "uuid:x", ":", '"\\é\n', ""])
def test_one_id_is_written_alike_as_a_text_and_in_a_sequence(tmp_path: Path, id_: str) -> None:
    with Ledger(tmp_path) as ledger:
        for ids in (id_, [id_]):
            ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", ids, 10, "contoso/there").end()
    first, second = entries_in(tmp_path)
    assert isinstance(first, Operation)
    assert isinstance(second, Operation)
    assert replace(first, at=second.at, id=second.id, seconds=second.seconds) == second


async def test_a_flush_waits_for_a_disk_that_hangs_no_longer_than_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path, options=LedgerOptions(on_error="stop"))
    with hanging_disk(monkeypatch):
        ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", ["1"], 1).end()
        with pytest.raises(LedgerUnavailableError):
            await ledger.flushed(0.05)
        with pytest.raises(LedgerUnavailableError):
            ledger.flush(0.05)
        assert caplog.text.count("has not answered for 0.05 s") == 2
    assert await ledger.flushed()
    ledger.close()


def test_l1_a_write_puts_queued_entries_into_the_file_while_a_sync_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With durability "lazy" too: a syphon writes the outcome of a delivery before it completes the message."""
    with Ledger(tmp_path, options=LedgerOptions(durability="lazy")) as ledger:
        running = ledger.begin(Stage.RETURN_PRIMARY, "contoso", "orders", ["a"], 10)
        assert ledger.flush()
        with hanging_disk(monkeypatch) as asked:
            ledger.state("restored", {})
            assert asked.wait(30)
            later = ledger.begin(Stage.RETURN_PRIMARY, "contoso", "orders", ["b"], 10)
            running.end()
            assert ledger.write()
            kinds = [(type(entry), entry.id) for entry in entries_in(tmp_path)]
            assert kinds[0] == (Intent, running.id)
            assert kinds[1][0] is State
            assert kinds[2:] == [(Intent, later.id), (Outcome, running.id)], "in the order in which they were recorded"


@pytest.mark.parametrize("on_error", ["go_on", "stop"])
def test_l1_a_write_that_fails_is_reported_and_repeated(
    tmp_path: Path, durability: Durability, on_error: Literal["go_on", "stop"], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    options = LedgerOptions(durability=durability, on_error=on_error, group_interval=timedelta(minutes=1))
    with Ledger(tmp_path, options=options) as ledger:
        send(ledger, "a")
        assert ledger.flush()
        with monkeypatch.context() as broken:
            broken.setattr(os, "write", full)
            ledger.state("restored", {})
            if on_error == "stop":
                with pytest.raises(LedgerUnavailableError, match="No space left"):
                    ledger.write()
            else:
                assert ledger.write() is False
            (gap,) = [entry for entry in read_ledger(tmp_path) if isinstance(entry, Gap)]
            assert "could not write" in gap.reason
        assert ledger.write() is True
        assert any(isinstance(entry, State) for entry in entries_in(tmp_path))
        assert ledger.flush()
        assert not [entry for entry in read_ledger(tmp_path) if isinstance(entry, Gap)]
    assert balance(read_ledger(tmp_path)).incomplete == []


def test_l1_a_failed_sync_removes_nothing_and_its_entries_are_written_again(
    tmp_path: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Ledger(tmp_path, options=LedgerOptions(durability=durability)) as ledger:
        send(ledger, "a")
        assert ledger.flush()
        with monkeypatch.context() as disk:
            disk.setattr(os, "fdatasync", broken)
            send(ledger, "b")
            assert ledger.flush() is False
        (segment,) = list_segments(tmp_path)
        before = segment.path.read_bytes()
        assert b'"b"' in before
        assert ledger.flush()
        first, second = list_segments(tmp_path)
        assert first.path.read_bytes() == before
        assert b'"b"' in second.path.read_bytes()
    assert balance(read_ledger(tmp_path)).delivered.total() == 2
    assert balance(read_ledger(tmp_path)).incomplete == []


def test_l1_a_write_that_fails_during_a_sync_is_not_forgotten_when_the_sync_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(group_writer, "RETRY_SECONDS", 3600.0)
    fdatasync = os.fdatasync
    with Ledger(tmp_path, options=LedgerOptions(group_interval=timedelta(minutes=1))) as ledger:
        send(ledger, "a")
        assert ledger.flush()

        def sync(file: int) -> None:
            monkeypatch.setattr(os, "fdatasync", fdatasync)
            with monkeypatch.context() as disk:
                disk.setattr(os, "write", full)
                send(ledger, "c")
            fdatasync(file)

        monkeypatch.setattr(os, "fdatasync", sync)
        send(ledger, "b")
        assert ledger.flush(), "what was recorded before the flush is on the disk"
        failures = [ledger.failure]
        assert [entry for entry in read_ledger(tmp_path) if isinstance(entry, Gap)]
        assert ledger.flush()
        assert [*failures, ledger.failure] == ["No space left on device", None]
    assert balance(read_ledger(tmp_path)).delivered.total() == 3
    assert balance(read_ledger(tmp_path)).incomplete == []


class RecordingHandler(logging.Handler):
    """Records an entry for each log record, as a handler does that sends through a pair."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self.is_called = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if not self.is_called.is_set():
            self.is_called.set()
            until(lambda: self.ledger.failure is not None)
        self.ledger.state("logged", {})


def test_a_log_handler_that_records_entries_and_a_failing_write_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(group_writer, "RETRY_SECONDS", 3600.0)
    with Ledger(tmp_path) as ledger:
        assert ledger.flush()
        handler = RecordingHandler(ledger)
        monkeypatch.setattr(logging.getLogger("twinbus"), "handlers", [handler])
        with monkeypatch.context() as disk:
            disk.setattr(os, "write", full)
            log = logging.getLogger("twinbus.application").warning
            threads = [
                threading.Thread(target=call, daemon=True) for call in (partial(log, "x"), partial(send, ledger, "a"))
            ]
            threads[0].start()
            assert handler.is_called.wait(60)
            threads[1].start()
            for thread in threads:
                thread.join(10)
            assert not any(thread.is_alive() for thread in threads)
        assert ledger.flush()


def test_while_the_disk_is_full_an_entry_does_not_copy_those_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(group_writer, "RETRY_SECONDS", 3600.0)
    with Ledger(tmp_path) as ledger:
        with monkeypatch.context() as disk:
            disk.setattr(os, "write", full)
            for _ in range(10):
                send(ledger, "x" * 100_000)
            assert not ledger.flush()
            tracemalloc.start()
            try:
                for _ in range(10):
                    send(ledger, "a")
                assert tracemalloc.get_traced_memory()[1] < 500_000
            finally:
                tracemalloc.stop()
        assert ledger.flush()
    assert balance(read_ledger(tmp_path)).delivered.total() == 20


def test_l1_a_writer_with_an_operation_in_flight_always_has_an_open_segment(tmp_path: Path) -> None:
    with Ledger(tmp_path, options=LedgerOptions(segment_age=timedelta(seconds=1))) as ledger:
        running = ledger.begin(Stage.RETURN_PRIMARY, "contoso", "orders", ["a"], 10)
        assert ledger.flush()
        until(lambda: any(not segment.is_open for segment in list_segments(tmp_path)))
        assert any(segment.is_open for segment in list_segments(tmp_path))
        assert dead_writers(tmp_path, now=time.time() + 3600) == frozenset()
        running.end()


def test_l2_behind_a_disk_that_hangs_entries_are_written_and_nothing_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_writer, "_QUEUE_LIMIT", 2000)
    sent = [str(number) for number in range(3000)]
    with Ledger(tmp_path) as ledger, hanging_disk(monkeypatch) as asked:
        send(ledger, "first")
        assert asked.wait(10)
        for name in sent:
            send(ledger, name)
        found = balance(read_ledger(tmp_path))
        assert {message.id for message in found.delivered} == {"first", *sent}
    assert ledger.missing == 0
    assert balance(read_ledger(tmp_path)).incomplete == []


def test_behind_a_disk_that_hangs_the_queue_is_limited_and_entries_beyond_the_limit_are_reported_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, sent = 2000, 3000
    monkeypatch.setattr(group_writer, "_QUEUE_LIMIT", limit)
    with Ledger(tmp_path, options=LedgerOptions(durability="lazy")) as ledger:
        with hanging_disk(monkeypatch) as asked:
            send(ledger, "first")
            assert asked.wait(10)
            for number in range(sent):
                send(ledger, str(number))
        assert ledger.flush()
        missing = ledger.missing
    entries = list(read_ledger(tmp_path))
    names = [name for entry in entries if isinstance(entry, Operation) for name in entry.ids]
    assert names[: limit + 1] == ["first", *map(str, range(limit))], "the newest found no room"
    assert len(names) == 1 + sent - missing
    assert limit <= sent - missing < limit + NOTIFY_EVERY
    assert sum(entry.count for entry in entries if isinstance(entry, Gap)) == missing
