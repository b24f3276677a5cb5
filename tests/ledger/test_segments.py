"""Segments: guarantees of `write` and `sync`, starting the next segment, the disk budget, segments of ended writers."""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from twinbus.ledger import Ledger
from twinbus.ledger.dead_writers import SEALED_AT_ONCE, own_host
from twinbus.ledger.entries import Dropped, Ended, Role, SegmentHeader
from twinbus.ledger.json_lines import decode_entry
from twinbus.ledger.options import LedgerOptions
from twinbus.ledger.segment_opening import SegmentOpening
from twinbus.ledger.segments import Segment, SegmentWriter, list_segments, segment_size

from .disks import hanging_disk

GROUP = b'{"group":1}\n'
SMALL = LedgerOptions(segment_bytes=4096, budget_bytes=5 * 4096)


def writer(
    directory: Path, name: str = "client-here-1-0123456789abcdef", *, most_bytes: int = 4096, most_seconds: float = 3600
) -> SegmentWriter:
    opening = SegmentOpening(directory, name, Role.CLIENT, name.split("-")[1], SMALL)
    return SegmentWriter(
        directory, name, opening, most_bytes=most_bytes, most_seconds=most_seconds, most_unsynced=100_000
    )


def write(one: SegmentWriter, lines: bytes) -> None:
    with one.lock:
        one.write(lines, lines.count(b"\n"))


def append(one: SegmentWriter, lines: bytes) -> None:
    """Write and sync."""
    write(one, lines)
    one.sync()


def broken(file: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


def only(directory: Path) -> Segment:
    (found,) = list_segments(directory)
    return found


def body(segment: Segment) -> bytes:
    """Return all lines except the header."""
    header, _, rest = segment.path.read_bytes().partition(b"\n")
    assert isinstance(decode_entry(header), SegmentHeader)
    return rest


def test_a_segment_begins_with_its_writers_header_is_open_while_written_and_sealed_after(tmp_path: Path) -> None:
    one = writer(tmp_path)
    append(one, GROUP)
    append(one, GROUP)
    segment = only(tmp_path)
    assert segment.is_open
    assert body(segment) == GROUP * 2
    one.seal()
    sealed = only(tmp_path)
    assert not sealed.is_open
    assert sealed.path == segment.sealed_path
    header = decode_entry(sealed.path.read_bytes().splitlines()[0])
    assert isinstance(header, SegmentHeader)
    assert (header.writer, header.role, header.host, header.pid, header.segment) == (
        "client-here-1-0123456789abcdef", Role.CLIENT, "here", os.getpid(), 0,
    )  # fmt: skip


def test_a_sync_returns_when_the_lines_and_the_name_of_the_file_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[Path, bytes] = {}
    names: set[Path] = set()

    def noted(sync: Callable[[int], None], file: int) -> None:
        sync(file)
        path = Path(f"/proc/self/fd/{file}").readlink()
        if path.is_dir():
            names.update(path.iterdir())
        else:
            synced[path] = path.read_bytes()

    monkeypatch.setattr(os, "fsync", partial(noted, os.fsync))
    monkeypatch.setattr(os, "fdatasync", partial(noted, os.fdatasync))
    one = writer(tmp_path)
    append(one, GROUP)
    append(one, GROUP)
    path = only(tmp_path).path
    assert synced[path] == path.read_bytes()
    assert path in names
    one.seal()
    assert only(tmp_path).path in names


def test_a_sync_includes_a_segment_that_becomes_full_while_older_segments_are_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, full = writer(tmp_path), b"x" * 4095 + b"\n"
    synced: set[str] = set()

    def noted(sync: Callable[[int], None], file: int) -> None:
        if not synced:  # another thread fills the open segment during the first sync
            write(one, full)
            write(one, full)
        synced.add(Path(f"/proc/self/fd/{file}").readlink().name)
        sync(file)

    write(one, full)
    write(one, GROUP)
    promised = next(segment.path for segment in list_segments(tmp_path) if segment.number == 1)
    monkeypatch.setattr(os, "fsync", partial(noted, os.fsync))
    one.sync()
    assert promised.name in synced
    one.seal()


def test_a_segment_is_sealed_at_its_size_and_at_its_age(tmp_path: Path) -> None:
    by_size = writer(tmp_path / "size", most_bytes=300)
    for _ in range(40):
        append(by_size, GROUP)
    by_size.seal()
    found = list(list_segments(tmp_path / "size"))
    assert [segment.number for segment in found] == list(range(len(found)))
    assert len(found) > 2
    assert b"".join(body(segment) for segment in found) == GROUP * 40
    assert all(segment.path.stat().st_size < 300 + len(GROUP) for segment in found)

    by_age = writer(tmp_path / "age", most_seconds=0)
    append(by_age, GROUP)
    assert by_age.seconds_left() <= 0
    by_age.seal()
    append(by_age, GROUP)
    assert [segment.is_open for segment in list_segments(tmp_path / "age")] == [False, True]


def test_an_idle_writer_makes_no_segment_and_sealing_nothing_does_nothing(tmp_path: Path) -> None:
    one = writer(tmp_path / "none")
    one.seal()
    assert not (tmp_path / "none").exists()


class FullDisk:
    """Takes `room` more bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self._write, self._room = os.write, room
        monkeypatch.setattr(os, "write", self)

    def __call__(self, file: int, data: bytes | memoryview) -> int:
        if self._room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(file, data[: self._room])
        self._room -= written
        return written


@pytest.mark.parametrize("room", range(1, 2 * len(GROUP)))
def test_l1_lines_that_were_written_in_part_are_written_again_to_a_new_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    one = writer(tmp_path)
    append(one, GROUP)
    FullDisk(monkeypatch, room)
    with pytest.raises(OSError, match="No space"):
        write(one, GROUP * 2)
    monkeypatch.undo()
    write(one, GROUP * 2)
    one.sync()
    first, second = list_segments(tmp_path)
    assert body(first) == GROUP + (GROUP * 2)[:room], "nothing that was written is removed"
    assert body(second) == GROUP * 2
    assert [first.is_open, second.is_open] == [False, True]


def test_l1_after_a_sync_that_failed_the_lines_are_written_again_to_a_new_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = writer(tmp_path)
    append(one, GROUP)
    write(one, GROUP * 2)
    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(OSError, match="Input/output"):
        one.sync()
    monkeypatch.undo()
    again = one.take_repeated()
    assert again == (GROUP * 2, 0)
    assert body(only(tmp_path)) == GROUP * 3, "nothing that was written is removed"
    append(one, again[0])
    assert [body(segment) for segment in list_segments(tmp_path)] == [GROUP * 3, GROUP * 2]
    assert [segment.is_open for segment in list_segments(tmp_path)] == [False, True]


def test_l1_lines_that_memory_had_no_room_for_count_as_lost_after_a_sync_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = writer(tmp_path, most_bytes=10**6)
    append(one, GROUP)
    line = b"x" * 9_999 + b"\n"
    for _ in range(15):
        write(one, line)
    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(OSError, match="Input/output"):
        one.sync()
    again, forgotten = one.take_repeated()
    assert again == line * 10
    assert forgotten == 5


def test_l1_a_write_does_not_wait_for_a_sync_and_the_segment_may_be_full_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = writer(tmp_path, most_bytes=300)
    append(one, GROUP)
    with hanging_disk(monkeypatch) as asked:
        write(one, GROUP)
        syncing = threading.Thread(target=one.sync)
        syncing.start()
        assert asked.wait(30)
        for _ in range(40):
            write(one, GROUP)
        assert sum(body(segment).count(GROUP) for segment in list_segments(tmp_path)) == 42
        assert syncing.is_alive()
    syncing.join()
    one.seal()
    assert not any(segment.is_open for segment in list_segments(tmp_path))
    assert b"".join(body(segment) for segment in list_segments(tmp_path)) == GROUP * 42


def test_a_segment_whose_first_sync_failed_is_followed_by_one_with_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", broken)
    one = writer(tmp_path)
    with pytest.raises(OSError, match="Input/output"):
        append(one, GROUP)
    monkeypatch.undo()
    append(one, one.take_repeated()[0])
    assert [body(segment) for segment in list_segments(tmp_path)] == [GROUP, GROUP]


def test_a_segment_that_could_not_be_made_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FullDisk(monkeypatch, 10)
    one = writer(tmp_path)
    with pytest.raises(OSError, match="No space"):
        write(one, GROUP)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    append(one, GROUP)
    assert only(tmp_path).number == 0


# --- the disk budget -------------------------------------------------------------------------------------------------


def test_the_oldest_sealed_segments_are_removed_for_the_budget_and_an_entry_reports_it(tmp_path: Path) -> None:
    group = b"x" * 1023 + b"\n"
    one = writer(tmp_path)
    for number in range(40):
        append(one, group)
        for age, segment in enumerate(sorted(list_segments(tmp_path), key=lambda each: -each.number)):
            # Files made within one tick of the clock would have no order.
            os.utime(segment.path, (1_000_000 + number - age, 1_000_000 + number - age))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= SMALL.budget_bytes
    one.seal()
    found = sorted(list_segments(tmp_path), key=lambda segment: segment.number)
    assert found[0].number > 0
    assert [segment.number for segment in found] == list(range(found[0].number, found[-1].number + 1))
    told = [decode_entry(line) for line in found[-1].path.read_bytes().splitlines() if line.startswith(b"{")]
    dropped = [entry for entry in told if isinstance(entry, Dropped)]
    assert [entry.count for entry in dropped] == [1]


def test_the_budget_is_that_of_one_role_on_one_host(tmp_path: Path) -> None:
    others = [
        tmp_path / f"{name}-1-0123456789abcdef-0.jsonl" for name in ("syphon-here", "client-there", "client-here-2")
    ]
    for path in others:
        path.write_bytes(b"x" * 30_000)
    own = tmp_path / "client-here-1-aaaaaaaaaaaaaaaa-0.jsonl"
    own.write_bytes(b"x" * 30_000)
    append(writer(tmp_path), GROUP)
    assert all(path.exists() for path in others)
    assert not own.exists()


def test_removed_segments_are_reported_even_if_the_entry_cannot_be_written_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "client-here-1-aaaaaaaaaaaaaaaa-0.jsonl").write_bytes(b"x" * 30_000)
    one = writer(tmp_path)
    write(one, GROUP)
    FullDisk(monkeypatch, 7)
    with pytest.raises(OSError, match="No space"):
        one.sync()
    monkeypatch.undo()
    lines, _ = one.take_repeated()
    assert isinstance(decode_entry(lines), Dropped)


# --- segments whose writer is gone -----------------------------------------------------------------------------------


def abandoned(tmp_path: Path, host: str = "here") -> Path:
    path = tmp_path / f"client-{host}-77-aaaaaaaaaaaaaaaa-3.jsonl.open"
    path.write_bytes(GROUP + GROUP[:-5])
    return path


def whole_lines(sealed: Path) -> bytes:
    """All but the last line, which says who sealed it."""
    *lines, last = sealed.read_bytes().splitlines(keepends=True)
    ended = decode_entry(last)
    assert isinstance(ended, Ended)
    assert (ended.writer, ended.segment) == ("client-here-77-aaaaaaaaaaaaaaaa", 3)
    assert ended.by == "client-here-1-0123456789abcdef"
    return b"".join(lines)


def test_an_open_segment_without_a_lock_is_cut_after_its_last_whole_line_and_sealed(tmp_path: Path) -> None:
    path = abandoned(tmp_path)
    append(writer(tmp_path), GROUP)
    assert not path.exists()
    assert whole_lines(path.with_suffix("")) == GROUP


def test_a_torn_line_longer_than_one_read_is_cut_too(tmp_path: Path) -> None:
    path = abandoned(tmp_path)
    path.write_bytes(GROUP + b"x" * 200_000)
    append(writer(tmp_path), GROUP)
    assert whole_lines(path.with_suffix("")) == GROUP


def test_an_open_segment_that_is_locked_is_left_alone(tmp_path: Path) -> None:
    path = abandoned(tmp_path)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        append(writer(tmp_path), GROUP)
        assert path.read_bytes() == GROUP + GROUP[:-5]


def test_a_segment_of_another_host_is_sealed_only_after_a_long_silence(tmp_path: Path) -> None:
    path = abandoned(tmp_path, "there")
    append(writer(tmp_path, "client-here-1-0000000000000000"), GROUP)
    assert path.exists()
    os.utime(path, (0, 0))
    append(writer(tmp_path, "client-here-1-1111111111111111"), GROUP)
    assert not path.exists()


def many_abandoned(directory: Path, count: int) -> None:
    for number in range(count):
        (directory / f"client-{own_host()}-77-aaaaaaaaaaaaaaaa-{number}.jsonl.open").write_bytes(GROUP)


def test_a_sync_seals_only_some_of_many_abandoned_segments_and_the_next_syncs_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_abandoned(tmp_path, 2 * SEALED_AT_ONCE + 1)
    one = writer(tmp_path, f"client-{own_host()}-1-0123456789abcdef")
    syncs: list[int] = []
    fsync = os.fsync

    def counted(file: int) -> None:
        syncs[-1] += 1
        fsync(file)

    monkeypatch.setattr(os, "fsync", counted)
    write(one, GROUP)
    sealed = []
    while one.is_preparing:
        syncs.append(0)
        one.sync()
        sealed.append(sum(not segment.is_open for segment in list_segments(tmp_path)))
    assert sealed == [SEALED_AT_ONCE, 2 * SEALED_AT_ONCE, 2 * SEALED_AT_ONCE + 1]
    # Each sealed segment, and the folder; with the first, the own segment and its name.
    assert syncs == [SEALED_AT_ONCE + 3, SEALED_AT_ONCE + 1, 2]
    one.seal()


def test_a_writer_seals_many_abandoned_segments_though_it_is_idle(tmp_path: Path) -> None:
    many_abandoned(tmp_path, 2 * SEALED_AT_ONCE)
    with Ledger(tmp_path, options=LedgerOptions(group_interval=timedelta(milliseconds=1))) as ledger:
        ledger.state("restored", {})
        deadline = time.monotonic() + 60
        while [segment.writer for segment in list_segments(tmp_path) if segment.is_open] != [ledger.writer]:
            assert time.monotonic() < deadline, "abandoned segments stay open"
            time.sleep(0.005)


def test_a_writer_whose_segment_another_writer_sealed_goes_on_with_the_next(tmp_path: Path) -> None:
    one = writer(tmp_path, most_bytes=1)
    append(one, GROUP)
    segment = only(tmp_path)
    segment.path.rename(segment.sealed_path)
    append(one, GROUP)
    assert [segment.is_open for segment in list_segments(tmp_path)] == [False, True]


def test_the_size_of_a_segment_is_found_after_it_was_sealed_or_removed(tmp_path: Path) -> None:
    one = writer(tmp_path)
    append(one, GROUP)
    (listed,) = list_segments(tmp_path)
    size = segment_size(listed)
    assert size == listed.path.stat().st_size > len(GROUP)
    one.seal()
    assert not listed.path.exists()
    assert segment_size(listed) == listed.sealed_path.stat().st_size >= size
    listed.sealed_path.unlink()
    assert segment_size(listed) == 0


def test_other_files_are_not_segments(tmp_path: Path) -> None:
    for name in ("notes.jsonl", ".client-here-1-0123456789abcdef-0.jsonl.open", "client-here-1-0123456789abcdef-0.csv"):
        (tmp_path / name).touch()
    assert list(list_segments(tmp_path)) == []


def test_l1_a_mark_that_another_writer_has_just_reported_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / f"client-{own_host()}-1-00000000000000aa.failing"
    mark.touch()
    flock = fcntl.flock

    def meanwhile(file: int, operation: int) -> None:
        flock(file, operation)
        if operation & fcntl.LOCK_SH:
            mark.unlink()

    one = writer(tmp_path)
    write(one, GROUP)
    monkeypatch.setattr(fcntl, "flock", meanwhile)
    one.sync()
    assert not mark.exists()
    assert body(only(tmp_path)) == GROUP
    one.seal()


def test_a_segment_that_this_user_may_not_remove_is_left_and_the_next_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [tmp_path / f"client-here-1-000000000000000{number}-0.jsonl" for number in range(6)]
    for age, path in enumerate(others):
        path.write_bytes(b"x" * 4096)
        os.utime(path, (age, age))
    unlink = os.unlink

    def of_another_user(path: Path) -> None:
        if Path(path) == others[0]:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path)

    monkeypatch.setattr(os, "unlink", of_another_user)
    one = writer(tmp_path)
    append(one, GROUP)
    assert [path.exists() for path in others] == [True, False, False, False, True, True]
    one.seal()
