"""The commit counter: a small file beside the store with the number of the last commit that was synced.

Why. SQLite ends the log at the first frame whose checksum is wrong. After a power loss that is right: the frame belongs
to a commit that was not finished. After damage, all later commits are silently gone. The counter tells the two apart:
its number is written after the commit is synced, so a store that is behind its counter has lost commits.

The number is not synced. It survives the end of the process, also by kill -9. After a power loss, the file may hold an
earlier number, and the store is ahead of it; that is no damage. The file itself is synced before the first commit. So
a store with commits and without a counter is no result of a power loss: it is a copy of which a part is missing.

The file has two slots, in different sectors, written in turn. So a write that a power loss interrupts leaves the other
slot. A slot has the identity of its store, the number and a checksum.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from twinbus.namespace.store.files import sync_folder

_log = logging.getLogger(__name__)

COUNTER_SUFFIX: Final = ".commits"
"""What the name of a commit counter has behind the name of its store."""

_SLOT: Final = Struct("<8sqqI4x")
_MAGIC: Final = b"TwBuCmt1"
_OFFSETS: Final = (0, 512)

# Unlike os.pwrite, a function of a PyDLL keeps the interpreter lock. After a release of the lock, the writer thread
# would have to wait for the event loop; the write itself goes to the page cache and takes a microsecond.
_pwrite = ctypes.PyDLL(None, use_errno=True).pwrite
_pwrite.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int64)
_pwrite.restype = ctypes.c_ssize_t


class CountedCommits(NamedTuple):
    """What a counter says: the identity of its store, and the number of the last commit that was synced."""

    identity: int
    commits: int


def counter_path(store: Path) -> Path:
    """Return the path of the commit counter of a store."""
    return store.with_name(store.name + COUNTER_SUFFIX)


def read_counter(store: Path) -> CountedCommits | None:
    """Return what the counter of a store says, or None if there is no counter that can be read."""
    path = counter_path(store)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    found = [slot for offset in _OFFSETS if (slot := _read_slot(content[offset : offset + _SLOT.size])) is not None]
    if len(found) == 1:
        # A power loss can interrupt the write of one slot. Damage to the slot with the last number looks the same.
        _log.warning("store %s: one of the two numbers in the commit counter %s cannot be read", store.name, path.name)
    if not found:
        _log.warning(
            "store %s: the commit counter %s cannot be read and is written anew."
            " If the last commits are missing, this is not noticed",
            store.name,
            path.name,
        )
        return None
    return max(found, key=lambda slot: slot.commits)


def _read_slot(content: bytes) -> CountedCommits | None:
    if len(content) < _SLOT.size:
        return None
    magic, identity, commits, crc = _SLOT.unpack(content)
    return CountedCommits(identity, commits) if magic == _MAGIC and crc == _slot_crc(content) else None


def _slot_crc(content: bytes) -> int:
    return crc32(content[: _SLOT.size - 8])


class CommitCounter:
    """The open counter of a store. Raises OSError if the file cannot be created or written."""

    def __init__(self, store: Path, identity: int, commits: int) -> None:
        self.path = counter_path(store)
        self._store = store.name
        self._identity = identity
        self._failed = False
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for offset in _OFFSETS:
                os.pwrite(self._descriptor, self._slot(commits), offset)
            os.fsync(self._descriptor)
            sync_folder(store.parent)
        except BaseException:
            self.close()
            raise

    def write(self, commits: int) -> None:
        """Set the counter, after the commit with this number was synced. Does not sync."""
        if _pwrite(self._descriptor, self._slot(commits), _SLOT.size, _OFFSETS[commits & 1]) != _SLOT.size:
            # The commit is on disk. Only a later loss of it would not be noticed.
            if not self._failed:
                cause = os.strerror(ctypes.get_errno())
                _log.error("store %s: the commit counter cannot be written: %s", self._store, cause)
            self._failed = True

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _slot(self, commits: int) -> bytes:
        content = _SLOT.pack(_MAGIC, self._identity, commits, 0)
        return _SLOT.pack(_MAGIC, self._identity, commits, _slot_crc(content))
