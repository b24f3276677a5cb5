"""Finds the earliest of many deadlines. Most deadlines are cancelled before they pass (locks of settled messages).

A heap with lazy deletion: a cancelled entry stays in the heap until it becomes the first, or until the heap is rebuilt.
The heap is rebuilt when it has more cancelled entries than valid ones (and 64 more), so that its size stays in
proportion to the number of deadlines.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Any, Final, Generic, Protocol, TypeVar

_SLACK: Final = 64


class OrderedKey(Hashable, Protocol):
    """A key that can be hashed and compared. The comparison gives keys with equal deadlines an order."""

    def __lt__(self, other: Any, /) -> bool: ...


K = TypeVar("K", bound=OrderedKey)


class DeadlineHeap(Generic[K]):
    """A set of deadlines, one for each key."""

    __slots__ = ("_at", "_heap")

    def __init__(self) -> None:
        self._at: dict[K, int] = {}
        self._heap: list[tuple[int, K]] = []

    def set(self, key: K, at: int) -> None:
        """Set or replace the deadline of a key."""
        self._at[key] = at
        heap = self._heap
        heappush(heap, (at, key))
        if len(heap) > _SLACK + 2 * len(self._at):
            heap[:] = [(deadline, each) for each, deadline in self._at.items()]
            heapify(heap)

    def cancel(self, key: K) -> None:
        """Remove the deadline of a key, if the key has one."""
        if self._at.pop(key, None) is not None and not self._at:
            self._heap.clear()

    def first(self) -> int | None:
        """Return the earliest deadline; None if there is none."""
        heap = self._heap
        while heap and self._at.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def take_due(self, now: int) -> list[K]:
        """Remove and return the keys whose deadline has passed, earliest first."""
        due: list[K] = []
        while (at := self.first()) is not None and at <= now:
            key = heappop(self._heap)[1]
            del self._at[key]
            due.append(key)
        return due
