"""X2: a store that lacks commits, messages or entities says what is missing; a kill or a power loss is no damage."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import struct
from pathlib import Path

import apsw
import pytest

from tests.crash.power_loss import leave_old_counter
from tests.namespace.store.failing_disk import failing_disk
from tests.namespace.store.older_layouts import older_store
from tests.namespace.store.sample_writes import counters, entity, everything, move, next_seqs, put, row
from twinbus.namespace.engine.storage_protocol import (
    DropRow,
    KnownIds,
    NextRows,
    PutRow,
    PutSeenId,
    PutSessionState,
    QueueLane,
    RowsBySeq,
    StoredSessionState,
    StoreRead,
)
from twinbus.namespace.store import SqliteStore, StoreDamagedError, StoreFullError
from twinbus.namespace.store.commit_counter import CommitCounter, CountedCommits, counter_path, read_counter
from twinbus.namespace.store.log_scan import read_log
from twinbus.namespace.store.open_store import PAGE_SIZE

FRAME = 24 + PAGE_SIZE


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "namespace.db"


def killed(path: Path, commits: int = 10) -> Path:
    """Return the store of a process that was killed after these commits: one message each."""
    store = SqliteStore(path)
    store.open()
    store.commit([entity(1), counters(1)])
    for seq in range(1, commits + 1):
        store.commit(put(seq, raw=b"%d" % seq * 500))
    copy = path.parent / "killed" / path.name
    shutil.copytree(path.parent, copy.parent, ignore=shutil.ignore_patterns("*-shm", "*.lock"))
    store.close()
    return copy


def log_of(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def change(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def refusal(path: Path) -> str:
    with pytest.raises(StoreDamagedError) as caught:
        SqliteStore(path).open()
    return str(caught.value)


def assert_opens(path: Path) -> None:
    store = SqliteStore(path)
    store.open()
    store.close()


def edit(path: Path, sql: str) -> None:
    connection = apsw.Connection(str(path))
    connection.execute(sql)
    connection.close()


class TestLog:
    def test_x2_a_log_of_a_killed_process_is_opened(self, path: Path) -> None:
        store = SqliteStore(killed(path))
        store.open()
        assert next_seqs(store) == list(range(1, 11))
        store.close()

    def test_x2_damage_in_the_log_is_refused_and_the_files_stay_as_they_were(self, path: Path) -> None:
        copy = killed(path)
        change(log_of(copy), log_of(copy).stat().st_size // 2)
        before = {file.name: file.read_bytes() for file in copy.parent.iterdir() if "shm" not in file.name}
        text = refusal(copy)
        assert "commits behind the damage are missing" in text
        assert "commits are missing" in text
        assert {name: (copy.parent / name).read_bytes() for name in before} == before

    def test_x2_damage_to_the_last_commit_is_found_by_the_counter(self, path: Path) -> None:
        copy = killed(path)
        change(log_of(copy), log_of(copy).stat().st_size - 9)
        assert "the last 1 commits are missing" in refusal(copy)

    def test_n2_a_last_commit_that_was_not_finished_is_no_damage(self, path: Path) -> None:
        copy = killed(path)
        with log_of(copy).open("r+b") as log:
            log.truncate(log_of(copy).stat().st_size - 100)
        leave_old_counter(copy)
        store = SqliteStore(copy)
        store.open()
        assert next_seqs(store) == list(range(1, 10))
        store.close()

    def test_x2_a_damaged_header_of_the_log_is_refused(self, path: Path) -> None:
        copy = killed(path)
        change(log_of(copy), 17)
        leave_old_counter(copy)
        assert "the header of the log is damaged, and up to 11 commits in the log are missing" in refusal(copy)

    @pytest.mark.parametrize("zeroed", [32, 512, 4096])
    def test_x2_a_log_whose_first_bytes_became_zero_is_refused(self, path: Path, zeroed: int) -> None:
        copy = killed(path)
        with log_of(copy).open("r+b") as log:
            log.write(bytes(zeroed))
        leave_old_counter(copy)
        assert "the header of the log is damaged, and up to 11 commits in the log are missing" in refusal(copy)

    def test_n2_a_log_that_was_being_started_is_no_damage(self, path: Path) -> None:
        closed(path)
        for content in (b"", bytes(20), bytes(32), bytes(3 * FRAME)):
            log_of(path).write_bytes(content)
            store = SqliteStore(path)
            store.open()
            assert everything(store) == ROWS
            store.close()

    @pytest.mark.parametrize("most_bytes", [0, 1 << 40])
    def test_x2_a_log_of_an_earlier_time_is_refused_and_nothing_of_the_file_is_lost(
        self, path: Path, most_bytes: int
    ) -> None:
        store = SqliteStore(path)
        store.open()
        store.commit([entity(1), counters(1), *put(1, 2)])
        earlier = log_of(path).read_bytes()
        store.commit(put(3))
        # This commit changes no counters. Its number is in the totals, which the earlier log does not have.
        store.commit([PutSessionState(1, "s", b"state", 5)])
        store.close()
        log_of(path).write_bytes(earlier)
        with pytest.raises(StoreDamagedError, match="the log is older than the file"):
            SqliteStore(path, most_bytes=most_bytes).open()
        again = SqliteStore(path, accept_damage=True)
        again.open()
        assert [found.seq for found in everything(again)] == [1, 2, 3]
        assert again.load(StoredSessionState(1, "s")) == b"state"
        again.close()

    def test_the_frames_of_a_log_are_read(self, path: Path) -> None:
        log = read_log(killed(path), 8192)
        assert not log.header_is_damaged
        assert sum(frame.ends_commit for frame in log.frames) == 11
        assert all(frame.is_current for frame in log.frames)
        assert log.lost_commits(len(log.frames)) == 0
        assert log.lost_commits(0) == 10  # the last one may be unfinished

    def test_frames_from_before_the_log_was_started_again_are_not_lost_commits(self, path: Path) -> None:
        copy = killed(path)
        content = bytearray(log_of(copy).read_bytes())
        for at in range(32 + FRAME, len(content), FRAME):
            content[at + 8 : at + 16] = struct.pack(">2I", 1, 2)
        log_of(copy).write_bytes(content)
        assert read_log(copy, 8192).lost_commits(1) == 0


class TestCounter:
    def test_the_counter_has_the_number_of_the_last_commit(self, path: Path) -> None:
        store = SqliteStore(path)
        store.open()
        first = read_counter(path)
        assert first is not None
        for number in range(1, 5):
            store.commit(put(number))
            assert read_counter(path) == CountedCommits(first.identity, number)
        store.close()
        again = SqliteStore(path)
        again.open()
        again.commit(put(9))
        assert read_counter(path) == CountedCommits(first.identity, 5)
        again.close()

    def test_a_write_that_was_interrupted_leaves_the_number_before(
        self, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        counter = CommitCounter(path, 7, 1)
        counter.write(2)
        counter.write(3)
        counter.close()
        for offset, expected in ((0, 3), (512, 2)):
            content = bytearray(counter.path.read_bytes())
            content[offset + 20] ^= 1
            (path.parent / "copy").mkdir(exist_ok=True)
            copy = path.parent / "copy" / path.name
            counter_path(copy).write_bytes(content)
            assert read_counter(copy) == CountedCommits(7, expected)
            assert "one of the two numbers in the commit counter namespace.db.commits cannot be read" in caplog.text
            caplog.clear()

    @pytest.mark.parametrize("content", [b"", b"short", bytes(4096), b"x" * 544])
    def test_a_counter_that_cannot_be_read_is_written_anew(self, path: Path, content: bytes) -> None:
        copy = killed(path)
        counter_path(copy).write_bytes(content)
        store = SqliteStore(copy)
        store.open()
        store.close()
        counted = read_counter(copy)
        assert counted is not None
        assert counted.commits == 11

    def test_x2_a_copy_of_the_file_alone_is_refused(self, path: Path) -> None:
        """The commonest mistake in a backup: the file of an open store is copied, without its log and its counter."""
        store = SqliteStore(path)
        store.open()
        store.commit([entity(1), *put(1, 2, 3)])
        store.close()
        again = SqliteStore(path)
        again.open()
        again.commit(put(4))
        copy = path.with_name("backup") / path.name
        copy.parent.mkdir()
        shutil.copy(path, copy)
        again.close()
        assert "the commit counter namespace.db.commits is missing" in refusal(copy)
        accepted = SqliteStore(copy, accept_damage=True)
        accepted.open()
        assert [found.seq for found in everything(accepted)] == [1, 2, 3]
        accepted.close()
        assert_opens(copy)

    def test_x2_a_store_beside_the_counter_of_another_one_is_refused(self, path: Path) -> None:
        copy = killed(path)
        CommitCounter(copy, 1, 1_000_000).close()
        text = "the commit counter is that of another store, which had 1000000 commits"
        assert text in refusal(copy)
        accepted = SqliteStore(copy, accept_damage=True)
        accepted.open()
        assert len(everything(accepted)) == 10
        accepted.close()
        assert_opens(copy)

    def test_x2_an_empty_store_in_the_place_of_another_one_is_refused(self, path: Path) -> None:
        copy = killed(path)
        log_of(copy).unlink()
        new = path.with_name("new.db")
        store = SqliteStore(new)
        store.open()
        store.close()
        shutil.copy(new, copy)
        assert "the commit counter is that of another store, which had 11 commits" in refusal(copy)

    def test_n2_a_store_without_commits_needs_no_counter(self, path: Path) -> None:
        """The process was killed between the creation of the store, or its upgrade, and that of the counter."""
        store = SqliteStore(path)
        store.open()
        store.close()
        counter_path(path).unlink()
        assert_opens(path)

    def test_x2_an_older_copy_of_the_file_is_refused(self, path: Path) -> None:
        store = SqliteStore(path)
        store.open()
        store.commit([entity(1), *put(1)])
        store.close()
        shutil.copy(path, path.with_name("backup"))
        again = SqliteStore(path)
        again.open()
        again.commit(put(2))
        again.close()
        shutil.copy(path.with_name("backup"), path)
        assert "the last 1 commits are missing" in refusal(path)

    def test_x2_a_store_whose_file_is_gone_is_refused_but_for_accepted_damage(self, path: Path) -> None:
        copy = killed(path)
        log_of(copy).unlink()
        copy.unlink()
        assert "the file is missing, but its commit counter is there: it had 11 commits" in refusal(copy)
        store = SqliteStore(copy, accept_damage=True)
        assert store.open().entities == []
        store.close()


ROWS = [
    row(1, session="s"),
    row(2, expires=5),
    row(3, lane=QueueLane.SCHEDULED, due=7),
    row(4, lane=QueueLane.DEAD, overlay=b"\xc1\x01\x00"),
]


def closed(path: Path) -> Path:
    """Return the path of a closed store with a sample of everything."""
    store = SqliteStore(path)
    store.open()
    store.commit([entity(1), counters(1, 5, active=2, scheduled=1, dead=1), entity(2, "other"), counters(2)])
    store.commit([*map(PutRow, ROWS), PutSessionState(1, "s", b"state", 5), PutSeenId(1, "id", 5)])
    store.close()
    return path


def mislead_index(path: Path) -> None:
    """Let the entry of message 2 in the index of messages lead to message 1."""
    connection = apsw.Connection(str(path))
    root = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'message_key'").get
    connection.close()
    content = bytearray(path.read_bytes())
    # An entry: the length of its head, a type for each of queue, lane, seq and rowid, and the values of seq and rowid.
    # Types 8 and 9 are the numbers 0 and 1.
    at = content.index(bytes([5, 9, 8, 1, 1, 2, 2]), (root - 1) * 8192)
    content[at + 6] = 1
    path.write_bytes(content)


def edit_untyped(path: Path, table: str, sql: str) -> None:
    """Change a table as damage does, which may give any column a value of any type."""
    connection = apsw.Connection(str(path))
    connection.pragma("writable_schema", "on")
    definition = connection.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (table,)).get
    untyped = re.sub(" (TEXT|INTEGER)", " BLOB", definition.replace("STRICT, ", "").replace(" STRICT", ""))
    for text in (untyped, definition):
        connection.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (text, table))
        connection.pragma("schema_version", connection.pragma("schema_version") + 1)
        connection.close()
        connection = apsw.Connection(str(path))
        connection.pragma("writable_schema", "on")
        if text == untyped:
            connection.execute(sql)
    connection.close()


COLUMNS = {
    "lane": "4",
    "seq": "77",
    "origin_seq": "99",
    "enqueued": "enqueued + 1",
    "expires": "6",
    "due": "8",
    "session": "'t'",
    "delivery_count": "3",
    "size": "size + 1",
    "overlay": "x'c100'",
    "raw": "x'00'",
}


class TestRows:
    @pytest.mark.parametrize("column", COLUMNS)
    def test_x2_a_change_of_any_column_is_refused_at_opening_and_when_it_is_read(self, path: Path, column: str) -> None:
        edit(closed(path), f"UPDATE message SET {column} = {COLUMNS[column]} WHERE seq = 4")  # noqa: S608  # constants
        assert "damaged" in refusal(path)
        if column in ("lane", "seq"):
            return  # the inventory of the queue is wrong, which is examined at every size
        store = SqliteStore(path, most_bytes=0)
        store.open()
        with pytest.raises(StoreDamagedError, match=r"orders: message 4 is damaged"):
            everything(store)
        with pytest.raises(StoreDamagedError, match=r"orders: message 4 is damaged"):
            store.load(RowsBySeq(1, (QueueLane.DEAD,), (4,)))
        assert [found.seq for found in store.load(NextRows(1, 0, 0, 9, 1 << 20))] == [1, 2]
        store.close()

    def test_x2_a_message_that_is_gone_is_missed(self, path: Path) -> None:
        edit(closed(path), "DELETE FROM message WHERE seq = 2")
        assert "1 of 4 messages of orders are missing" in refusal(path)

    def test_x2_a_message_that_comes_again_is_noticed(self, path: Path) -> None:
        edit(closed(path), "UPDATE message SET seq = 9 WHERE seq = 4")
        assert "the messages of orders are not those that were stored" in refusal(path)

    def test_x2_an_index_that_leads_to_another_row_is_noticed(self, path: Path) -> None:
        mislead_index(closed(path))
        store = SqliteStore(path, most_bytes=0)
        store.open()
        with pytest.raises(StoreDamagedError, match="orders: message 2 is damaged"):
            store.load(NextRows(1, 0, 0, 9, 1 << 20))
        store.close()

    @pytest.mark.parametrize(
        ("sql", "text"),
        [
            ("UPDATE session_state SET state = x'00'", "the state of the session 's' is damaged"),
            ("UPDATE seen SET at = 6", "the remembered id 'id' is damaged"),
            ("UPDATE entity SET text = '{}' WHERE queue = 1", "the description of the entity 'orders' is damaged"),
            ("UPDATE counter SET next_seq = 1 WHERE queue = 1", "the counters of orders are damaged"),
            ("UPDATE totals SET highest = 1", "the totals of the store are damaged"),
            ("DELETE FROM entity WHERE queue = 2", "1 of 2 entities are missing"),
            ("DELETE FROM counter WHERE queue = 2", "the counters of other are missing or damaged"),
            ("INSERT INTO dropped VALUES (2)", "the list of deleted entities is damaged"),
            ("DROP INDEX message_due", "the definitions of tables and indexes are not those of a store"),
        ],
    )
    def test_x2_other_rows_are_covered(self, path: Path, sql: str, text: str) -> None:
        edit(closed(path), sql)
        assert text in refusal(path)

    def test_x2_states_and_ids_are_checked_when_they_are_read(self, path: Path) -> None:
        edit(closed(path), "UPDATE session_state SET state = x'00'; UPDATE seen SET at = 6")
        store = SqliteStore(path, most_bytes=0)
        store.open()
        with pytest.raises(StoreDamagedError):
            store.load(StoredSessionState(1, "s"))
        with pytest.raises(StoreDamagedError):
            store.load(KnownIds(1, ("id",), 0))
        assert store.load(KnownIds(1, ("another",), 0)) == set()
        store.close()

    @pytest.mark.parametrize(
        ("table", "sql", "read"),
        [
            ("message", "UPDATE message SET session = 7 WHERE seq = 1", NextRows(1, 0, 0, 9, 1 << 20)),
            ("message", "UPDATE message SET size = CAST(x'ff' AS TEXT)", NextRows(1, 0, 0, 9, 1 << 20)),
            ("session_state", "UPDATE session_state SET state = CAST(x'ff' AS TEXT)", StoredSessionState(1, "s")),
            ("seen", "UPDATE seen SET at = CAST(x'ff' AS TEXT)", KnownIds(1, ("id",), 0)),
        ],
    )
    def test_x2_a_value_of_another_type_is_reported_as_damage(
        self, path: Path, table: str, sql: str, read: StoreRead
    ) -> None:
        store = SqliteStore(closed(path))
        store.open()
        edit_untyped(path, table, sql)
        with pytest.raises(StoreDamagedError, match=r"orders: .*message"):
            store.load(read)
        store.close()

    @pytest.mark.parametrize("value", ["x'00'", "CAST(x'ff' AS TEXT)", "1.5"])
    def test_x2_a_row_with_a_value_of_another_type_is_not_moved(self, path: Path, value: str) -> None:
        store = SqliteStore(closed(path))
        store.open()
        edit_untyped(path, "message", f"UPDATE message SET size = {value} WHERE seq = 1")  # noqa: S608  # constants
        with pytest.raises(StoreDamagedError):
            store.commit([move(ROWS[0], QueueLane.DEFERRED)])
        store.close()

    def test_x2_a_state_that_is_gone_is_noticed_in_a_large_store(self, path: Path) -> None:
        store = SqliteStore(closed(path))
        store.open()
        store.commit([PutSessionState(1, f"s{number}", b"state", 5) for number in range(5)])
        store.close()
        connection = apsw.Connection(str(path))
        root = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'session_state'").get
        connection.close()
        with path.open("r+b") as file:
            file.seek((root - 1) * PAGE_SIZE + 3)  # the number of entries in the page
            assert file.read(2) == b"\0\6"
            file.seek(-1, os.SEEK_CUR)
            file.write(b"\5")
        with pytest.raises(StoreDamagedError, match="the structure of the file"):
            SqliteStore(path, most_bytes=0).open()

    @pytest.mark.parametrize("gone", ["seq = 2", "seq IN (1, 2)"])
    def test_x2_a_drop_of_a_message_that_is_gone_is_not_acknowledged_and_hides_nothing(
        self, path: Path, gone: str
    ) -> None:
        store = SqliteStore(closed(path))
        store.open()
        edit(path, f"DELETE FROM message WHERE {gone}")  # noqa: S608  # constants
        with pytest.raises(StoreDamagedError, match=r"[12] messages of orders are missing"):
            store.commit([DropRow(1, 0, 2)])
        store.close()
        assert "of 4 messages of orders are missing" in refusal(path)

    def test_a_drop_of_a_row_that_is_not_there_leaves_the_inventory_right(self, path: Path) -> None:
        store = SqliteStore(closed(path))
        store.open()
        store.commit([DropRow(1, 0, 2), DropRow(1, 0, 1_000), DropRow(1, QueueLane.DEAD, 4)])
        store.close()
        again = SqliteStore(path)
        again.open()
        assert [found.seq for found in everything(again)] == [1, 3]
        again.close()


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files that are not empty, but for those that each opening writes."""
    files = (file for file in folder.iterdir() if not file.name.endswith(("namespace.db.lock", "namespace.db-shm")))
    return {file.name: content for file in files if (content := file.read_bytes()) or "rebuilt" in file.name}


class TestAcceptedDamage:
    def test_x2_accepting_damage_keeps_the_rest_and_the_damaged_files(self, path: Path) -> None:
        edit(closed(path), "UPDATE message SET raw = x'00' WHERE seq = 2; UPDATE seen SET at = 6")
        damaged = path.read_bytes()
        store = SqliteStore(path, accept_damage=True)
        opened = store.open()
        assert [stored.entity.path for stored in opened.entities] == ["orders", "other"]
        assert (opened.entities[0].queue.next_seq, opened.next_queue) == (5, 3)
        assert everything(store) == [ROWS[0], *ROWS[2:]]
        assert store.load(StoredSessionState(1, "s")) == b"state"
        assert store.load(KnownIds(1, ("id",), 0)) == set()
        store.close()
        assert path.with_name("namespace.db.damaged-1").read_bytes() == damaged
        listed = path.with_name("namespace.db.damaged-1.txt").read_text().splitlines()
        assert "lost: orders: 1 of 4 messages; sequence numbers 2" in listed
        assert "lost: orders: 1 remembered ids" in listed
        names = {file.name for file in path.parent.iterdir()}
        assert not [name for name in names if "rebuilt" in name or "source" in name or "empty" in name]
        again = SqliteStore(path)
        assert len(again.open().entities) == 2
        again.close()

    def test_x2_an_intact_store_stays_as_it_is(self, path: Path) -> None:
        before = closed(path).read_bytes()
        store = SqliteStore(path, accept_damage=True)
        store.open()
        assert everything(store) == ROWS
        store.close()
        assert path.read_bytes() == before
        assert not list(path.parent.glob("*damaged*"))

    @pytest.mark.parametrize(
        "sql", ["UPDATE totals SET highest = 1", "UPDATE counter SET active = 9", "DELETE FROM seen"]
    )
    def test_x2_damage_beside_the_messages_costs_no_message(self, path: Path, sql: str) -> None:
        edit(closed(path), sql)
        edit(path, "UPDATE shared SET bytes = 1; INSERT INTO dropped VALUES (2)")
        store = SqliteStore(path, accept_damage=True)
        opened = store.open()
        assert [(stored.entity.path, stored.queue.active) for stored in opened.entities] == [
            ("orders", 2),
            ("other", 0),
        ]
        assert opened.next_queue == 3
        assert everything(store) == ROWS
        store.close()

    def test_x2_a_move_of_a_damaged_row_leaves_it_damaged(self, path: Path) -> None:
        edit(closed(path), "UPDATE message SET origin_seq = 99 WHERE seq = 1")
        store = SqliteStore(path, most_bytes=0)
        store.open()
        store.commit([move(ROWS[0], QueueLane.DEFERRED)])
        with pytest.raises(StoreDamagedError, match="orders: message 1 is damaged"):
            store.load(RowsBySeq(1, (QueueLane.DEFERRED,), (1,)))
        store.close()

    def test_x2_a_full_disk_while_damage_is_accepted_leaves_the_damaged_store_alone(self, path: Path) -> None:
        edit(closed(path), "UPDATE message SET raw = x'00' WHERE seq = 2")
        number = 0
        with failing_disk() as disk:
            while True:
                before = contents(path.parent)
                disk.writes, disk.after = apsw.FullError, number
                store = SqliteStore(path, vfs=disk.vfs, accept_damage=True)
                try:
                    store.open()
                    break
                except StoreFullError:
                    assert contents(path.parent) == before, number
                    number += 1
            disk.writes = None
            assert number > 10
            assert everything(store) == [ROWS[0], *ROWS[2:]]
            store.close()

    def test_x2_a_lost_entity_takes_its_messages_with_it(self, path: Path) -> None:
        edit(closed(path), "UPDATE entity SET text = '[]' WHERE queue = 1")
        store = SqliteStore(path, accept_damage=True)
        opened = store.open()
        assert [stored.entity.path for stored in opened.entities] == ["other"]
        assert opened.next_queue == 3
        store.close()
        listed = path.with_name("namespace.db.damaged-1.txt").read_text()
        assert "lost: the entity 'orders': its description is damaged; with 4 messages" in listed


ALL_LOST = "lost: everything: the tables cannot be found"


@pytest.mark.parametrize("with_log", [False, True])
@pytest.mark.parametrize(("head", "is_saved"), [(None, False), (b"", False), (b"no SQLite file!!", True)])
def test_x2_damage_is_accepted_whatever_is_left_of_the_file(
    path: Path, head: bytes | None, is_saved: bool, with_log: bool
) -> None:
    """`head` replaces the first bytes of the file. None: the file is gone. Empty: all bytes are gone."""
    copy = killed(path)
    if not with_log:
        store = SqliteStore(copy)
        store.open()
        store.close()
        log_of(copy).unlink(missing_ok=True)
    content = copy.read_bytes()
    if head is None:
        copy.unlink()
    else:
        copy.write_bytes(head + content[len(head) :] if head else b"")
    assert "The store is damaged" in refusal(copy)
    again = SqliteStore(copy, accept_damage=True)
    again.open()
    kept = [found.seq for found in everything(again)]
    again.close()
    # The log has every page that was changed since the store was created.
    assert kept == (list(range(1, 11)) if is_saved or with_log else [])
    if head is not None:
        assert copy.with_name("namespace.db.damaged-1").read_bytes()[: len(head)] == head
        assert (ALL_LOST in copy.with_name("namespace.db.damaged-1.txt").read_text()) == (not kept)


@pytest.mark.parametrize("left", [PAGE_SIZE * 20 + 100, PAGE_SIZE * 20])
def test_x2_a_file_that_is_cut_short_is_refused_and_what_is_left_can_be_kept(path: Path, left: int) -> None:
    store = SqliteStore(path)
    store.open()
    store.commit([entity(1), counters(1, 301, active=300), *put(*range(1, 301), raw=b"x" * 1_000)])
    store.close()
    with path.open("r+b") as file:
        file.truncate(left)
    assert "The store is damaged" in refusal(path)
    again = SqliteStore(path, accept_damage=True)
    again.open()
    kept = everything(again)
    again.close()
    assert 0 < len(kept) < 300
    assert {found.raw for found in kept} == {b"x" * 1_000}
    listed = path.with_name("namespace.db.damaged-1.txt").read_text()
    assert f"lost: orders: {300 - len(kept)} of 300 messages" in listed


def test_x2_a_large_message_whose_last_page_is_cut_is_lost_alone(path: Path) -> None:
    store = SqliteStore(path)
    store.open()
    store.commit([entity(1), counters(1, 4, active=3), *put(1, 2), *put(3, raw=b"x" * 100_000)])
    store.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - PAGE_SIZE // 2)
    assert "it is cut short, in the middle of a page" in refusal(path)
    with pytest.raises(StoreDamagedError):
        SqliteStore(path, most_bytes=0).open()
    again = SqliteStore(path, accept_damage=True)
    again.open()
    assert [found.seq for found in everything(again)] == [1, 2]
    again.close()
    listed = path.with_name("namespace.db.damaged-1.txt").read_text()
    assert "lost: orders: 1 of 3 messages; sequence numbers 3" in listed


def change_number(path: Path, at: int, number: int) -> None:
    """Write a number of four bytes into the header of the file."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack(">i", number))


USER_VERSION, APPLICATION_ID = 60, 68


@pytest.mark.parametrize(
    ("at", "number", "found"),
    [
        (USER_VERSION, 0, "the header of the file says version 0, but its tables are those of version 4"),
        (USER_VERSION, 3, "the header of the file says version 3, but its tables are those of version 4"),
        (USER_VERSION, 12, "the header of the file says version 12, but its tables are those of version 4"),
        (USER_VERSION, -4, "the header of the file says version -4, but its tables are those of version 4"),
        (APPLICATION_ID, 0, "the header of the file does not say that it is a store"),
    ],
)
@pytest.mark.parametrize("most_bytes", [0, 1 << 40])
def test_x2_a_store_whose_header_says_another_kind_or_version_is_refused_and_nothing_of_it_is_lost(
    path: Path, at: int, number: int, found: str, most_bytes: int
) -> None:
    change_number(closed(path), at, number)
    with pytest.raises(StoreDamagedError, match=found) as caught:
        SqliteStore(path, most_bytes=most_bytes).open()
    assert "--accept-damage" in caught.value.hint
    again = SqliteStore(path, accept_damage=True, most_bytes=most_bytes)
    again.open()
    assert everything(again) == ROWS
    again.close()
    assert "lost" not in path.with_name("namespace.db.damaged-1.txt").read_text()
    assert_opens(path)


@pytest.mark.parametrize("accept_damage", [False, True])
@pytest.mark.parametrize(
    ("stored", "said"),
    [(3, 2), (3, 1), (3, 0), (3, -3), (3, 4), (3, 7), (2, 1), (2, 3), (2, 4), (1, 2), (1, 3), (1, 4)],
)
def test_x2_an_older_store_whose_header_says_another_version_is_refused_and_not_changed(
    path: Path, stored: int, said: int, accept_damage: bool
) -> None:
    older_store(path, stored)
    change_number(path, USER_VERSION, said)
    before = path.read_bytes()
    found = f"the header of the file says version {said}, but its tables are those of version {stored}"
    with pytest.raises(StoreDamagedError, match=found) as caught:
        SqliteStore(path, accept_damage=accept_damage).open()
    assert path.read_bytes() == before
    assert "--accept-damage" not in caught.value.hint
    correct_as_hinted(path, caught.value.hint)
    assert_opens(path)


def test_x2_an_older_store_whose_header_says_another_kind_gets_a_hint_that_mends_it(path: Path) -> None:
    older_store(path, 3)
    change_number(path, APPLICATION_ID, 0)
    with pytest.raises(StoreDamagedError, match="the header of the file does not say that it is a store") as caught:
        SqliteStore(path, accept_damage=True).open()
    correct_as_hinted(path, caught.value.hint)
    assert_opens(path)


def correct_as_hinted(path: Path, hint: str) -> None:
    """Run the SQL that the hint gives to the program sqlite3."""
    *_, program, name, sql = shlex.split(hint)
    assert (program, name) == ("sqlite3", path.name)
    connection = apsw.Connection(str(path))
    connection.execute(sql)
    connection.close()


def test_x2_an_older_store_that_cannot_be_upgraded_gets_no_hint_that_leads_nowhere(path: Path) -> None:
    older_store(path, 3)
    connection = apsw.Connection(str(path))
    connection.execute("ALTER TABLE body RENAME COLUMN topic TO subject")
    connection.close()
    for accept_damage in (False, True):
        with pytest.raises(StoreDamagedError, match="it cannot be upgraded from version 3") as caught:
            SqliteStore(path, accept_damage=accept_damage).open()
        assert "put a backup of all of them in their place" in caught.value.hint
        assert "--accept-damage" not in caught.value.hint
