"""The send side that a queue and a topic share: accepting, scheduling and forwarding messages to the entity.

A message takes this way: the checks of `send_checks`; then it gets a message id if it has none, a time to live, and a
sequence number; a message with a future enqueue time goes to the scheduled lane; all others are passed to `_store`,
which a queue and a topic implement differently. Messages that another entity forwards take the same way without being
scheduled.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any, Final, NamedTuple

from twinbus.amqp import RoutingFields, with_message_id
from twinbus.namespace.engine.descriptions import QueueDescription, TopicDescription
from twinbus.namespace.engine.duplicate_detection import SeenIds
from twinbus.namespace.engine.effects import (
    AnswerRequest,
    EngineDecision,
    Meter,
    MeteredOperation,
    ReadingPart,
    Refusal,
    messages_not_found,
    not_found,
)
from twinbus.namespace.engine.events import MessagesScheduled, MessagesSent, ScheduleCancelled
from twinbus.namespace.engine.lifecycle import EntityCounters, Lifecycle, NamespaceEntity
from twinbus.namespace.engine.limits import MIB
from twinbus.namespace.engine.receive_state import EngineResources
from twinbus.namespace.engine.send_checks import (
    meter_sent,
    shorter_ttl,
    time_to_live,
    transfer_refusal,
    without_pings_and_duplicates,
)
from twinbus.namespace.engine.storage_protocol import (
    DropRow,
    DueAnswer,
    DueRows,
    PutRow,
    QueueLane,
    Row,
    RowsBySeq,
    StoreRead,
    distinct,
)

_PAGE: Final = 256


class ForwardedMessage(NamedTuple):
    """A message that another entity forwards."""

    fields: RoutingFields
    origin_seq: int
    ttl: int | None
    """What is left of the time to live, in ms."""
    overlay: bytes
    """Counts how often the message was forwarded."""


class AcceptedMessage(NamedTuple):
    """A message that the entity accepted and stores now."""

    origin_seq: int
    ttl: int | None
    session: str | None
    raw: bytes
    overlay: bytes | None = None
    """Of a message that was forwarded to the entity."""


class ScheduledLane:
    """The scheduled lane of one queue or topic: messages that wait for their enqueue time."""

    __slots__ = ("_counters", "next_due")

    def __init__(self, counters: EntityCounters, next_due: int | None) -> None:
        self._counters = counters
        self.next_due = next_due

    def add(
        self, raw: bytes, due: int, ttl: int | None, session: str | None, now: int, decision: EngineDecision
    ) -> int:
        """Store a message until `due`. Returns its sequence number.

        The time to live starts when the message becomes active; the row's `expires` assumes that this is at `due`.
        """
        seq = self._counters.take_seq()
        row = Row.new(
            queue=self._counters.queue,
            lane=QueueLane.SCHEDULED,
            seq=seq,
            origin_seq=seq,
            enqueued=now,
            expires=None if ttl is None else due + ttl,
            due=due,
            session=session,
            raw=raw,
        )
        decision.writes.append(PutRow(row))
        self._counters.add(QueueLane.SCHEDULED, row.size)
        if self.next_due is None or due < self.next_due:
            self.next_due = due
        return seq

    def cancel(self, event: ScheduleCancelled, path: str, decision: EngineDecision) -> ReadingPart:
        """Drop all messages of the event, or none of them if one is missing."""
        seqs = distinct(event.seqs)
        queue = self._counters.queue
        rows: list[Row] = yield RowsBySeq(queue, (QueueLane.SCHEDULED,), seqs, with_raw=False)
        if len(rows) < len(seqs):
            found = {row.seq for row in rows}
            missing = [seq for seq in seqs if seq not in found]
            decision.effects.append(AnswerRequest(event.reply, messages_not_found("scheduled", missing)))
            return
        for row in rows:
            decision.writes.append(DropRow(queue, QueueLane.SCHEDULED, row.seq))
            self._counters.drop(QueueLane.SCHEDULED, row.size)
        decision.effects += (
            AnswerRequest(event.reply, None),
            Meter(path, MeteredOperation.CANCEL_SCHEDULED, len(rows)),
        )

    def read_due(self, now: int) -> Generator[StoreRead, Any, list[Row]]:
        """Read messages whose enqueue time has come, at most one page."""
        if self.next_due is None or self.next_due > now:
            return []
        answer: DueAnswer = yield DueRows(self._counters.queue, now, _PAGE, MIB)
        self.next_due = answer.next_at
        return answer.rows


def ttl_after_schedule(row: Row) -> int | None:
    """Return the time to live of a scheduled message, which starts when it becomes active."""
    return None if row.expires is None or row.due is None else row.expires - row.due


class SendTarget(NamespaceEntity):
    """The common part of Queue and Topic."""

    __slots__ = ("resources", "scheduled", "seen_ids")

    description: QueueDescription | TopicDescription

    def __init__(
        self,
        description: QueueDescription | TopicDescription,
        lifecycle: Lifecycle,
        resources: EngineResources,
        *,
        next_due: int | None,
        new: bool,
    ) -> None:
        super().__init__(description, lifecycle)
        self.resources = resources
        self.scheduled = ScheduledLane(self.counters, next_due)
        self.seen_ids: SeenIds | None = None
        """None without duplicate detection."""
        if description.requires_duplicate_detection:
            window, budget = description.duplicate_window, resources.seen_id_budget
            self.seen_ids = SeenIds(self.counters.queue, window, budget, new=new)

    # --- what a queue and a topic do differently ----------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes charged against the quota."""
        raise NotImplementedError

    @property
    def keeps_sessions(self) -> bool:
        """Whether the session ids of messages matter."""
        raise NotImplementedError

    def arm_timer(self, at: int) -> None:
        """Move the next timer forward to `at`, unless it fires earlier."""
        raise NotImplementedError

    def _store(
        self, messages: Sequence[AcceptedMessage], now: int, decision: EngineDecision, *, forwarded: bool = False
    ) -> ReadingPart | None:
        """Store accepted messages. Returns None if that is done, or the part of the decision that must read rows.

        A forwarded message keeps its `origin_seq`, and has no sequence number of this entity yet.
        """
        raise NotImplementedError

    # --- sending ------------------------------------------------------------------------------------------------

    def _send(self, event: MessagesSent, now: int, decision: EngineDecision) -> ReadingPart:
        refusal = transfer_refusal(event.messages, self.description, self.size)
        if refusal is None:
            yield from self._accept(event.messages, now, decision)
            meter_sent(self.path, MeteredOperation.SEND, event.messages, decision)
        decision.effects.append(AnswerRequest(event.reply, refusal))

    def _schedule(self, event: MessagesScheduled, now: int, decision: EngineDecision) -> ReadingPart:
        refusal = transfer_refusal(event.messages, self.description, self.size)
        if refusal is not None:
            decision.effects.append(AnswerRequest(event.reply, refusal))
            return
        seqs = yield from self._accept(event.messages, now, decision, number_all=True)
        meter_sent(self.path, MeteredOperation.SCHEDULE, event.messages, decision)
        decision.effects.append(AnswerRequest(event.reply, seqs))

    def _accept(
        self, messages: Sequence[RoutingFields], now: int, decision: EngineDecision, *, number_all: bool = False
    ) -> Generator[StoreRead, Any, list[int]]:
        """Store the messages, now or in the scheduled lane. Returns their sequence numbers.

        A ping or duplicate is not stored. Its number is 0, or with `number_all` a number that no message has.
        """
        kept = yield from without_pings_and_duplicates(messages, self.seen_ids, now, decision)
        seqs: list[int] = []
        accepted: list[AcceptedMessage] = []
        default_ttl, keeps_sessions = self.description.default_time_to_live, self.keeps_sessions
        for message in kept:
            if message is None:
                seqs.append(0)
                continue
            raw = message.raw
            if message.message_id is None:
                raw = with_message_id(raw, self.resources.new_token().hex())
            ttl = time_to_live(message, default_ttl, now)
            session = message.group_id if keeps_sessions else None
            due = message.scheduled_enqueue_time
            if due is not None and due > now:
                seqs.append(self.scheduled.add(raw, due, ttl, session, now, decision))
            else:
                seq = self.counters.take_seq()
                seqs.append(seq)
                accepted.append(AcceptedMessage(seq, ttl, session, raw))
        if number_all:
            seqs = [seq or self.counters.take_seq() for seq in seqs]
        self._arm_send_timers()
        storing = self._store(accepted, now, decision)
        if storing is not None:
            yield from storing
        return seqs

    def accept_forwarded(
        self, forwarded: Sequence[ForwardedMessage], now: int, decision: EngineDecision
    ) -> Generator[StoreRead, Any, list[Refusal | None]]:
        """Store messages that another entity forwards. Returns for each why it is refused, or None.

        Unlike the messages of a transfer, each is accepted or refused by itself.
        """
        if self.lifecycle.ended:
            return [not_found(self.path)] * len(forwarded)
        taken, results = self._check_forwarded(forwarded)
        messages = [each.fields for each in taken]
        kept = yield from without_pings_and_duplicates(messages, self.seen_ids, now, decision)
        self.counters.accessed = now
        default_ttl, keeps_sessions = self.description.default_time_to_live, self.keeps_sessions
        accepted = [
            AcceptedMessage(
                each.origin_seq,
                shorter_ttl(each.ttl, default_ttl),
                message.group_id if keeps_sessions else None,
                message.raw,
                each.overlay,
            )
            for each, message in zip(taken, kept, strict=True)
            if message is not None
        ]
        self._arm_send_timers()
        storing = self._store(accepted, now, decision, forwarded=True)
        if storing is not None:
            yield from storing
        meter_sent(self.path, MeteredOperation.SEND, messages, decision)
        yield from self.conclude(now, decision)
        return results

    def _check_forwarded(
        self, forwarded: Iterable[ForwardedMessage]
    ) -> tuple[list[ForwardedMessage], list[Refusal | None]]:
        size = self.size
        taken: list[ForwardedMessage] = []
        results: list[Refusal | None] = []
        for each in forwarded:
            refusal = transfer_refusal((each.fields,), self.description, size)
            results.append(refusal)
            if refusal is None:
                taken.append(each)
                size += len(each.fields.raw)
        return taken, results

    # --- time and administration --------------------------------------------------------------------------------

    def _arm_send_timers(self) -> None:
        for at in (self.scheduled.next_due, None if self.seen_ids is None else self.seen_ids.purge_at):
            if at is not None:
                self.arm_timer(at)

    def _purge_seen_ids(self, now: int, decision: EngineDecision) -> None:
        if self.seen_ids is not None:
            self.seen_ids.purge(now, decision.writes)

    def _change_description(self, description: QueueDescription | TopicDescription) -> None:
        self.description = description
        if self.seen_ids is not None:
            self.seen_ids.window = description.duplicate_window

    def _end(self) -> None:
        """End the life of the entity: it was deleted."""
        if self.seen_ids is not None:
            self.seen_ids.close()
        self.lifecycle.end(self.path)
