"""Keys kept in order in memory: adding, removing and walking on from a key, each quick at millions of keys.

Short sorted lists in a row. Knows nothing of messages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Any)

_LONGEST = 1_024


class SortedKeys(Generic[K]):
    """A sorted set."""

    __slots__ = ("_last", "_lists")

    def __init__(self) -> None:
        self._lists: list[list[K]] = []
        self._last: list[K] = []
        """The last key of each list."""

    def __bool__(self) -> bool:
        return bool(self._lists)

    def add(self, key: K) -> None:
        """Add a key that is not there."""
        if not self._lists:
            self._lists.append([key])
            self._last.append(key)
            return
        at = min(bisect_left(self._last, key), len(self._last) - 1)
        keys = self._lists[at]
        insort(keys, key)
        if len(keys) > _LONGEST:
            # What comes in order leaves full lists behind it.
            cut = _LONGEST if key == keys[-1] else _LONGEST // 2
            self._lists[at : at + 1] = keys[:cut], keys[cut:]
            self._last[at : at + 1] = keys[cut - 1], keys[-1]
        else:
            self._last[at] = keys[-1]

    def remove(self, key: K) -> None:
        """Remove a key that is there."""
        at = bisect_left(self._last, key)
        keys = self._lists[at]
        del keys[bisect_left(keys, key)]
        if keys:
            self._last[at] = keys[-1]
        else:
            del self._lists[at], self._last[at]

    def first(self) -> K | None:
        return self._lists[0][0] if self._lists else None

    def after(self, key: K) -> Iterator[K]:
        """The keys above this one, in order. Not to be walked on after a change."""
        at = bisect_right(self._last, key)
        if at < len(self._lists):
            keys = self._lists[at]
            yield from islice(keys, bisect_right(keys, key), None)
            for keys in islice(self._lists, at + 1, None):
                yield from keys

    def __iter__(self) -> Iterator[K]:
        for keys in self._lists:
            yield from keys
