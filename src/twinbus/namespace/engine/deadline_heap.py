"""Which of many instants comes first, when most of them are taken back before they come (locks that are settled).

A heap with lazy deletion, compacted so that it stays in proportion to what is set.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Any, Generic, Protocol, TypeVar

_SLACK = 64


class OrderedKey(Hashable, Protocol):
    """Told apart by hash, and ordered among equals in time."""

    def __lt__(self, other: Any, /) -> bool: ...


K = TypeVar("K", bound=OrderedKey)


class DeadlineHeap(Generic[K]):
    """One instant per key."""

    __slots__ = ("_at", "_heap")

    def __init__(self) -> None:
        self._at: dict[K, int] = {}
        self._heap: list[tuple[int, K]] = []

    def set(self, key: K, at: int) -> None:
        self._at[key] = at
        heap = self._heap
        heappush(heap, (at, key))
        if len(heap) > _SLACK + 2 * len(self._at):
            heap[:] = [(instant, held) for held, instant in self._at.items()]
            heapify(heap)

    def clear(self, key: K) -> None:
        if self._at.pop(key, None) is not None and not self._at:
            self._heap.clear()

    def first(self) -> int | None:
        heap = self._heap
        while heap and self._at.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def take_due(self, now: int) -> list[K]:
        """The keys whose instant has come, earliest first; they are no longer set."""
        due: list[K] = []
        while (at := self.first()) is not None and at <= now:
            key = heappop(self._heap)[1]
            del self._at[key]
            due.append(key)
        return due
