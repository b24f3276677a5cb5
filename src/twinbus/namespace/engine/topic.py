"""A topic and its subscriptions: each accepted message is copied to every subscription whose rules select it.

A topic stores only scheduled messages. A published message becomes one row in each subscription that selects the
message. If several subscriptions select the message unchanged, the body of the message is stored once and the rows
share this body (`PutBody`). Then the topic is charged for the shared body, and each row for a fixed number of bytes.

The topic is the root of its subscriptions: the events of the topic and of all its subscriptions are decided one after
the other, and the timer of the topic fires for all of them. A subscription that needs an earlier firing moves the timer
of the topic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from twinbus.namespace.engine import receiving, validation
from twinbus.namespace.engine.descriptions import SubscriptionDescription, TopicDescription
from twinbus.namespace.engine.effects import (
    AnswerRequest,
    DetachReceiver,
    EngineDecision,
    ForgetEntity,
    PendingDecision,
    ReadingPart,
    Refusal,
    not_allowed,
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
from twinbus.namespace.engine.lifecycle import Lifecycle, NamespaceEntity, confirm, refuse_as_deleted
from twinbus.namespace.engine.receive_state import EngineResources, ReceiveState
from twinbus.namespace.engine.receiving import ReceivingEvent
from twinbus.namespace.engine.rules.message_view import MAX_STEPS, MAX_TOPIC_STEPS, MessageView
from twinbus.namespace.engine.rules.ruleset import RuleSet
from twinbus.namespace.engine.send_checks import shorter_ttl
from twinbus.namespace.engine.send_target import AcceptedMessage, SendTarget, ttl_after_schedule
from twinbus.namespace.engine.settlement import dead_letter_properties
from twinbus.namespace.engine.storage_protocol import (
    DropEntity,
    DropRow,
    PutBody,
    PutRow,
    QueueLane,
    Row,
    merge_overlay,
)
from twinbus.values import Condition

_NO_SESSION: Final = dead_letter_properties(
    "Session ID is null", "Session enabled entity doesn't allow a message whose session identifier is null."
)
_FILTER_ERROR: Final = "FilterException"
"""The documented dead-letter reason of a message that a filter could not be evaluated on."""


# --- subscriptions -----------------------------------------------------------------------------------------------


class SubscriptionCopy(NamedTuple):
    """A copy of a published message that one subscription stores."""

    message: AcceptedMessage
    body: int | None
    """The id of the body that several subscriptions share; None if the copy has a body of its own."""
    dead_letter_reason: Mapping[str, Any] | None = None
    """If set, the copy goes to the dead-letter queue of the subscription, with these properties."""


class Subscription(NamespaceEntity):
    """One subscription: the rules that select messages of its topic, and a receive side."""

    __slots__ = ("_rules", "receive_state", "topic")

    description: SubscriptionDescription

    def __init__(
        self,
        description: SubscriptionDescription,
        topic: Topic,
        lifecycle: Lifecycle,
        resources: EngineResources,
        *,
        next_expiry: int | None = None,
    ) -> None:
        super().__init__(description, lifecycle)
        self.topic = topic
        self._rules: RuleSet | None = None
        self.receive_state = ReceiveState(self.counters, description, resources, next_expiry)
        self._rearm(self.counters.accessed)

    @property
    def rules(self) -> RuleSet:
        """The compiled rules. Compiled when first used, so that a namespace with many rules opens quickly."""
        if self._rules is None:
            self._rules = RuleSet(self.description.rules)
        return self._rules

    @property
    def root(self) -> Topic:
        return self.topic

    @property
    def next_timer(self) -> int | None:
        return None if self.lifecycle.ended else self.receive_state.next_timer

    def advance(self, event: Event, now: int, decision: EngineDecision | None = None) -> PendingDecision:
        if self.lifecycle.ended:
            return refuse_as_deleted(event, self.path)
        decision = decision or EngineDecision()
        if not isinstance(event, EntityTimerFired):
            self.counters.accessed = self.topic.counters.accessed = now
        match event:
            case MessagesSent() | MessagesScheduled() | ScheduleCancelled():
                refusal = not_allowed(f"'{self.path}' is a subscription: messages are sent to its topic.")
                decision.effects.append(AnswerRequest(event.reply, refusal))
            case EntityTimerFired():
                yield from self._fire_timer(now, decision)
            case DescriptionChanged():
                self._update(event, now, decision)
            case RuleAdded() | RuleChanged() | RuleRemoved():
                self._change_rules(event, now, decision)
            case RulesListed():
                page = self.description.rules[event.skip : event.skip + event.top]
                decision.effects.append(AnswerRequest(event.reply, list(page)))
            case Deleted():
                self.delete(now, decision)
                confirm(event, decision)
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
        if self.receive_state.next_timer is not None and not self.lifecycle.ended:
            self.topic.arm_timer(self.receive_state.next_timer)

    def store(self, copies: Iterable[SubscriptionCopy], now: int, decision: EngineDecision) -> None:
        """Store copies of the topic's messages, each under a sequence number of this subscription."""
        counters, dead_letter = self.counters, self.receive_state.dead_letter
        default_ttl, needs_session = self.description.default_time_to_live, self.description.requires_session
        rows: list[Row] = []
        for message, body, reason in copies:
            ttl = shorter_ttl(message.ttl, default_ttl)
            lacks_session = needs_session and not message.session
            is_dead = reason is not None or lacks_session
            overlay = message.overlay
            if is_dead:
                # The new overlay keeps the forward count: entities that forward dead letters in a circle must stop too.
                overlay = merge_overlay(overlay, reason or _NO_SESSION)
            row = Row.new(
                queue=counters.queue,
                lane=QueueLane.DEAD if is_dead else QueueLane.ACTIVE,
                seq=counters.take_seq(),
                origin_seq=message.origin_seq,
                enqueued=now,
                expires=None if is_dead or ttl is None else now + ttl,
                session=message.session if needs_session else None,
                overlay=overlay,
                body=body,
                raw=message.raw,
            )
            decision.writes.append(PutRow(row))
            counters.add(row.lane, row.charge)
            if is_dead:
                dead_letter.read_ahead.append(row)
                self.receive_state.request_delivery(dead_letter)
            else:
                rows.append(row)
        receiving.enqueue(self.receive_state, rows, now, decision)

    def _fire_timer(self, now: int, decision: EngineDecision) -> ReadingPart:
        state = self.receive_state
        expired = yield from receiving.read_expired(state, now)
        receiving.expire(state, expired, now, decision)
        yield from receiving.finish_timer(state, now, decision)
        if self._is_idle(bool(state.receivers), now):
            self.delete(now, decision)
        else:
            self._rearm(now)

    def _update(self, event: DescriptionChanged, now: int, decision: EngineDecision) -> None:
        description = event.description
        assert isinstance(description, SubscriptionDescription), "the registry checks the kind of the entity"
        # An update of the description does not change the rules: RuleAdded, RuleChanged and RuleRemoved change them.
        self.description = replace(description, rules=self.description.rules)
        receiving.change_settings(self.receive_state, self.description, now, decision)
        self._rearm(now)
        self._write_record(event, now, decision)

    def _change_rules(self, event: RuleAdded | RuleChanged | RuleRemoved, now: int, decision: EngineDecision) -> None:
        rules = validation.changed_rules(self.description.rules, event, self.path, now)
        if isinstance(rules, Refusal):
            decision.effects.append(AnswerRequest(event.reply, rules))
            return
        described = replace(self.description, rules=rules)
        record = self.lifecycle.record(described)
        if len(record.text) > validation.MAX_RULES_CHARACTERS and not isinstance(event, RuleRemoved):
            text = f"The rules of a subscription take at most {validation.MAX_RULES_CHARACTERS} characters in all."
            decision.effects.append(AnswerRequest(event.reply, Refusal(Condition.RESOURCE_LIMIT_EXCEEDED, text)))
            return
        self._rules = RuleSet(rules, self._rules)
        self.description = described
        self.receive_state.settings = self.description
        decision.writes.append(record)
        decision.effects.append(AnswerRequest(event.reply, None))

    def delete(self, now: int, decision: EngineDecision) -> None:
        receiving.close(self.receive_state, now, decision)
        self.lifecycle.end(self.path)
        self.topic.remove(self)

    def _rearm(self, now: int) -> None:
        receiving.rearm(self.receive_state, self._idle_at(), now)


# --- fan-out -----------------------------------------------------------------------------------------------------


class FanOut(NamedTuple):
    """The subscriptions that store copies of one message, by kind of copy. A subscription may store several copies."""

    unchanged: list[Subscription]
    changed: list[tuple[Subscription, AcceptedMessage]]
    """One pair for each copy that an action of a rule changed: the subscription, and the changed message."""
    dead: list[tuple[Subscription, Mapping[str, Any]]]
    """One pair for each dead letter, made because a rule could not be evaluated: the subscription, and the properties
    that the dead letter gets."""


def fan_out(
    message: AcceptedMessage, subscriptions: Sequence[Subscription], now: int, new_token: Callable[[], bytes]
) -> FanOut:
    """Evaluate the rules of these subscriptions on a message. Returns which subscription stores which copies.

    The work of all of them together is bounded. Each has its share, which the others cannot use up.
    """
    found = FanOut([], [], [])
    share, spare = MAX_TOPIC_STEPS // 2 // max(1, len(subscriptions)), MAX_TOPIC_STEPS // 2
    view = MessageView(message.raw, now=now, seq=message.origin_seq, ttl=message.ttl, new_token=new_token)
    for subscription in subscriptions:
        if subscription.rules.takes_everything:
            found.unchanged.append(subscription)
            continue
        most = min(MAX_STEPS, share + spare)
        selection = subscription.rules.select(view, most)
        spare -= max(0, most - max(0, view.steps_left) - share)
        if selection.unchanged:
            found.unchanged.append(subscription)
        for copy in selection.copies:
            changed = message._replace(ttl=copy.ttl, session=copy.session, raw=copy.raw)
            found.changed.append((subscription, changed))
        if selection.error is not None and subscription.description.dead_lettering_on_filter_errors:
            found.dead.append((subscription, dead_letter_properties(_FILTER_ERROR, selection.error)))
    return found


# --- topics ------------------------------------------------------------------------------------------------------


class Topic(SendTarget):
    """One topic with its subscriptions."""

    __slots__ = ("_due_first", "_next_timer", "shared_bytes", "subscriptions")

    description: TopicDescription

    def __init__(
        self,
        description: TopicDescription,
        lifecycle: Lifecycle,
        resources: EngineResources,
        *,
        next_due: int | None = None,
        shared_bytes: int = 0,
        new: bool,
    ) -> None:
        super().__init__(description, lifecycle, resources, next_due=next_due, new=new)
        self.shared_bytes = shared_bytes
        """Bytes of the bodies that several subscriptions share. `EntityRegistry.free` subtracts a dropped body."""
        self.subscriptions: dict[str, Subscription] = {}
        """The subscriptions of the topic, by name in lower case."""
        self._next_timer: int | None = None
        self._due_first = False
        self._rearm()

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
        """Bytes charged against the quota: scheduled messages, each shared body once, and all subscriptions."""
        return self.counters.size + self.shared_bytes + sum(each.counters.size for each in self.subscriptions.values())

    @property
    def keeps_sessions(self) -> bool:
        return True  # a subscription may require sessions

    def arm_timer(self, at: int) -> None:
        if self._next_timer is None or at < self._next_timer:
            self._next_timer = at

    def add(self, subscription: Subscription) -> None:
        self.subscriptions[subscription.description.name.lower()] = subscription
        if subscription.next_timer is not None:
            self.arm_timer(subscription.next_timer)

    def remove(self, subscription: Subscription) -> None:
        self.subscriptions.pop(subscription.description.name.lower(), None)

    def advance(self, event: Event, now: int, decision: EngineDecision | None = None) -> PendingDecision:
        if self.lifecycle.ended:
            return refuse_as_deleted(event, self.path)
        decision = decision or EngineDecision()
        if not isinstance(event, EntityTimerFired):
            self.counters.accessed = now
        match event:
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
            case _:
                self._refuse(event, decision)
        yield from self.conclude(now, decision)
        return decision

    def conclude(self, now: int, decision: EngineDecision) -> ReadingPart:
        self._write_counters(decision)
        yield from ()

    def _refuse(self, event: ReceivingEvent | RuleEvent, decision: EngineDecision) -> None:
        refusal = not_allowed(f"'{self.path}' is a topic: its subscriptions have receivers and rules.")
        match event:
            case SessionReceiverAttached():
                decision.effects.append(DetachReceiver(event.receiver, refusal))
            case CreditGranted() | ReceiverDetached():
                pass  # no receiver was attached, and these events have no answer
            case _:
                decision.effects.append(AnswerRequest(event.reply, refusal))

    def _store(
        self, messages: Sequence[AcceptedMessage], now: int, decision: EngineDecision, *, forwarded: bool = False
    ) -> ReadingPart:
        """Publish: copy each message to every subscription whose rules select it."""
        takers = [each for each in self.subscriptions.values() if each.description.status.takes_sends]
        copies: dict[Subscription, list[SubscriptionCopy]] = {taker: [] for taker in takers}
        needs_rules = not all(taker.rules.takes_everything for taker in takers)
        for message in messages:
            to = fan_out(message, takers, now, self.resources.new_token) if needs_rules else FanOut(takers, [], [])
            body = None
            if len(to.unchanged) + len(to.dead) > 1:
                body = self.resources.take_body_id()
                decision.writes.append(PutBody(body, message.raw, self.counters.queue))
                self.shared_bytes += len(message.raw)
            unchanged = SubscriptionCopy(message, body)
            for subscription in to.unchanged:
                copies[subscription].append(unchanged)
            for subscription, changed in to.changed:
                copies[subscription].append(SubscriptionCopy(changed, None))
            for subscription, reason in to.dead:
                copies[subscription].append(SubscriptionCopy(message, body, reason))
        for subscription, taken in copies.items():
            if taken:
                subscription.store(taken, now, decision)
            yield from subscription.conclude(now, decision)

    # --- time and administration --------------------------------------------------------------------------------

    def _fire_timer(self, now: int, decision: EngineDecision) -> ReadingPart:
        # A firing handles either the scheduled messages that are due or the timers of the subscriptions, and the next
        # firing handles the other kind first. Both kinds in one decision could write the counters of a queue twice, and
        # a read that fails for the second kind would undo the decision about the first.
        self._due_first = not self._due_first
        next_due = self.scheduled.next_due
        if not self._due_first or next_due is None or next_due > now:
            yield from self._fire_subscriptions(now, decision)
        if decision.is_empty:
            due = yield from self.scheduled.read_due(now)
            yield from self._store([self._activate(row, decision) for row in due], now, decision)
        self._purge_seen_ids(now, decision)
        in_use = any(subscription.receive_state.receivers for subscription in self.subscriptions.values())
        if self._is_idle(in_use, now):
            self._delete(now, decision)
        else:
            self._rearm()

    def _fire_subscriptions(self, now: int, decision: EngineDecision) -> ReadingPart:
        for subscription in list(self.subscriptions.values()):
            at = subscription.next_timer
            if at is not None and at <= now:
                try:
                    own = yield from subscription.advance(EntityTimerFired(), now)
                except Exception:
                    if decision.is_empty:
                        raise
                    return  # carry out the decisions of the other subscriptions; the next firing repeats this one
                decision.writes += own.writes
                decision.effects += own.effects

    def _activate(self, row: Row, decision: EngineDecision) -> AcceptedMessage:
        """Remove a due message from the scheduled lane. Returns the message, which the caller publishes."""
        decision.writes.append(DropRow(queue=row.queue, lane=row.lane, seq=row.seq))
        self.counters.drop(row.lane, row.size)
        return AcceptedMessage(row.origin_seq, ttl_after_schedule(row), row.session, row.raw)

    def _update(self, event: DescriptionChanged, now: int, decision: EngineDecision) -> None:
        description = event.description
        assert isinstance(description, TopicDescription), "the registry checks the kind of the entity"
        self._change_description(description)
        self._rearm()
        self._write_record(event, now, decision)

    def _delete(self, now: int, decision: EngineDecision) -> None:
        """Delete the topic with all its subscriptions."""
        decision.writes.clear()
        for subscription in list(self.subscriptions.values()):
            own = EngineDecision()
            subscription.delete(now, own)
            decision.writes += own.writes
            decision.effects += own.effects
        decision.writes.append(DropEntity(self.counters.queue))
        decision.effects.append(ForgetEntity(self.path))
        self._end()

    def _rearm(self) -> None:
        self._next_timer = self._idle_at()
        self._arm_send_timers()
        for subscription in self.subscriptions.values():
            if subscription.next_timer is not None:
                self.arm_timer(subscription.next_timer)
