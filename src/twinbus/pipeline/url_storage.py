"""Tables in an object store (D6). `deltalake` reads and writes their logs there; `stored_files` the Parquet files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import BinaryIO

from twinbus.object_store import ObjectFolder
from twinbus.pipeline.storage_lease import StorageLease
from twinbus.pipeline.table_storage import LOG_FOLDER, SNAPSHOTS, TableStorage


class UrlTableStorage(TableStorage):
    """The tables below the URL `root`. `TableStorage(url)` makes it."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        self._folder = ObjectFolder(self.location)
        self._lease = StorageLease(self._folder)

    @property
    def is_url(self) -> bool:
        return True

    def has_tables(self) -> bool:
        return next(self._folder.list(f"{SNAPSHOTS}/{LOG_FOLDER}"), None) is not None

    def has_old_format(self) -> bool:
        return False  # earlier versions wrote local folders only

    def uri(self, table: str) -> str:
        return f"{self.location}/{table}"

    def file_uri(self, table: str, path: str) -> str:
        return f"{self.location}/{table}/{path}"

    def open_file(self, table: str, path: str) -> BinaryIO:
        return self._folder.open(f"{table}/{path}")

    @contextmanager
    def lock(self) -> Iterator[None]:
        with self._lease.held():
            yield

    def check_lock(self) -> None:
        self._lease.check()

    def replace_file(self, folder: str, name: str, data: bytes) -> None:
        self._folder.put(f"{folder}/{name}", BytesIO(data))

    def names(self) -> list[str]:
        objects, folders = self._folder.list_folder()
        return [*(one.name for one in objects), *folders]

    def log_files(self, table: str) -> list[tuple[str, float]]:
        log = f"{table}/{LOG_FOLDER}"
        return [(one.name.removeprefix(f"{log}/"), one.modified.timestamp()) for one in self._folder.list(log)]

    def remove_log_file(self, table: str, name: str) -> None:
        self._folder.remove(f"{table}/{LOG_FOLDER}/{name}")

    def remove(self, name: str) -> None:
        for one in self._folder.list(name):
            self._folder.remove(one.name)

    def discard_staged(self) -> None:
        """Does nothing: the files of a process that died are removed by `TableLog.vacuum`."""
