"""What a queue and a subscription have in common: the state of the side that receivers see.

Data with the few moves every part needs; the decisions about it are in the modules named after them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinbus.namespace.engine.counters import Counters
from twinbus.namespace.engine.descriptions import QueueDescription, SubscriptionDescription
from twinbus.namespace.engine.duplicates import IdBudget
from twinbus.namespace.engine.locks import Locks
from twinbus.namespace.engine.receivers import Consumer, Feed
from twinbus.namespace.engine.rows import Lane, Row
from twinbus.namespace.engine.sessions import Sessions
from twinbus.namespace.engine.window import Budget, Window

Settings = QueueDescription | SubscriptionDescription


class Supplies:
    """What the engine is given from outside: tokens nobody can guess, ids for shared bodies, memory."""

    __slots__ = ("budget", "ids", "new_token", "next_body", "onward")

    def __init__(self, new_token: Callable[[], bytes], next_body: int, budget: Budget, ids: IdBudget) -> None:
        self.new_token = new_token
        self.next_body = next_body
        self.budget = budget
        self.ids = ids
        self.onward: dict[tuple[Shelf, Feed], None] = {}
        """Feeds with rows to be forwarded, in the order they were noticed."""

    def take_body(self) -> int:
        body = self.next_body
        self.next_body = body + 1
        return body


class Shelf:
    """One queue's messages as receivers see them."""

    __slots__ = (
        "consumers",
        "counters",
        "dead",
        "locks",
        "main",
        "next_expiry",
        "next_timer",
        "path",
        "pending",
        "sessions",
        "settings",
        "supplies",
        "transfer",
    )

    def __init__(self, counters: Counters, settings: Settings, supplies: Supplies, next_expiry: int | None) -> None:
        self.counters = counters
        self.settings = settings
        self.path = settings.path
        self.supplies = supplies
        self.locks = Locks()
        self.consumers: dict[Any, Consumer] = {}
        self.sessions = Sessions()
        self.main = self._feed(Lane.ACTIVE)
        self.dead = self._feed(Lane.DEAD)
        self.transfer = self._feed(Lane.TRANSFER_DEAD)
        self.next_expiry = next_expiry
        """Nothing expires before; None: nothing ever will."""
        self.pending: list[Feed] = []
        """Feeds that may have both rows and receivers."""
        self.next_timer: int | None = next_expiry
        """Nothing is to be done by itself before. It may come for nothing: then it is worked out anew."""
        self.direct()

    def _feed(self, lane: Lane) -> Feed:
        queue, empty = self.counters.queue, self.counters.lanes[lane] == 0
        return Feed(Window(queue, lane, self.supplies.budget, empty=empty))

    def direct(self) -> None:
        """Where the settings send rows on to."""
        self.main.onward = self.settings.forward_to or None
        self.dead.onward = self.settings.forward_dead_letters_to or None
        for feed in (self.main, self.dead):
            self.wake(feed)

    def arm(self, at: int) -> None:
        if self.next_timer is None or at < self.next_timer:
            self.next_timer = at

    def wake(self, feed: Feed) -> None:
        if feed.hungry and feed not in self.pending:
            self.pending.append(feed)
        if feed.onward is not None and not feed.window.exhausted:
            self.supplies.onward[self, feed] = None

    def feed_of(self, row: Row) -> Feed | None:
        """Where the row is delivered from; None if that is a session nobody holds."""
        if row.lane >= Lane.TRANSFER_DEAD:
            return self.transfer
        if row.lane >= Lane.DEAD:
            return self.dead
        if not self.settings.requires_session:
            return self.main
        held = self.sessions.held.get(row.session or "")
        return held.feed if held else None

    def expires_at(self, at: int | None) -> None:
        if at is not None and (self.next_expiry is None or at < self.next_expiry):
            self.next_expiry = at
            self.arm(at)

    def forget(self, seqs: set[int]) -> None:
        """Rows that went without being delivered leave every window."""
        self.main.window.forget(seqs)
        self.dead.window.forget(seqs)
        self.transfer.window.forget(seqs)
        for held in self.sessions.held.values():
            held.feed.window.forget(seqs)
