"""Duplicate detection: which message ids a queue or topic has seen within its window.

The store remembers them all; the newest are kept in memory too, so that it is asked only about times from before
what memory covers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable
from typing import Any, Final

from twinbus.amqp.sections import Envelope
from twinbus.namespace.engine.rows import ForgetSeenIds, KnownIds, Need, PutSeenId, Write

REMEMBERED: Final = 16_384


class SeenIds:
    """The ids seen by one entity."""

    __slots__ = ("_covered_since", "_ids", "purge_at", "queue", "window")

    def __init__(self, queue: int, window: int, *, new: bool) -> None:
        self.queue = queue
        self.window = window
        self._ids: OrderedDict[str, int] = OrderedDict()
        self._covered_since: int | None = 0 if new else None
        """Memory knows every id seen since then; None: this is not known before the next event."""
        self.purge_at: int | None = None if new else 0

    def duplicates(self, messages: Iterable[Envelope], now: int) -> Generator[Need, Any, set[str]]:
        """Which of these ids were seen within the window."""
        since = now - self.window
        self._prune(since)
        if self._covered_since is None:
            self._covered_since = now
        ids = {key_of(message) for message in messages if message.message_id is not None}
        known = ids & self._ids.keys()
        asked = ids - known
        if asked and self._covered_since > since:
            known |= yield KnownIds(self.queue, tuple(asked), since)
        return known

    def remember(self, message_id: str, now: int, writes: list[Write]) -> None:
        writes.append(PutSeenId(self.queue, message_id, now))
        self._ids[message_id] = now
        self._ids.move_to_end(message_id)
        if len(self._ids) > REMEMBERED:
            _, at = self._ids.popitem(last=False)
            self._covered_since = max(self._covered_since or 0, at + 1)
        if self.purge_at is None:
            self.purge_at = now + self.window + 1

    def purge(self, now: int, writes: list[Write]) -> None:
        """Forget what the window has passed, from time to time."""
        if self.purge_at is None or self.purge_at > now:
            return
        since = now - self.window
        self._prune(since)
        writes.append(ForgetSeenIds(self.queue, since))
        # After a restart memory is empty but the store may not be: one more purge finds what is left of it.
        self.purge_at = now + self.window + 1 if self._ids or self.purge_at == 0 else None

    def _prune(self, since: int) -> None:
        ids = self._ids
        while ids:
            message_id, at = next(iter(ids.items()))
            if at >= since:
                return
            del ids[message_id]


def key_of(message: Envelope) -> str:
    """Ids of different AMQP types are different ids."""
    value = message.message_id
    return value if type(value) is str else f"{type(value).__name__}:{value!s}"
