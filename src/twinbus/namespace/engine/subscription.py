"""A subscription: takes what its rules choose of its topic's messages, and has all a queue has on its receiving side.

It belongs to the family of its topic: their events are decided one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from twinbus.namespace.engine import receiving
from twinbus.namespace.engine.counters import Counters
from twinbus.namespace.engine.descriptions import SubscriptionDescription
from twinbus.namespace.engine.effects import Answer, Decision, Refusal, Step
from twinbus.namespace.engine.events import (
    Deleted,
    DescriptionChanged,
    Event,
    MessagesScheduled,
    MessagesSent,
    RuleAdded,
    RuleChanged,
    RuleRemoved,
    RulesListed,
    ScheduleCancelled,
    TimerFired,
)
from twinbus.namespace.engine.life import Life, confirm, refuse_as_gone
from twinbus.namespace.engine.overlays import dead_letter_properties, merged, properties_of
from twinbus.namespace.engine.refusals import not_allowed
from twinbus.namespace.engine.rows import COPY_BYTES, Lane, PutRow, Row
from twinbus.namespace.engine.rules import administration
from twinbus.namespace.engine.rules.ruleset import RuleSet
from twinbus.namespace.engine.shelf import Shelf, Supplies
from twinbus.namespace.engine.shelving import shelve

if TYPE_CHECKING:
    from twinbus.namespace.engine.topic import Topic

_NO_SESSION: Final = merged(
    None,
    dead_letter_properties(
        "Session ID is null", "Session enabled entity doesn't allow a message whose session identifier is null."
    ),
)


class Published(NamedTuple):
    """A message that its topic accepted."""

    origin_seq: int
    ttl: int | None
    session: str | None
    raw: bytes
    overlay: bytes | None = None
    """Of a message that was forwarded to the topic."""


class Arrival(NamedTuple):
    """A message that a subscription takes; with `why` it goes to its dead-letter queue, and this tells the reason."""

    message: Published
    body: int | None
    """The id of its body where several share it."""
    why: bytes | None = None


class Subscription:
    """One subscription at work."""

    __slots__ = ("_rules", "counters", "description", "life", "shelf", "topic")

    def __init__(
        self,
        description: SubscriptionDescription,
        topic: Topic,
        life: Life,
        supplies: Supplies,
        *,
        next_expiry: int | None = None,
    ) -> None:
        self.description = description
        self.topic = topic
        self.life = life
        self._rules: RuleSet | None = None
        self.counters: Counters = life.counters
        self.shelf = Shelf(self.counters, description, supplies, next_expiry)
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
    def family(self) -> Topic:
        return self.topic

    @property
    def next_timer(self) -> int | None:
        return None if self.life.ended else self.shelf.next_timer

    def advance(self, event: Event, now: int, step: Step | None = None) -> Decision:
        """Decide about one event; with a step of others, what is decided is added to it."""
        if self.life.ended:
            return refuse_as_gone(event, self.path)
        step, shelf = step or Step(), self.shelf
        if not isinstance(event, TimerFired):
            self.counters.accessed = self.topic.counters.accessed = now
        match event:
            case MessagesSent() | MessagesScheduled() | ScheduleCancelled():
                refusal = not_allowed(f"'{self.path}' is a subscription: messages are sent to its topic.")
                step.effects.append(Answer(event.reply, refusal))
            case TimerFired():
                expired = yield from receiving.read_expired(shelf, now)
                receiving.lapse(shelf, expired, now, step)
                yield from receiving.follow_up(shelf, now, step)
                receiving.time_out(shelf, now, step)
                if self.life.is_idle(self.description.auto_delete_on_idle, bool(shelf.consumers), now):
                    self.delete(now, step)
                else:
                    self._rearm(now)
            case DescriptionChanged():
                self._changed(event, now, step)
            case RuleAdded() | RuleChanged() | RuleRemoved():
                self._rules_changed(event, now, step)
            case RulesListed():
                page = self.description.rules[event.skip : event.skip + event.top]
                step.effects.append(Answer(event.reply, list(page)))
            case Deleted():
                self.delete(now, step)
                confirm(event, step)
            case _:
                asking = receiving.decide(shelf, event, now, step)
                if asking is not None:
                    yield from asking
        if shelf.pending or shelf.sessions.search:
            yield from receiving.follow_up(shelf, now, step)
        self.finish(step)
        return step

    def finish(self, step: Step) -> None:
        """Write what changed, and let the topic know when to look again."""
        if self.counters.changed:
            step.writes.append(self.counters.put())
        if self.shelf.next_timer is not None and not self.life.ended:
            self.topic.arm(self.shelf.next_timer)

    def take(self, arrivals: Iterable[Arrival], now: int, step: Step) -> None:
        """Messages of the topic enter the subscription, each under a number of its own."""
        counters, writes, dead = self.counters, step.writes, self.shelf.dead
        queue, default = counters.queue, self.description.default_time_to_live
        wants_session = self.description.requires_session
        fresh: list[Row] = []
        for (origin_seq, ttl, session, raw, passed), body, why in arrivals:
            shortest = ttl if default is None else default if ttl is None else min(ttl, default)
            fault = _NO_SESSION if why is None and wants_session and not session else why
            lane, expires = (0, None if shortest is None else now + shortest) if fault is None else (Lane.DEAD, None)
            # With how often it was forwarded: a circle of dead letters has to end too.
            overlay = passed if fault is None else merged(passed, properties_of(fault))
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
                self.shelf.wake(dead)
        shelve(self.shelf, fresh, now, step)

    def _changed(self, event: DescriptionChanged, now: int, step: Step) -> None:
        description = event.description
        assert isinstance(description, SubscriptionDescription), "the namespace keeps the kind of an entity"
        self.description = description = replace(description, rules=self.description.rules)
        self.life.updated = now
        receiving.change_settings(self.shelf, description, now, step)
        self._rearm(now)
        step.writes.append(self.life.record(description))
        confirm(event, step)

    def _rules_changed(self, event: RuleAdded | RuleChanged | RuleRemoved, now: int, step: Step) -> None:
        rules = administration.changed(self.description.rules, event, self.path, now)
        if isinstance(rules, Refusal):
            step.effects.append(Answer(event.reply, rules))
            return
        self._rules = RuleSet(rules, self._rules)
        self.description = replace(self.description, rules=rules)
        self.shelf.settings = self.description
        step.writes.append(self.life.record(self.description))
        step.effects.append(Answer(event.reply, None))

    def delete(self, now: int, step: Step) -> None:
        receiving.close(self.shelf, now, step)
        self.life.end(self.path)
        self.topic.forget(self)

    def _rearm(self, now: int) -> None:
        self.shelf.next_timer = receiving.next_instant(self.shelf, now)
        idle = self.life.idle_at(self.description.auto_delete_on_idle)
        if idle is not None:
            self.shelf.arm(idle)
