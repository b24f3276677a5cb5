"""L7: the folder of a ledger, or the segment that is being written, is removed or replaced while it is in use."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest

from twinbus.ledger import Ledger, LedgerOptions, LedgerUnavailableError, Stage, balance, read_ledger
from twinbus.ledger.entries import Gap, Operation
from twinbus.ledger.segments import list_segments

BEFORE = 7
# Only a flush writes, so the number of lost entries does not depend on the speed of the machine.
SLOW = timedelta(minutes=1)


def send(ledger: Ledger, *numbers: int) -> None:
    for number in numbers:
        ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", [f"m{number}"], 10).end()


def there(directory: Path) -> set[str]:
    return {name for entry in read_ledger(directory) if isinstance(entry, Operation) for name in entry.ids}


def gaps(directory: Path) -> list[Gap]:
    return [entry for entry in read_ledger(directory) if isinstance(entry, Gap)]


def folder_removed(directory: Path) -> None:
    shutil.rmtree(directory)


def folder_renamed(directory: Path) -> None:
    directory.rename(directory.with_name("moved"))


def folder_replaced_by_a_copy(directory: Path) -> None:
    shutil.copytree(directory, directory.with_name("copy"))
    folder_renamed(directory)
    directory.with_name("copy").rename(directory)


def folder_replaced_by_an_empty_one(directory: Path) -> None:
    folder_renamed(directory)
    directory.mkdir()


def link_swapped(directory: Path) -> None:
    folder_renamed(directory)
    directory.with_name("other").mkdir()
    directory.symlink_to(directory.with_name("other"))


def segment_removed(directory: Path) -> None:
    (segment,) = list_segments(directory)
    segment.path.unlink()


def segment_replaced(directory: Path) -> None:
    (segment,) = list_segments(directory)
    shutil.copy(segment.path, directory / "copy")
    (directory / "copy").rename(segment.path)


EVERYTHING = [
    folder_removed,
    folder_renamed,
    folder_replaced_by_a_copy,
    folder_replaced_by_an_empty_one,
    link_swapped,
    segment_removed,
    segment_replaced,
]
NEEDS_A_FOLDER = (folder_removed, folder_renamed)


@pytest.mark.parametrize("durability", ["process", "lazy"])
@pytest.mark.parametrize("happens", EVERYTHING)
def test_l7_with_stop_operations_are_refused_from_the_next_flush_until_the_folder_is_back(
    tmp_path: Path,
    happens: Callable[[Path], None],
    durability: Literal["process", "lazy"],
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = tmp_path / "ledger"
    with Ledger(
        directory, options=LedgerOptions(on_error="stop", durability=durability, group_interval=SLOW)
    ) as ledger:
        send(ledger, *range(BEFORE))
        assert ledger.flush()
        happens(directory)
        with suppress(LedgerUnavailableError):  # the writer may have checked already
            send(ledger, BEFORE)
        with pytest.raises(LedgerUnavailableError):
            ledger.flush()
        if happens in NEEDS_A_FOLDER:
            for _ in range(3):
                with pytest.raises(LedgerUnavailableError):
                    send(ledger, BEFORE + 1)
                with pytest.raises(LedgerUnavailableError):
                    ledger.flush()
            assert not directory.exists(), "a folder that was unmounted is not made again on the disk below it"
            directory.mkdir()
        assert ledger.flush()
        send(ledger, BEFORE + 1)
        assert ledger.flush()
    assert "removed or replaced while it was being written" in caplog.text
    assert f"m{BEFORE + 1}" in there(directory)
    assert gaps(directory)[0].count == BEFORE


@pytest.mark.parametrize("durability", ["process", "lazy"])
@pytest.mark.parametrize("happens", EVERYTHING)
def test_l7_with_go_on_the_entries_of_a_lost_segment_count_as_missing(
    tmp_path: Path,
    happens: Callable[[Path], None],
    durability: Literal["process", "lazy"],
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = tmp_path / "ledger"
    with (
        caplog.at_level(logging.WARNING, "twinbus.ledger"),
        Ledger(directory, options=LedgerOptions(durability=durability, group_interval=SLOW)) as ledger,
    ):
        send(ledger, *range(BEFORE))
        assert ledger.flush()
        happens(directory)
        send(ledger, BEFORE)
        assert ledger.flush() is False
        send(ledger, BEFORE + 1)
        if happens in NEEDS_A_FOLDER:
            assert ledger.flush() is False
            assert ledger.failure is not None
            directory.mkdir()
        assert ledger.flush()
        assert ledger.failure is None
        assert ledger.missing == BEFORE
    assert "removed or replaced" in caplog.text
    assert f"{BEFORE} entries are missing" in caplog.text
    copied = happens in (folder_replaced_by_a_copy, segment_replaced)
    assert there(directory) == {f"m{number}" for number in range(0 if copied else BEFORE, BEFORE + 2)}
    (gap,) = gaps(directory)
    assert gap.count == BEFORE
    assert "removed or replaced" in gap.reason
    found = balance(read_ledger(directory))
    assert any(f"{BEFORE} entries are missing" in reason for reason in found.incomplete)
    assert found.lost.total() == 0


def test_l7_a_folder_that_was_moved_and_linked_back_is_still_the_same(tmp_path: Path) -> None:
    directory = tmp_path / "ledger"
    with Ledger(directory) as ledger:
        send(ledger, 1)
        assert ledger.flush()
        folder_renamed(directory)
        directory.symlink_to(directory.with_name("moved"))
        send(ledger, 2)
        assert ledger.flush()
    assert there(tmp_path / "moved") == {"m1", "m2"}
    assert balance(read_ledger(directory)).incomplete == []


@pytest.mark.parametrize("on_error", ["go_on", "stop"])
def test_l7_a_folder_that_is_gone_is_noticed_on_closing(
    tmp_path: Path, on_error: str, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger(tmp_path / "ledger", options=LedgerOptions(on_error=on_error))  # type: ignore[arg-type] # one of the two
    send(ledger, 1)
    assert ledger.flush()
    shutil.rmtree(ledger.directory)
    if on_error == "stop":
        with pytest.raises(LedgerUnavailableError, match="No such file or directory"):
            ledger.close()
    else:
        ledger.close()
    assert "removed or replaced while it was being written" in caplog.text
    assert "closed, but not everything is in" in caplog.text


def test_l7_the_entries_of_a_segment_that_is_gone_at_sealing_count_as_missing(tmp_path: Path) -> None:
    """The segment is full. The next group starts another segment, which reports the entries of the first as missing."""
    options = LedgerOptions(segment_bytes=4096, group_interval=SLOW, durability="lazy")
    with Ledger(tmp_path, options=options) as ledger:
        send(ledger, *range(100))
        assert ledger.flush()
        segment_removed(tmp_path)
        send(ledger, 100)
        assert ledger.flush() is False
        assert ledger.flush()
        assert ledger.missing == 100
    assert there(tmp_path) == {"m100"}
    assert sum(gap.count for gap in gaps(tmp_path)) == 100


def test_l7_a_gap_entry_that_is_lost_with_its_segment_is_written_again(tmp_path: Path) -> None:
    with Ledger(tmp_path, options=LedgerOptions(group_interval=SLOW)) as ledger:
        for lost in range(2):
            send(ledger, *range(10 * lost, 10 * lost + 10))
            assert ledger.flush()
            (segment,) = list_segments(tmp_path)
            segment.path.unlink()
            assert ledger.flush() is False, "there is nothing new to be written, but what was written is gone"
            send(ledger, 100 + lost)
            assert ledger.flush()
    # 10 entries, then a segment with their gap and one entry; then 10 more in that segment.
    assert there(tmp_path) == {"m101"}
    (gap,) = gaps(tmp_path)
    assert gap.count == ledger.missing
    assert gap.count >= 10 + 1 + 10


def test_l7_a_segment_that_another_writer_sealed_is_not_written_any_more(tmp_path: Path) -> None:
    """A reader of sealed segments may have read the segment already, so its last lines are written again."""
    with Ledger(tmp_path, options=LedgerOptions(group_interval=SLOW)) as ledger:
        send(ledger, 1)
        assert ledger.flush()
        (segment,) = list_segments(tmp_path)
        segment.path.rename(segment.sealed_path)
        send(ledger, 2)
        assert ledger.flush()
        assert [one.is_open for one in list_segments(tmp_path)] == [False, True]
        (_, new) = list_segments(tmp_path)
        assert b"m2" in new.path.read_bytes()
        sealed = segment.sealed_path.read_bytes()
        send(ledger, 3)
        assert ledger.flush()
        assert segment.sealed_path.read_bytes() == sealed
        assert ledger.missing == 0
    assert balance(read_ledger(tmp_path)).incomplete == []
    assert balance(read_ledger(tmp_path)).delivered.total() == 3
