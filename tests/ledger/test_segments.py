"""Segments: guarantees of `append`, starting the next segment, the disk budget, segments of ended writers."""

import errno
import fcntl
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from twinbus.ledger.entries import Dropped, Ended, Role, SegmentHeader
from twinbus.ledger.json_lines import decode_entry
from twinbus.ledger.options import LedgerOptions
from twinbus.ledger.segment_opening import SegmentOpening
from twinbus.ledger.segments import Segment, SegmentWriter, list_segments

GROUP = b'{"group":1}\n'
SMALL = LedgerOptions(segment_bytes=4096, budget_bytes=5 * 4096)


def writer(
    directory: Path, name: str = "client-here-1-0123456789abcdef", *, most_bytes: int = 4096, most_seconds: float = 3600
) -> SegmentWriter:
    opening = SegmentOpening(directory, name, Role.CLIENT, name.split("-")[1], SMALL)
    return SegmentWriter(directory, name, opening, most_bytes=most_bytes, most_seconds=most_seconds)


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
    one.append(GROUP)
    one.append(GROUP)
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


def test_append_returns_when_the_lines_and_the_name_of_the_file_are_on_the_disk(
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
    one.append(GROUP)
    one.append(GROUP)
    path = only(tmp_path).path
    assert synced[path] == path.read_bytes()
    assert path in names
    one.seal()
    assert only(tmp_path).path in names


def test_a_segment_is_sealed_at_its_size_and_at_its_age(tmp_path: Path) -> None:
    by_size = writer(tmp_path / "size", most_bytes=300)
    for _ in range(40):
        by_size.append(GROUP)
    by_size.seal()
    found = list(list_segments(tmp_path / "size"))
    assert [segment.number for segment in found] == list(range(len(found)))
    assert len(found) > 2
    assert b"".join(body(segment) for segment in found) == GROUP * 40
    assert all(segment.path.stat().st_size < 300 + len(GROUP) for segment in found)

    by_age = writer(tmp_path / "age", most_seconds=0)
    by_age.append(GROUP)
    assert by_age.seconds_left() <= 0
    by_age.append(GROUP)
    assert [segment.is_open for segment in list_segments(tmp_path / "age")] == [False, True]


def test_an_idle_writer_makes_no_segment_and_sealing_nothing_does_nothing(tmp_path: Path) -> None:
    one = writer(tmp_path / "none")
    one.seal()
    assert not (tmp_path / "none").exists()


def test_a_group_that_was_written_in_part_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = writer(tmp_path)
    one.append(GROUP)
    write = os.write
    given: list[int] = []

    def full(file: int, data: memoryview) -> int:
        if given:
            raise OSError(errno.ENOSPC, "No space left on device")
        given.append(write(file, data[:5]))
        return given[0]

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        one.append(GROUP)
    monkeypatch.undo()
    one.append(GROUP)
    assert [body(segment) for segment in list_segments(tmp_path)] == [GROUP, GROUP]


def test_after_a_sync_that_failed_the_group_goes_into_a_new_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = writer(tmp_path)
    one.append(GROUP)

    def broken(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(OSError, match="Input/output"):
        one.append(GROUP)
    monkeypatch.undo()
    one.append(GROUP)
    assert [body(segment) for segment in list_segments(tmp_path)] == [GROUP, GROUP]
    assert [segment.is_open for segment in list_segments(tmp_path)] == [False, True]


def test_a_segment_that_could_not_be_made_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    one = writer(tmp_path)
    with pytest.raises(OSError, match="Input/output"):
        one.append(GROUP)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    one.append(GROUP)
    assert only(tmp_path).number == 0


# --- the disk budget -------------------------------------------------------------------------------------------------


def test_the_oldest_sealed_segments_are_removed_for_the_budget_and_an_entry_reports_it(tmp_path: Path) -> None:
    group = b"x" * 1023 + b"\n"
    one = writer(tmp_path)
    for number in range(40):
        one.append(group)
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
    writer(tmp_path).append(GROUP)
    assert all(path.exists() for path in others)
    assert not own.exists()


def test_removed_segments_are_reported_even_if_the_next_segment_could_not_be_made_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "client-here-1-aaaaaaaaaaaaaaaa-0.jsonl").write_bytes(b"x" * 30_000)

    def broken(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    one = writer(tmp_path)
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        one.append(GROUP)
    monkeypatch.undo()
    one.append(GROUP)
    entries = [decode_entry(line) for line in only(tmp_path).path.read_bytes().splitlines()[:2]]
    assert isinstance(entries[1], Dropped)


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
    writer(tmp_path).append(GROUP)
    assert not path.exists()
    assert whole_lines(path.with_suffix("")) == GROUP


def test_a_torn_line_longer_than_one_read_is_cut_too(tmp_path: Path) -> None:
    path = abandoned(tmp_path)
    path.write_bytes(GROUP + b"x" * 200_000)
    writer(tmp_path).append(GROUP)
    assert whole_lines(path.with_suffix("")) == GROUP


def test_an_open_segment_that_is_locked_is_left_alone(tmp_path: Path) -> None:
    path = abandoned(tmp_path)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer(tmp_path).append(GROUP)
        assert path.read_bytes() == GROUP + GROUP[:-5]


def test_a_segment_of_another_host_is_sealed_only_after_a_long_silence(tmp_path: Path) -> None:
    path = abandoned(tmp_path, "there")
    writer(tmp_path, "client-here-1-0000000000000000").append(GROUP)
    assert path.exists()
    os.utime(path, (0, 0))
    writer(tmp_path, "client-here-1-1111111111111111").append(GROUP)
    assert not path.exists()


def test_a_writer_whose_segment_another_writer_sealed_goes_on_with_the_next(tmp_path: Path) -> None:
    one = writer(tmp_path, most_bytes=1)
    one.append(GROUP)
    segment = only(tmp_path)
    segment.path.rename(segment.sealed_path)
    one.append(GROUP)
    assert [segment.is_open for segment in list_segments(tmp_path)] == [False, True]


def test_other_files_are_not_segments(tmp_path: Path) -> None:
    for name in ("notes.jsonl", ".client-here-1-0123456789abcdef-0.jsonl.open", "client-here-1-0123456789abcdef-0.csv"):
        (tmp_path / name).touch()
    assert list(list_segments(tmp_path)) == []
