"""The file of a store: creation, locking, versions, damage, and a disk that fails."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

from tests.namespace.store.failing_disk import FailingDisk, failing_disk
from tests.namespace.store.sample_writes import counters, entity, everything, next_seqs, put, row
from twinbus.errors import OperatorError
from twinbus.namespace.engine.storage_protocol import DropRow, NextRows, QueueLane
from twinbus.namespace.store import open_store
from twinbus.namespace.store.errors import (
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StoreInUseError,
    StoreVersionError,
)
from twinbus.namespace.store.sqlite import SqliteStore

PAGE = open_store.PAGE_SIZE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "namespace.db"


@pytest.fixture
def disk() -> Iterator[FailingDisk]:
    with failing_disk() as made:
        yield made


def filled(path: Path, rows: int = 300) -> None:
    """Write a store with rows of a kilobyte, and close it."""
    store = SqliteStore(path)
    store.open()
    store.commit([entity(1), counters(1, rows + 1, active=rows), *put(*range(1, rows + 1), raw=b"x" * 1_000)])
    store.close()


def refused(path: Path, kind: type[StoreError]) -> str:
    """Check that opening fails and leaves the file and the lock as they were. Returns the text of the error."""
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(kind) as caught:
        SqliteStore(path).open()
    assert (path.read_bytes() if path.exists() else None) == before
    with pytest.raises(kind):  # not StoreInUseError: the lock was released
        SqliteStore(path).open()
    assert isinstance(caught.value, OperatorError)
    assert caught.value.hint
    assert str(path) in str(caught.value)
    return str(caught.value)


class TestCreation:
    def test_a_new_store_creates_its_folder_and_files_that_only_the_owner_can_read(self, tmp_path: Path) -> None:
        path = tmp_path / "a" / "b" / "namespace.db"
        store = SqliteStore(path)
        assert store.open().entities == []
        store.commit(put(1))
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
        store.close()
        assert set(modes.values()) == {0o600}
        assert {"namespace.db", "namespace.db-wal", "namespace.db.lock"} <= modes.keys()

    def test_closing_leaves_no_log_behind(self, path: Path) -> None:
        filled(path)
        assert sorted(file.name for file in path.parent.iterdir()) == [
            "namespace.db",
            "namespace.db.commits",
            "namespace.db.lock",
        ]

    def test_an_interrupted_creation_is_started_again(self, path: Path) -> None:
        building = path.with_name("namespace.db.new")
        building.write_bytes(b"half a file")
        building.with_name("namespace.db.new-wal").write_bytes(b"half a log")
        filled(path)
        assert sorted(file.name for file in path.parent.iterdir()) == [
            "namespace.db",
            "namespace.db.commits",
            "namespace.db.lock",
        ]

    def test_a_folder_that_cannot_be_created_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StoreError, match="data folder cannot be created"):
            SqliteStore(tmp_path / "file" / "namespace.db").open()

    def test_a_store_that_is_not_open_raises(self, path: Path) -> None:
        store = SqliteStore(path)
        with pytest.raises(StoreError, match="not open"):
            store.commit(put(1))
        with pytest.raises(StoreError, match="not open"):
            store.load(NextRows(1, 0, 0, 1, 1))


HOLD = """
import sys
from pathlib import Path
from twinbus.namespace.store.sqlite import SqliteStore
store = SqliteStore(Path(sys.argv[1]))
store.open()
print("open", flush=True)
sys.stdin.read()
"""


class TestUse:
    def test_a_store_in_use_by_another_process_is_refused_until_the_process_is_killed(self, path: Path) -> None:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert holder.stdout is not None
        with holder:
            assert holder.stdout.readline() == "open\n"
            with pytest.raises(StoreInUseError, match=f"in use by process {holder.pid}.*{path.name}"):
                SqliteStore(path).open()
            holder.send_signal(signal.SIGKILL)
            holder.wait()
        store = SqliteStore(path)
        assert store.open().next_queue == 1
        store.close()

    def test_a_second_store_of_the_same_process_is_refused_and_the_first_goes_on(self, path: Path) -> None:
        first = SqliteStore(path)
        first.open()
        with pytest.raises(StoreInUseError):
            SqliteStore(path).open()
        first.commit([entity(1), *put(1)])
        assert next_seqs(first) == [1]
        with pytest.raises(StoreInUseError):
            SqliteStore(path).open()
        first.close()
        second = SqliteStore(path)
        second.open()
        assert next_seqs(second) == [1]
        second.close()


class TestVersions:
    def test_an_older_store_is_migrated(self, path: Path) -> None:
        older = apsw.Connection(str(path))
        older.pragma("application_id", open_store.APPLICATION_ID)
        older.close()
        filled(path, 3)
        made = apsw.Connection(str(path))
        assert made.pragma("user_version") == open_store.VERSION
        made.close()

    def test_every_version_has_a_migration_to_the_next(self) -> None:
        assert sorted(open_store.MIGRATIONS) == list(range(open_store.VERSION))

    def test_every_version_has_tables_of_its_own(self) -> None:
        """So a header with another version is damaged if the tables are those of the current version (X2)."""
        connection = apsw.Connection("")
        layouts = [frozenset(open_store.layout(connection))]
        for version in open_store.MIGRATIONS:
            open_store.migrate(connection, version, {version: open_store.MIGRATIONS[version]})
            layouts.append(frozenset(open_store.layout(connection)))
        assert len(set(layouts)) == open_store.VERSION + 1

    def test_a_migration_that_fails_leaves_the_version_before_it(self) -> None:
        connection = apsw.Connection("")
        steps = {
            0: "CREATE TABLE a (x)",
            1: "CREATE TABLE b (x); INSERT INTO a VALUES (1)",
            2: "DROP TABLE a; CREATE b",
        }
        with pytest.raises(apsw.SQLError):
            open_store.migrate(connection, 0, steps)
        assert connection.pragma("user_version") == 2
        assert connection.execute("SELECT x FROM a").get == 1
        open_store.migrate(connection, 2, {2: "DROP TABLE a"})
        assert connection.pragma("user_version") == 3

    def test_a_newer_store_is_refused(self, path: Path) -> None:
        filled(path)
        newer = apsw.Connection(str(path))
        newer.execute("ALTER TABLE message ADD COLUMN more INTEGER")
        newer.pragma("user_version", open_store.VERSION + 1)
        newer.close()
        assert "Use a newer Twinbus" in refused(path, StoreVersionError)

    def test_a_file_of_something_else_is_refused(self, path: Path) -> None:
        other = apsw.Connection(str(path))
        other.execute("CREATE TABLE theirs (x)")
        other.close()
        assert "not a Twinbus store" in refused(path, StoreError)


class TestDamage:
    def test_a_file_that_is_no_database_is_refused(self, path: Path) -> None:
        path.write_bytes(b"x" * 3 * PAGE)
        text = refused(path, StoreDamagedError)
        assert "not an SQLite file" in text
        assert ".recover" in text

    def test_an_empty_file_is_refused_even_with_a_log_beside_it(self, path: Path) -> None:
        path.touch()
        assert "the file is empty" in refused(path, StoreDamagedError)
        path.with_name(path.name + "-wal").write_bytes(b"log")
        assert "the file is empty" in refused(path, StoreDamagedError)
        assert path.with_name(path.name + "-wal").read_bytes() == b"log"

    def test_a_log_without_its_file_is_refused(self, path: Path) -> None:
        path.with_name(path.name + "-wal").write_bytes(b"log")
        assert "the file is missing" in refused(path, StoreDamagedError)

    def test_a_file_cut_short_is_refused(self, path: Path) -> None:
        filled(path)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2 // PAGE * PAGE)
        refused(path, StoreDamagedError)

    def test_a_file_whose_layout_is_overwritten_is_refused(self, path: Path) -> None:
        filled(path)
        with path.open("r+b") as file:
            file.seek(100)
            file.write(b"\xff" * (PAGE - 100))
        refused(path, StoreDamagedError)

    def test_a_file_that_lacks_a_table_is_refused(self, path: Path) -> None:
        filled(path)
        connection = apsw.Connection(str(path))
        connection.execute("DROP TABLE seen")
        connection.close()
        assert "lacks the table seen" in refused(path, StoreDamagedError)

    def test_damage_found_by_a_read_is_reported_and_the_rest_can_be_read(self, path: Path) -> None:
        filled(path, 2_000)
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2 // PAGE * PAGE)
            file.write(b"\xff" * PAGE)
        store = SqliteStore(path, most_bytes=0)
        store.open()
        with pytest.raises(StoreDamagedError, match=r"\.recover"):
            everything(store)
        assert store.load(NextRows(1, 0, 0, 1, 1))[0].seq == 1
        store.close()

    def test_damage_found_by_a_commit_leaves_nothing_applied(self, path: Path) -> None:
        filled(path, 2_000)
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2 // PAGE * PAGE)
            file.write(b"\xff" * PAGE)
        store = SqliteStore(path, most_bytes=0)
        store.open()
        with pytest.raises(StoreDamagedError):
            store.commit([*put(5_000), *(DropRow(1, QueueLane.ACTIVE, seq) for seq in range(1, 2_001))])
        assert next_seqs(store, after=4_000) == []
        assert store.load(NextRows(1, 0, 0, 1, 1))[0].seq == 1
        store.commit(put(6_000))
        assert next_seqs(store, after=4_000) == [6_000]
        store.close()


class TestFailingDisk:
    @pytest.mark.parametrize(
        ("error", "kind"),
        [(apsw.FullError, StoreFullError), (apsw.ReadOnlyError, StoreError), (apsw.IOError, StoreError)],
    )
    @pytest.mark.parametrize("after", [0, 1, 5])
    def test_a_commit_that_cannot_be_written_leaves_nothing_and_the_next_can_succeed(
        self, path: Path, disk: FailingDisk, error: type[apsw.Error], kind: type[StoreError], after: int
    ) -> None:
        store = SqliteStore(path, vfs=disk.vfs)
        store.open()
        store.commit([entity(1), *put(1, 2)])
        disk.writes, disk.after = error, after
        with pytest.raises(kind) as caught:
            store.commit([*put(*range(3, 100), raw=b"x" * 1_000), DropRow(1, QueueLane.ACTIVE, 1), counters(1, 100)])
        assert str(path) in str(caught.value)
        assert everything(store) == [row(1), row(2)]
        disk.writes = None
        store.commit(put(200))
        assert next_seqs(store) == [1, 2, 200]
        store.close()
        again = SqliteStore(path)
        assert again.open().entities[0].queue.next_seq == 1
        assert next_seqs(again) == [1, 2, 200]
        again.close()

    def test_a_commit_that_fails_on_a_full_disk_says_what_to_do(self, path: Path, disk: FailingDisk) -> None:
        store = SqliteStore(path, vfs=disk.vfs)
        store.open()
        disk.writes = apsw.FullError
        with pytest.raises(StoreFullError, match=r"The disk is full while committing: .*namespace\.db\. Make room"):
            store.commit(put(1))
        disk.writes = None
        store.close()

    def test_a_read_that_fails_raises(self, path: Path, disk: FailingDisk) -> None:
        filled(path, 3_000)
        store = SqliteStore(path, vfs=disk.vfs)
        store.open()
        disk.reads = apsw.IOError
        with pytest.raises(StoreError, match="while reading"):
            everything(store)
        disk.reads = None
        assert len(everything(store)) == 3_000
        store.close()

    def test_a_commit_in_the_log_is_kept_if_the_checkpoint_fails(self, path: Path, disk: FailingDisk) -> None:
        store = SqliteStore(path, vfs=disk.vfs, log_pages=4)
        store.open()
        store.commit([entity(1), *put(*range(1, 40), raw=b"x" * 1_000)])
        disk.writes, disk.after = apsw.FullError, 0
        store.tidy()
        store.close()
        disk.writes = None
        again = SqliteStore(path)
        again.open()
        assert next_seqs(again) == list(range(1, 40))
        again.close()

    @pytest.mark.parametrize("after", [0, 3, 8])
    def test_a_store_that_could_not_be_created_can_be_created_later(
        self, path: Path, disk: FailingDisk, after: int
    ) -> None:
        disk.writes, disk.after = apsw.FullError, after
        with pytest.raises(StoreFullError):
            SqliteStore(path, vfs=disk.vfs).open()
        disk.writes = None
        store = SqliteStore(path, vfs=disk.vfs)
        assert store.open().next_queue == 1
        store.close()
