"""The contract of `Store`: rows, reads, atomic commits. One suite for every implementation."""

import pytest

from tests.namespace.store.sample_writes import ALL_LANES, Home, counters, entity, everything, move, next_seqs, put, row
from twinbus.namespace.engine.storage_protocol import (
    BrowseRows,
    DropEntity,
    DropRow,
    DueAnswer,
    DueRows,
    ExpiredRows,
    ForgetSeenIds,
    KnownIds,
    NextRows,
    PutBody,
    PutCounters,
    PutRow,
    PutSeenId,
    PutSessionState,
    QueueLane,
    RowsBySeq,
    StoredSessions,
    StoredSessionState,
    WaitingSessions,
)
from twinbus.namespace.store.errors import StoreConflictError


class TestRows:
    def test_a_row_comes_back_as_it_was_put(self, home: Home) -> None:
        whole = row(
            7,
            origin_seq=3,
            expires=99,
            session="a\x00β😀",
            delivery_count=2,
            overlay=b"\x00\xff",
            raw=bytes(range(256)) + b"\x00" * 40_000,
        )
        home.commit(PutRow(whole))
        assert everything(home.store) == [whole]
        home.reopen()
        assert everything(home.store) == [whole]

    def test_an_empty_overlay_is_not_the_same_as_none(self, home: Home) -> None:
        home.commit(PutRow(row(1, overlay=b"")), PutRow(row(2, overlay=None)))
        assert [found.overlay for found in everything(home.store)] == [b"", None]

    def test_numbers_of_64_bits_are_kept(self, home: Home) -> None:
        last = (1 << 63) - 2
        home.commit(put(last, last - 1, enqueued=last))
        home.commit(DropRow(1, QueueLane.ACTIVE, last - 1))
        assert next_seqs(home.store, after=last - 2) == [last]

    def test_rows_of_any_number_in_one_commit_are_all_there(self, home: Home) -> None:
        first = 1
        for count in (1, 2, 3, 255, 256, 257, 511, 700):
            home.commit(put(*range(first, first + count)))
            first += count
        assert next_seqs(home.store) == list(range(1, first))[:1_000]
        assert len(everything(home.store)) == first - 1

    def test_drops_of_runs_and_of_scattered_rows_delete_exactly_those(self, home: Home) -> None:
        home.commit(put(*range(1, 101)), put(*range(1, 101), queue=2))
        gone = {*range(5, 20), 33, 47, *range(90, 101)}
        home.commit([DropRow(1, QueueLane.ACTIVE, seq) for seq in sorted(gone, key=lambda seq: seq * 37 % 101)])
        assert next_seqs(home.store) == [seq for seq in range(1, 101) if seq not in gone]
        assert next_seqs(home.store, queue=2) == list(range(1, 101))

    def test_drops_of_consecutive_numbers_in_several_lanes_and_queues_delete_all_of_them(self, home: Home) -> None:
        home.commit(put(1, 5), put(2, 6, lane=QueueLane.DEAD), put(3, 7, queue=2, lane=QueueLane.DEAD))
        home.commit(DropRow(1, QueueLane.ACTIVE, 1), DropRow(1, QueueLane.DEAD, 2), DropRow(2, QueueLane.DEAD, 3))
        assert everything(home.store) == [row(5), row(6, lane=QueueLane.DEAD)]
        assert everything(home.store, 2) == [row(7, queue=2, lane=QueueLane.DEAD)]

    def test_a_drop_or_move_of_a_row_that_is_not_there_does_nothing(self, home: Home) -> None:
        home.commit(put(1))
        home.commit(DropRow(1, QueueLane.DEAD, 1), DropRow(1, QueueLane.ACTIVE, 2), move(row(9), QueueLane.DEAD))
        assert everything(home.store) == [row(1)]

    def test_a_move_changes_its_columns_and_leaves_the_rest(self, home: Home) -> None:
        old = row(4, session="s", expires=50, raw=b"x" * 5_000)
        home.commit(PutRow(old))
        home.commit(move(old, QueueLane.DEAD, enqueued=5, expires=None, delivery_count=10, overlay=b"why"))
        moved = old._replace(lane=QueueLane.DEAD, enqueued=5, expires=None, delivery_count=10, overlay=b"why")
        assert everything(home.store) == [moved]
        assert next_seqs(home.store) == []

    def test_a_scheduled_row_that_becomes_active_is_no_longer_due(self, home: Home) -> None:
        old = row(4, lane=QueueLane.SCHEDULED, due=50)
        home.commit(PutRow(old))
        home.commit(move(old, QueueLane.ACTIVE, 9))
        assert everything(home.store) == [old._replace(lane=QueueLane.ACTIVE, seq=9, due=None)]
        assert home.store.load(DueRows(1, 100, 10, 1_000)) == DueAnswer([], None)

    def test_a_scheduled_row_that_stays_scheduled_stays_due(self, home: Home) -> None:
        old = row(4, lane=QueueLane.SCHEDULED, due=50)
        home.commit(PutRow(old), move(old, QueueLane.SCHEDULED, delivery_count=1))
        home.commit(move(old, QueueLane.SCHEDULED, delivery_count=2))
        assert home.store.load(DueRows(1, 100, 10, 1_000)).rows == [old._replace(delivery_count=2)]


class TestOneCommit:
    def test_writes_are_applied_in_their_order(self, home: Home) -> None:
        home.commit(put(1, 2, 3))
        home.commit(
            move(row(1), QueueLane.DEFERRED),
            move(row(1, lane=QueueLane.DEFERRED), QueueLane.DEAD, delivery_count=3),
            put(4),
            move(row(4), QueueLane.DEFERRED, delivery_count=1),
            DropRow(1, QueueLane.ACTIVE, 2),
            put(2, raw=b"again"),
            move(row(3), QueueLane.DEAD),
            DropRow(1, QueueLane.DEAD, 3),
            put(5),
            DropRow(1, QueueLane.ACTIVE, 5),
        )
        assert everything(home.store) == [
            row(1, lane=QueueLane.DEAD, delivery_count=3),
            row(2, raw=b"again"),
            row(4, lane=QueueLane.DEFERRED, delivery_count=1),
        ]

    def test_a_row_can_have_the_key_of_a_row_that_the_same_commit_removes(self, home: Home) -> None:
        home.commit(put(1, 2))
        home.commit(
            move(row(2), QueueLane.ACTIVE, 3), move(row(1), QueueLane.ACTIVE, 2), move(row(3), QueueLane.ACTIVE, 1)
        )
        assert [(found.seq, found.raw) for found in everything(home.store)] == [(1, b"message 2"), (2, b"message 1")]

    @pytest.mark.parametrize("second", [put(1), [move(row(2), QueueLane.ACTIVE, 1)]])
    def test_a_row_with_the_key_of_a_stored_row_is_refused_and_nothing_is_stored(
        self, home: Home, second: list[PutRow]
    ) -> None:
        home.commit(put(1, 2))
        with pytest.raises(StoreConflictError):
            home.commit(put(3), DropRow(1, QueueLane.ACTIVE, 2), put(2, raw=b"new"), counters(1, 99), entity(7), second)
        assert everything(home.store) == [row(1), row(2)]
        assert home.reopen().next_queue == 3
        assert home.opened.entities[0].queue.next_seq == 1

    def test_two_rows_with_one_key_are_refused(self, home: Home) -> None:
        with pytest.raises(StoreConflictError):
            home.commit(put(1), put(1))
        assert everything(home.store) == []

    def test_the_store_goes_on_after_a_refused_commit(self, home: Home) -> None:
        home.commit(put(1))
        with pytest.raises(StoreConflictError):
            home.commit(put(1))
        home.commit(put(2))
        assert next_seqs(home.store) == [1, 2]

    def test_an_empty_commit_is_allowed(self, home: Home) -> None:
        home.commit()
        assert everything(home.store) == []


class TestNextRows:
    def test_rows_come_by_number_after_the_given_one(self, home: Home) -> None:
        home.commit(put(5, 3, 9), put(4, lane=QueueLane.DEAD), put(6, queue=2))
        assert next_seqs(home.store, after=3) == [5, 9]
        assert next_seqs(home.store, lane=QueueLane.DEAD) == [4]

    def test_rows_are_bounded_by_count_and_by_bytes_but_at_least_one_comes(self, home: Home) -> None:
        home.commit(put(*range(1, 11), raw=b"x" * 100))
        assert [found.seq for found in home.store.load(NextRows(1, 0, 0, 3, 10_000))] == [1, 2, 3]
        assert [found.seq for found in home.store.load(NextRows(1, 0, 0, 9, 250))] == [1, 2]
        assert [found.seq for found in home.store.load(NextRows(1, 0, 4, 9, 10))] == [5]

    def test_a_read_of_a_session_returns_only_its_rows(self, home: Home) -> None:
        home.commit(put(1, 4, session="a"), put(2, 3, session="b"), put(5), put(6, session="a", lane=QueueLane.DEAD))
        assert next_seqs(home.store, session="a") == [1, 4]
        assert next_seqs(home.store, session="b", after=2) == [3]
        assert next_seqs(home.store, session="c") == []


class TestRowsBySeq:
    def test_rows_come_in_the_requested_order_without_missing_ones(self, home: Home) -> None:
        home.commit(put(1, 2, 3), put(4, lane=QueueLane.DEFERRED), put(5, lane=QueueLane.DEAD))
        found = home.store.load(RowsBySeq(1, (QueueLane.ACTIVE, QueueLane.DEFERRED), (4, 9, 1, 5)))
        assert found == [row(4, lane=QueueLane.DEFERRED), row(1)]

    def test_a_read_without_raw_returns_all_other_columns(self, home: Home) -> None:
        home.commit(PutBody(3, b"shared", 1), put(1), put(2, body=3, raw=b"", size=6))
        found = home.store.load(RowsBySeq(1, ALL_LANES, (1, 2), with_raw=False))
        assert found == [row(1)._replace(raw=b""), row(2, body=3, raw=b"", size=6)]


class TestBrowseRows:
    def test_lanes_are_merged_by_number(self, home: Home) -> None:
        home.commit(
            put(1, 6),
            put(2, 5, lane=QueueLane.DEFERRED),
            put(3, lane=QueueLane.SCHEDULED, due=9),
            put(4, lane=QueueLane.DEAD),
        )
        lanes = (QueueLane.ACTIVE, QueueLane.DEFERRED, QueueLane.SCHEDULED)
        assert [found.seq for found in home.store.load(BrowseRows(1, lanes, 2, 3, 1_000))] == [2, 3, 5]
        assert [found.seq for found in home.store.load(BrowseRows(1, (QueueLane.DEAD,), 0, 3, 1_000))] == [4]

    def test_a_browse_is_bounded_by_bytes_and_may_be_of_one_session(self, home: Home) -> None:
        home.commit(
            put(1, 3, 5, session="a", raw=b"x" * 100), put(2, 4, session="a", lane=QueueLane.DEFERRED, raw=b"x" * 100)
        )
        home.commit(put(6, session="b"))
        lanes = (QueueLane.ACTIVE, QueueLane.DEFERRED)
        assert [found.seq for found in home.store.load(BrowseRows(1, lanes, 1, 9, 300, "a"))] == [1, 2, 3]
        assert [found.seq for found in home.store.load(BrowseRows(1, lanes, 4, 9, 300, "a"))] == [4, 5]


class TestTime:
    def test_expired_rows_come_oldest_first_with_the_next_instant(self, home: Home) -> None:
        home.commit(put(1, expires=30), put(2, expires=10), put(3), put(4, expires=20), put(5, expires=99))
        home.commit(put(6, expires=1, lane=QueueLane.DEAD), put(7, expires=1, queue=2))
        home.commit(put(8, expires=1, lane=QueueLane.DEFERRED), put(9, expires=1, lane=QueueLane.SCHEDULED, due=1))
        answer = home.store.load(ExpiredRows(1, 30, 10))
        assert [found.seq for found in answer.rows] == [2, 4, 1]
        assert [found.raw for found in answer.rows] == [b"", b"", b""]
        assert answer.next_at == 99
        assert home.store.load(ExpiredRows(1, 30, 2)).next_at == 30
        assert home.store.load(ExpiredRows(1, 5, 2)) == DueAnswer([], 10)

    def test_due_rows_come_by_instant_and_number_with_their_raw(self, home: Home) -> None:
        home.commit(
            [PutRow(row(seq, lane=QueueLane.SCHEDULED, due=due)) for seq, due in ((1, 20), (2, 10), (3, 20), (4, 70))]
        )
        answer = home.store.load(DueRows(1, 20, 10, 1_000))
        assert [(found.seq, found.raw) for found in answer.rows] == [
            (2, b"message 2"),
            (1, b"message 1"),
            (3, b"message 3"),
        ]
        assert answer.next_at == 70
        bounded = home.store.load(DueRows(1, 20, 10, 18))
        assert ([found.seq for found in bounded.rows], bounded.next_at) == ([2, 1], 20)

    def test_opening_returns_the_next_expiry_and_due_instants(self, home: Home) -> None:
        home.commit(
            put(1, expires=30),
            put(2, expires=10, lane=QueueLane.DEAD),
            put(3, lane=QueueLane.SCHEDULED, due=7, queue=2),
        )
        home.commit(put(4, expires=10, lane=QueueLane.DEFERRED))
        first, second = home.reopen().entities
        assert (first.next_expiry, first.next_due) == (30, None)
        assert (second.next_expiry, second.next_due) == (None, 7)


class TestSessions:
    def test_waiting_sessions_are_those_with_active_rows(self, home: Home) -> None:
        home.commit(
            put(1, 2, 3, session="b"), put(4, session="a"), put(5, session="d", lane=QueueLane.DEFERRED), put(6)
        )
        home.commit(put(7, session="c", queue=2), put(8, session="é"))
        assert home.store.load(WaitingSessions(1, "", 10)) == ["a", "b", "é"]
        assert home.store.load(WaitingSessions(1, "a", 1)) == ["b"]
        assert home.store.load(WaitingSessions(1, "é", 1)) == []
        home.commit(DropRow(1, QueueLane.ACTIVE, 4))
        assert home.store.load(WaitingSessions(1, "", 10)) == ["b", "é"]

    def test_stored_sessions_are_those_with_rows_or_a_state(self, home: Home) -> None:
        home.commit(
            put(1, 2, session="b"),
            put(3, session="a", lane=QueueLane.SCHEDULED, due=9),
            put(4, session="x", lane=QueueLane.DEAD),
        )
        home.commit(
            put(5, session="c", lane=QueueLane.DEFERRED),
            PutSessionState(1, "b", b"1", 10),
            PutSessionState(1, "s", b"", 20),
        )
        assert home.store.load(StoredSessions(1, 0, 10)) == ["a", "b", "c", "s"]
        assert home.store.load(StoredSessions(1, 1, 2)) == ["b", "c"]
        assert home.store.load(StoredSessions(1, 3, 2)) == ["s"]
        assert home.store.load(StoredSessions(1, 0, 10, state_since=10)) == ["s"]
        assert home.store.load(StoredSessions(1, 1, 10, state_since=9)) == ["s"]

    def test_a_state_is_kept_replaced_and_cleared(self, home: Home) -> None:
        home.commit(
            PutSessionState(1, "s", b"one", 1), PutSessionState(2, "s", b"other", 1), PutSessionState(1, "t", b"", 1)
        )
        assert home.store.load(StoredSessionState(1, "s")) == b"one"
        assert home.store.load(StoredSessionState(1, "t")) == b""
        home.commit(PutSessionState(1, "s", b"x", 2), PutSessionState(1, "s", b"two", 2))
        home.reopen()
        assert home.store.load(StoredSessionState(1, "s")) == b"two"
        home.commit(
            PutSessionState(1, "s", b"x", 3), PutSessionState(1, "s", None, 3), PutSessionState(1, "u", None, 3)
        )
        assert home.store.load(StoredSessionState(1, "s")) is None
        assert home.store.load(StoredSessionState(2, "s")) == b"other"


class TestSeenIds:
    def test_ids_are_known_since_the_requested_instant(self, home: Home) -> None:
        home.commit(PutSeenId(1, "a", 10), PutSeenId(1, "b", 20), PutSeenId(2, "c", 20))
        assert home.store.load(KnownIds(1, ("a", "b", "c", "é"), 10)) == {"a", "b"}
        assert home.store.load(KnownIds(1, ("a", "b"), 11)) == {"b"}
        home.commit(PutSeenId(1, "a", 30))
        assert home.store.load(KnownIds(1, ("a", "b"), 21)) == {"a"}

    def test_forgotten_ids_are_deleted_and_later_ones_stay(self, home: Home) -> None:
        home.commit([PutSeenId(1, str(number), number) for number in range(3_000)])
        home.commit(ForgetSeenIds(1, 2_990))
        while home.store.tidy():
            pass
        assert home.store.load(KnownIds(1, tuple(map(str, range(3_000))), 0)) == {str(n) for n in range(2_990, 3_000)}


class TestBodies:
    def test_each_row_that_names_a_shared_body_is_returned_with_it(self, home: Home) -> None:
        home.commit(PutBody(5, b"shared body", 1), put(1, body=5, size=11), put(2, body=5, size=11, queue=2))
        assert next(iter(everything(home.store))).raw == b"shared body"
        assert home.store.load(NextRows(2, 0, 0, 1, 1))[0].raw == b"shared body"
        assert home.reopen().next_body == 6

    def test_a_body_is_deleted_with_the_last_row_that_names_it(self, home: Home) -> None:
        home.commit(PutBody(5, b"shared body", 1), put(1, body=5), put(2, body=5, queue=2))
        home.commit(DropRow(1, 0, 1))
        assert home.store.load(NextRows(2, 0, 0, 1, 1))[0].raw == b"shared body"
        home.commit(move(row(2, queue=2), QueueLane.DEAD))
        assert home.reopen().next_body == 6
        home.commit(DropRow(2, QueueLane.DEAD, 2))
        assert home.reopen().next_body == 1

    def test_a_row_put_and_dropped_in_one_commit_leaves_no_body(self, home: Home) -> None:
        home.commit(PutBody(5, b"b", 1), PutBody(6, b"c", 1), put(1, body=5), DropRow(1, 0, 1), put(2, body=6))
        assert everything(home.store) == [row(2, body=6, raw=b"c", size=9)]
        assert home.reopen().next_body == 7
        home.commit(DropRow(1, 0, 2))
        assert home.reopen().next_body == 1

    def test_a_body_stays_if_the_commit_that_drops_its_last_row_puts_another(self, home: Home) -> None:
        home.commit(PutBody(5, b"shared body", 1), put(1, body=5))
        home.commit(DropRow(1, 0, 1), put(2, body=5, queue=2))
        assert home.store.load(NextRows(2, 0, 0, 1, 1))[0].raw == b"shared body"

    def test_a_body_is_deleted_with_the_entities_whose_rows_name_it(self, home: Home) -> None:
        home.commit(PutBody(5, b"shared body", 3), entity(3, "news"), put(1, body=5), put(2, body=5, queue=2))
        home.commit(DropEntity(1))
        home.tidy()
        assert home.reopen().next_body == 6
        assert home.charged == {3: 11}
        home.commit(DropEntity(2))
        home.tidy()
        assert home.reopen().next_body == 1
        assert home.charged == {3: 0}

    def test_a_topic_is_charged_once_for_a_body_until_its_last_row_is_dropped(self, home: Home) -> None:
        home.commit(PutBody(5, b"shared body", 1), put(1, 3, body=5), put(2, body=5, queue=2))
        home.commit(PutBody(6, b"another", 2), put(4, body=6), DropRow(1, 0, 1))
        assert home.store.take_freed() == {}
        assert [stored.shared_bytes for stored in home.reopen().entities] == [11, 7]
        home.store.commit([DropRow(1, 0, 3), DropRow(1, 0, 4)])
        assert home.store.take_freed() == {2: 7}
        home.store.commit([DropRow(2, 0, 2)])
        assert home.store.take_freed() == {1: 11}
        assert home.store.take_freed() == {}
        assert [stored.shared_bytes for stored in home.reopen().entities] == [0, 0]

    def test_a_row_put_and_dropped_in_one_commit_is_not_charged(self, home: Home) -> None:
        home.store.commit([PutBody(5, b"shared body", 1), *put(1, body=5), DropRow(1, 0, 1)])
        assert home.store.take_freed() == {1: 11}
        assert home.reopen().entities[0].shared_bytes == 0

    def test_a_commit_that_is_refused_frees_nothing(self, home: Home) -> None:
        home.commit(PutBody(5, b"shared body", 1), put(1, body=5), put(2))
        with pytest.raises(StoreConflictError):
            home.commit(DropRow(1, 0, 1), put(2))
        assert home.store.take_freed() == {}
        assert home.reopen().entities[0].shared_bytes == 11


class TestEntities:
    def test_opening_returns_entities_and_counters(self, home: Home) -> None:
        deep = PutCounters(1, 500, 1, 2, 3, 4, 5, 6_000, 7)
        home.commit(entity(1, "renamed"), counters(1, 9), deep, entity(3, "new"))
        opened = home.reopen()
        assert [stored.entity for stored in opened.entities] == [
            entity(1, "renamed"),
            entity(2, "invoices"),
            entity(3, "new"),
        ]
        assert opened.entities[0].queue == deep
        assert opened.entities[2].queue == PutCounters(3, 1, 0, 0, 0, 0, 0, 0, 10)
        assert opened.next_queue == 4

    def test_the_id_of_a_queue_is_never_used_again(self, home: Home) -> None:
        home.commit(entity(9))
        home.commit(DropEntity(9))
        assert home.reopen().next_queue == 10
        home.commit(entity(12), DropEntity(12))
        assert home.reopen().next_queue == 13

    def test_reads_of_a_dropped_queue_are_empty_at_once(self, home: Home) -> None:
        home.commit(
            put(*range(1, 1_500), session="s", expires=5), put(1_600, lane=QueueLane.SCHEDULED, due=5), put(1, queue=2)
        )
        home.commit(PutSessionState(1, "s", b"x", 1), PutSeenId(1, "m", 1))
        home.commit(DropEntity(1))
        self._assert_empty(home)
        home.reopen()
        self._assert_empty(home)
        assert [stored.entity.queue for stored in home.opened.entities] == [2]
        assert next_seqs(home.store, queue=2) == [1]

    def test_writes_to_a_dropped_queue_are_ignored(self, home: Home) -> None:
        home.commit(put(1, 2))
        home.commit(put(3), DropEntity(1), put(4), counters(1, 5), PutSessionState(1, "s", b"x", 1))
        home.commit(put(5), counters(1, 6), entity(1))
        while home.store.tidy():
            pass
        home.commit(put(6), PutSessionState(1, "s", b"x", 1))
        self._assert_empty(home)
        assert [stored.entity.queue for stored in home.reopen().entities] == [2]

    def _assert_empty(self, home: Home) -> None:
        load = home.store.load
        assert everything(home.store) == []
        assert next_seqs(home.store) == next_seqs(home.store, session="s") == []
        assert load(RowsBySeq(1, ALL_LANES, (1, 2))) == []
        assert load(ExpiredRows(1, 99, 9)) == load(DueRows(1, 99, 9, 99)) == DueAnswer([], None)
        assert load(WaitingSessions(1, "", 9)) == load(StoredSessions(1, 0, 9)) == []
        assert load(StoredSessionState(1, "s")) is None
        assert load(KnownIds(1, ("m",), 0)) == set()

    def test_closing_twice_does_nothing(self, home: Home) -> None:
        home.store.close()
        home.store.close()
        assert [stored.entity.queue for stored in home.reopen().entities] == [1, 2]
