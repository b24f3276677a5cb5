"""A `Discovery` that returns the queues it was given."""

from __future__ import annotations

from collections.abc import Sequence


class FixedQueues:
    def __init__(self, queues: Sequence[str]) -> None:
        self._queues = tuple(queues)

    async def queues(self) -> Sequence[str]:
        return self._queues

    async def remaining(self) -> int | None:
        return None

    async def close(self) -> None:
        pass
