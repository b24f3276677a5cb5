"""Duplicate detection: which message ids a queue or topic has seen within its window.

The store remembers them all; the newest are kept in memory too, as many as all entities together may have, so that
the store is asked only about times from before what memory covers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable
from typing import Any, Final

from twinbus.amqp import RoutingFields
from twinbus.namespace.engine.storage_protocol import ForgetSeenIds, KnownIds, PutSeenId, StoreRead, StoreWrite

REMEMBERED: Final = 65_536


class IdBudget:
    """Ids that may be kept in memory, all entities together. Whoever was sent to longest ago gives up ids first."""

    __slots__ = ("_holders", "limit", "used")

    def __init__(self, limit: int = REMEMBERED) -> None:
        self.limit = limit
        self.used = 0
        self._holders: OrderedDict[SeenIds, None] = OrderedDict()

    def took(self, holder: SeenIds) -> None:
        """The holder has one more."""
        self.used += 1
        self._holders[holder] = None
        self._holders.move_to_end(holder)
        while self.used > self.limit:
            next(iter(self._holders)).give_up_oldest()

    def gave(self, holder: SeenIds, count: int, left: int) -> None:
        self.used -= count
        if not left:
            self._holders.pop(holder, None)


class SeenIds:
    """The ids seen by one entity."""

    __slots__ = ("_budget", "_covered_since", "_ids", "_newest", "purge_at", "queue", "recalled", "window")

    def __init__(self, queue: int, window: int, budget: IdBudget, *, new: bool) -> None:
        self.queue = queue
        self.window = window
        self._budget = budget
        self._ids: OrderedDict[str, int] = OrderedDict()
        self._covered_since: int | None = 0 if new else None
        """Memory knows every id seen since then; None: this is not known before the next event."""
        self._newest: int | None = None
        """When an id was remembered last; the store may have it when memory has not."""
        self.purge_at: int | None = None if new else 0
        self.recalled: set[str] | None = None
        """What the store said about the ids of a transaction that is being carried out: it is not asked again."""

    def duplicates(self, messages: Iterable[RoutingFields], now: int) -> Generator[StoreRead, Any, set[str]]:
        """Which of these ids were seen within the window."""
        since = now - self.window
        self._prune(since)
        if self._covered_since is None:
            self._covered_since = now
        ids = {key_of(message) for message in messages if message.message_id is not None}
        known = ids & self._ids.keys()
        asked = ids - known
        if self.recalled is not None:
            known |= asked & self.recalled
        elif asked and self._covered_since > since:
            known |= yield KnownIds(self.queue, tuple(asked), since)
        return known

    def remember(self, message_id: str, now: int, writes: list[StoreWrite]) -> None:
        writes.append(PutSeenId(self.queue, message_id, now))
        is_new = message_id not in self._ids
        self._ids[message_id] = self._newest = now
        self._ids.move_to_end(message_id)
        if is_new:
            self._budget.took(self)
        if self.purge_at is None:
            self.purge_at = now + self.window + 1

    def give_up_oldest(self) -> None:
        _, at = self._ids.popitem(last=False)
        self._covered_since = max(self._covered_since or 0, at + 1)
        self._budget.gave(self, 1, len(self._ids))

    def close(self) -> None:
        """The entity is removed."""
        count = len(self._ids)
        self._ids.clear()
        self._budget.gave(self, count, 0)

    def purge(self, now: int, writes: list[StoreWrite]) -> None:
        """Forget what the window has passed, from time to time."""
        if self.purge_at is None or self.purge_at > now:
            return
        since = now - self.window
        self._prune(since)
        writes.append(ForgetSeenIds(self.queue, since))
        # After a restart memory is empty but the store may not be: one more purge finds what is left of it.
        is_left = self.purge_at == 0 or (self._newest is not None and self._newest >= since)
        self.purge_at = now + self.window + 1 if is_left else None

    def _prune(self, since: int) -> None:
        ids, count = self._ids, 0
        while ids:
            message_id, at = next(iter(ids.items()))
            if at >= since:
                break
            del ids[message_id]
            count += 1
        if count:
            self._budget.gave(self, count, len(ids))


def key_of(message: RoutingFields) -> str:
    """Ids of different AMQP types are different ids."""
    value = message.message_id
    return value if type(value) is str else f"{type(value).__name__}:{value!s}"
