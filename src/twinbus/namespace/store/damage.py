"""Finds damage in the files of a store before it is used, and puts a rebuilt store in its place (X2)."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import apsw

from twinbus.namespace.store import open_store
from twinbus.namespace.store.checksums import values_crc
from twinbus.namespace.store.commit_counter import CountedCommits, counter_path
from twinbus.namespace.store.examine import DAMAGE_ERRORS, UNREADABLE, damage_text, examine
from twinbus.namespace.store.files import sync_folder
from twinbus.namespace.store.log_scan import read_log

_log = logging.getLogger(__name__)

_LINES_LOGGED: Final = 50
_CHARACTERS_LOGGED: Final = 1_000
_CACHE_KIB: Final = 2 * 1024
_PAGE_COUNT: Final = slice(28, 32)
"""Where the header of an SQLite file has the number of its pages."""


@contextmanager
def connected_to_examine(path: Path, vfs: str | None) -> Iterator[apsw.Connection]:
    """Connect to a store, and leave the files as they are, also when the connection is closed."""
    connection = open_store.connect(path, vfs, _CACHE_KIB)
    try:
        # Otherwise the last connection to be closed copies the readable part of the log into the file and removes the
        # log.
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.pragma("query_only", "on")
        connection.pragma("cell_size_check", "on")
        yield connection
    finally:
        connection.close()


def find_damage(path: Path, vfs: str | None, counted: CountedCommits | None, most_bytes: int) -> list[str]:
    """Return a text for each damage of a store. Changes no file. Raises StoreError and apsw.Error as `examine` does."""
    log = read_log(path, open_store.PAGE_SIZE)
    try:
        with connected_to_examine(path, vfs) as connection:
            return examine(connection, path, log, counted, most_bytes)
    except DAMAGE_ERRORS as error:  # the definitions of the tables cannot be read
        return [damage_text(error)]
    except apsw.IOError:
        # SQLite reports a page that ends in the middle as an error of the disk.
        if path.stat().st_size % open_store.PAGE_SIZE == 0:
            raise
        return ["it is cut short, in the middle of a page"]


def is_older(path: Path, vfs: str | None) -> bool:
    """Whether the store has the layout of an earlier version, without checksums."""
    try:
        with connected_to_examine(path, vfs) as connection:
            return open_store.checked_version(connection, path) < open_store.VERSION
    except (*DAMAGE_ERRORS, apsw.IOError):
        return False


def is_layout_intact(path: Path, vfs: str | None) -> bool:
    """Whether the definitions of tables and indexes are those of a store."""
    try:
        with connected_to_examine(path, vfs) as connection:
            return open_store.layout(connection) == open_store.expected_layout()
    except (*DAMAGE_ERRORS, *UNREADABLE, apsw.IOError):
        return False


def has_totals(path: Path, vfs: str | None) -> bool:
    """Whether the totals can be read and have their checksum, so that the tables are where their definitions say."""
    try:
        with connected_to_examine(path, vfs) as connection:
            totals = connection.execute(f"SELECT {', '.join(open_store.Totals._fields)}, crc FROM totals").get  # noqa: S608
            return totals is not None and bool(values_crc(totals[:-1]) == totals[-1])
    except (*DAMAGE_ERRORS, *UNREADABLE):
        return False


def copy_with_new_first_page(path: Path, vfs: str | None) -> Path:
    """Copy file and log of a store, and replace the first page by that of an empty store. Returns the path of the copy.

    The first page has the header of the file and the definitions of the tables, with the page at which each begins.
    These are the same in every store that was created in this version. In a store that was upgraded they may differ;
    `has_totals` then finds none.
    """
    empty, source = path.with_name(path.name + ".empty"), path.with_name(path.name + ".source")
    remove_files(empty)
    open_store.create(empty, vfs)
    page = bytearray(empty.read_bytes()[: open_store.PAGE_SIZE])
    remove_files(empty)
    remove_files(source)
    _copy(path, source)
    pages = path.stat().st_size // open_store.PAGE_SIZE
    page[_PAGE_COUNT] = pages.to_bytes(4, "big")
    with source.open("r+b") as file:
        file.write(page)
        file.truncate(pages * open_store.PAGE_SIZE)
    with suppress(FileNotFoundError):
        _copy(path.with_name(path.name + "-wal"), source.with_name(source.name + "-wal"))
    return source


def _copy(path: Path, copy: Path) -> None:
    copy.touch(0o600)
    shutil.copyfile(path, copy)


def remove_files(path: Path) -> None:
    """Remove all files of a store that is not open."""
    for suffix in ("", "-wal", "-shm", ".commits", ".lock"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def put_in_place(path: Path, rebuilt: Path, lines: Iterable[str]) -> None:
    """Keep the files of a damaged store under another name, with the list of what is lost, and rename `rebuilt`.

    If the process ends in between, the next start reports damage again: the commit counter is moved last.
    """
    number = 1
    while (kept := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    listed = kept.with_name(kept.name + ".txt")
    listed.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    listed.chmod(0o600)
    try:
        os.link(path, kept)
    except OSError:  # a file system without links
        _copy(path, kept)
    with suppress(FileNotFoundError):
        path.with_name(path.name + "-wal").rename(kept.with_name(kept.name + "-wal"))
    path.with_name(path.name + "-shm").unlink(missing_ok=True)
    rebuilt.rename(path)
    with suppress(FileNotFoundError):
        counter_path(path).rename(counter_path(kept))
    sync_folder(path.parent)
    _log.warning("store %s: the damaged files are kept as %s*, what is lost is listed in %s", path.name, kept, listed)


def log_loss(path: Path, findings: Sequence[str], lost: Sequence[str]) -> None:
    """Log what was damaged and what is lost."""
    lines = [*(f"damaged: {line}" for line in findings), *(f"lost: {line}" for line in lost)]
    for line in lines[:_LINES_LOGGED]:
        shown = line if len(line) <= _CHARACTERS_LOGGED else f"{line[:_CHARACTERS_LOGGED]}…"
        _log.warning("store %s: %s", path.name, shown)
    if len(lines) > _LINES_LOGGED:
        _log.warning("store %s: and %d more", path.name, len(lines) - _LINES_LOGGED)
