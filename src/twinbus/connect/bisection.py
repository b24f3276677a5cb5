"""Bisecting a request that the service refuses as a whole because of one of its items."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


async def bisect_refused(
    items: Sequence[T], request: Callable[[Sequence[T]], Awaitable[R]], refusal: type[Exception]
) -> list[tuple[Sequence[T], R | None]]:
    """Call `request` for all items, and for each half of them where it raises `refusal`.

    Returns every part that was asked for to the end, with its answer, in the order of the items. A single item that is
    refused has the answer None. Any other exception passes to the caller.
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
