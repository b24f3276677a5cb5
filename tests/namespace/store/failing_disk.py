"""A file system that fails on demand: full, read-only, broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import apsw

_names = count()


class FailingDisk(apsw.VFS):
    """Set `writes` or `reads` to the error that they raise. `after` writes succeed first."""

    def __init__(self) -> None:
        self.vfs = f"failing-{next(_names)}"
        self.writes: type[apsw.Error] | None = None
        self.reads: type[apsw.Error] | None = None
        self.after = 0
        super().__init__(self.vfs, "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> _File:  # noqa: N802  # apsw's names
        return _File(self, name, flags)


class _File(apsw.VFSFile):
    def __init__(self, disk: FailingDisk, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        self._disk = disk
        super().__init__("", name, flags)

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        if self._disk.reads is not None:
            raise self._disk.reads
        return super().xRead(amount, offset)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        if self._disk.writes is not None:
            self._disk.after -= 1
            if self._disk.after < 0:
                raise self._disk.writes
        super().xWrite(data, offset)


@contextmanager
def failing_disk() -> Iterator[FailingDisk]:
    disk = FailingDisk()
    try:
        yield disk
    finally:
        disk.unregister()
