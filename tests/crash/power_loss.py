"""A disk that can lose power: an SQLite VFS that records which bytes were synced and which are only in the cache.

SQLite uses files of the real file system. For each file, the disk also stores the synced bytes and the changes since
the last sync. After a power cut, `survivors` returns the files that a restarted machine would find: of the changes that
were not synced, a part chosen by the seed, none, or all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import apsw

from twinbus.namespace.store.commit_counter import CommitCounter, read_counter

SECTOR = 512
_names = count()


class Loss(Enum):
    """What happens to changes that were not synced."""

    ALL = "all of them are lost"
    SOME = "each is kept or lost as a whole, in any combination"
    TORN = "each sector of each is kept or lost"
    NONE = "none is lost: the process died, the machine did not"


class PowerCutError(apsw.IOError):
    """The power is off: every operation fails."""


class _Shadow:
    """One file: the synced bytes, and the changes since."""

    def __init__(self) -> None:
        self.safe = bytearray()
        self.pending: list[tuple[int, bytes | None]] = []
        """A write at an offset, or a new length (data None)."""
        self.named = False
        """Whether its entry in the folder is synced."""

    def sync(self) -> None:
        for change in self.pending:
            _apply(self.safe, *change)
        self.pending.clear()

    def survivor(self, rng: Random, loss: Loss) -> bytes | None:
        named = self.named or loss is Loss.NONE or (loss is not Loss.ALL and rng.random() < 0.5)
        if not named:
            return None
        content = bytearray(self.safe)
        for offset, data in self.pending:
            if loss is Loss.NONE:
                _apply(content, offset, data)
            elif loss is Loss.SOME or (loss is Loss.TORN and data is None):
                if rng.random() < 0.5:
                    _apply(content, offset, data)
            elif loss is Loss.TORN and data is not None:
                for start, sector in _sectors(offset, data):
                    if rng.random() < 0.5:
                        _apply(content, start, sector)
        return bytes(content)


def _sectors(offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    end = offset + len(data)
    while offset < end:
        stop = min(end, (offset // SECTOR + 1) * SECTOR)
        yield offset, data[len(data) - (end - offset) : len(data) - (end - stop)]
        offset = stop


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del content[offset:]
        content.extend(bytes(offset - len(content)))
    else:
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data


class Disk:
    """All files of the disk, and the number of operations until the power is lost."""

    def __init__(self, *, syncs: bool = True) -> None:
        self.vfs = f"power-loss-{next(_names)}"
        self.operations_left = 1 << 60
        self.is_dead = False
        self._syncs = syncs
        self._files: dict[str, _Shadow] = {}

    def operate(self) -> None:
        """Count an operation that is about to happen. Raises PowerCutError when the power is lost."""
        self.operations_left -= 1
        if self.operations_left < 0:
            self.is_dead = True
        self.check()

    def check(self) -> None:
        if self.is_dead:
            raise PowerCutError

    def opened(self, name: str) -> _Shadow:
        shadow = self._files.get(name)
        if shadow is None:
            # A renamed file keeps its state, so that a rename before the sync is detected.
            shadow = self._files.pop(name + ".new", None) or _Shadow()
            self._files[name] = shadow
            if Path(name).exists() and Path(name).stat().st_size and not shadow.safe and not shadow.pending:
                shadow.safe += Path(name).read_bytes()
                shadow.named = True
        return shadow

    def synced(self, shadow: _Shadow, is_log: bool) -> None:
        if self._syncs:
            shadow.sync()
            if is_log:
                # SQLite syncs the folder with the first sync of a new log or journal, and so every name in it.
                for other in self._files.values():
                    other.named = True

    def deleted(self, name: str, folder_synced: bool) -> None:
        shadow = self._files.pop(name, None)
        if shadow is not None and shadow.named and not folder_synced and self._syncs:
            self._files[name + "\0"] = shadow  # may be there again after the cut

    def survivors(self, rng: Random, loss: Loss) -> dict[str, bytes]:
        """Write the files that a machine finds after the restart. The shared-memory file is never among them."""
        found: dict[str, bytes] = {}
        for name, shadow in sorted(self._files.items(), key=lambda item: item[0].endswith("\0"), reverse=True):
            if name.endswith("\0") and (loss is Loss.NONE or rng.random() < 0.5):
                continue
            content = shadow.survivor(rng, loss)
            if content is not None and not name.endswith("-shm"):
                found[Path(name.rstrip("\0")).name] = content
        return found

    @contextmanager
    def plugged_in(self) -> Iterator[None]:
        vfs = _Vfs(self)
        try:
            yield
        finally:
            vfs.unregister()


class _Vfs(apsw.VFS):
    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        super().__init__(disk.vfs, "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> _File:  # noqa: N802  # apsw's names
        self._disk.check()
        return _File(self._disk, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        self._disk.operate()
        super().xDelete(filename, syncdir)
        self._disk.deleted(filename, syncdir)


class _File(apsw.VFSFile):
    def __init__(self, disk: Disk, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        self._disk = disk
        self._is_log = bool(flags[0] & (apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL))
        self._shadow = disk.opened(name.filename() if isinstance(name, apsw.URIFilename) else str(name))
        super().__init__("", name, flags)

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        self._disk.check()
        return super().xRead(amount, offset)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        self._disk.operate()
        super().xWrite(data, offset)
        self._shadow.pending.append((offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        self._disk.operate()
        super().xTruncate(newsize)
        self._shadow.pending.append((newsize, None))

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._disk.operate()
        self._disk.synced(self._shadow, self._is_log)


def leave_old_counter(store: Path) -> None:
    """Leave the commit counter of a store as a power loss may: with the number that it was created with."""
    counted = read_counter(store)
    assert counted is not None
    CommitCounter(store, counted.identity, 0).close()
