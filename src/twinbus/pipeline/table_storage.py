"""Where the tables are. The only place that turns the path of the tables into an address of a storage.

The tables are in a folder that the driver and all executors share, or in an object store (`url_storage`).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final
from uuid import uuid4

from twinbus.errors import OperatorError
from twinbus.storage_location import StorageLocation

SNAPSHOTS: Final = "snapshots"
"""The table that names the versions of the other tables."""
OLD_FORMAT: Final = "current.json"
"""The file that earlier versions wrote instead of the table `snapshots`."""
LOG_FOLDER: Final = "_delta_log"
_STAGING: Final = ".staging"
_ABANDONED: Final = 24 * 3600.0
# The commit of results takes less. Flock has no time limit of its own.
_LOCK_SECONDS: Final = 3.0
_LOCK_PAUSE: Final = 0.05


class TablesBusyError(OperatorError):
    """Another process has the lock of the tables."""


class TableStorage:
    """The tables in the folder `root`. Every method names a table by its path below `root`."""

    options: Final[dict[str, str] | None] = None
    """The options that `deltalake` needs for this storage."""

    location: StorageLocation
    """The folder of the tables, or their URL."""

    def __new__(cls, root: str | os.PathLike[str]) -> TableStorage:
        """Returns the storage of a local folder, or of a URL. Raises LocationError if a URL cannot be used."""
        if cls is TableStorage and StorageLocation.parse(root).is_url:
            from twinbus.pipeline.url_storage import UrlTableStorage  # noqa: PLC0415 - rarely needed

            return super().__new__(UrlTableStorage)
        return super().__new__(cls)

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.location = StorageLocation.parse(root).absolute()

    @property
    def root(self) -> Path:
        """The folder of the tables. Raises LocationError if they are in an object store."""
        return Path(self.location)

    @property
    def is_url(self) -> bool:
        """Whether the tables are in an object store. Then `stored_files` reads and writes their files."""
        return False

    def has_tables(self) -> bool:
        """Returns whether there are tables, also of the old format."""
        return (self.root / SNAPSHOTS / LOG_FOLDER).is_dir() or self.has_old_format()

    def has_old_format(self) -> bool:
        return (self.root / OLD_FORMAT).is_file()

    def refuse_old_format(self) -> None:
        """Raises OperatorError if the tables have the old format."""
        if self.has_old_format():
            raise OperatorError(
                f"the tables in {self.location} have the format of an earlier version ({OLD_FORMAT})",
                f"Make them again from the ledger: twinbus ledger ingest LEDGER {self.location} --rebuild",
            )

    def uri(self, table: str) -> str:
        """Returns the address of a table, for `deltalake` and Spark."""
        return str(self.root / table)

    def file_uri(self, table: str, path: str) -> str:
        """Returns the address of a file, for Spark. `path` is relative to the table."""
        return str(self.root / table / path)

    def open_file(self, table: str, path: str) -> BinaryIO:
        return (self.root / table / path).open("rb")

    @contextmanager
    def staging(self, table: str) -> Iterator[str]:
        """Yields the address of a folder that does not exist, for Spark to write files of a table to.

        Removes the folder at the end.
        """
        folder = (self.root / table).parent / _STAGING / uuid4().hex
        try:
            yield str(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def adopt(self, staged: str, table: str, prefix: str = "") -> list[tuple[str, dict[str, str]]]:
        """Moves the Parquet files of a staged folder into a table. Their new names start with `prefix`.

        Returns the new path of each file, relative to the table, and its partition: the `name=value` folders that the
        file was in.
        """
        moved = []
        for file in sorted(Path(staged).glob("**/*.parquet")):
            folders = file.parent.relative_to(staged)
            target = self.root / table / folders / f"{prefix}{uuid4().hex}.parquet"
            target.parent.mkdir(parents=True, exist_ok=True)
            file.rename(target)
            partition = dict(folder.split("=", 1) for folder in folders.parts)
            moved.append((str(target.relative_to(self.root / table)), partition))
        return moved

    def take_in(self, staged: str, table: str, paths: Iterable[str]) -> None:
        """Moves files of a staged folder into a table. They keep their paths."""
        for path in paths:
            target = self.root / table / path
            target.parent.mkdir(parents=True, exist_ok=True)
            (Path(staged) / path).rename(target)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Has the lock of the tables inside the `with` block.

        Waits a few seconds for another process that has the lock; then raises TablesBusyError.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as lock:
            deadline = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TablesBusyError(
                            f"another process is writing the tables in {self.location}", "Wait for it, or end it."
                        ) from None
                    time.sleep(_LOCK_PAUSE)
            yield

    def check_lock(self) -> None:
        """Raises OperatorError if this process has lost the lock. The lock of a folder cannot be lost."""

    def replace_file(self, folder: str, name: str, data: bytes) -> None:
        """Writes a small file beside the tables, all of it or nothing. It replaces one of this name."""
        with self.staging(f"{folder}/{name}") as staged:
            new = Path(staged) / name
            new.parent.mkdir(parents=True)
            new.write_bytes(data)
            new.replace(self.root / folder / name)

    def names(self) -> list[str]:
        """Returns the names of the tables, and of other folders and files beside them."""
        return [path.name for path in self.root.iterdir()]

    def log_files(self, table: str) -> list[tuple[str, float]]:
        """Returns the name and the time of the last change of each file of the log of a table."""
        return [(file.name, file.stat().st_mtime) for file in (self.root / table / LOG_FOLDER).iterdir()]

    def remove_log_file(self, table: str, name: str) -> None:
        (self.root / table / LOG_FOLDER / name).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Removes a table, or another folder or file beside the tables. Does nothing if there is none."""
        path = self.root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def discard_staged(self) -> None:
        """Removes staged folders of processes that died. Only the process that holds the lock may call this.

        Files of results are written without the lock. So of their folders, only those are removed that are older than a
        day.
        """
        shutil.rmtree(self.root / _STAGING, ignore_errors=True)
        for folder in self.root.glob(f"*/{_STAGING}/*"):
            with suppress(FileNotFoundError):  # its process has just removed it
                if folder.stat().st_mtime < time.time() - _ABANDONED:
                    shutil.rmtree(folder, ignore_errors=True)
