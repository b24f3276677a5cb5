"""Finds damage in the files of a store before it is used, and puts a rebuilt store in its place (X2)."""

from __future__ import annotations

import glob
import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import apsw

from twinbus.namespace.store import open_store
from twinbus.namespace.store.commit_counter import COUNTER_SUFFIX, CountedCommits, counter_path
from twinbus.namespace.store.errors import DAMAGE_ERRORS, UNREADABLE, damage_text, is_cut_short
from twinbus.namespace.store.examine import examine
from twinbus.namespace.store.files import sync_folder
from twinbus.namespace.store.log_scan import read_log

_log = logging.getLogger(__name__)

_LINES_LOGGED: Final = 50
_CHARACTERS_LOGGED: Final = 1_000
_CACHE_KIB: Final = 2 * 1024
_KEPT: Final = ("", "-wal", COUNTER_SUFFIX)
_BESIDE: Final = ("-wal", "-shm", COUNTER_SUFFIX, ".lock")
_PAGE_COUNT: Final = slice(28, 32)
"""Where the header of an SQLite file has the number of its pages."""


@contextmanager
def connected_to_examine(path: Path, vfs: str | None, *, to_save: bool = False) -> Iterator[apsw.Connection]:
    """Connect to a store, and leave the files as they are, also when the connection is closed.

    With `to_save`, SQLite also reads a file that has fewer pages than its header says.
    """
    connection = open_store.connect(path, vfs, _CACHE_KIB)
    try:
        # Otherwise the last connection to be closed copies the readable part of the log into the file and removes the
        # log.
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.pragma("query_only", "on")
        connection.pragma("cell_size_check", "on")
        if to_save:
            connection.pragma("writable_schema", "on")
        yield connection
    finally:
        connection.close()


def find_damage(path: Path, vfs: str | None, counted: CountedCommits | None, most_bytes: int) -> list[str]:
    """Return a text for each damage of a store. Changes no file. Raises StoreError and apsw.Error as `examine` does."""
    log = read_log(path, open_store.PAGE_SIZE)
    try:
        with connected_to_examine(path, vfs) as connection:
            return examine(connection, path, log, counted, most_bytes)
    except (*DAMAGE_ERRORS, apsw.IOError) as error:  # the definitions of the tables cannot be read
        if isinstance(error, apsw.IOError) and not is_cut_short(error):
            raise
        return [damage_text(error)]


def is_older(path: Path, vfs: str | None) -> bool:
    """Whether the store has the layout of an earlier version, without checksums."""
    if open_store.find_unusable(path) is not None:
        return False
    try:
        with connected_to_examine(path, vfs) as connection:
            return open_store.checked_version(connection, path) < open_store.VERSION
    except (*DAMAGE_ERRORS, apsw.IOError):
        return False


def is_layout_intact(path: Path, vfs: str | None) -> bool:
    """Whether the definitions of tables and indexes are those of a store."""
    if open_store.find_unusable(path) is not None:
        return False  # SQLite would remove the log of an empty file
    try:
        with connected_to_examine(path, vfs, to_save=True) as connection:
            return open_store.layout(connection) == open_store.expected_layout()
    except (*DAMAGE_ERRORS, *UNREADABLE, apsw.IOError):
        return False


def has_totals(path: Path, vfs: str | None) -> bool:
    """Whether the totals can be read and have their checksum, so that the tables are where their definitions say."""
    try:
        with connected_to_examine(path, vfs) as connection:
            return open_store.are_totals_intact(connection)
    except (*DAMAGE_ERRORS, *UNREADABLE, apsw.IOError):
        return False


def copy_to_save(path: Path, *, with_log: bool) -> Path:
    """Copy a store, with or without its log. Returns the path of the copy. It is empty if the file is missing."""
    source = path.with_name(path.name + ".source")
    remove_files(source)
    try:
        for suffix in ("", "-wal") if with_log else ("",):
            with suppress(FileNotFoundError):
                _copy(path.with_name(path.name + suffix), source.with_name(source.name + suffix))
    except BaseException:
        remove_files(source)
        raise
    return source


def replace_first_page(path: Path, vfs: str | None) -> None:
    """Replace the first page by that of an empty store.

    The first page has the header of the file and the definitions of the tables, with the page at which each begins.
    These are the same in every store that was created in this version. In a store that was upgraded they may differ;
    `has_totals` then finds none.
    """
    empty = path.with_name(path.name + ".empty")
    remove_files(empty)
    open_store.create(empty, vfs)
    page = bytearray(empty.read_bytes()[: open_store.PAGE_SIZE])
    remove_files(empty)
    page[_PAGE_COUNT] = bytes(4)  # not known: SQLite then takes it from the log, or from the size of the file
    pages = max(1, path.stat().st_size // open_store.PAGE_SIZE)
    with path.open("r+b") as file:
        file.write(page)
        file.truncate(pages * open_store.PAGE_SIZE)


def _copy(path: Path, copy: Path) -> None:
    copy.touch(0o600)
    shutil.copyfile(path, copy)


def has_log(path: Path) -> bool:
    """Whether the log of a closed store has content. Its last checkpoint failed then."""
    log = path.with_name(path.name + "-wal")
    return log.exists() and log.stat().st_size > 0


def remove_files(path: Path, suffixes: Sequence[str] = ("", *_BESIDE)) -> None:
    """Remove the files of a store that is not open: all, or those with the suffixes."""
    for suffix in suffixes:
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def rebuilt_path(path: Path) -> Path:
    """Return the path at which a damaged store is rebuilt."""
    return path.with_name(path.name + ".rebuilt")


def put_in_place(path: Path, lines: Iterable[str]) -> None:
    """Keep the files of a damaged store under another name, with the list of what is lost, and rename the rebuilt one.

    The files of the damaged store belong together: without its log, a store lacks commits, and a log beside another
    store would alter it. So the exchange is decided by one rename. If the process ends before it, the damaged files are
    as they were. If it ends after it, the next start finishes the exchange.
    """
    remove_files(rebuilt_path(path), [suffix for suffix in _BESIDE if suffix != COUNTER_SUFFIX])
    number = 1
    while any(path.with_name(f"{path.name}.damaged-{number}{suffix}").exists() for suffix in _KEPT):
        number += 1
    listed = path.with_name(f"{path.name}.damaged-{number}.txt")
    listed.touch(0o600)
    listed.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    rebuilt_path(path).rename(path.with_name(f"{path.name}.accepted-{number}"))
    sync_folder(path.parent)
    finish_exchange(path)


def finish_exchange(path: Path) -> None:
    """Put a rebuilt store in place, if that was decided. Otherwise do nothing."""
    for accepted in path.parent.glob(f"{glob.escape(path.name)}.accepted-*"):
        kept = path.with_name(f"{path.name}.damaged-{accepted.name.rpartition('-')[2]}")
        counter = counter_path(rebuilt_path(path))
        for suffix in _KEPT:
            # If the counter of the rebuilt store is in its place already, the exchange was interrupted behind that.
            if suffix != COUNTER_SUFFIX or counter.exists():
                with suppress(FileNotFoundError):
                    path.with_name(path.name + suffix).rename(kept.with_name(kept.name + suffix))
        path.with_name(path.name + "-shm").unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            counter.rename(counter_path(path))
        accepted.rename(path)
        sync_folder(path.parent)
        _log.warning(
            "store %s: the damaged files are kept as %s*, what is lost is listed in %s.txt", path.name, kept, kept
        )


def log_loss(path: Path, findings: Sequence[str], lost: Sequence[str]) -> None:
    """Log what was damaged and what is lost."""
    lines = [*(f"damaged: {line}" for line in findings), *(f"lost: {line}" for line in lost)]
    for line in lines[:_LINES_LOGGED]:
        shown = line if len(line) <= _CHARACTERS_LOGGED else f"{line[:_CHARACTERS_LOGGED]}…"
        _log.warning("store %s: %s", path.name, shown)
    if len(lines) > _LINES_LOGGED:
        _log.warning("store %s: and %d more", path.name, len(lines) - _LINES_LOGGED)
