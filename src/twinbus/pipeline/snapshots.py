"""The table `snapshots`: which versions of the tables belong together (D5). Needs no Spark.

A batch of the ledger changes several tables, and each table has a log of its own. A reader that opens one table after
the other could see a batch in the first and not in the second. So the last commit of a batch adds a snapshot: one row
for each table, with the version that has this batch. The tables at these versions are one consistent state.

A process that dies before this last commit leaves versions that no snapshot names. `Tables.locked` undoes them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import write_deltalake
from deltalake.exceptions import TableNotFoundError

from twinbus.pipeline.table_log import (
    RETENTION,
    TABLE_CONFIGURATION,
    AppTransaction,
    DataFile,
    TableLog,
    commit_properties,
)
from twinbus.pipeline.table_storage import SNAPSHOTS, TableStorage

_SCHEMA: Final = pa.schema(
    [
        ("snapshot", pa.int64()),
        ("at", pa.int64()),
        ("newest", pa.int64()),
        ("table_name", pa.string()),
        ("version", pa.int64()),
    ]
)
# Each snapshot adds a file. This number of files is replaced by one file.
_MOST_FILES: Final = 64


@dataclass(frozen=True, slots=True)
class TablesVersion:
    """The state of all tables after a batch: one snapshot."""

    number: int = 0
    """The number of the snapshot: how many batches there were."""
    tables: Mapping[str, int] = field(default_factory=dict)
    """The version of each table."""
    newest: int = 0
    """Time of the newest entry, in milliseconds since the epoch."""
    uncommitted: Mapping[str, tuple[DataFile, ...]] = field(default_factory=dict)
    """Before the commit of a batch: the files of each table that the batch changes."""


class Snapshots:
    """The table `snapshots` of a storage."""

    def __init__(self, storage: TableStorage) -> None:
        self.storage = storage
        self._log = TableLog(storage, SNAPSHOTS)

    def last(self) -> TablesVersion:
        """Returns the last snapshot; number 0 if there is none. Raises OperatorError for tables of the old format."""
        self.storage.refuse_old_format()
        try:
            rows = self._log.query("select * from rows where snapshot = (select max(snapshot) from rows)").to_pylist()
        except TableNotFoundError:
            return TablesVersion()
        if not rows:
            return TablesVersion()
        versions = {row["table_name"]: row["version"] for row in rows}
        return TablesVersion(rows[0]["snapshot"], versions, rows[0]["newest"])

    def is_committed(self, transaction: AppTransaction) -> bool:
        """Returns whether a snapshot was added with this transaction, or with a later one of the same application."""
        try:
            known = self._log.open().transaction_version(transaction.application)
        except TableNotFoundError:
            return False
        return known is not None and known >= transaction.number

    def add(self, version: TablesVersion, transaction: AppTransaction | None = None) -> None:
        """Adds a snapshot. Raises CommitFailedError if another process has committed the same transaction.

        From time to time, this replaces all files by one, and drops snapshots whose files may be removed.
        """
        now = int(time.time() * 1000)
        rows = pa.Table.from_pylist(
            [
                {"snapshot": version.number, "at": now, "newest": version.newest, "table_name": name, "version": number}
                for name, number in version.tables.items()
            ],
            _SCHEMA,
        )
        if is_rewritten := self._log.version() is not None and len(self._log.files()) >= _MOST_FILES:
            known = self._log.query("select * from rows").cast(_SCHEMA)
            is_old = pc.field("at") < now - int(RETENTION.total_seconds() * 1000)
            # The newest of the old snapshots was the last one at that time, so it may have been replaced only now.
            newest = pc.max(known.filter(is_old)["snapshot"]).as_py() or 0
            rows = pa.concat_tables([known.filter(~is_old | (pc.field("snapshot") >= newest)), rows])
        write_deltalake(
            self.storage.uri(SNAPSHOTS),
            rows,
            mode="overwrite" if is_rewritten else "append",
            configuration=TABLE_CONFIGURATION,
            storage_options=self.storage.options,
            commit_properties=commit_properties(transaction),
        )

    def vacuum(self) -> None:
        """Removes files that no version of the last RETENTION has."""
        self._log.vacuum()
