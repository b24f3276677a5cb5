"""A topic: takes messages in, keeps scheduled ones until due, and hands each to its subscriptions.

With its subscriptions it is one family: their events are decided one after the other, and their timers fire as one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from twinbus.amqp import RoutingFields, with_message_id
from twinbus.namespace.engine import receiving, validation
from twinbus.namespace.engine.descriptions import SubscriptionDescription, TopicDescription
from twinbus.namespace.engine.duplicate_detection import SeenIds
from twinbus.namespace.engine.effects import (
    AnswerRequest,
    DetachReceiver,
    EngineDecision,
    ForgetEntity,
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
    ReceiverDetached,
    RuleAdded,
    RuleChanged,
    RuleEvent,
    RuleRemoved,
    RulesListed,
    ScheduleCancelled,
    SessionReceiverAttached,
)
from twinbus.namespace.engine.lifecycle import EntityCounters, Lifecycle, confirm, refuse_as_gone
from twinbus.namespace.engine.passing import ForwardedMessage, admit, life_of
from twinbus.namespace.engine.receive_state import EngineResources, ReceiveState
from twinbus.namespace.engine.receiving import ReceivingEvent, follow_up, shelve
from twinbus.namespace.engine.rules.message_view import MessageView
from twinbus.namespace.engine.rules.ruleset import RuleSet
from twinbus.namespace.engine.schedule import Schedule, remaining
from twinbus.namespace.engine.send_checks import meter, sift, time_to_live, transfer_refusal
from twinbus.namespace.engine.settlement import dead_letter_properties, merged, overlay_properties
from twinbus.namespace.engine.storage_protocol import (
    COPY_BYTES,
    DropEntity,
    DropRow,
    PutBody,
    PutRow,
    QueueLane,
    Row,
    StoreRead,
)

Asking = Generator[StoreRead, Any, None]


_NO_SESSION: Final = merged(
    None,
    dead_letter_properties(
        "Session ID is null", "Session enabled entity doesn't allow a message whose session identifier is null."
    ),
)


class AcceptedMessage(NamedTuple):
    """A message that its topic accepted."""

    origin_seq: int
    ttl: int | None
    session: str | None
    raw: bytes
    overlay: bytes | None = None
    """Of a message that was forwarded to the topic."""


class SubscriptionCopy(NamedTuple):
    """A message that a subscription takes; with `why` it goes to its dead-letter queue, and this tells the reason."""

    message: AcceptedMessage
    body: int | None
    """The id of its body where several share it."""
    why: bytes | None = None


_REASON: Final = "FilterException"
"""What the documentation calls the error of a filter that cannot be evaluated."""


class FanOut(NamedTuple):
    """Who takes the message as it is, who takes changed copies, and whose rules could not be evaluated."""

    as_it_is: list[Subscription]
    copies: list[tuple[Subscription, AcceptedMessage]]
    dead: list[tuple[Subscription, bytes | None]]
    """With the properties that tell why, for those who dead-letter what their rules fail on."""


def fan_out(
    message: AcceptedMessage, takers: Sequence[Subscription], now: int, new_token: Callable[[], bytes]
) -> FanOut:
    found = FanOut([], [], [])
    view = MessageView(message.raw, now=now, seq=message.origin_seq, ttl=message.ttl, new_token=new_token)
    for taker in takers:
        if taker.rules.takes_everything:
            found.as_it_is.append(taker)
            continue
        selection = taker.rules.select(view)
        if selection.as_it_is:
            found.as_it_is.append(taker)
        for copy in selection.copies:
            changed = message._replace(ttl=copy.ttl, session=copy.session, raw=copy.raw)
            found.copies.append((taker, changed))
        if selection.fault is not None and taker.description.dead_lettering_on_filter_errors:
            found.dead.append((taker, merged(None, dead_letter_properties(_REASON, selection.fault))))
    return found


class Subscription:
    """One subscription at work."""

    __slots__ = ("_rules", "counters", "description", "lifecycle", "receive_state", "topic")

    def __init__(
        self,
        description: SubscriptionDescription,
        topic: Topic,
        lifecycle: Lifecycle,
        supplies: EngineResources,
        *,
        next_expiry: int | None = None,
    ) -> None:
        self.description = description
        self.topic = topic
        self.lifecycle = lifecycle
        self._rules: RuleSet | None = None
        self.counters: EntityCounters = lifecycle.counters
        self.receive_state = ReceiveState(self.counters, description, supplies, next_expiry)
        self._rearm(self.counters.accessed)

    @property
    def path(self) -> str:
        return self.description.path

    @property
    def rules(self) -> RuleSet:
        """Compiled with the first message: a namespace with many rules opens as quickly as any."""
        if self._rules is None:
            self._rules = RuleSet(self.description.rules)
        return self._rules

    @property
    def root(self) -> Topic:
        return self.topic

    @property
    def next_timer(self) -> int | None:
        return None if self.lifecycle.ended else self.receive_state.next_timer

    def advance(self, event: Event, now: int, step: EngineDecision | None = None) -> PendingDecision:
        """Decide about one event; with a step of others, what is decided is added to it."""
        if self.lifecycle.ended:
            return refuse_as_gone(event, self.path)
        step, state = step or EngineDecision(), self.receive_state
        if not isinstance(event, EntityTimerFired):
            self.counters.accessed = self.topic.counters.accessed = now
        match event:
            case MessagesSent() | MessagesScheduled() | ScheduleCancelled():
                refusal = not_allowed(f"'{self.path}' is a subscription: messages are sent to its topic.")
                step.effects.append(AnswerRequest(event.reply, refusal))
            case EntityTimerFired():
                expired = yield from receiving.read_expired(state, now)
                receiving.lapse(state, expired, now, step)
                yield from receiving.follow_up(state, now, step)
                receiving.time_out(state, now, step)
                if self.lifecycle.is_idle(self.description.auto_delete_on_idle, bool(state.consumers), now):
                    self.delete(now, step)
                else:
                    self._rearm(now)
            case DescriptionChanged():
                self._changed(event, now, step)
            case RuleAdded() | RuleChanged() | RuleRemoved():
                self._rules_changed(event, now, step)
            case RulesListed():
                page = self.description.rules[event.skip : event.skip + event.top]
                step.effects.append(AnswerRequest(event.reply, list(page)))
            case Deleted():
                self.delete(now, step)
                confirm(event, step)
            case _:
                asking = receiving.decide(state, event, now, step)
                if asking is not None:
                    yield from asking
        if state.pending or state.sessions.search:
            yield from receiving.follow_up(state, now, step)
        self.finish(step)
        return step

    def finish(self, step: EngineDecision) -> None:
        """Write what changed, and let the topic know when to look again."""
        if self.counters.changed:
            step.writes.append(self.counters.put())
        if self.receive_state.next_timer is not None and not self.lifecycle.ended:
            self.topic.arm(self.receive_state.next_timer)

    def take(self, arrivals: Iterable[SubscriptionCopy], now: int, step: EngineDecision) -> None:
        """Messages of the topic enter the subscription, each under a number of its own."""
        counters, writes, dead = self.counters, step.writes, self.receive_state.dead
        queue, default = counters.queue, self.description.default_time_to_live
        wants_session = self.description.requires_session
        fresh: list[Row] = []
        for (origin_seq, ttl, session, raw, passed), body, why in arrivals:
            shortest = ttl if default is None else default if ttl is None else min(ttl, default)
            fault = _NO_SESSION if why is None and wants_session and not session else why
            lane, expires = (
                (0, None if shortest is None else now + shortest) if fault is None else (QueueLane.DEAD, None)
            )
            # With how often it was forwarded: a circle of dead letters has to end too.
            overlay = passed if fault is None else merged(passed, overlay_properties(fault))
            kept = session if wants_session else None
            seq, size = counters.take_seq(), len(raw)
            key = (queue, lane, seq, origin_seq)
            row = tuple.__new__(Row, (*key, now, expires, None, kept, 0, size, overlay, body, raw))
            writes.append(tuple.__new__(PutRow, (row,)))
            counters.add(lane, size if body is None else COPY_BYTES)
            if fault is None:
                fresh.append(row)
            else:
                dead.window.append(row)
                self.receive_state.wake(dead)
        shelve(self.receive_state, fresh, now, step)

    def _changed(self, event: DescriptionChanged, now: int, step: EngineDecision) -> None:
        description = event.description
        assert isinstance(description, SubscriptionDescription), "the namespace keeps the kind of an entity"
        self.description = description = replace(description, rules=self.description.rules)
        self.lifecycle.updated = now
        receiving.change_settings(self.receive_state, description, now, step)
        self._rearm(now)
        step.writes.append(self.lifecycle.record(description))
        confirm(event, step)

    def _rules_changed(self, event: RuleAdded | RuleChanged | RuleRemoved, now: int, step: EngineDecision) -> None:
        rules = validation.changed(self.description.rules, event, self.path, now)
        if isinstance(rules, Refusal):
            step.effects.append(AnswerRequest(event.reply, rules))
            return
        self._rules = RuleSet(rules, self._rules)
        self.description = replace(self.description, rules=rules)
        self.receive_state.settings = self.description
        step.writes.append(self.lifecycle.record(self.description))
        step.effects.append(AnswerRequest(event.reply, None))

    def delete(self, now: int, step: EngineDecision) -> None:
        receiving.close(self.receive_state, now, step)
        self.lifecycle.end(self.path)
        self.topic.forget(self)

    def _rearm(self, now: int) -> None:
        self.receive_state.next_timer = receiving.next_instant(self.receive_state, now)
        idle = self.lifecycle.idle_at(self.description.auto_delete_on_idle)
        if idle is not None:
            self.receive_state.arm(idle)


class Topic:
    """One topic at work, with its subscriptions."""

    __slots__ = (
        "_due_first",
        "_next_timer",
        "counters",
        "description",
        "lifecycle",
        "schedule",
        "seen",
        "shared_bytes",
        "subscriptions",
        "supplies",
    )

    def __init__(
        self,
        description: TopicDescription,
        lifecycle: Lifecycle,
        supplies: EngineResources,
        *,
        next_due: int | None = None,
        shared_bytes: int = 0,
        new: bool,
    ) -> None:
        self.description = description
        self.lifecycle = lifecycle
        self.counters: EntityCounters = lifecycle.counters
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
    def root(self) -> Topic:
        return self

    @property
    def entities(self) -> list[Topic | Subscription]:
        return [self, *self.subscriptions.values()]

    @property
    def next_timer(self) -> int | None:
        return None if self.lifecycle.ended else self._next_timer

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

    def advance(self, event: Event, now: int, step: EngineDecision | None = None) -> PendingDecision:
        """Decide about one event; with a step of others, what is decided is added to it."""
        if self.lifecycle.ended:
            return refuse_as_gone(event, self.path)
        step = step or EngineDecision()
        if not isinstance(event, EntityTimerFired):
            self.counters.accessed = now
        match event:
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
            case _:
                self._refuse(event, step)
        self.finish(step)
        return step

    def finish(self, step: EngineDecision) -> None:
        if self.counters.changed:
            step.writes.append(self.counters.put())

    def _refuse(self, event: ReceivingEvent | RuleEvent, step: EngineDecision) -> None:
        refusal = not_allowed(f"'{self.path}' is a topic: its subscriptions have receivers and rules.")
        match event:
            case SessionReceiverAttached():
                step.effects.append(DetachReceiver(event.receiver, refusal))
            case CreditGranted() | ReceiverDetached():
                pass  # of a receiver that was never attached
            case _:
                step.effects.append(AnswerRequest(event.reply, refusal))

    # --- arrival -------------------------------------------------------------------------------------------------

    def _sent(self, event: MessagesSent, now: int, step: EngineDecision) -> Asking:
        refusal = transfer_refusal(event.messages, self.description, self.size)
        if refusal is None:
            messages = yield from sift(event.messages, self.seen, now, step)
            yield from self._publish(self._store(messages, now, step)[1], now, step)
            meter(self.path, MeteredOperation.SEND, event.messages, step)
        step.effects.append(AnswerRequest(event.reply, refusal))

    def _scheduled(self, event: MessagesScheduled, now: int, step: EngineDecision) -> Asking:
        refusal = transfer_refusal(event.messages, self.description, self.size)
        if refusal is not None:
            step.effects.append(AnswerRequest(event.reply, refusal))
            return
        messages = yield from sift(event.messages, self.seen, now, step)
        stored, published = self._store(messages, now, step)
        # A ping or a duplicate is answered like the others: with a number, which nothing has.
        seqs = [seq or self.counters.take_seq() for seq in stored]
        yield from self._publish(published, now, step)
        meter(self.path, MeteredOperation.SCHEDULE, event.messages, step)
        step.effects.append(AnswerRequest(event.reply, seqs))

    def _store(
        self, messages: Iterable[RoutingFields | None], now: int, step: EngineDecision
    ) -> tuple[list[int], list[AcceptedMessage]]:
        """Schedule what is to wait. The numbers given, 0 for what is not stored; and what is to be published now."""
        seqs: list[int] = []
        published: list[AcceptedMessage] = []
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
                published.append(AcceptedMessage(seqs[-1], ttl, message.group_id, raw))
        self._arm()
        return seqs, published

    def take_over(
        self, passed: Sequence[ForwardedMessage], now: int, step: EngineDecision
    ) -> Generator[StoreRead, Any, list[Refusal | None]]:
        """Messages that another entity forwards: for each, why it is not taken."""
        if self.lifecycle.ended:
            return [not_found(self.path)] * len(passed)
        kept, results = admit(
            passed, self.size, lambda message, size: transfer_refusal((message,), self.description, size)
        )
        messages = [each.envelope for each in kept]
        sifted = yield from sift(messages, self.seen, now, step)
        self.counters.accessed = now
        default = self.description.default_time_to_live
        published = [
            AcceptedMessage(each.origin_seq, life_of(each.ttl, default), message.group_id, message.raw, each.overlay)
            for each, message in zip(kept, sifted, strict=True)
            if message is not None
        ]
        yield from self._publish(published, now, step)
        meter(self.path, MeteredOperation.SEND, messages, step)
        self.finish(step)
        return results

    def _publish(self, messages: Iterable[AcceptedMessage], now: int, step: EngineDecision) -> Asking:
        """Each message to every subscription whose rules take it; where several do, its body is stored once."""
        takers = [each for each in self.subscriptions.values() if each.description.status.takes_sends]
        arrivals: dict[Subscription, list[SubscriptionCopy]] = {taker: [] for taker in takers}
        chosen = not all(taker.rules.takes_everything for taker in takers)
        for message in messages:
            to = fan_out(message, takers, now, self.supplies.new_token) if chosen else FanOut(takers, [], [])
            body = None
            if len(to.as_it_is) + len(to.dead) > 1:
                body = self.supplies.take_body()
                step.writes.append(PutBody(body, message.raw, self.counters.queue))
                self.shared_bytes += len(message.raw)
            as_it_is = SubscriptionCopy(message, body)
            for subscription in to.as_it_is:
                arrivals[subscription].append(as_it_is)
            for subscription, copy in to.copies:
                arrivals[subscription].append(SubscriptionCopy(copy, None))
            for subscription, why in to.dead:
                arrivals[subscription].append(SubscriptionCopy(message, body, why))
        for subscription, taken in arrivals.items():
            if taken:
                subscription.take(taken, now, step)
            state = subscription.receive_state
            if state.pending or state.sessions.search:
                yield from follow_up(state, now, step)
            subscription.finish(step)

    # --- time and administration ---------------------------------------------------------------------------------

    def _fired(self, now: int, step: EngineDecision) -> Asking:
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
        in_use = any(subscription.receive_state.consumers for subscription in self.subscriptions.values())
        if self.lifecycle.is_idle(self.description.auto_delete_on_idle, in_use, now):
            self._delete(now, step)
        else:
            self._rearm()

    def _fire_subscriptions(self, now: int, step: EngineDecision) -> Asking:
        for subscription in list(self.subscriptions.values()):
            at = subscription.next_timer
            if at is not None and at <= now:
                try:
                    own = yield from subscription.advance(EntityTimerFired(), now)
                except Exception:  # the store could not be read
                    if not (step.writes or step.effects):
                        raise
                    return  # what the others decided is carried out; the next firing fails by itself
                step.writes += own.writes
                step.effects += own.effects

    def _activate(self, row: Row, step: EngineDecision) -> AcceptedMessage:
        step.writes.append(DropRow(row.queue, row.lane, row.seq))
        self.counters.drop(row.lane, row.size)
        return AcceptedMessage(row.origin_seq, remaining(row), row.session, row.raw)

    def _changed(self, event: DescriptionChanged, now: int, step: EngineDecision) -> None:
        description = event.description
        assert isinstance(description, TopicDescription), "the namespace keeps the kind of an entity"
        self.description = description
        self.lifecycle.updated = now
        if self.seen is not None:
            self.seen.window = description.duplicate_window
        self._rearm()
        step.writes.append(self.lifecycle.record(description))
        confirm(event, step)

    def _delete(self, now: int, step: EngineDecision) -> None:
        """With all its subscriptions."""
        step.writes.clear()
        for subscription in list(self.subscriptions.values()):
            own = EngineDecision()
            subscription.delete(now, own)
            step.writes += own.writes
            step.effects += own.effects
        step.writes.append(DropEntity(self.counters.queue))
        step.effects.append(ForgetEntity(self.path))
        if self.seen is not None:
            self.seen.close()
        self.lifecycle.end(self.path)

    def _arm(self) -> None:
        for at in (self.schedule.next_due, self.seen.purge_at if self.seen is not None else None):
            if at is not None:
                self.arm(at)

    def _rearm(self) -> None:
        self._next_timer = self.lifecycle.idle_at(self.description.auto_delete_on_idle)
        self._arm()
        for subscription in self.subscriptions.values():
            if subscription.next_timer is not None:
                self.arm(subscription.next_timer)
