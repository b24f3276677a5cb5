"""Bisecting a request that the service refuses as a whole because of one of its items."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def bisect_refused(
    items: Sequence[T], request: Callable[[Sequence[T]], Awaitable[R]], refusal: type[Exception]
) -> list[tuple[Sequence[T], R | None]]:
    """Call `request` with all items. If `request` raises `refusal`, call it with each half of the items, and so on.

    Returns pairs (part, answer) that together cover all items, in the order of the items. A refused part of one item
    has the answer None. Any exception other than `refusal` passes to the caller.
    """
    answers: list[tuple[Sequence[T], R | None]] = []
    open_parts = [items] if items else []
    while open_parts:
        part = open_parts.pop()
        try:
            answers.append((part, await request(part)))
        except refusal:
            if len(part) == 1:
                answers.append((part, None))
            else:
                middle = len(part) // 2
                open_parts += (part[middle:], part[:middle])
    return answers
