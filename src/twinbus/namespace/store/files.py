"""Who may use a store: one at a time, for as long as its process lives. And files and folders that stay what they are.

The lock is the kernel's (flock), so that kill -9 releases it; the lock file stays, since removing it would race.

A process that has a file open does not notice when the file is removed or replaced: it writes and syncs without an
error into a file that nobody will ever find. So a store compares the files at its paths with those it opened (L7).
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from twinbus.namespace.store.errors import StoreError, StoreGoneError, StoreInUseError

# A folder's time of change is a multiple of its file system's clock tick: 1 to 10 ms on Linux, 2 s on FAT.
_TICK_NS: Final = 3_000_000_000


class StoreLock:
    """The right to use one store file."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(path.name + ".lock")
        self._store = path
        self._descriptor = -1

    def take(self) -> None:
        """Take it, or raise StoreInUseError naming the process that has it."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"The lock file cannot be opened ({error.strerror})", self.path, "Give this user the right to it."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise StoreInUseError(
                f"The store is in use by process {holder}",
                self._store,
                "Stop that process, or use another data folder.",
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise StoreError(
                f"The file system does not lock ({error.strerror})", self.path, "Put the data folder on a local disk."
            ) from error
        with suppress(OSError):  # the number only serves the message above; a full disk is met soon enough
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        self._descriptor = descriptor

    def give_back(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class StoreFiles:
    """The files of a store in use, all in one folder. Raises OSError if one is not there from the start."""

    def __init__(self, *paths: Path) -> None:
        self._folder = paths[0].parent
        self._folder_identity = _identity(self._folder.stat())
        self._files = [(path, _identity(path.stat())) for path in paths]
        self._unchanged: tuple[int, int, int] | None = None

    def check(self) -> None:
        """Raise StoreGoneError if the file at one of the paths is not the one that was there at first.

        Every removal and rename changes the folder's ctime, which no program can set back. While ctime is the same, one
        look at the folder is enough. A change within the last 3 s may leave the same ctime, so each file is compared.
        """
        try:
            folder = self._folder.stat()
        except OSError:
            raise StoreGoneError("The data folder", self._folder) from None
        found = (folder.st_dev, folder.st_ino, folder.st_ctime_ns)
        if found == self._unchanged:
            return
        looked = time.time_ns()
        for path, identity in self._files:
            if not _is(path, identity):
                if _identity(folder) != self._folder_identity:
                    raise StoreGoneError("The data folder", self._folder)
                raise StoreGoneError("A file of the store", path)
        self._unchanged = found if looked - folder.st_ctime_ns > _TICK_NS else None


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _is(path: Path, identity: tuple[int, int]) -> bool:
    try:
        return _identity(path.stat()) == identity
    except OSError:
        return False


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, each with its entry on disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Bring the entries of a folder to disk: syncing a new file does not promise its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
