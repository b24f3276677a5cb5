"""Where the tables are. The only place that turns the path of the tables into an address of a storage.

Today the tables are in a folder that the driver and all executors share.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final
from uuid import uuid4

_STAGING: Final = ".staging"


class TableStorage:
    """The tables in the folder `root`. Every method names a table by its path below `root`."""

    options: Final[dict[str, str] | None] = None
    """The options that `deltalake` needs for this storage."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()

    def uri(self, table: str) -> str:
        """Returns the address of a table, for `deltalake` and Spark."""
        return str(self.root / table)

    def file_uri(self, table: str, path: str) -> str:
        """Returns the address of a file, for Spark. `path` is relative to the table."""
        return str(self.root / table / path)

    def open_file(self, table: str, path: str) -> BinaryIO:
        return (self.root / table / path).open("rb")

    @contextmanager
    def staging(self) -> Iterator[str]:
        """Yields the address of a folder that does not exist, for Spark to write to. Removes the folder at the end."""
        folder = self.root / _STAGING / uuid4().hex
        try:
            yield str(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def adopt(self, staged: str, table: str) -> list[tuple[str, dict[str, str]]]:
        """Moves the Parquet files of a staged folder into a table.

        Returns the new path of each file, relative to the table, and its partition: the `name=value` folders that the
        file was in.
        """
        moved = []
        for file in sorted(Path(staged).glob("**/*.parquet")):
            folders = file.parent.relative_to(staged)
            target = self.root / table / folders / f"{uuid4().hex}.parquet"
            target.parent.mkdir(parents=True, exist_ok=True)
            file.rename(target)
            partition = dict(folder.split("=", 1) for folder in folders.parts)
            moved.append((str(target.relative_to(self.root / table)), partition))
        return moved

    def discard_staged(self) -> None:
        """Removes staged folders of processes that died. Only the process that holds the lock may call this."""
        shutil.rmtree(self.root / _STAGING, ignore_errors=True)
