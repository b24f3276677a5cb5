"""`twinbus ledger ship`: copies sealed segments to an object store or to another folder, each exactly once (D6).

A sealed segment never changes, so a copy is made once and never again. A segment is stored with one request that
stores all of it or nothing, and that fails if there is an object of this name. So a process that is killed at any
instant leaves no half segment, and two processes that ship the same ledger do not disturb each other.

A segment that is there already is compared by its length and by its SHA-256, which is stored beside it. If another
tool has copied it, its content is read. A segment that differs is never replaced.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final, Protocol

from twinbus.errors import OperatorError
from twinbus.ledger.permissions import file_mode, make_ledger_folder
from twinbus.ledger.segments import list_segments, sync_folder
from twinbus.object_store import ObjectFolder
from twinbus.storage_location import StorageLocation

_DIGEST: Final = "sha256"
_UNFINISHED: Final = ".shipping-"
_ABANDONED: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class ShippedSegments:
    """What one call of `Shipping.ship` did."""

    copied: int = 0
    copied_bytes: int = 0
    present: int = 0
    """Segments that were there already, with the same content."""
    open: int = 0
    """Segments that are still written. They are shipped when they are sealed."""
    differing: tuple[str, ...] = ()
    """Names of the segments that are there with another content."""


class _Target(Protocol):
    """Where segments are copied to."""

    def known(self) -> Mapping[str, int]:
        """Returns the length of each file that is there."""

    def put_new(self, name: str, data: bytes, digest: str) -> bool:
        """Stores a file, all of it or nothing. Returns False if there is one of this name."""

    def has_digest(self, name: str, digest: str) -> bool:
        """Returns whether the file of this name has a content with this SHA-256."""


class Shipping:
    """Copies the sealed segments of the ledger in a folder to a target. Remembers which ones are there."""

    def __init__(self, directory: Path, target: StorageLocation) -> None:
        if target.canonical() == StorageLocation.parse(directory).canonical():
            raise OperatorError(f"{target} is the ledger itself", "Name another folder or a URL.")
        self._directory = directory
        self._target: _Target = _StoreTarget(target) if target.is_url else _FolderTarget(Path(target))
        self._known: Mapping[str, int] | None = None
        self._settled: set[str] = set()
        """Names of the segments that the target has, with the same content or another one."""
        self._differing: set[str] = set()

    def ship(self) -> ShippedSegments:
        """Copies the sealed segments that are not there yet.

        Raises StorageError or OSError; then some segments may be there, and the next call does the rest.
        """
        if self._known is None:
            self._known = self._target.known()
        segments = list(list_segments(self._directory))
        copied = copied_bytes = present = 0
        for segment in segments:
            name = segment.path.name
            if segment.is_open or name in self._settled:
                continue
            try:
                data = segment.path.read_bytes()
            except FileNotFoundError:
                continue  # removed for the disk budget; a `dropped` entry reports this
            digest = hashlib.sha256(data).hexdigest()
            if name not in self._known and self._target.put_new(name, data, digest):
                copied, copied_bytes = copied + 1, copied_bytes + len(data)
            elif self._known.get(name, len(data)) == len(data) and self._target.has_digest(name, digest):
                present += 1
            else:
                self._differing.add(name)
            self._settled.add(name)
        unsealed = sum(segment.is_open for segment in segments)
        return ShippedSegments(copied, copied_bytes, present, unsealed, tuple(sorted(self._differing)))


class _StoreTarget:
    """A folder in an object store."""

    def __init__(self, location: StorageLocation) -> None:
        self._folder = ObjectFolder(location)

    def known(self) -> Mapping[str, int]:
        return {one.name: one.size for one in self._folder.list_folder()[0]}

    def put_new(self, name: str, data: bytes, digest: str) -> bool:
        return self._folder.put_new(name, data, {_DIGEST: digest})

    def has_digest(self, name: str, digest: str) -> bool:
        stored = self._folder.attributes(name).get(_DIGEST)
        return digest == (stored or hashlib.sha256(self._folder.read(name)).hexdigest())


class _FolderTarget:
    """A local folder, such as a mounted volume."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def known(self) -> Mapping[str, int]:
        make_ledger_folder(self._folder)
        found = {}
        for path in self._folder.iterdir():
            with suppress(FileNotFoundError):  # a file of another process that ships, which has finished it
                state = path.stat()
                if not path.name.startswith(_UNFINISHED):
                    found[path.name] = state.st_size
                elif state.st_mtime < time.time() - _ABANDONED:
                    path.unlink()
        return found

    def put_new(self, name: str, data: bytes, _digest: str) -> bool:
        with NamedTemporaryFile(dir=self._folder, prefix=_UNFINISHED) as made:
            made.write(data)
            made.flush()
            os.fchmod(made.fileno(), file_mode(self._folder))
            os.fsync(made.fileno())
            try:
                os.link(made.name, self._folder / name)
            except FileExistsError:
                return False
        sync_folder(self._folder)
        return True

    def has_digest(self, name: str, digest: str) -> bool:
        return hashlib.sha256((self._folder / name).read_bytes()).hexdigest() == digest
