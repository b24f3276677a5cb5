"""The shared state in a folder (S16): one file for each entity that is failed over, and one file for all holds.

    <folder>/<name of the primary>/       mode 0700
        failover-<digest of the path>.json    mode 0600; replaced with each ping, removed at a restore
        holds.json                            mode 0600; all holds
        holds.lock                            locked while holds.json is changed
        holds.json.damaged-<n>                holds that could not be read, kept when holds.json was written anew

Several processes may use a folder at the same time. A file is replaced as a whole: a reader sees the old file or the
new one, also if the writer is killed. Each file is on the disk before it replaces the old one. A change of the holds
reads them first, so it takes a lock; the kernel frees the lock of a killed process.

A file that is damaged, too long or no regular file is unreadable, and so is not known. It does not hide other files.
Damaged holds are never overwritten: which entities an operator holds is not known anywhere else. While their file is
there, no missing hold counts as ended. A release of all entities, or an operator, removes the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from uuid import uuid4

from twinbus.pairing.decide.known_state import (
    EVERY_ENTITY,
    MAX_STATE_BYTES,
    FailoverRecord,
    HoldRecord,
    KnownState,
    ReleaseRecord,
    RestoreRecord,
    StateChange,
    StateFormatError,
    StateReading,
    apply_changes,
    entity_key,
    hold_changes,
    read_state,
    state_text,
)

_log = logging.getLogger("twinbus.pairing")

_HOLDS: Final = "holds.json"
_LOCK: Final = "holds.lock"
_DAMAGED_HOLDS: Final = re.compile(r"holds\.json\.damaged-[0-9]+")
_FAILOVER: Final = re.compile(r"failover-[0-9a-f]{32}\.json")
_TEMPORARY: Final = ".tmp"
_MOST_FILES: Final = 10_000
# Seconds after which a file is removed: one that a killed writer left half-written, and a failover that nobody ended.
_OLD_TEMPORARY: Final = 3600.0
_OLD_FAILOVER: Final = 86_400.0


class FolderState:
    """The shared state of one primary in `folder`. Every method may block, and raises OSError."""

    def __init__(self, folder: str | os.PathLike[str], primary: str) -> None:
        """`primary` is the name of the primary (P4). Several primaries may share a folder."""
        self.folder = Path(folder) / primary.lower()

    def read(self) -> StateReading:
        """Return what is known. Raises FileNotFoundError if nobody has written to the folder yet."""
        changes: list[StateChange] = []
        unreadable: list[str] = []
        hides_holds = False
        names = os.listdir(self.folder)  # noqa: PTH208 - names are enough
        for name in sorted(filter(_DAMAGED_HOLDS.fullmatch, names)):
            text = "these holds were damaged; release all entities, or remove the file when nothing in it is held"
            unreadable.append(f"{self.folder / name}: {text}")
            hides_holds = True
        failovers = sorted(filter(_FAILOVER.fullmatch, names))
        for name in (_HOLDS, *failovers[:_MOST_FILES]):
            try:
                found = self._read_file(name)
            except FileNotFoundError:
                # Nobody holds anything, or a restore removed the file after the folder was listed.
                continue
            except (OSError, StateFormatError) as error:
                unreadable.append(f"{self.folder / name}: {error}")
                hides_holds = hides_holds or name == _HOLDS
            else:
                kinds = (HoldRecord, ReleaseRecord) if name == _HOLDS else (FailoverRecord,)
                changes += [change for change in found if isinstance(change, kinds)]
        return StateReading(apply_changes(changes), tuple(unreadable), hides_holds)

    def write(self, changes: Sequence[StateChange]) -> None:
        """Write changes, in their order. Makes the folder at the first write."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sweep()
        for change in changes:
            match change:
                case FailoverRecord():
                    self._replace_file(self._failover_file(change.entity), [change])
                case RestoreRecord():
                    (self.folder / self._failover_file(change.entity)).unlink(missing_ok=True)
                case HoldRecord() | ReleaseRecord():
                    pass
        holds = [change for change in changes if isinstance(change, HoldRecord | ReleaseRecord)]
        if holds:
            with self._locked():
                self._replace_file(_HOLDS, hold_changes(apply_changes(holds, self._holds())))
                if any(isinstance(change, ReleaseRecord) and change.entity == EVERY_ENTITY for change in holds):
                    for kept in self._damaged_holds():
                        kept.unlink(missing_ok=True)

    def _holds(self) -> KnownState:
        try:
            return apply_changes(self._read_file(_HOLDS))
        except FileNotFoundError:
            return KnownState()
        except StateFormatError as error:
            # An operator may have removed any of the files that are kept.
            last = max((int(path.name.rpartition("-")[2]) for path in self._damaged_holds()), default=0)
            kept = self.folder / f"{_HOLDS}.damaged-{last + 1}"
            (self.folder / _HOLDS).rename(kept)
            _log.warning("the holds of the shared state are damaged, and are kept in %s: %s", kept, error)
            return KnownState()

    def _damaged_holds(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if _DAMAGED_HOLDS.fullmatch(path.name)]

    @staticmethod
    def _failover_file(entity: str) -> str:
        return f"failover-{hashlib.sha256(entity_key(entity).encode()).hexdigest()[:32]}.json"

    def _read_file(self, name: str) -> tuple[StateChange, ...]:
        # O_NONBLOCK: opening a named pipe would wait for its writer.
        descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise StateFormatError("it is no regular file")
            return read_state(file.read(MAX_STATE_BYTES + 1))

    def _replace_file(self, name: str, changes: Sequence[StateChange]) -> None:
        temporary = self.folder / f".{name}.{uuid4().hex}{_TEMPORARY}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(temporary, flags, 0o600), "wb") as file:  # noqa: PTH123 - a descriptor
                file.write(state_text(changes).encode())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.folder / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._sync_folder()

    def _sync_folder(self) -> None:
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.folder / _LOCK, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _sweep(self) -> None:
        """Remove files that are of no use any more. A file that cannot be removed does no harm."""
        now = time.time()
        with contextlib.suppress(OSError), os.scandir(self.folder) as files:
            for file in files:
                limit = _OLD_TEMPORARY if file.name.endswith(_TEMPORARY) else None
                limit = _OLD_FAILOVER if _FAILOVER.fullmatch(file.name) else limit
                if limit is not None and now - file.stat(follow_symlinks=False).st_mtime > limit:
                    os.unlink(file.path)  # noqa: PTH108 - an entry of scandir
