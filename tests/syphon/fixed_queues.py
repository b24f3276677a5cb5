"""A `Discovery` that returns the queues it was given."""

from __future__ import annotations

from collections.abc import Sequence


class FixedQueues:
    def __init__(self, queues: Sequence[str], lock: float | None = None) -> None:
        self._queues = tuple(queues)
        self._lock = lock

    async def queues(self) -> Sequence[str]:
        return self._queues

    def lock_seconds(self, queue: str) -> float | None:
        return self._lock

    async def remaining(self) -> int | None:
        return None

    async def close(self) -> None:
        pass
