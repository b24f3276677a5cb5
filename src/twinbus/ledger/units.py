"""M2: what an operation costs in billable units. Prices are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

UNIT: Final = 64 * 1024


def units(messages: int, size: int | Sequence[int] = 0) -> int:
    """64 KB or a part of it, of every message; an operation without messages is one.

    `size` is each message's, or all of them together: then the dearest way to share it out.
    """
    if isinstance(size, int):
        return max(messages, 1) + max(size - max(messages, 1), 0) // UNIT
    return max(messages, sum(max(1, -(-one // UNIT)) for one in size), 1)
