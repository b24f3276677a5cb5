"""The peer of the store's figures: a bare SQLite loop that inserts the same rows with the same group commit.

The simplest form: one table, no index except the rowid, `executemany` between BEGIN and COMMIT.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import apsw

from twinbus.namespace.engine.storage_protocol import QueueLane, Row


def some_rows(count: int, size: int, first: int = 1, queue: int = 1) -> list[Row]:
    """Messages of `size` bytes for one queue, numbered from `first`."""
    now = 1_790_000_000_000
    block = os.urandom(size + 256)
    return [
        Row(
            queue,
            QueueLane.ACTIVE,
            seq,
            seq,
            now,
            None,
            None,
            None,
            0,
            size,
            None,
            None,
            block[seq % 256 : seq % 256 + size],
        )
        for seq in range(first, first + count)
    ]


class BareSqlite:
    """A file with one table of rows."""

    def __init__(self, path: Path) -> None:
        self._connection = apsw.Connection(str(path))
        self._connection.pragma("journal_mode", "wal")
        self._connection.pragma("synchronous", "full")
        self._connection.execute("""
            CREATE TABLE message (
              queue INTEGER, lane INTEGER, seq INTEGER, origin_seq INTEGER, enqueued INTEGER, expires INTEGER,
              due INTEGER, session TEXT, delivery_count INTEGER, size INTEGER, overlay BLOB, body INTEGER, raw BLOB)
        """)

    def commit(self, rows: Sequence[Row]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany("INSERT INTO message VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)", rows)
        self._connection.execute("COMMIT")

    def close(self) -> None:
        self._connection.close()
