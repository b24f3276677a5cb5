"""When a syphon searches for backlog queues (Y1, Y2). Pure: times are arguments.

The pair may make the backlog queues after the syphon has started, or only some of them at once. So the pause before the
next search depends on what the last search found:

    it failed               growing pauses, 1 s to a minute
    no queue is known yet   growing pauses, 1 s to a minute
    it found a new queue    a minute: the pair may be making more queues
    nothing new             an hour

A repeated search opens a link to each queue that may exist, which is not charged (`discovery`).
"""

from __future__ import annotations

from math import inf
from typing import Final

SEARCH_INTERVAL: Final = 3600.0
"""Seconds between two searches once no search finds a new queue."""
FIRST_PAUSE: Final = 1.0
LONGEST_PAUSE: Final = 60.0


class QueueSearches:
    """Decides when the next search begins. The first one is due at once."""

    def __init__(self) -> None:
        self._due = -inf
        self._is_wanted = False
        self._failed = 0
        self._empty = 0

    @property
    def due(self) -> float:
        """The time of the next search; -inf if it is due at once."""
        return -inf if self._is_wanted else self._due

    def search_now(self) -> None:
        """Search at once. If a search is in progress, search again after it: it may have looked too early."""
        self._is_wanted = True

    def began(self) -> None:
        """Report that a search begins."""
        self._is_wanted = False

    def failed(self, now: float) -> float:
        """Report that the search failed. Returns the seconds until the next one."""
        pause = _pause(self._failed)
        self._failed += 1
        self._due = now + pause
        return pause

    def succeeded(self, now: float, *, known: int, new: int) -> float:
        """Report the end of a search: `known` queues are known now, `new` of them since this search.

        Returns the seconds until the next search.
        """
        self._failed = 0
        if known:
            self._empty = 0
            pause = LONGEST_PAUSE if new else SEARCH_INTERVAL
        else:
            pause = _pause(self._empty)
            self._empty += 1
        self._due = now + pause
        return pause


def _pause(repeated: int) -> float:
    return min(FIRST_PAUSE * 2.0 ** min(repeated, 10), LONGEST_PAUSE)
