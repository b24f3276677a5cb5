"""A queue: a send target (`SendTarget`) that stores accepted messages in its own active lane, and a receive side."""

from __future__ import annotations

from collections.abc import Sequence

from twinbus.namespace.engine import receiving
from twinbus.namespace.engine.descriptions import QueueDescription
from twinbus.namespace.engine.effects import AnswerRequest, EngineDecision, PendingDecision, ReadingPart, not_allowed
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
from twinbus.namespace.engine.lifecycle import Lifecycle, confirm, refuse_as_deleted
from twinbus.namespace.engine.receive_state import EngineResources, ReceiveState
from twinbus.namespace.engine.send_target import AcceptedMessage, SendTarget, ttl_after_schedule
from twinbus.namespace.engine.storage_protocol import MoveRow, PutRow, QueueLane, Row


class Queue(SendTarget):
    """One queue. A queue is a root entity: its events are decided one after the other."""

    __slots__ = ("receive_state",)

    description: QueueDescription

    def __init__(
        self,
        description: QueueDescription,
        lifecycle: Lifecycle,
        resources: EngineResources,
        *,
        next_expiry: int | None = None,
        next_due: int | None = None,
        new: bool,
    ) -> None:
        super().__init__(description, lifecycle, resources, next_due=next_due, new=new)
        self.receive_state = ReceiveState(self.counters, description, resources, next_expiry)
        self._rearm(self.counters.accessed)

    @property
    def root(self) -> Queue:
        return self

    @property
    def entities(self) -> list[Queue]:
        return [self]

    @property
    def next_timer(self) -> int | None:
        return None if self.lifecycle.ended else self.receive_state.next_timer

    @property
    def size(self) -> int:
        return self.counters.size

    @property
    def keeps_sessions(self) -> bool:
        return self.description.requires_session

    def arm_timer(self, at: int) -> None:
        self.receive_state.arm_timer(at)

    def advance(self, event: Event, now: int, decision: EngineDecision | None = None) -> PendingDecision:
        if self.lifecycle.ended:
            return refuse_as_deleted(event, self.path)
        decision = decision or EngineDecision()
        if not isinstance(event, EntityTimerFired):
            self.counters.accessed = now
        match event:
            case MessagesSettled() | CreditGranted():  # the most frequent events first: these two never read rows
                receiving.decide(self.receive_state, event, now, decision)
            case MessagesSent():
                yield from self._send(event, now, decision)
            case MessagesScheduled():
                yield from self._schedule(event, now, decision)
            case ScheduleCancelled():
                yield from self.scheduled.cancel(event, self.path, decision)
            case EntityTimerFired():
                yield from self._fire_timer(now, decision)
            case DescriptionChanged():
                self._update(event, now, decision)
            case Deleted():
                self._delete(now, decision)
                confirm(event, decision)
            case RuleAdded() | RuleChanged() | RuleRemoved() | RulesListed():
                refusal = not_allowed(f"'{self.path}' is a queue: only subscriptions have rules.")
                decision.effects.append(AnswerRequest(event.reply, refusal))
            case _:
                reading = receiving.decide(self.receive_state, event, now, decision)
                if reading is not None:
                    yield from reading
        yield from self.conclude(now, decision)
        return decision

    def conclude(self, now: int, decision: EngineDecision) -> ReadingPart:
        if self.receive_state.has_work:
            yield from receiving.follow_up(self.receive_state, now, decision)
        self._write_counters(decision)

    def _store(
        self, messages: Sequence[AcceptedMessage], now: int, decision: EngineDecision, *, forwarded: bool = False
    ) -> None:
        counters = self.counters
        rows: list[Row] = []
        for message in messages:
            row = Row.new(
                queue=counters.queue,
                lane=QueueLane.ACTIVE,
                seq=counters.take_seq() if forwarded else message.origin_seq,
                origin_seq=message.origin_seq,
                enqueued=now,
                expires=None if message.ttl is None else now + message.ttl,
                session=message.session,
                overlay=message.overlay,
                raw=message.raw,
            )
            decision.writes.append(PutRow(row))
            counters.add(row.lane, row.size)
            rows.append(row)
        receiving.enqueue(self.receive_state, rows, now, decision)

    # --- time and administration --------------------------------------------------------------------------------

    def _fire_timer(self, now: int, decision: EngineDecision) -> ReadingPart:
        state = self.receive_state
        expired = yield from receiving.read_expired(state, now)
        try:
            due = yield from self.scheduled.read_due(now)
        except Exception:  # the expired rows were read already, and must not be lost with the failed read
            if not expired:
                raise
            due = []
        receiving.expire(state, expired, now, decision)
        self._activate(due, now, decision)
        yield from receiving.finish_timer(state, now, decision)
        self._purge_seen_ids(now, decision)
        if self._is_idle(bool(state.receivers), now):
            self._delete(now, decision)
        else:
            self._rearm(now)

    def _activate(self, due: list[Row], now: int, decision: EngineDecision) -> None:
        """Move scheduled messages into the queue, under new sequence numbers."""
        rows: list[Row] = []
        for row in due:
            seq, ttl = self.counters.take_seq(), ttl_after_schedule(row)
            expires = None if ttl is None else now + ttl
            decision.writes.append(
                MoveRow(
                    queue=row.queue,
                    lane=row.lane,
                    seq=row.seq,
                    to_lane=QueueLane.ACTIVE,
                    to_seq=seq,
                    enqueued=now,
                    expires=expires,
                    delivery_count=row.delivery_count,
                    overlay=row.overlay,
                )
            )
            self.counters.move(row.lane, QueueLane.ACTIVE)
            rows.append(row._replace(lane=QueueLane.ACTIVE, seq=seq, enqueued=now, expires=expires, due=None))
        receiving.enqueue(self.receive_state, rows, now, decision)

    def _update(self, event: DescriptionChanged, now: int, decision: EngineDecision) -> None:
        description = event.description
        assert isinstance(description, QueueDescription), "the registry checks the kind of the entity"
        self._change_description(description)
        receiving.change_settings(self.receive_state, description, now, decision)
        self._rearm(now)
        self._write_record(event, now, decision)

    def _delete(self, now: int, decision: EngineDecision) -> None:
        receiving.close(self.receive_state, now, decision)
        self._end()

    def _rearm(self, now: int) -> None:
        receiving.rearm(self.receive_state, self._idle_at(), now)
        self._arm_send_timers()
