"""A simple model that the real stores are compared with, and random commits like those of the engine."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, NamedTuple

from tests.namespace.store.sample_writes import everything, row
from twinbus.namespace.engine.storage_protocol import (
    DropEntity,
    DropRow,
    ForgetSeenIds,
    KnownIds,
    MoveRow,
    OpenedStore,
    PutBody,
    PutCounters,
    PutEntity,
    PutRow,
    PutSeenId,
    PutSessionState,
    QueueLane,
    Row,
    StoredSessions,
    StoredSessionState,
    StoreWrite,
    WaitingSessions,
)
from twinbus.namespace.store.interface import Store

SESSIONS = ("a", "b", "ä\x00", "zz")
IDS = tuple(f"id {number}" for number in range(12))


class View(NamedTuple):
    """Everything that can be read of one queue."""

    rows: list[Row]
    waiting: list[str]
    sessions: list[str]
    states: dict[str, bytes | None]
    known: set[str]


class Model:
    """The state of a namespace as dictionaries. Applies one write after the other."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int, int], Row] = {}
        self.bodies: dict[int, bytes] = {}
        self.topics: dict[int, int] = {}
        """The topic that is charged for each body."""
        self.entities: dict[int, PutEntity] = {}
        self.counters: dict[int, PutCounters] = {}
        self.states: dict[tuple[int, str], bytes] = {}
        self.seen: dict[tuple[int, str], int] = {}
        self.floor: dict[int, int] = {}
        self.highest_queue = 0
        self.highest_body = 0

    def after(self, writes: Iterable[StoreWrite]) -> Model:
        made = copy.copy(self)
        for name, value in vars(self).items():
            setattr(made, name, copy.copy(value))
        for write in writes:
            made.apply(write)
        return made

    def apply(self, write: StoreWrite) -> None:
        match write:
            case PutRow(new):
                self.rows[new[:3]] = new
            case DropRow():
                self.rows.pop((write.queue, write.lane, write.seq), None)
            case MoveRow(queue, lane, seq, to_lane, to_seq, enqueued, expires, delivery_count, overlay):
                if (old := self.rows.pop((queue, lane, seq), None)) is not None:
                    self.rows[queue, to_lane, to_seq] = old._replace(
                        lane=to_lane,
                        seq=to_seq,
                        enqueued=enqueued,
                        expires=expires,
                        due=old.due if to_lane == QueueLane.SCHEDULED else None,
                        delivery_count=delivery_count,
                        overlay=overlay,
                    )
            case PutBody(body, raw, topic):
                self.bodies[body] = raw
                self.topics[body] = topic
                self.highest_body = max(self.highest_body, body)
            case PutCounters():
                self.counters[write.queue] = write
            case PutEntity():
                self.entities[write.queue] = write
                self.highest_queue = max(self.highest_queue, write.queue)
            case DropEntity(queue):
                self.rows = {key: kept for key, kept in self.rows.items() if key[0] != queue}
                self.states = {key: state for key, state in self.states.items() if key[0] != queue}
                self.seen = {key: at for key, at in self.seen.items() if key[0] != queue}
                del self.entities[queue], self.counters[queue]
            case PutSessionState(queue, session, state, _):
                self.states.pop((queue, session), None)
                if state is not None:
                    self.states[queue, session] = state
            case PutSeenId(queue, message_id, at):
                self.seen[queue, message_id] = at
            case ForgetSeenIds(queue, before):
                self.floor[queue] = max(before, self.floor.get(queue, 0))

    def rows_of(self, queue: int) -> list[Row]:
        found = sorted((kept for kept in self.rows.values() if kept.queue == queue), key=lambda kept: kept.seq)
        return [kept if kept.body is None else kept._replace(raw=self.bodies[kept.body]) for kept in found]

    def view(self, queue: int) -> View:
        rows = self.rows_of(queue)
        listed = {kept.session for kept in rows if kept.session is not None and kept.lane <= QueueLane.SCHEDULED}
        return View(
            rows,
            sorted({kept.session for kept in rows if kept.session is not None and kept.lane == QueueLane.ACTIVE}),
            sorted(listed | {session for number, session in self.states if number == queue}),
            {session: self.states.get((queue, session)) for session in SESSIONS},
            {name for (number, name), at in self.seen.items() if number == queue and at >= self.floor.get(queue, 0)},
        )

    def shared_bytes(self, topic: int) -> int:
        named = {kept.body for kept in self.rows.values() if kept.body is not None}
        return sum(len(self.bodies[body]) for body in named if self.topics[body] == topic)

    def counted(self, queue: int, next_seq: int, now: int) -> PutCounters:
        """Return the counters that match the stored rows."""
        rows = self.rows_of(queue)
        lanes = [sum(kept.lane == lane for kept in rows) for lane in QueueLane]
        size = sum(kept.size for kept in rows)
        return PutCounters._make((queue, next_seq, *lanes[:5], size, now, *lanes[5:]))


def seen_in(store: Store, queue: int, since: int) -> View:
    """Read everything of a queue from a store."""
    return View(
        everything(store, queue),
        store.load(WaitingSessions(queue, "", 100)),
        store.load(StoredSessions(queue, 0, 100)),
        {session: store.load(StoredSessionState(queue, session)) for session in SESSIONS},
        store.load(KnownIds(queue, IDS, since)),
    )


def assert_shows(store: Store, opened: OpenedStore | None, model: Model) -> None:
    """Check that the store holds what the model holds, for every queue that ever existed."""
    for queue in range(1, model.highest_queue + 2):
        assert seen_in(store, queue, model.floor.get(queue, 0)) == model.view(queue)
    if opened is not None:
        assert {stored.entity.queue: stored.entity for stored in opened.entities} == model.entities
        assert {stored.queue.queue: stored.queue for stored in opened.entities} == model.counters
        assert opened.next_queue == model.highest_queue + 1
        named = [kept.body for kept in model.rows.values() if kept.body is not None]
        assert opened.next_body > max(named, default=0)
        for stored in opened.entities:
            # The rows of dropped queues are deleted in pieces.
            assert stored.shared_bytes >= model.shared_bytes(stored.entity.queue)
            expiring = [kept for kept in model.rows_of(stored.entity.queue) if kept.lane == QueueLane.ACTIVE]
            assert stored.next_expiry == min(
                (kept.expires for kept in expiring if kept.expires is not None), default=None
            )


class Engine:
    """Generates commits that fit the state: new sequence numbers, stored rows, matching counters."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._now = 1_000

    def commit(self, model: Model, count: int) -> tuple[list[StoreWrite], Model]:
        """Return the writes of `count` random operations, and the state after them."""
        writes: list[StoreWrite] = []
        model = model.after(())
        if not model.entities:
            self._do(model, writes, self._new_entity(model))
        for _ in range(count):
            self._now += self._rng.randrange(3)
            self._do(model, writes, self._operation(model, self._rng.choice(sorted(model.entities))))
        return writes, model

    def _do(self, model: Model, writes: list[StoreWrite], operation: Sequence[StoreWrite]) -> None:
        for write in operation:
            model.apply(write)
        touched = {write.queue for write in operation if isinstance(write, DropRow | MoveRow)}
        touched |= {write.row.queue for write in operation if isinstance(write, PutRow)}
        writes += operation
        for queue in sorted(touched):
            numbers = [key[2] for key in model.rows if key[0] == queue]
            next_seq = max(model.counters[queue].next_seq, max(numbers, default=0) + 1)
            counted = model.counted(queue, next_seq, self._now)
            model.apply(counted)
            writes.append(counted)

    def _new_entity(self, model: Model) -> list[StoreWrite]:
        queue = model.highest_queue + 1
        return [
            PutEntity(queue, "queue", f"q{queue}", "{}", self._now, self._now),
            PutCounters(queue, 1, 0, 0, 0, 0, 0, 0, self._now),
        ]

    def _operation(self, model: Model, queue: int) -> Sequence[StoreWrite]:
        rng = self._rng
        rows = [kept for kept in model.rows.values() if kept.queue == queue]
        choice = rng.randrange(100)
        if choice < 45 or not rows:
            return self._puts(model, queue)
        if choice < 65:
            return [DropRow(*kept[:3]) for kept in rng.sample(rows, min(len(rows), rng.choice((1, 1, 3))))]
        if choice < 80:
            return [self._move(model, rng.choice(rows))]
        if choice < 83:
            return [DropRow(queue, rng.choice(list(QueueLane)), 1 << 40)]
        if choice < 88:
            state = rng.choice((None, b"", b"state %d" % self._now))
            return [PutSessionState(queue, rng.choice(SESSIONS), state, self._now)]
        if choice < 93:
            return [PutSeenId(queue, rng.choice(IDS), self._now)]
        if choice < 95:
            return [ForgetSeenIds(queue, self._now - 5)]
        if choice < 98 or len(model.entities) == 1:
            return self._new_entity(model) if len(model.entities) < 4 else []
        return [DropEntity(queue)]

    def _puts(self, model: Model, queue: int) -> list[StoreWrite]:
        rng = self._rng
        seq = model.counters[queue].next_seq
        raw = rng.randbytes(rng.choice((1, 40, 1_000, 9_000)))
        if rng.randrange(4):
            return [PutRow(self._row(queue, number, raw=raw)) for number in range(seq, seq + rng.choice((1, 1, 1, 4)))]
        if (named := [kept for kept in model.rows.values() if kept.body is not None]) and not rng.randrange(3):
            other = rng.choice(named)
            return [PutRow(self._row(queue, seq, raw=b"", size=other.size, body=other.body))]
        body = model.highest_body + 1
        others = [number for number in sorted(model.entities) if number == queue or rng.randrange(2)]
        rows = [self._row(number, model.counters[number].next_seq, raw=raw, body=body) for number in others]
        return [
            PutBody(body, raw, rng.choice(sorted(model.entities))),
            *(PutRow(made._replace(raw=b"", size=len(raw))) for made in rows),
        ]

    def _row(self, queue: int, seq: int, **columns: Any) -> Row:
        rng = self._rng
        lane = rng.choice((QueueLane.ACTIVE, QueueLane.ACTIVE, QueueLane.ACTIVE, QueueLane.SCHEDULED))
        columns["due"] = self._now + rng.randrange(9) if lane == QueueLane.SCHEDULED else None
        columns["expires"] = rng.choice((None, self._now + rng.randrange(99)))
        return row(seq, queue, lane, session=rng.choice((None, *SESSIONS)), **columns)

    def _move(self, model: Model, old: Row) -> MoveRow:
        rng = self._rng
        to_lane: int = (
            rng.choice(list(QueueLane)) if old.due is None else rng.choice((QueueLane.ACTIVE, QueueLane.DEAD))
        )
        to_lane = old.lane if to_lane == QueueLane.SCHEDULED else to_lane
        to_seq = rng.choice((old.seq, model.counters[old.queue].next_seq))
        expires = rng.choice((old.expires, None, self._now))
        overlay = rng.choice((None, b"", b"\x00overlay"))
        return MoveRow(*old[:3], to_lane, to_seq, self._now, expires, old.delivery_count + 1, overlay)
