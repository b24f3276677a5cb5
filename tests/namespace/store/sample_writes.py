"""Rows and writes for the tests of the stores."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinbus.namespace.engine.storage_protocol import (
    BrowseRows,
    MoveRow,
    NextRows,
    OpenedStore,
    PutBody,
    PutCounters,
    PutEntity,
    PutRow,
    QueueLane,
    Row,
)
from twinbus.namespace.store.interface import Store
from twinbus.namespace.store.memory import MemoryStore
from twinbus.namespace.store.sqlite import SqliteStore

ALL_LANES = tuple(QueueLane)


def row(seq: int, queue: int = 1, lane: int = QueueLane.ACTIVE, **columns: Any) -> Row:
    """Return a small message. Its raw bytes contain its number."""
    raw = columns.pop("raw", b"message %d" % seq)
    made = Row(queue, lane, seq, seq, 1_000, None, None, None, 0, len(raw), None, None, raw)
    return made._replace(**columns)


def put(*seqs: int, **columns: Any) -> list[PutRow]:
    return [PutRow(row(seq, **columns)) for seq in seqs]


def move(old: Row, to_lane: int, to_seq: int | None = None, **columns: Any) -> MoveRow:
    """Return a move that changes only the named columns."""
    made = MoveRow(
        old.queue,
        old.lane,
        old.seq,
        to_lane,
        old.seq if to_seq is None else to_seq,
        old.enqueued,
        old.expires,
        old.delivery_count,
        old.overlay,
    )
    return made._replace(**columns)


def entity(queue: int = 1, path: str = "orders") -> PutEntity:
    return PutEntity(queue, "queue", path, '{"max_delivery_count": 10}', 10, 20)


def counters(queue: int = 1, next_seq: int = 1, **columns: int) -> PutCounters:
    return PutCounters(queue, next_seq, 0, 0, 0, 0, 0, 0, 0)._replace(**columns)


def next_seqs(
    store: Store, queue: int = 1, lane: int = QueueLane.ACTIVE, after: int = 0, session: str | None = None
) -> list[int]:
    return [found.seq for found in store.load(NextRows(queue, lane, after, 1_000, 1 << 30, session))]


def everything(store: Store, queue: int = 1) -> list[Row]:
    rows: list[Row] = store.load(BrowseRows(queue, ALL_LANES, 0, 1_000_000, 1 << 40))
    return rows


def _shared(writes: Sequence[Any]) -> dict[int, int]:
    charged: Counter[int] = Counter()
    for write in writes:
        if isinstance(write, PutBody):
            charged[write.topic] += len(write.raw)
    return charged


class Home:
    """A store that can be closed and opened again."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.path = folder / "namespace.db"
        self._kind = kind
        self.store: Store = self._made()
        self.opened: OpenedStore = self.store.open()
        self.charged: Counter[int] = Counter()
        """Bytes that topics are charged for shared bodies, from the bodies put and the bytes freed."""

    def _made(self) -> Store:
        return MemoryStore() if self._kind == "memory" else SqliteStore(self.path)

    def reopen(self) -> OpenedStore:
        self.store.close()
        if self._kind == "sqlite":
            self.store = self._made()
        self.opened = self.store.open()
        return self.opened

    def tidy(self) -> None:
        """Do all pending housekeeping."""
        while self.store.tidy():
            pass
        self.charged.subtract(self.store.take_freed())

    def commit(self, *writes: Any) -> None:
        flat: list[Any] = []
        for write in writes:
            flat += write if isinstance(write, Sequence) and not hasattr(write, "_fields") else [write]
        self.store.commit(flat)
        self.charged.update(_shared(flat))
        self.charged.subtract(self.store.take_freed())
