"""The SQLite store in use: concurrent reads and commits, a log that stays short, dropped queues deleted in pieces."""

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import apsw
import pytest

from tests.namespace.store.sample_writes import counters, entity, next_seqs, put
from twinbus.namespace.engine.storage_protocol import (
    DropEntity,
    DropRow,
    ForgetSeenIds,
    NextRows,
    PutSeenId,
    PutSessionState,
    QueueLane,
    StoreWrite,
)
from twinbus.namespace.store.open_store import PAGE_SIZE
from twinbus.namespace.store.sqlite import SqliteStore

LOG_PAGES = 50


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore(tmp_path / "namespace.db", log_pages=LOG_PAGES)
    made.open()
    made.commit([entity(1), counters(1), entity(2), counters(2)])
    yield made
    made.close()


def count(store: SqliteStore, table: str) -> int:
    """Return the number of rows of a table, as another connection sees it."""
    connection = apsw.Connection(str(store.path), flags=apsw.SQLITE_OPEN_READONLY)
    found: int = connection.execute(f"SELECT count(*) FROM {table}").get  # noqa: S608  # a table's name
    connection.close()
    return found


def log_size(store: SqliteStore) -> int:
    return store.path.with_name(store.path.name + "-wal").stat().st_size


def reading(store: SqliteStore, stop: threading.Event, failures: list[BaseException], progress: list[int]) -> None:
    """Read without a pause until `stop`. Rows must be consecutive, and at least those that were committed before."""
    try:
        while not stop.is_set():
            acknowledged = progress[0]
            seqs = [found.seq for found in store.load(NextRows(1, QueueLane.ACTIVE, 0, 100_000, 1 << 30))]
            assert seqs == list(range(1, len(seqs) + 1))
            assert len(seqs) >= acknowledged
    except BaseException as error:
        failures.append(error)


class TestReaderAndWriter:
    def test_a_load_sees_every_finished_commit_and_the_log_stays_short_under_constant_load(
        self, store: SqliteStore
    ) -> None:
        stop, failures, progress = threading.Event(), list[BaseException](), [0]
        reader = threading.Thread(target=reading, args=(store, stop, failures, progress))
        reader.start()
        longest = 0
        for group in range(250):
            first = group * 20 + 1
            store.commit([*put(*range(first, first + 20), raw=b"x" * 1_000), counters(1, first + 20)])
            progress[0] = first + 19
            longest = max(longest, log_size(store))
        stop.set()
        reader.join()
        assert not failures
        assert longest < 6 * LOG_PAGES * PAGE_SIZE

    def test_tidy_checkpoints_the_log_so_that_it_starts_again(self, store: SqliteStore) -> None:
        for group in range(200):
            store.commit(put(*range(group * 5, group * 5 + 5), raw=b"x" * 1_000))
            store.tidy()
        assert log_size(store) < 3 * LOG_PAGES * PAGE_SIZE


class TestPurging:
    def test_the_rows_of_a_dropped_queue_are_deleted_in_pieces_with_later_commits(self, store: SqliteStore) -> None:
        store.commit(put(*range(1, 2_001)))
        store.commit([DropEntity(1)])
        left = [count(store, "message")]
        while left[-1] > 20 and len(left) < 100:
            store.commit(put(len(left), queue=2))
            left.append(count(store, "message"))
        assert left[0] == 2_000
        assert max(before - after for before, after in pairwise(left)) <= 200
        assert next_seqs(store, queue=2) == list(range(1, len(left)))

    def test_purging_goes_on_after_a_restart(self, store: SqliteStore) -> None:
        writes: list[StoreWrite] = [*put(*range(1, 3_001)), PutSessionState(1, "s", b"x", 1)]
        store.commit([*writes, *(PutSeenId(1, str(number), 1) for number in range(1_500)), *put(1, queue=2)])
        store.commit([DropEntity(1)])
        assert store.tidy()
        store.close()
        again = SqliteStore(store.path)
        assert [stored.entity.queue for stored in again.open().entities] == [2]
        assert 1 < count(again, "message") < 3_001
        while again.tidy():
            pass
        assert [count(again, table) for table in ("message", "session_state", "seen", "dropped")] == [1, 0, 0, 0]
        assert next_seqs(again, queue=2) == [1]
        again.close()

    def test_several_dropped_queues_are_all_purged(self, store: SqliteStore) -> None:
        store.commit([*put(*range(1, 1_201)), *put(*range(1, 1_201), queue=2)])
        store.commit([DropEntity(1), DropEntity(2)])
        store.commit([entity(3), *put(1, queue=3)])
        while store.tidy():
            pass
        assert count(store, "message") == 1
        assert not store.tidy()

    def test_outdated_ids_are_deleted_in_pieces(self, store: SqliteStore) -> None:
        store.commit([PutSeenId(1, str(number), number) for number in range(2_500)])
        store.commit([ForgetSeenIds(1, 2_000)])
        assert count(store, "seen") == 2_500
        store.commit(put(1))
        assert 2_000 <= count(store, "seen") < 2_500
        while store.tidy():
            pass
        assert count(store, "seen") == 500

    def test_a_purge_of_a_failed_commit_is_repeated(self, store: SqliteStore) -> None:
        store.commit(put(*range(1, 601)))
        store.commit([DropEntity(1), *put(1, queue=2)])
        with pytest.raises(Exception, match="overwritten"):
            store.commit(put(1, queue=2))
        assert count(store, "message") == 601
        store.commit([DropRow(2, QueueLane.ACTIVE, 1)])
        assert count(store, "message") == 400
