"""Random sequences of sends, receives, settlements, waits and restarts, compared with a simple model.

No accepted message is lost, no settled message is delivered again, no message is locked twice, and a receiver with
credit gets every available message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.tiers import budget
from twinbus.namespace.engine import events
from twinbus.namespace.engine.descriptions import QueueDescription, SubscriptionDescription, TopicDescription
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.storage_protocol import BrowseRows, QueueLane, Row
from twinbus.namespace.engine.topic import Topic
from twinbus.values import Condition

from .bus import Bus, Delivery, Receiver, envelope, text_of
from .model import LANES, EntityModel, ModelMessage, SessionHolder

OUTCOMES: dict[str, events.MessageOutcome] = {
    "complete": events.Complete(),
    "abandon": events.Abandon({"tried": True}),
    "defer": events.Defer(),
    "dead-letter": events.MoveToDeadLetter("no good", "at all"),
    "release": events.Release(),
}
SESSIONS = ("red", "green", "blue")
WINDOW = 20_000
EVERYTHING = 1 << 40


@dataclass(eq=False)
class ModelReceiver:
    """A receiver, and what the test expects of it."""

    path: str
    dead: bool
    peek_lock: bool
    session: bool
    receiver: Receiver = field(default_factory=Receiver)
    limit: int = 0
    seen: int = 0
    order: list[int] = field(default_factory=list)
    """Sequence numbers of the first deliveries of the session that it holds."""

    @property
    def credit(self) -> int:
        return self.limit - len(self.receiver.deliveries)


class EntityMachine(RuleBasedStateMachine):
    bus: Bus
    models: dict[str, EntityModel]

    def __init__(self) -> None:
        super().__init__()
        self.receivers: list[ModelReceiver] = []
        self.sent = 0
        self.seen_ids: dict[str, int] = {}
        self.scheduled: dict[str, tuple[int, str | None, int | None, int]] = {}
        """Messages scheduled in the topic: due, session, time to live, sequence number."""
        self.numbers: dict[str, set[int]] = {}

    # --- beginning -----------------------------------------------------------------------------------------------

    @initialize(
        topic=st.booleans(),
        sessions=st.booleans(),
        duplicates=st.booleans(),
        lock=st.sampled_from([5_000, 60_000]),
        deliveries=st.integers(1, 3),
        dead_letters=st.booleans(),
        ttl=st.sampled_from([None, None, 30_000]),
        hot=st.sampled_from([None, 0, 120]),
    )
    def begin(
        self,
        topic: bool,
        sessions: bool,
        duplicates: bool,
        lock: int,
        deliveries: int,
        dead_letters: bool,
        ttl: int | None,
        hot: int | None,
    ) -> None:
        self.bus = Bus(read_ahead_bytes=hot)
        self.topic, self.ttl, self.duplicates = topic, ttl, duplicates
        self.path = "t" if topic else "q"
        shared: dict[str, Any] = {
            "lock_duration": lock,
            "max_delivery_count": deliveries,
            "dead_lettering_on_expiration": dead_letters,
        }
        sending: dict[str, Any] = {
            "default_time_to_live": ttl,
            "requires_duplicate_detection": duplicates,
            "duplicate_window": WINDOW,
        }
        if topic:
            self.bus.create(TopicDescription(path="t", **sending))
            self.bus.create(SubscriptionDescription(topic="t", name="a", requires_session=sessions, **shared))
            self.bus.create(SubscriptionDescription(topic="t", name="b", **shared))
            self.models = {
                "t/Subscriptions/a": EntityModel(lock, deliveries, dead_letters, sessions),
                "t/Subscriptions/b": EntityModel(lock, deliveries, dead_letters, False),
            }
        else:
            self.bus.create(QueueDescription(path="q", requires_session=sessions, **shared, **sending))
            self.models = {"q": EntityModel(lock, deliveries, dead_letters, sessions)}

    # --- sending -------------------------------------------------------------------------------------------------

    @rule(
        count=st.integers(1, 4),
        session=st.sampled_from(SESSIONS),
        ttl=st.sampled_from([None, None, 0, 3_000, 45_000]),
        delay=st.sampled_from([None, None, None, -1_000, 7_000, 100_000]),
        message_id=st.sampled_from([None, "one", "two"]),
        by_schedule=st.booleans(),
    )
    def send(
        self,
        count: int,
        session: str,
        ttl: int | None,
        delay: int | None,
        message_id: str | None,
        by_schedule: bool,
    ) -> None:
        due = None if delay is None else self.bus.now + delay
        messages = []
        arriving: list[str | None] = []
        for _ in range(count):
            self.sent += 1
            body = f"m{self.sent}"
            messages.append(envelope(body, message_id=message_id, session=session, ttl=ttl, due=due))
            arriving.append(None if self._is_duplicate(message_id) else body)
        if by_schedule:
            answer = self.bus.schedule(self.path, *messages)
            assert isinstance(answer, list)
            seqs = answer
        else:
            assert self.bus.send(self.path, *messages) is None
            seqs = [0] * count
        effective = self.ttl if ttl is None else ttl if self.ttl is None else min(ttl, self.ttl)
        for fresh, seq in zip(arriving, seqs, strict=True):
            if fresh is not None:
                self._arrive(fresh, session, effective, due, seq)
        self._look()

    def _is_duplicate(self, message_id: str | None) -> bool:
        if message_id is None or not self.duplicates:
            return False
        if self.seen_ids.get(message_id, -EVERYTHING) >= self.bus.now - WINDOW:
            return True
        self.seen_ids[message_id] = self.bus.now
        return False

    def _arrive(self, body: str, session: str, ttl: int | None, due: int | None, seq: int) -> None:
        if self.topic and due is not None and due > self.bus.now:
            self.scheduled[body] = (due, session, ttl, seq)
            return
        for model in self.models.values():
            model.arrive(body, session, ttl, due, self.bus.now)
            if due is not None and due > self.bus.now and seq:
                model.messages[body].seq = seq

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiting = {body: seq for body, (_, _, _, seq) in self.scheduled.items() if seq}
        if not self.topic:
            waiting = {each.body: each.seq for each in self.models["q"].in_state("scheduled") if each.seq}
        if not waiting:
            refusal = self.bus.cancel(self.path, 999_999)
            assert isinstance(refusal, Refusal)
            assert refusal.condition is Condition.MESSAGE_NOT_FOUND
            return
        body = data.draw(st.sampled_from(sorted(waiting)))
        assert self.bus.cancel(self.path, waiting[body]) is None
        if self.topic:
            del self.scheduled[body]
        else:
            self.models["q"].messages[body].state = "gone"
        self._look()

    # --- receiving -----------------------------------------------------------------------------------------------

    @rule(data=st.data(), dead=st.booleans(), peek_lock=st.booleans(), by_id=st.booleans(), credit=st.integers(0, 3))
    def attach(self, data: st.DataObject, dead: bool, peek_lock: bool, by_id: bool, credit: int) -> None:
        path = data.draw(st.sampled_from(sorted(self.models)))
        model = self.models[path]
        attached = ModelReceiver(path, dead, peek_lock, model.sessions and not dead)
        self.receivers.append(attached)
        if not attached.session:
            event = events.ReceiverAttached("reply", attached.receiver, dead, peek_lock)
            assert self.bus.submit(path, event) is None
        else:
            wanted = data.draw(st.sampled_from(SESSIONS)) if by_id else None
            taken = wanted in [holder.session for holder in model.holders.values()]
            deadline = self.bus.now + 10_000
            self.bus.submit(path, events.SessionReceiverAttached(attached.receiver, wanted, deadline, peek_lock))
            assert (attached.receiver.refusal is not None) == taken
        self._look()
        self._grant(attached, credit, drain=False)

    @precondition(lambda self: self.receivers)
    @rule(data=st.data(), credit=st.integers(0, 4), drain=st.booleans())
    def grant(self, data: st.DataObject, credit: int, drain: bool) -> None:
        self._grant(data.draw(st.sampled_from(self.receivers)), credit, drain=drain)

    def _grant(self, attached: ModelReceiver, credit: int, *, drain: bool) -> None:
        if attached.receiver.refusal is not None:
            return
        drained = attached.receiver.drained
        attached.limit = max(attached.limit, len(attached.receiver.deliveries)) + credit
        self.bus.submit(attached.path, events.CreditGranted(attached.receiver, attached.limit, drain))
        self._look()
        if drain and not (attached.session and attached.receiver.session is None):
            assert attached.receiver.drained == drained + 1
            attached.limit = len(attached.receiver.deliveries)
            # The engine counts drained credit as used; a link would, too.
            attached.receiver.deliveries.clear()
            attached.seen = attached.limit = 0
            self._leave(attached)

    @precondition(lambda self: self.receivers)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        self._leave(data.draw(st.sampled_from(self.receivers)))

    def _leave(self, attached: ModelReceiver) -> None:
        self.bus.submit(attached.path, events.ReceiverDetached(attached.receiver))
        self.receivers.remove(attached)
        model = self.models[attached.path]
        if attached in model.holders:
            model.release_session(attached, self.bus.now, failed=False)
        self._look()

    # --- settling ------------------------------------------------------------------------------------------------

    def _held(self) -> list[tuple[str, ModelMessage]]:
        return [(path, each) for path, model in self.models.items() for each in model.messages.values() if each.held]

    @precondition(lambda self: self._held())
    @rule(data=st.data(), outcome=st.sampled_from(sorted(OUTCOMES)))
    def settle(self, data: st.DataObject, outcome: str) -> None:
        path, message = data.draw(st.sampled_from(self._held()))
        assert message.token is not None
        token = message.token
        allowed = self.models[path].settle(message, outcome, self.bus.now)
        [refusal] = self.bus.settle_tokens(path, [token], OUTCOMES[outcome])
        assert (refusal is None) == allowed
        if allowed:
            [again] = self.bus.settle_tokens(path, [token], OUTCOMES[outcome])
            assert again is not None
            assert again.condition is Condition.MESSAGE_LOCK_LOST
        self._look()

    @precondition(lambda self: self._held())
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        path, message = data.draw(st.sampled_from(self._held()))
        model = self.models[path]
        assert message.token is not None
        if model.sessions and message.mortal:
            assert message.session is not None
            until = self.bus.submit(path, events.SessionLockRenewed("reply", message.session))
            for holder in model.holders.values():
                if holder.session == message.session:
                    holder.until = until
        else:
            [until] = self.bus.submit(path, events.LocksRenewed("reply", (message.token,)))
            message.until = until
        assert until == self.bus.now + model.lock_duration

    @rule(data=st.data(), peek_lock=st.booleans())
    def receive_deferred(self, data: st.DataObject, peek_lock: bool) -> None:
        path = data.draw(st.sampled_from(sorted(self.models)))
        model = self.models[path]
        candidates = [each for each in model.in_state("deferred", "dead-deferred") if each.seq is not None]
        if not candidates:
            return
        message = data.draw(st.sampled_from(candidates))
        assert message.seq is not None
        dead = message.state == "dead-deferred"
        session = message.session if model.sessions and not dead else None
        answer = self.bus.deferred(path, message.seq, peek_lock=peek_lock, dead=dead, session=session)
        held = session in [holder.session for holder in model.holders.values()]
        if message.held or (session is not None and not held):
            assert isinstance(answer, Refusal)
            return
        if not dead and message.is_overdue(self.bus.now):
            assert isinstance(answer, Refusal)
            model.expire(message)
            self._look()
            return
        [(row, token, until)] = answer
        assert text_of(row) == message.body
        if peek_lock:
            message.token, message.until = token, until
        else:
            message.state = "gone"
        self._look()

    # --- time and accidents --------------------------------------------------------------------------------------

    @rule(milliseconds=st.sampled_from([1, 1_000, 5_000, 20_000, 61_000, 120_000]))
    def wait(self, milliseconds: int) -> None:
        self.bus.wait(milliseconds, self._look)
        self._look()

    @rule(milliseconds=st.sampled_from([1_000, 10_000, 90_000]), credit=st.integers(1, 2))
    def be_late(self, milliseconds: int, credit: int) -> None:
        """Advance the time, and grant credit before any timer has fired."""
        self.bus.now += milliseconds
        for attached in list(self.receivers):
            self._grant(attached, credit, drain=False)
        self.bus.settle()
        self._look()

    @rule()
    def restart(self) -> None:
        self.bus.restart()
        self.receivers.clear()
        for model in self.models.values():
            model.restart()
        self.bus.settle()
        self._look()

    # --- looking -------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Advance the model to the present time, then compare it with the new effects of every receiver."""
        now = self.bus.now
        for body, (due, session, ttl, _) in list(self.scheduled.items()):
            if due <= now:
                del self.scheduled[body]
                for model in self.models.values():
                    model.arrive(body, session, ttl, None, now)
        for path, model in self.models.items():
            self._lose_sessions(path, model, now)
            model.pass_time(now)
        for attached in list(self.receivers):
            self._take_session(attached, now)
        for attached in list(self.receivers):
            for delivery in attached.receiver.deliveries[attached.seen :]:
                self._check(attached, delivery, now)
            attached.seen = len(attached.receiver.deliveries)
            if attached.receiver.refusal is not None:
                self.receivers.remove(attached)

    def _lose_sessions(self, path: str, model: EntityModel, now: int) -> None:
        for receiver, holder in list(model.holders.items()):
            if holder.until <= now:
                model.release_session(receiver, now, failed=True)
                [attached] = [attached for attached in self.receivers if attached is receiver]
                assert attached.receiver.refusal is not None
                assert attached.receiver.refusal.condition is Condition.SESSION_LOCK_LOST

    def _take_session(self, attached: ModelReceiver, now: int) -> None:
        model = self.models[attached.path]
        session = attached.receiver.session
        if session is None or attached in model.holders or attached.receiver.refusal is not None:
            return
        assert session not in [holder.session for holder in model.holders.values()], "one holder per session"
        assert attached.receiver.locked_until is not None
        model.holders[attached] = SessionHolder(session, attached.receiver.locked_until)

    def _check(self, attached: ModelReceiver, delivery: Delivery, now: int) -> None:
        model = self.models[attached.path]
        message = model.messages[text_of(delivery.row)]
        assert message.state == ("dead" if attached.dead else "active"), "delivered from where it stands"
        assert not message.held, "held by one at a time"
        assert delivery.row.delivery_count == message.deliveries
        if attached.session:
            assert message.session == attached.receiver.session
            if message.deliveries == 0 and message.seq is None:
                assert attached.order == sorted([*attached.order, delivery.row.seq])[:-1]
                attached.order.append(delivery.row.seq)
        assert message.seq in (None, delivery.row.seq), "a number stays with its message"
        message.seq = delivery.row.seq
        if delivery.token is None:
            assert not attached.peek_lock
            message.state = "gone"
        else:
            assert delivery.locked_until is not None
            message.token, message.until = delivery.token, delivery.locked_until

    def _stored(self, path: str) -> list[Row]:
        queue = self.bus.entity(path).counters.queue
        rows: list[Row] = self.bus.store.load(BrowseRows(queue, (0, 1, 2, 3, 4), 0, 10_000, EVERYTHING))
        return rows

    @invariant()
    def the_store_holds_what_the_model_holds(self) -> None:
        for path, model in self.models.items():
            rows = self._stored(path)
            expected = sorted(
                (each.body, LANES[each.state]) for each in model.messages.values() if each.state != "gone"
            )
            assert sorted((text_of(row), row.lane) for row in rows) == expected
            assert len({row.seq for row in rows}) == len(rows)
        if self.topic:
            assert sorted(text_of(row) for row in self._stored("t")) == sorted(self.scheduled)

    @invariant()
    def the_counters_are_those_of_the_rows(self) -> None:
        for path in [*self.models, self.path]:
            rows = self._stored(path)
            counters = self.bus.entity(path).counters
            assert counters.lanes == [sum(row.lane == lane for row in rows) for lane in QueueLane]
            assert counters.size == sum(row.charge for row in rows)
            [stored] = [each.queue for each in self.bus.store.open().entities if each.queue.queue == counters.queue]
            assert stored._replace(accessed=0) == counters.put()._replace(accessed=0)
            assert all(row.seq < stored.next_seq for row in rows)

    @invariant()
    def a_topic_is_charged_for_each_body_once(self) -> None:
        if self.topic:
            shared = {row.body: row.size for path in self.models for row in self._stored(path) if row.body is not None}
            topic = self.bus.entity("t")
            assert isinstance(topic, Topic)
            assert topic.shared_bytes == sum(shared.values())

    @invariant()
    def whoever_has_credit_gets_what_there_is(self) -> None:
        for attached in self.receivers:
            model = self.models[attached.path]
            if attached.credit > 0 and not attached.session:
                assert not model.available("dead" if attached.dead else "active")
            if attached.credit > 0 and attached.receiver.session is not None:
                assert not model.available("active", attached.receiver.session)
            if attached.session and attached.receiver.session is None and attached.receiver.refusal is None:
                held = [holder.session for holder in model.holders.values()]
                assert not [each for each in model.available("active") if each.session not in held]

    @invariant()
    def the_namespace_knows_the_locks_of_the_model_and_no_others(self) -> None:
        for path, model in self.models.items():
            entity = self.bus.entity(path)
            assert not isinstance(entity, Topic), "a topic holds no locks"
            held = {each.token for each in model.messages.values() if each.held}
            assert set(entity.receive_state.locks.by_token) == held


TestEntityMachine = EntityMachine.TestCase
TestEntityMachine.settings = settings(max_examples=budget(75, 150), stateful_step_count=50, deadline=None)
