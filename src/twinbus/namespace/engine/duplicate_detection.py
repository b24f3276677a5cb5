"""Duplicate detection: which message ids a queue or topic has seen within its time window.

The store has every id of the window. The newest ids are in memory too, up to a number that all entities share
(`SeenIdBudget`). All ids that were seen since the instant `_covered_since` are in memory. The store is read only if the
window begins before this instant.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable
from typing import Any, Final

from twinbus.amqp import RoutingFields
from twinbus.namespace.engine.storage_protocol import ForgetSeenIds, KnownIds, PutSeenId, StoreRead, StoreWrite

MAX_IDS_IN_MEMORY: Final = 65_536


class SeenIdBudget:
    """A limit for the number of ids in memory, of all entities together.

    Above the limit, ids are dropped first from the entity that has received no message for the longest time.
    """

    __slots__ = ("_holders", "limit", "used")

    def __init__(self, limit: int = MAX_IDS_IN_MEMORY) -> None:
        self.limit = limit
        self.used = 0
        self._holders: OrderedDict[SeenIds, None] = OrderedDict()

    def add_one(self, holder: SeenIds) -> None:
        """Count one more id. Above the limit, the holder without a new id for the longest time drops its oldest ids."""
        self.used += 1
        self._holders[holder] = None
        self._holders.move_to_end(holder)
        while self.used > self.limit:
            next(iter(self._holders)).drop_oldest()

    def release(self, holder: SeenIds, count: int, left: int) -> None:
        """Subtract `count` ids that the holder dropped. `left` is the number of ids that the holder still has."""
        self.used -= count
        if not left:
            self._holders.pop(holder, None)


class SeenIds:
    """The message ids that one entity has seen."""

    __slots__ = ("_budget", "_covered_since", "_ids", "_newest", "loaded", "purge_at", "queue", "window")

    def __init__(self, queue: int, window: int, budget: SeenIdBudget, *, new: bool) -> None:
        self.queue = queue
        self.window = window
        self._budget = budget
        self._ids: OrderedDict[str, int] = OrderedDict()
        self._covered_since: int | None = 0 if new else None
        """Every id seen since this instant is in memory. None after a restart, until the first call of `duplicates`."""
        self._newest: int | None = None
        """The instant at which the newest id was stored. The store may have this id after memory has dropped it."""
        self.purge_at: int | None = None if new else 0
        self.loaded: set[str] | None = None
        """During a transaction, the ids of its messages that were seen before: `duplicates` does not read the store."""

    def duplicates(self, messages: Iterable[RoutingFields], now: int) -> Generator[StoreRead, Any, set[str]]:
        """Return the ids of these messages that were seen within the window."""
        since = now - self.window
        self._drop_before(since)
        if self._covered_since is None:
            self._covered_since = now
        ids = {id_key(message) for message in messages if message.message_id is not None}
        known = ids & self._ids.keys()
        unknown = ids - known
        if self.loaded is not None:
            known |= unknown & self.loaded
        elif unknown and self._covered_since > since:
            known |= yield KnownIds(self.queue, tuple(unknown), since)
        return known

    def add(self, message_id: str, now: int, writes: list[StoreWrite]) -> None:
        """Remember an id, in memory and in the store."""
        writes.append(PutSeenId(self.queue, message_id, now))
        is_new = message_id not in self._ids
        self._ids[message_id] = self._newest = now
        self._ids.move_to_end(message_id)
        if is_new:
            self._budget.add_one(self)
        if self.purge_at is None:
            self.purge_at = now + self.window + 1

    def drop_oldest(self) -> None:
        """Drop the oldest id from memory, to stay within the budget."""
        _, at = self._ids.popitem(last=False)
        self._covered_since = max(self._covered_since or 0, at + 1)
        self._budget.release(self, 1, len(self._ids))

    def close(self) -> None:
        """Drop all ids from memory: the entity was deleted."""
        count = len(self._ids)
        self._ids.clear()
        self._budget.release(self, count, 0)

    def purge(self, now: int, writes: list[StoreWrite]) -> None:
        """Remove ids older than the window from memory and store, if `purge_at` has come."""
        if self.purge_at is None or self.purge_at > now:
            return
        since = now - self.window
        self._drop_before(since)
        writes.append(ForgetSeenIds(self.queue, since))
        # After a restart memory is empty and the store may not be: one more purge removes what the store still has.
        is_left = self.purge_at == 0 or (self._newest is not None and self._newest >= since)
        self.purge_at = now + self.window + 1 if is_left else None

    def _drop_before(self, since: int) -> None:
        ids, count = self._ids, 0
        while ids:
            message_id, at = next(iter(ids.items()))
            if at >= since:
                break
            del ids[message_id]
            count += 1
        if count:
            self._budget.release(self, count, len(ids))


def id_key(message: RoutingFields) -> str:
    """Return the message id as text. Ids of different AMQP types are different ids."""
    value = message.message_id
    return value if type(value) is str else f"{type(value).__name__}:{value!s}"
