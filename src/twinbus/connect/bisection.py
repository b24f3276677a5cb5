"""Bisecting a request that the service refuses as a whole because of one of its items."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def bisect_refused(
    parts: Sequence[T], ask: Callable[[Sequence[T]], Awaitable[R]], refusal: type[Exception]
) -> list[tuple[Sequence[T], R | None]]:
    """Asks for all; where it is refused for one of them, for each half. None is the answer to a single one refused."""
    answers: list[tuple[Sequence[T], R | None]] = []
    waiting = [parts] if parts else []
    while waiting:
        part = waiting.pop()
        try:
            answers.append((part, await ask(part)))
        except refusal:
            if len(part) == 1:
                answers.append((part, None))
            else:
                middle = len(part) // 2
                waiting += (part[middle:], part[:middle])
    return answers
