"""Timeouts: every operation of the client runs inside `deadline`, whose timeout error names the operation."""

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
    seconds: float, operation: str, entity: str | None = None, unfinished: Callable[[], Sequence[Any]] = _nothing
) -> AsyncIterator[None]:
    """Cancel the block after `seconds` and raise OperationTimeoutError. The error's `failed` is `unfinished()`."""
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        text = f"{operation}: no answer in {seconds:g} s"
        raise OperationTimeoutError(text, entity=entity, failed=unfinished()) from None
