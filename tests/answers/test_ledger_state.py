"""What a verb sees in the folder of a ledger: lines that were not ingested, and writers that died (D7)."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.object_stores import s3_server
from twinbus.answers import LedgerState, ledger_states
from twinbus.ledger import Ledger, Role, Stage, list_segments
from twinbus.object_store import ObjectFolder
from twinbus.pipeline.ingested_segments import LOOKED_AT_FOLDER, IngestedLedger, IngestedSegments, ingested_by_batch
from twinbus.pipeline.table_storage import TableStorage
from twinbus.storage_location import StorageLocation

SILENCE = timedelta(minutes=15)
NAME = "client-elsewhere-7-00000000000000aa"


def seen(folder: Path, segments: dict[str, int], dead: tuple[str, ...] = ()) -> LedgerState:
    (state,) = ledger_states([IngestedLedger(str(folder), 5, segments)], StorageLocation.parse(folder), dead, SILENCE)
    return state


@pytest.mark.parametrize(
    ("file", "text", "ingested", "sealed", "opened"),
    [
        ("-0.jsonl", "one\ntwo\n", 8, False, False),
        ("-0.jsonl", "one\ntwo\n", 4, True, False),
        ("-0.jsonl", "one\ntwo\n", None, True, False),
        ("-0.jsonl", "one\ncut", 4, False, False),
        ("-0.jsonl.open", "one\ntwo\n", 8, False, False),
        ("-0.jsonl.open", "one\ntwo\n", 4, False, True),
        ("-0.jsonl.open", "one\ncut", 4, False, False),
        ("-0.jsonl.open", "one\n" + "x" * 100_000 + "\n", 4, False, True),
        ("-0.jsonl.open", "", 0, False, False),
    ],
)
def test_d7_only_whole_lines_that_were_not_ingested_make_results_incomplete(
    tmp_path: Path, file: str, text: str, ingested: int | None, sealed: bool, opened: bool
) -> None:
    (tmp_path / f"{NAME}{file}").write_text(text)
    state = seen(tmp_path, {} if ingested is None else {f"{NAME}-0.jsonl": ingested})
    assert (state.at_hand, state.looked_at) == (True, 5)
    assert (state.unread_sealed is not None, state.unread_open is not None) == (sealed, opened)


def test_d7_a_ledger_that_cannot_be_read_here_is_not_at_hand(tmp_path: Path) -> None:
    assert seen(tmp_path / "away", {"a": 1}) == LedgerState(str(tmp_path / "away"), 5)
    assert seen(tmp_path, {"a": 1}) == LedgerState(str(tmp_path), 5), "perhaps its volume is not mounted"


def test_d7_a_ledger_that_was_never_ingested_is_not_in_the_results(tmp_path: Path) -> None:
    states = ledger_states([IngestedLedger("/elsewhere", 5, {})], StorageLocation.parse(tmp_path), (), SILENCE)
    assert states == [LedgerState("/elsewhere", 5), LedgerState(str(tmp_path), None)]


def test_d7_a_ledger_under_another_name_is_the_ledger_that_was_ingested(tmp_path: Path) -> None:
    folder, link, segments = tmp_path / "ledger", tmp_path / "link", IngestedSegments(TableStorage(tmp_path / "tables"))
    folder.mkdir()
    (folder / f"{NAME}-0.jsonl").write_text("one\n")
    link.symlink_to(folder)
    segments.add(IngestedLedger(str(link), 5, {f"{NAME}-0.jsonl": 4}))
    for name in (folder, link, tmp_path / "tables" / ".." / "ledger"):
        location = StorageLocation.parse(name)
        assert segments.name_of(location) == str(link)
        (state,) = ledger_states(segments.ledgers(), location, (), SILENCE)
        assert (state.ledger, state.at_hand, state.looked_at) == (str(link), True, 5)
    assert segments.name_of(StorageLocation.parse(tmp_path / "other")) == str(tmp_path / "other")
    # An earlier version kept a ledger that had two names as two ledgers.
    last = segments.add(IngestedLedger(str(folder), 7, {f"{NAME}-0.jsonl": 3, "b": 9}))
    segments.record_look(str(link), 11, last)
    assert segments.ledgers() == [IngestedLedger(str(folder), 11, {f"{NAME}-0.jsonl": 4, "b": 9})]
    assert segments.name_of(StorageLocation.parse(link)) == str(link), "its checkpoint has this name"


def test_d7_a_ledger_that_was_moved_and_ingested_again_does_not_make_answers_old(tmp_path: Path) -> None:
    before = IngestedLedger(str(tmp_path / "before"), 5, {f"{NAME}-0.jsonl": 4})
    (tmp_path / f"{NAME}-0.jsonl").write_text("one\n")
    after = IngestedLedger(str(tmp_path), 7, {f"{NAME}-0.jsonl": 4, "b": 1})

    def found(*ledgers: IngestedLedger) -> list[str]:
        return [state.ledger for state in ledger_states(ledgers, None, (), SILENCE)]

    assert found(before, after) == [after.ledger]
    assert found(before, replace(after, looked_at=4)) == [before.ledger, after.ledger], "before it was moved"
    assert found(replace(before, segments={f"{NAME}-0.jsonl": 5}), after) == [before.ledger, after.ledger]
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / f"{NAME}-0.jsonl").write_text("one\n")
    assert found(before, after) == [before.ledger, after.ledger], "it is still there"


def test_d7_l1_a_writer_that_ended_since_is_noticed(tmp_path: Path) -> None:
    with Ledger(tmp_path, Role.CLIENT) as ledger:
        ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", ["a"], 1).end()
        ledger.flush()
        (segment,) = list_segments(tmp_path)
        sizes = {segment.sealed_path.name: segment.path.stat().st_size}
        alive = seen(tmp_path, sizes)
        assert (alive.unread_open, alive.same_writers) == (None, True)
        assert not seen(tmp_path, sizes, (segment.writer,)).same_writers, "the results take it for dead"
    ended = seen(tmp_path, sizes)
    assert not ended.same_writers
    assert ended.unread_sealed is not None, "its last line"


@pytest.mark.thorough
def test_d7_many_batches_stay_few_files_and_keep_what_was_ingested(tmp_path: Path) -> None:
    segments = IngestedSegments(TableStorage(tmp_path))
    for number in range(70):
        segments.add(IngestedLedger("one", number, {f"{number // 2}": number + 1}))
    assert segments.ledgers() == [IngestedLedger("one", 69, {f"{one}": 2 * one + 2 for one in range(35)})]
    assert len(DeltaTable(tmp_path / "segments").file_uris()) < 10


def test_d7_a_look_that_found_no_new_lines_counts_for_the_version_that_had_them_all(tmp_path: Path) -> None:
    segments = IngestedSegments(TableStorage(tmp_path))
    first = segments.add(IngestedLedger("one", 5, {"a": 1}))
    segments.record_look("one", 9, first)
    segments.record_look("other", 10, first)
    assert segments.ledgers() == [IngestedLedger("one", 9, {"a": 1})]
    second = segments.add(IngestedLedger("one", 7, {"a": 2}))
    assert segments.ledgers() == [IngestedLedger("one", 7, {"a": 2})], "at 9, not all of these lines were there"
    assert segments.ledgers(first) == [IngestedLedger("one", 9, {"a": 1})]
    segments.record_look("one", 6, second)
    assert segments.ledgers() == [IngestedLedger("one", 7, {"a": 2})], "the latest time counts"
    for look in (tmp_path / LOOKED_AT_FOLDER).glob("*.json"):
        look.write_text("[]")
    assert segments.ledgers() == [IngestedLedger("one", 7, {"a": 2})]


def test_d7_what_a_process_left_that_died_while_it_recorded_a_look_is_removed_a_day_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = IngestedSegments(TableStorage(tmp_path))

    def files() -> list[Path]:
        return [path for path in (tmp_path / LOOKED_AT_FOLDER).rglob("*") if path.is_file()]

    with monkeypatch.context() as dying:
        dying.setattr(Path, "replace", lambda *_: os._exit(0))
        if not (child := os.fork()):
            segments.record_look("one", 5, 1)
        os.waitpid(child, 0)
    (left,) = files()
    segments.storage.discard_staged()
    assert files() == [left], "its process may still be writing"
    os.utime(left.parent, (1, 1))
    segments.storage.discard_staged()
    assert files() == []
    segments.record_look("one", 5, 1)
    assert len(files()) == 1


def test_d7_a_batch_ingests_what_its_offset_has_more_than_the_one_before(tmp_path: Path) -> None:
    place = StorageLocation.parse(tmp_path)
    (tmp_path / "offsets").mkdir()
    for batch, offset in enumerate(({"a": 1, "b": 2, "looked_at": 5}, {"a": 1, "b": 3, "c": 4, "looked_at": 9})):
        (tmp_path / "offsets" / str(batch)).write_text(f"v1\n{{}}\n{json.dumps(offset)}")
    assert ingested_by_batch("one", place, 0) == IngestedLedger("one", 5, {"a": 1, "b": 2})
    assert ingested_by_batch("one", place, 1) == IngestedLedger("one", 9, {"b": 3, "c": 4})
    # Tables of an earlier version have no segments of the batches before.
    assert ingested_by_batch("one", place, 1, is_first=True) == IngestedLedger("one", 9, {"a": 1, "b": 3, "c": 4})
    assert ingested_by_batch("one", place, 2) == IngestedLedger("one", 0, {}), "Spark has removed the offset"


@pytest.mark.thorough
def test_d6_d7_a_ledger_in_an_object_store_is_looked_at_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        place, file = StorageLocation.parse(server.url()), f"{NAME}-0.jsonl"
        ingested = IngestedLedger(str(place), 5, {file: 8})
        assert ledger_states([ingested], place, (), SILENCE) == [LedgerState(str(place), 5)], "nothing is there"
        ObjectFolder(place).put_new(file, b"one\ntwo\n", {})
        (state,) = ledger_states([ingested], None, (), SILENCE)
        assert (state.at_hand, state.unread_sealed, state.unread_open) == (True, None, None)
        ObjectFolder(place).put_new(f"{NAME}-1.jsonl", b"three\n", {})
        (state,) = ledger_states([ingested], None, (), SILENCE)
        assert state.unread_sealed == f"{NAME}-1.jsonl"
    assert ledger_states([ingested], place, (), SILENCE) == [LedgerState(str(place), 5)], "the store does not answer"
