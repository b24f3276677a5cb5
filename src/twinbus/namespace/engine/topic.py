"""A topic: takes messages in, keeps scheduled ones until due, and hands each to its subscriptions.

With its subscriptions it is one family: their events are decided one after the other, and their timers fire as one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

from twinbus.amqp.delivery_splicing import with_message_id
from twinbus.amqp.routing_fields import Envelope
from twinbus.namespace.engine.arrival import meter, refusal_of, sift, time_to_live
from twinbus.namespace.engine.counters import Counters
from twinbus.namespace.engine.descriptions import TopicDescription
from twinbus.namespace.engine.duplicates import SeenIds
from twinbus.namespace.engine.effects import Answer, Decision, DetachReceiver, ForgetEntity, Operation, Refusal, Step
from twinbus.namespace.engine.events import (
    CreditGranted,
    Deleted,
    DescriptionChanged,
    Event,
    MessagesScheduled,
    MessagesSent,
    ReceiverDetached,
    RuleEvent,
    ScheduleCancelled,
    SessionReceiverAttached,
    TimerFired,
)
from twinbus.namespace.engine.fanout import FanOut, fan_out
from twinbus.namespace.engine.life import Life, confirm, refuse_as_gone
from twinbus.namespace.engine.passing import Passed, admit, life_of
from twinbus.namespace.engine.receiving import ReceivingEvent, follow_up
from twinbus.namespace.engine.refusals import not_allowed, not_found
from twinbus.namespace.engine.rows import DropEntity, DropRow, Need, PutBody, Row
from twinbus.namespace.engine.schedule import Schedule, remaining
from twinbus.namespace.engine.shelf import Supplies
from twinbus.namespace.engine.subscription import Arrival, Published, Subscription

Asking = Generator[Need, Any, None]


class Topic:
    """One topic at work, with its subscriptions."""

    __slots__ = (
        "_due_first",
        "_next_timer",
        "counters",
        "description",
        "life",
        "schedule",
        "seen",
        "shared_bytes",
        "subscriptions",
        "supplies",
    )

    def __init__(
        self,
        description: TopicDescription,
        life: Life,
        supplies: Supplies,
        *,
        next_due: int | None = None,
        shared_bytes: int = 0,
        new: bool,
    ) -> None:
        self.description = description
        self.life = life
        self.counters: Counters = life.counters
        self.shared_bytes = shared_bytes
        """Bodies that several subscriptions hold, each once. The store tells when one has gone."""
        self.supplies = supplies
        self.schedule = Schedule(self.counters, next_due)
        self.subscriptions: dict[str, Subscription] = {}
        self.seen: SeenIds | None = None
        if description.requires_duplicate_detection:
            self.seen = SeenIds(self.counters.queue, description.duplicate_window, supplies.ids, new=new)
        self._next_timer: int | None = None
        self._due_first = False
        self._rearm()

    @property
    def path(self) -> str:
        return self.description.path

    @property
    def family(self) -> Topic:
        return self

    @property
    def entities(self) -> list[Topic | Subscription]:
        return [self, *self.subscriptions.values()]

    @property
    def next_timer(self) -> int | None:
        return None if self.life.ended else self._next_timer

    @property
    def size(self) -> int:
        """What is charged against the quota: what is scheduled, each body once, and what copies take besides."""
        return self.counters.size + self.shared_bytes + sum(each.counters.size for each in self.subscriptions.values())

    def arm(self, at: int) -> None:
        if self._next_timer is None or at < self._next_timer:
            self._next_timer = at

    def adopt(self, subscription: Subscription) -> None:
        self.subscriptions[subscription.description.name.lower()] = subscription
        if subscription.next_timer is not None:
            self.arm(subscription.next_timer)

    def forget(self, subscription: Subscription) -> None:
        self.subscriptions.pop(subscription.description.name.lower(), None)

    def advance(self, event: Event, now: int, step: Step | None = None) -> Decision:
        """Decide about one event; with a step of others, what is decided is added to it."""
        if self.life.ended:
            return refuse_as_gone(event, self.path)
        step = step or Step()
        if not isinstance(event, TimerFired):
            self.counters.accessed = now
        match event:
            case MessagesSent():
                yield from self._sent(event, now, step)
            case MessagesScheduled():
                yield from self._scheduled(event, now, step)
            case ScheduleCancelled():
                yield from self.schedule.cancel(event, self.path, step)
            case TimerFired():
                yield from self._fired(now, step)
            case DescriptionChanged():
                self._changed(event, now, step)
            case Deleted():
                self._delete(now, step)
                confirm(event, step)
            case _:
                self._refuse(event, step)
        self.finish(step)
        return step

    def finish(self, step: Step) -> None:
        if self.counters.changed:
            step.writes.append(self.counters.put())

    def _refuse(self, event: ReceivingEvent | RuleEvent, step: Step) -> None:
        refusal = not_allowed(f"'{self.path}' is a topic: its subscriptions have receivers and rules.")
        match event:
            case SessionReceiverAttached():
                step.effects.append(DetachReceiver(event.receiver, refusal))
            case CreditGranted() | ReceiverDetached():
                pass  # of a receiver that was never attached
            case _:
                step.effects.append(Answer(event.reply, refusal))

    # --- arrival -------------------------------------------------------------------------------------------------

    def _sent(self, event: MessagesSent, now: int, step: Step) -> Asking:
        refusal = refusal_of(event.messages, self.description, self.size)
        if refusal is None:
            messages = yield from sift(event.messages, self.seen, now, step)
            yield from self._publish(self._store(messages, now, step)[1], now, step)
            meter(self.path, Operation.SEND, event.messages, step)
        step.effects.append(Answer(event.reply, refusal))

    def _scheduled(self, event: MessagesScheduled, now: int, step: Step) -> Asking:
        refusal = refusal_of(event.messages, self.description, self.size)
        if refusal is not None:
            step.effects.append(Answer(event.reply, refusal))
            return
        messages = yield from sift(event.messages, self.seen, now, step)
        stored, published = self._store(messages, now, step)
        # A ping or a duplicate is answered like the others: with a number, which nothing has.
        seqs = [seq or self.counters.take_seq() for seq in stored]
        yield from self._publish(published, now, step)
        meter(self.path, Operation.SCHEDULE, event.messages, step)
        step.effects.append(Answer(event.reply, seqs))

    def _store(self, messages: Iterable[Envelope | None], now: int, step: Step) -> tuple[list[int], list[Published]]:
        """Schedule what is to wait. The numbers given, 0 for what is not stored; and what is to be published now."""
        seqs: list[int] = []
        published: list[Published] = []
        for message in messages:
            if message is None:
                seqs.append(0)
                continue
            raw = message.raw
            if message.message_id is None:
                raw = with_message_id(raw, self.supplies.new_token().hex())
            ttl = time_to_live(message, self.description.default_time_to_live, now)
            due = message.scheduled_enqueue_time
            if due is not None and due > now:
                seqs.append(self.schedule.add(raw, due, ttl, message.group_id, now, step))
            else:
                seqs.append(self.counters.take_seq())
                published.append(Published(seqs[-1], ttl, message.group_id, raw))
        self._arm()
        return seqs, published

    def take_over(self, passed: Sequence[Passed], now: int, step: Step) -> Generator[Need, Any, list[Refusal | None]]:
        """Messages that another entity forwards: for each, why it is not taken."""
        if self.life.ended:
            return [not_found(self.path)] * len(passed)
        kept, results = admit(passed, self.size, lambda message, size: refusal_of((message,), self.description, size))
        messages = [each.envelope for each in kept]
        sifted = yield from sift(messages, self.seen, now, step)
        self.counters.accessed = now
        default = self.description.default_time_to_live
        published = [
            Published(each.origin_seq, life_of(each.ttl, default), message.group_id, message.raw, each.overlay)
            for each, message in zip(kept, sifted, strict=True)
            if message is not None
        ]
        yield from self._publish(published, now, step)
        meter(self.path, Operation.SEND, messages, step)
        self.finish(step)
        return results

    def _publish(self, messages: Iterable[Published], now: int, step: Step) -> Asking:
        """Each message to every subscription whose rules take it; where several do, its body is stored once."""
        takers = [each for each in self.subscriptions.values() if each.description.status.takes_sends]
        arrivals: dict[Subscription, list[Arrival]] = {taker: [] for taker in takers}
        chosen = not all(taker.rules.takes_everything for taker in takers)
        for message in messages:
            to = fan_out(message, takers, now, self.supplies.new_token) if chosen else FanOut(takers, [], [])
            body = None
            if len(to.as_it_is) + len(to.dead) > 1:
                body = self.supplies.take_body()
                step.writes.append(PutBody(body, message.raw, self.counters.queue))
                self.shared_bytes += len(message.raw)
            as_it_is = Arrival(message, body)
            for subscription in to.as_it_is:
                arrivals[subscription].append(as_it_is)
            for subscription, copy in to.copies:
                arrivals[subscription].append(Arrival(copy, None))
            for subscription, why in to.dead:
                arrivals[subscription].append(Arrival(message, body, why))
        for subscription, taken in arrivals.items():
            if taken:
                subscription.take(taken, now, step)
            shelf = subscription.shelf
            if shelf.pending or shelf.sessions.search:
                yield from follow_up(shelf, now, step)
            subscription.finish(step)

    # --- time and administration ---------------------------------------------------------------------------------

    def _fired(self, now: int, step: Step) -> Asking:
        # What is due and what time brings to subscriptions take turns, each in a firing of its own: a queue's counters
        # are written once in a step, and a read that fails must not take with it what is decided.
        self._due_first = not self._due_first
        next_due = self.schedule.next_due
        if not self._due_first or next_due is None or next_due > now:
            yield from self._fire_subscriptions(now, step)
        if not (step.writes or step.effects):
            due = yield from self.schedule.read_due(now)
            yield from self._publish([self._activate(row, step) for row in due], now, step)
        if self.seen is not None:
            self.seen.purge(now, step.writes)
        in_use = any(subscription.shelf.consumers for subscription in self.subscriptions.values())
        if self.life.is_idle(self.description.auto_delete_on_idle, in_use, now):
            self._delete(now, step)
        else:
            self._rearm()

    def _fire_subscriptions(self, now: int, step: Step) -> Asking:
        for subscription in list(self.subscriptions.values()):
            at = subscription.next_timer
            if at is not None and at <= now:
                try:
                    own = yield from subscription.advance(TimerFired(), now)
                except Exception:  # the store could not be read
                    if not (step.writes or step.effects):
                        raise
                    return  # what the others decided is carried out; the next firing fails by itself
                step.writes += own.writes
                step.effects += own.effects

    def _activate(self, row: Row, step: Step) -> Published:
        step.writes.append(DropRow(row.queue, row.lane, row.seq))
        self.counters.drop(row.lane, row.size)
        return Published(row.origin_seq, remaining(row), row.session, row.raw)

    def _changed(self, event: DescriptionChanged, now: int, step: Step) -> None:
        description = event.description
        assert isinstance(description, TopicDescription), "the namespace keeps the kind of an entity"
        self.description = description
        self.life.updated = now
        if self.seen is not None:
            self.seen.window = description.duplicate_window
        self._rearm()
        step.writes.append(self.life.record(description))
        confirm(event, step)

    def _delete(self, now: int, step: Step) -> None:
        """With all its subscriptions."""
        step.writes.clear()
        for subscription in list(self.subscriptions.values()):
            own = Step()
            subscription.delete(now, own)
            step.writes += own.writes
            step.effects += own.effects
        step.writes.append(DropEntity(self.counters.queue))
        step.effects.append(ForgetEntity(self.path))
        if self.seen is not None:
            self.seen.close()
        self.life.end(self.path)

    def _arm(self) -> None:
        for at in (self.schedule.next_due, self.seen.purge_at if self.seen is not None else None):
            if at is not None:
                self.arm(at)

    def _rearm(self) -> None:
        self._next_timer = self.life.idle_at(self.description.auto_delete_on_idle)
        self._arm()
        for subscription in self.subscriptions.values():
            if subscription.next_timer is not None:
                self.arm(subscription.next_timer)
