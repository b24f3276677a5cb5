"""The send side that a queue and a topic share: accepting, scheduling and forwarding messages to the entity.

A message that a client sends goes through these steps:

1. The checks of `send_checks` accept or refuse the message.
2. The message gets a message id if it has none, a time to live, and a sequence number.
3. A message with a future enqueue time goes to the scheduled lane. Every other message is passed to `_store`, which a
   queue and a topic implement differently.

A message that another entity forwards is checked too, and passed to `_store` without being scheduled.
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
    """The rest of the time to live, in ms; None if the message never expires."""
    overlay: bytes
    """The overlay that the message gets in the target. It contains how often the message was forwarded."""


class AcceptedMessage(NamedTuple):
    """A message that passed the checks of the entity, and is about to be stored."""

    origin_seq: int
    ttl: int | None
    session: str | None
    raw: bytes
    overlay: bytes | None = None
    """The overlay of a message that another entity forwarded; None for a message that a client sent."""


class ScheduledLane:
    """The scheduled lane of one queue or topic: messages that wait for their enqueue time."""

    __slots__ = ("_counters", "next_due")

    def __init__(self, counters: EntityCounters, next_due: int | None) -> None:
        self._counters = counters
        self.next_due = next_due

    def add(
        self, raw: bytes, due: int, ttl: int | None, session: str | None, now: int, decision: EngineDecision
    ) -> int:
        """Store a message in the scheduled lane until the instant `due`. Returns the sequence number of the message.

        The time to live starts when the message becomes active. `expires` of the row is computed as if the message
        became active exactly at `due`.
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
        """Drop the scheduled messages that the event names. If one of them is missing, drop none."""
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
        """Read messages whose enqueue time has come, at most 256 and about 1 MiB."""
        if self.next_due is None or self.next_due > now:
            return []
        answer: DueAnswer = yield DueRows(self._counters.queue, now, _PAGE, MIB)
        self.next_due = answer.next_at
        return answer.rows


def ttl_after_schedule(row: Row) -> int | None:
    """Return the time to live of a scheduled message in ms, which starts when the message becomes active."""
    return None if row.expires is None or row.due is None else row.expires - row.due


class SendTarget(NamespaceEntity):
    """The base class of Queue and Topic: accepts messages, schedules them, and detects duplicates."""

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
        """The message ids for duplicate detection; None if the entity does not detect duplicates."""
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
        """Whether the session ids of messages are stored."""
        raise NotImplementedError

    def arm_timer(self, at: int) -> None:
        """Let the timer fire at the instant `at`, if it does not fire before that anyway."""
        raise NotImplementedError

    def _store(
        self, messages: Sequence[AcceptedMessage], now: int, decision: EngineDecision, *, forwarded: bool = False
    ) -> ReadingPart | None:
        """Store accepted messages. Returns None, or a part of the decision that the caller must run to store them.

        If `forwarded`, the `origin_seq` of each message is from another entity, and the message gets a new sequence
        number of this entity. Otherwise `origin_seq` is a sequence number of this entity already.
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
        """Store the messages, those with a future enqueue time in the scheduled lane. Returns the sequence numbers.

        A ping or duplicate is not stored. In its place, the result contains 0, or with `number_all` a new sequence
        number that no stored message has.
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
        self, forwarded: Sequence[ForwardedMessage], now: int, decision: EngineDecision, *, is_return: bool = False
    ) -> Generator[StoreRead, Any, list[Refusal | None]]:
        """Store messages that another entity forwards. Returns for each message None, or why the message is refused.

        A refused message does not affect the others. (A client's transfer is accepted or refused as a whole.) With
        `is_return` the messages come from this entity, or from a subscription of this topic: they are no duplicates.
        """
        if self.lifecycle.ended:
            return [not_found(self.path)] * len(forwarded)
        taken, results = self._check_forwarded(forwarded)
        messages = [each.fields for each in taken]
        seen_ids = None if is_return else self.seen_ids
        kept = yield from without_pings_and_duplicates(messages, seen_ids, now, decision)
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
        """Free the memory of the deleted entity, and remove it from the registry."""
        if self.seen_ids is not None:
            self.seen_ids.close()
        self.lifecycle.end(self.path)
