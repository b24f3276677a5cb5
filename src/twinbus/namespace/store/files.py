"""The files of a store: the lock that keeps other processes out, and the check that the files are still in place.

The lock is a lock of the kernel (flock): the kernel releases it when the process ends, also after kill -9. The lock
file is never removed, because another process could be taking the lock at the same instant.

A process that has a file open does not notice when the file is removed or replaced. The process writes and syncs
without an error into a file that no longer has a name. So a store compares the files at its paths with the files that
it opened (L7).
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from twinbus.namespace.store.errors import StoreError, StoreGoneError, StoreInUseError

# A file system rounds times to its clock tick: 1 to 10 ms on Linux, 2 s on FAT.
_TICK_NS: Final = 3_000_000_000


class StoreLock:
    """The exclusive right of a process to use one store file."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(path.name + ".lock")
        self._store = path
        self._descriptor = -1

    def take(self) -> None:
        """Take the lock. Raises StoreInUseError with the id of the process that holds it, or StoreError."""
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
        with suppress(OSError):  # the id only serves the message above
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
        self._descriptor = descriptor

    def give_back(self) -> None:
        """Release the lock. Does nothing if this object does not hold the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class StoreFiles:
    """The identities of the files of an open store, all in one folder. Raises OSError if a file is missing."""

    def __init__(self, *paths: Path) -> None:
        self._folder = paths[0].parent
        self._folder_identity = _identity(self._folder.stat())
        self._files = [(path, _identity(path.stat())) for path in paths]
        self._unchanged: tuple[int, int, int] | None = None

    def check(self) -> None:
        """Raise StoreGoneError if a path no longer leads to the file that was there when this object was made.

        Every removal and rename changes the ctime of the folder, and no program can set a ctime back. While the ctime
        is the same, one stat of the folder is enough. Two changes within 3 s may have the same ctime. So for 3 s after
        a change, every call compares all files.
        """
        try:
            folder = self._folder.stat()
        except OSError:
            raise StoreGoneError("The data folder", self._folder) from None
        found = (folder.st_dev, folder.st_ino, folder.st_ctime_ns)
        if found == self._unchanged:
            return
        checked_at = time.time_ns()
        for path, identity in self._files:
            if not _is_same(path, identity):
                if _identity(folder) != self._folder_identity:
                    raise StoreGoneError("The data folder", self._folder)
                raise StoreGoneError("A file of the store", path)
        self._unchanged = found if checked_at - folder.st_ctime_ns > _TICK_NS else None


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _is_same(path: Path, identity: tuple[int, int]) -> bool:
    try:
        return _identity(path.stat()) == identity
    except OSError:
        return False


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, and sync the entry of each to disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to disk. Syncing a new file does not guarantee that its name is on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
