"""Who may use a store: one at a time, for as long as its process lives. And folders that survive power loss.

The lock is the kernel's (flock), so that kill -9 releases it; the lock file stays, since removing it would race.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from twinbus.namespace.store.errors import StoreError, StoreInUseError


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
