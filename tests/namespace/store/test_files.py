"""L7: a commit raises after files of the open store were removed or replaced."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.namespace.store.sample_writes import counters, entity, next_seqs, put
from twinbus.namespace.store.errors import StoreGoneError
from twinbus.namespace.store.sqlite import SqliteStore

NAME = "primary.sqlite"


@pytest.fixture(params=["new", "quiet"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SqliteStore:
    """An open store in a folder that changed just now (every file is compared), or an hour ago (only the folder is)."""
    made = SqliteStore(tmp_path / "data" / NAME)
    made.open()
    if request.param == "quiet":
        in_an_hour = time.time_ns() + 3600 * 10**9
        monkeypatch.setattr("twinbus.namespace.store.files.time.time_ns", lambda: in_an_hour)
    made.commit([entity(), counters(), *put(1, 2)])
    made.commit(put(3))
    return made


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def rename(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def replace_by_a_copy(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("copy"))
    folder.rename(folder.with_name("moved"))
    folder.with_name("copy").rename(folder)


def replace_by_an_empty_one(folder: Path) -> None:
    rename(folder)
    folder.mkdir()


def replace_by_a_file(folder: Path) -> None:
    rename(folder)
    folder.touch()


def replace_by_a_link_to_a_copy(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("copy"))
    rename(folder)
    folder.symlink_to(folder.with_name("copy"))


@pytest.mark.parametrize(
    "happens",
    [
        remove,
        rename,
        replace_by_a_copy,
        replace_by_an_empty_one,
        replace_by_a_file,
        replace_by_a_link_to_a_copy,
    ],
)
def test_l7_a_commit_after_the_folder_is_gone_is_refused(store: SqliteStore, happens: Callable[[Path], None]) -> None:
    happens(store.path.parent)
    with pytest.raises(StoreGoneError, match=r"data folder was removed or replaced.*/data\..*Put the data folder back"):
        store.commit(put(4))
    with pytest.raises(StoreGoneError):
        store.commit(put(5))
    store.close()


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", ".lock"])
@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_l7_a_commit_after_one_of_the_files_is_gone_is_refused(store: SqliteStore, suffix: str, replaced: bool) -> None:
    path = lose(store, suffix, replaced)
    with pytest.raises(StoreGoneError, match=path.name) as caught:
        store.commit(put(4))
    assert caught.value.path == path
    store.close()


def test_l7_a_folder_that_was_moved_and_linked_back_is_still_the_same(store: SqliteStore) -> None:
    folder = store.path.parent
    rename(folder)
    folder.symlink_to(folder.with_name("moved"))
    store.commit(put(4))
    store.close()
    assert seqs(folder.with_name("moved")) == [1, 2, 3, 4]


def test_l7_a_commit_after_a_restore_that_kept_the_times_of_the_folder_is_refused(store: SqliteStore) -> None:
    folder = store.path.parent
    before = folder.stat()
    for path in sorted(folder.iterdir()):
        shutil.copy2(path, folder / "copy")
        (folder / "copy").rename(path)
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert folder.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(StoreGoneError):
        store.commit(put(4))
    store.close()


def lose(store: SqliteStore, suffix: str, replaced: bool) -> Path:
    """Remove one of the files, or replace it by a copy."""
    path = store.path.with_name(NAME + suffix)
    if replaced:
        shutil.copy(path, path.with_name("copy"))
        path.with_name("copy").rename(path)
    else:
        path.unlink()
    return path


def seqs(folder: Path) -> list[int]:
    store = SqliteStore(folder / NAME)
    store.open()
    try:
        return next_seqs(store)
    finally:
        store.close()


def test_l7_a_renamed_folder_holds_all_that_was_committed(store: SqliteStore) -> None:
    rename(store.path.parent)
    with pytest.raises(StoreGoneError):
        store.commit(put(4))
    store.close()
    assert seqs(store.path.parent.with_name("moved"))[:3] == [1, 2, 3]


@pytest.mark.parametrize("suffix", ["-wal", "-shm", ".lock"])
@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced"])
def test_l7_all_that_was_committed_is_kept_where_the_main_file_is_left(
    store: SqliteStore, suffix: str, replaced: bool
) -> None:
    """Only the log holds the newest commits: closing copies them into the file and leaves no older log."""
    lose(store, suffix, replaced)
    with pytest.raises(StoreGoneError):
        store.commit(put(4))
    store.close()
    assert seqs(store.path.parent)[:3] == [1, 2, 3]


@pytest.mark.parametrize("noticed", [True, False])
def test_l7_a_store_that_lost_its_folder_leaves_the_files_of_the_next_one_alone(
    store: SqliteStore, noticed: bool
) -> None:
    """SQLite removes its log by name when it closes, and another server uses that name now."""
    folder = store.path.parent
    rename(folder)
    other = SqliteStore(store.path)
    other.open()
    other.commit([entity(), counters(), *put(7, 8)])
    if noticed:
        with pytest.raises(StoreGoneError):
            store.commit(put(4))
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    assert before[f"{NAME}-wal"]
    store.close()
    assert {path.name: path.stat().st_ino for path in folder.iterdir()} == before
    other.commit(put(9))
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    other.close()
    assert seqs(copy) == [7, 8, 9], "what a kill would have left"
    assert seqs(folder) == [7, 8, 9]
