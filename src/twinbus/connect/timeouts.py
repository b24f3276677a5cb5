"""Waiting with an end: every wait of the client goes through here and ends in time with an error that says what for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from twinbus.connect.errors import OperationTimeoutError


def _nothing() -> Sequence[Any]:
    return ()


@asynccontextmanager
async def deadline(
    seconds: float, what: str, entity: str | None = None, unfinished: Callable[[], Sequence[Any]] = _nothing
) -> AsyncIterator[None]:
    """Past it, whatever is awaited inside is cancelled; `unfinished` tells the messages the error is about."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise OperationTimeoutError(f"{what}: no answer in {seconds:g} s", entity=entity, failed=unfinished()) from None
