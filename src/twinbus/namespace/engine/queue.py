"""A queue: takes messages in, keeps scheduled ones until due, and gives them out through its receiving side.

It is a family of its own: its events are decided one after the other.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

from twinbus.amqp import RoutingFields, with_message_id
from twinbus.namespace.engine import receiving
from twinbus.namespace.engine.descriptions import QueueDescription
from twinbus.namespace.engine.duplicate_detection import SeenIds
from twinbus.namespace.engine.effects import (
    AnswerRequest,
    EngineDecision,
    MeteredOperation,
    PendingDecision,
    Refusal,
    not_allowed,
    not_found,
)
from twinbus.namespace.engine.events import (
    CreditGranted,
    Deleted,
    DescriptionChanged,
    EntityTimerFired,
    Event,
    MessagesScheduled,
    MessagesSent,
    MessagesSettled,
    RuleAdded,
    RuleChanged,
    RuleRemoved,
    RulesListed,
    ScheduleCancelled,
)
from twinbus.namespace.engine.lifecycle import EntityCounters, Lifecycle, confirm, refuse_as_gone
from twinbus.namespace.engine.passing import ForwardedMessage, admit, life_of
from twinbus.namespace.engine.receive_state import EngineResources, ReceiveState
from twinbus.namespace.engine.receiving import shelve
from twinbus.namespace.engine.schedule import Schedule, remaining
from twinbus.namespace.engine.send_checks import meter, sift, time_to_live, transfer_refusal
from twinbus.namespace.engine.storage_protocol import MoveRow, PutRow, QueueLane, Row, StoreRead

Asking = Generator[StoreRead, Any, None]


class Queue:
    """One queue at work."""

    __slots__ = ("counters", "description", "lifecycle", "receive_state", "schedule", "seen", "supplies")

    def __init__(
        self,
        description: QueueDescription,
        lifecycle: Lifecycle,
        supplies: EngineResources,
        *,
        next_expiry: int | None = None,
        next_due: int | None = None,
        new: bool,
    ) -> None:
        self.description = description
        self.lifecycle = lifecycle
        self.counters: EntityCounters = lifecycle.counters
        self.supplies = supplies
        self.receive_state = ReceiveState(self.counters, description, supplies, next_expiry)
        self.schedule = Schedule(self.counters, next_due)
        self.seen: SeenIds | None = None
        if description.requires_duplicate_detection:
            self.seen = SeenIds(self.counters.queue, description.duplicate_window, supplies.ids, new=new)
        self._rearm(self.counters.accessed)

    @property
    def path(self) -> str:
        return self.description.path

    @property
    def root(self) -> Queue:
        return self

    @property
    def entities(self) -> list[Queue]:
        return [self]

    @property
    def next_timer(self) -> int | None:
        return None if self.lifecycle.ended else self.receive_state.next_timer

    def advance(self, event: Event, now: int, step: EngineDecision | None = None) -> PendingDecision:
        """Decide about one event; with a step of others, what is decided is added to it."""
        if self.lifecycle.ended:
            return refuse_as_gone(event, self.path)
        step, state = step or EngineDecision(), self.receive_state
        if not isinstance(event, EntityTimerFired):
            self.counters.accessed = now
        match event:
            case MessagesSettled() | CreditGranted():  # the most frequent first; they never ask
                receiving.decide(state, event, now, step)
            case MessagesSent():
                yield from self._sent(event, now, step)
            case MessagesScheduled():
                yield from self._scheduled(event, now, step)
            case ScheduleCancelled():
                yield from self.schedule.cancel(event, self.path, step)
            case EntityTimerFired():
                yield from self._fired(now, step)
            case DescriptionChanged():
                self._changed(event, now, step)
            case Deleted():
                self._delete(now, step)
                confirm(event, step)
            case RuleAdded() | RuleChanged() | RuleRemoved() | RulesListed():
                refusal = not_allowed(f"'{self.path}' is a queue: only subscriptions have rules.")
                step.effects.append(AnswerRequest(event.reply, refusal))
            case _:
                asking = receiving.decide(state, event, now, step)
                if asking is not None:
                    yield from asking
        if state.pending or state.sessions.search:
            yield from receiving.follow_up(state, now, step)
        self.finish(step)
        return step

    def finish(self, step: EngineDecision) -> None:
        if self.counters.changed:
            step.writes.append(self.counters.put())

    # --- arrival -------------------------------------------------------------------------------------------------

    def _sent(self, event: MessagesSent, now: int, step: EngineDecision) -> Asking:
        refusal = transfer_refusal(event.messages, self.description, self.counters.size)
        if refusal is None:
            messages = yield from sift(event.messages, self.seen, now, step)
            self._store(messages, now, step)
            meter(self.path, MeteredOperation.SEND, event.messages, step)
        step.effects.append(AnswerRequest(event.reply, refusal))

    def _scheduled(self, event: MessagesScheduled, now: int, step: EngineDecision) -> Asking:
        refusal = transfer_refusal(event.messages, self.description, self.counters.size)
        if refusal is not None:
            step.effects.append(AnswerRequest(event.reply, refusal))
            return
        messages = yield from sift(event.messages, self.seen, now, step)
        stored = self._store(messages, now, step)
        # A ping or a duplicate is answered like the others: with a number, which nothing has.
        seqs = [seq or self.counters.take_seq() for seq in stored]
        meter(self.path, MeteredOperation.SCHEDULE, event.messages, step)
        step.effects.append(AnswerRequest(event.reply, seqs))

    def _store(self, messages: Iterable[RoutingFields | None], now: int, step: EngineDecision) -> list[int]:
        """The sequence numbers given, 0 for what is not stored."""
        counters, writes = self.counters, step.writes
        queue, default = counters.queue, self.description.default_time_to_live
        wants_session = self.description.requires_session
        seqs: list[int] = []
        fresh: list[Row] = []
        for message in messages:
            if message is None:
                seqs.append(0)
                continue
            raw = message.raw
            if message.message_id is None:
                raw = with_message_id(raw, self.supplies.new_token().hex())
            ttl = time_to_live(message, default, now)
            session = message.group_id if wants_session else None
            due = message.scheduled_enqueue_time
            if due is not None and due > now:
                seqs.append(self.schedule.add(raw, due, ttl, session, now, step))
                continue
            seq = counters.take_seq()
            expires = None if ttl is None else now + ttl
            size = len(raw)
            row = tuple.__new__(Row, (queue, 0, seq, seq, now, expires, None, session, 0, size, None, None, raw))
            writes.append(tuple.__new__(PutRow, (row,)))
            counters.add(0, size)
            fresh.append(row)
            seqs.append(seq)
        shelve(self.receive_state, fresh, now, step)
        self._arm()
        return seqs

    def take_over(
        self, passed: Sequence[ForwardedMessage], now: int, step: EngineDecision
    ) -> Generator[StoreRead, Any, list[Refusal | None]]:
        """Messages that another entity forwards: for each, why it is not taken."""
        if self.lifecycle.ended:
            return [not_found(self.path)] * len(passed)
        counters, wants_session = self.counters, self.description.requires_session
        kept, results = admit(
            passed, counters.size, lambda message, size: transfer_refusal((message,), self.description, size)
        )
        messages = [each.envelope for each in kept]
        sifted = yield from sift(messages, self.seen, now, step)
        counters.accessed = now
        fresh: list[Row] = []
        for each, message in zip(kept, sifted, strict=True):
            if message is None:
                continue
            ttl = life_of(each.ttl, self.description.default_time_to_live)
            row = Row(
                queue=counters.queue,
                lane=QueueLane.ACTIVE,
                seq=counters.take_seq(),
                origin_seq=each.origin_seq,
                enqueued=now,
                expires=None if ttl is None else now + ttl,
                due=None,
                session=message.group_id if wants_session else None,
                delivery_count=0,
                size=len(message.raw),
                overlay=each.overlay,
                body=None,
                raw=message.raw,
            )
            step.writes.append(PutRow(row))
            counters.add(row.lane, row.size)
            fresh.append(row)
        shelve(self.receive_state, fresh, now, step)
        self._arm()
        meter(self.path, MeteredOperation.SEND, messages, step)
        if self.receive_state.pending or self.receive_state.sessions.search:
            yield from receiving.follow_up(self.receive_state, now, step)
        self.finish(step)
        return results

    def _activate(self, due: list[Row], now: int, step: EngineDecision) -> None:
        """A scheduled message enters the queue: under a new number, at this time."""
        fresh: list[Row] = []
        for row in due:
            seq = self.counters.take_seq()
            ttl = remaining(row)
            expires = None if ttl is None else now + ttl
            place = (row.queue, row.lane, row.seq, QueueLane.ACTIVE, seq)
            step.writes.append(MoveRow(*place, now, expires, row.delivery_count, row.overlay))
            self.counters.move(row.lane, QueueLane.ACTIVE)
            fresh.append(row._replace(lane=QueueLane.ACTIVE, seq=seq, enqueued=now, expires=expires, due=None))
        shelve(self.receive_state, fresh, now, step)

    # --- time and administration ---------------------------------------------------------------------------------

    def _fired(self, now: int, step: EngineDecision) -> Asking:
        expired = yield from receiving.read_expired(self.receive_state, now)
        try:
            due = yield from self.schedule.read_due(now)
        except Exception:  # the store could not be read: what was read before must not be forgotten for that
            if not expired:
                raise
            due = []
        receiving.lapse(self.receive_state, expired, now, step)
        self._activate(due, now, step)
        yield from receiving.follow_up(self.receive_state, now, step)
        receiving.time_out(self.receive_state, now, step)
        if self.seen is not None:
            self.seen.purge(now, step.writes)
        if self.lifecycle.is_idle(self.description.auto_delete_on_idle, bool(self.receive_state.consumers), now):
            self._delete(now, step)
        else:
            self._rearm(now)

    def _changed(self, event: DescriptionChanged, now: int, step: EngineDecision) -> None:
        description = event.description
        assert isinstance(description, QueueDescription), "the namespace keeps the kind of an entity"
        self.description = description
        self.lifecycle.updated = now
        if self.seen is not None:
            self.seen.window = description.duplicate_window
        receiving.change_settings(self.receive_state, description, now, step)
        self._rearm(now)
        step.writes.append(self.lifecycle.record(description))
        confirm(event, step)

    def _delete(self, now: int, step: EngineDecision) -> None:
        receiving.close(self.receive_state, now, step)
        if self.seen is not None:
            self.seen.close()
        self.lifecycle.end(self.path)

    def _arm(self) -> None:
        for at in (self.schedule.next_due, self.seen.purge_at if self.seen is not None else None):
            if at is not None:
                self.receive_state.arm(at)

    def _rearm(self, now: int) -> None:
        self.receive_state.next_timer = receiving.next_instant(self.receive_state, now)
        self._arm()
        idle = self.lifecycle.idle_at(self.description.auto_delete_on_idle)
        if idle is not None:
            self.receive_state.arm(idle)
