"""Stores compared with a simple model: random commits, every read, reopening."""

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.namespace.store.sample_writes import Home
from tests.namespace.store.store_model import Engine, Model, assert_shows
from tests.tiers import budget
from twinbus.namespace.engine.storage_protocol import (
    BrowseRows,
    DueRows,
    ExpiredRows,
    NextRows,
    QueueLane,
    Row,
    RowsBySeq,
    StoredSessions,
    WaitingSessions,
)

QUEUES = st.integers(1, 4)
LANES = st.lists(st.sampled_from(QueueLane), min_size=1, unique=True).map(tuple)
BYTES = st.sampled_from((1, 100, 5_000, 1 << 30))
SESSION = st.sampled_from((None, "a", "ä\x00"))


class Stores(RuleBasedStateMachine):
    """Both stores do what the model does."""

    @initialize(rng=st.randoms(use_true_random=False))
    def open(self, rng: Random) -> None:
        self._folder = TemporaryDirectory()
        self.homes = [Home("memory", Path(self._folder.name)), Home("sqlite", Path(self._folder.name))]
        self.model = Model()
        self.engine = Engine(rng)

    def teardown(self) -> None:
        for home in self.homes:
            home.store.close()
        self._folder.cleanup()

    @rule(count=st.sampled_from((1, 3, 30)))
    def commit(self, count: int) -> None:
        writes, self.model = self.engine.commit(self.model, count)
        for home in self.homes:
            home.commit(writes)

    @rule()
    def reopen(self) -> None:
        for home in self.homes:
            opened = home.reopen()
            assert_shows(home.store, opened, self.model)
            for stored in opened.entities:
                assert stored.shared_bytes == home.charged[stored.entity.queue]

    @rule()
    def tidy(self) -> None:
        for home in self.homes:
            home.store.tidy()

    @rule()
    def tidy_up(self) -> None:
        for home in self.homes:
            home.tidy()
            for topic in self.model.entities:
                assert home.charged[topic] == self.model.shared_bytes(topic)

    @rule(queue=QUEUES, lanes=LANES, start=st.integers(0, 40), limit=st.integers(1, 9), size=BYTES, session=SESSION)
    def walk(self, queue: int, lanes: tuple[int, ...], start: int, limit: int, size: int, session: str | None) -> None:
        rows = [row for row in self.model.rows_of(queue) if row.seq >= start and session in (None, row.session)]
        browsed = bounded([row for row in rows if row.lane in lanes], limit, size)
        following = bounded([row for row in rows if row.lane == lanes[0]], limit, size)
        for home in self.homes:
            assert home.store.load(BrowseRows(queue, lanes, start, limit, size, session)) == browsed
            assert home.store.load(NextRows(queue, lanes[0], start - 1, limit, size, session)) == following

    @rule(queue=QUEUES, lanes=LANES, seqs=st.lists(st.integers(1, 40), unique=True).map(tuple), whole=st.booleans())
    def by_seq(self, queue: int, lanes: tuple[int, ...], seqs: tuple[int, ...], whole: bool) -> None:
        rows = {row.seq: row for row in self.model.rows_of(queue) if row.lane in lanes}
        found = [rows[seq] if whole else rows[seq]._replace(raw=b"") for seq in seqs if seq in rows]
        for home in self.homes:
            assert home.store.load(RowsBySeq(queue, lanes, seqs, whole)) == found

    @rule(queue=QUEUES, later=st.integers(0, 100), limit=st.integers(1, 9), size=BYTES)
    def time(self, queue: int, later: int, limit: int, size: int) -> None:
        at = 1_000 + later
        rows = self.model.rows_of(queue)
        expiring = sorted(
            (row.expires, row.seq) for row in rows if row.expires is not None and row.lane == QueueLane.ACTIVE
        )
        expired = [seq for expires, seq in expiring if expires <= at][:limit]
        scheduled = sorted((row for row in rows if row.due is not None), key=lambda row: (row.due, row.seq))
        due = bounded([row for row in scheduled if row.due is not None and row.due <= at], limit, size)
        for home in self.homes:
            answer = home.store.load(ExpiredRows(queue, at, limit))
            assert [row.seq for row in answer.rows] == expired
            assert answer.next_at == next((expires for expires, _ in expiring[len(expired) :]), None)
            answer = home.store.load(DueRows(queue, at, limit, size))
            assert answer.rows == due
            assert answer.next_at == next((row.due for row in scheduled[len(due) :]), None)

    @rule(queue=QUEUES, skip=st.integers(0, 4), limit=st.integers(1, 4), after=st.sampled_from(("", "a", "aa", "b")))
    def sessions(self, queue: int, skip: int, limit: int, after: str) -> None:
        view = self.model.view(queue)
        for home in self.homes:
            assert home.store.load(StoredSessions(queue, skip, limit)) == view.sessions[skip : skip + limit]
            waiting = home.store.load(WaitingSessions(queue, after, limit))
            assert waiting == [session for session in view.waiting if session > after][:limit]

    @invariant()
    def they_show_the_same(self) -> None:
        for home in self.homes:
            assert_shows(home.store, None, self.model)


def bounded(rows: list[Row], limit: int, size: int) -> list[Row]:
    taken: list[Row] = []
    for row in rows[:limit]:
        if taken and sum(other.size for other in taken) + row.size > size:
            break
        taken.append(row)
    return taken


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=budget(20, 40), stateful_step_count=25)
