"""Counts messages in the files of running namespaces with plain SQLite: no client, no codec and no ledger of ours.

Each message of these tests carries its id in its body, between marks, so that a count needs to decode nothing.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_MARKED: Final = re.compile(rb"<id>([^<]+)</id>")
_NEW_ROWS: Final = """
SELECT message.rowid, coalesce(message.raw, body.raw) FROM message
JOIN entity ON entity.queue = message.queue
LEFT JOIN body ON body.id = message.body
WHERE entity.path = ? AND message.rowid > ?
"""


def marked_body(message_id: str) -> bytes:
    return f"<id>{message_id}</id>".encode()


@dataclass(slots=True)
class StoredIds:
    """The ids in one queue of a namespace, with the number of copies. `file` is the SQLite file of the namespace."""

    file: Path
    queue: str
    _seen: Counter[str] = field(default_factory=Counter)
    _last_row: int = -1

    def all(self) -> Counter[str]:
        """Every message in the queue now, in any state, dead letters included."""
        return Counter(name for _, name in self._rows(-1))

    def ever(self) -> Counter[str]:
        """Every message that came into the queue so far. Nothing may be removed from the queue between two calls."""
        for row, name in self._rows(self._last_row):
            self._seen[name] += 1
            self._last_row = max(self._last_row, row)
        return self._seen

    def _rows(self, after: int) -> list[tuple[int, str]]:
        with closing(sqlite3.connect(f"file:{self.file}?mode=ro", uri=True)) as connection:
            return [(row, _id_of(raw)) for row, raw in connection.execute(_NEW_ROWS, (self.queue.lower(), after))]


def _id_of(raw: bytes) -> str:
    found = _MARKED.search(raw)
    assert found is not None, f"a message without an id in its body: {raw[:100]!r}"
    return found[1].decode()
