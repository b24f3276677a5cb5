"""Stores of older versions: after opening they hold what they held, and each body is charged once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from tests.namespace.store.older_layouts import (
    FIRST,
    LAYOUTS,
    OTHER_TOPIC,
    OWN,
    QUEUE,
    SECOND,
    SHARED,
    TOPIC,
    older_store,
)
from tests.namespace.store.sample_writes import everything
from twinbus.namespace.engine.registry import EntityRegistry
from twinbus.namespace.engine.storage_protocol import (
    COPY_BYTES,
    DropRow,
    KnownIds,
    OpenedStore,
    PutBody,
    QueueLane,
    StoredSessionState,
)
from twinbus.namespace.store import open_store
from twinbus.namespace.store.sqlite import SqliteStore


def purge(store: SqliteStore) -> None:
    while store.tidy():
        pass


@pytest.fixture(params=sorted(LAYOUTS))
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[SqliteStore, OpenedStore]]:
    path = tmp_path / "namespace.db"
    older_store(path, request.param)
    store = SqliteStore(path)
    yield store, store.open()
    store.close()


def test_every_older_version_is_tested() -> None:
    assert sorted(LAYOUTS) == list(range(1, open_store.VERSION + 1))


def test_everything_is_kept(opened: tuple[SqliteStore, OpenedStore]) -> None:
    store, found = opened
    paths = ["orders", "News", "News/Subscriptions/a", "News/Subscriptions/b", "other"]
    assert [stored.entity.path for stored in found.entities] == paths
    assert [(row.lane, row.raw) for row in everything(store, QUEUE)] == [(QueueLane.ACTIVE, OWN), (QueueLane.DEAD, OWN)]
    assert [row.raw for row in everything(store, FIRST)] == [SHARED[1], b"of one alone"]
    assert [(row.lane, row.raw) for row in everything(store, SECOND)] == [(0, SHARED[1]), (QueueLane.DEAD, SHARED[2])]
    assert store.load(StoredSessionState(QUEUE, "session")) == b"\x01"
    assert store.load(KnownIds(QUEUE, ("an id",), 0)) == {"an id"}
    assert (found.next_queue, found.next_body) == (7, 4)


def test_topics_are_charged_once_for_each_body(opened: tuple[SqliteStore, OpenedStore]) -> None:
    _, found = opened
    sizes = {stored.entity.queue: (stored.queue.size, stored.shared_bytes) for stored in found.entities}
    assert sizes == {
        QUEUE: (2 * len(OWN), 0),
        TOPIC: (len(b"due"), len(SHARED[1]) + len(SHARED[2])),
        FIRST: (COPY_BYTES + len(b"of one alone"), 0),
        SECOND: (2 * COPY_BYTES, 0),
        OTHER_TOPIC: (0, 0),
    }
    info = EntityRegistry(found, new_token=lambda: b"").info("news")
    assert info is not None
    assert info.counts.size_bytes == 3 + 300 + 200 + 12 + 3 * COPY_BYTES
    assert info.subscriptions == 2


def test_the_topic_of_a_body_is_known_when_the_body_is_deleted_later(opened: tuple[SqliteStore, OpenedStore]) -> None:
    store, _ = opened
    purge(store)
    assert store.take_freed() == {}  # body 3 was nobody's any more
    store.commit([DropRow(FIRST, 0, 1), DropRow(SECOND, QueueLane.DEAD, 2)])
    assert store.take_freed() == {TOPIC: len(SHARED[2])}
    store.commit([DropRow(SECOND, 0, 1), PutBody(9, b"new", OTHER_TOPIC)])
    assert store.take_freed() == {TOPIC: len(SHARED[1])}


def test_the_layout_is_that_of_a_new_store(opened: tuple[SqliteStore, OpenedStore], tmp_path: Path) -> None:
    store, _ = opened
    new = SqliteStore(tmp_path / "new.db")
    new.open()
    new.close()
    store.close()
    assert layout(store.path) == layout(new.path)


def layout(path: Path) -> list[tuple[str, str, str]]:
    connection = apsw.Connection(str(path))
    found = connection.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY type, name").fetchall()
    connection.close()
    return [(str(kind), str(name), " ".join(str(sql).split())) for kind, name, sql in found]
