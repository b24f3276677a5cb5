"""CPU time of a hostile input beside an ordinary one of the same size, for the fuzzers.

The ratio is taken in one process and within milliseconds, so a busy machine disturbs both sides alike. A ratio above
the bound is measured again before it counts: a quadratic input stays above it, a disturbed one does not.
"""

import gc
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

MOST: Final = 25.0  # The slowest linear input that is known takes 17 times as long as an ordinary map of its size.
TRIES: Final = 5
_LEAST_SECONDS: Final = 1e-4


def seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


@contextmanager
def small_heap() -> Iterator[None]:
    """Excludes all present objects from garbage collection. Inputs of many objects cause full collections, and in a
    process that runs many tests a full collection takes longer than the input."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def ratio(hostile: Callable[[], object], ordinary: Callable[[], object]) -> float:
    """The first ratio of CPU times, hostile over ordinary, that is within the bound; else the least of several."""
    found = float("inf")
    with small_heap():
        for _ in range(TRIES):
            found = min(found, seconds(hostile) / max(seconds(ordinary), _LEAST_SECONDS))
            if found < MOST:
                break
    return found


async def ratio_of(
    hostile: Callable[[], Awaitable[object]], ordinary: Callable[[], Awaitable[object]], most: float = MOST
) -> float:
    """The same of coroutines. Nothing else should run in their loop."""
    found = float("inf")
    with small_heap():
        for _ in range(TRIES):
            taken = []
            for call in (hostile, ordinary):
                start = time.process_time()
                await call()
                taken.append(time.process_time() - start)
            found = min(found, taken[0] / max(taken[1], _LEAST_SECONDS))
            if found < most:
                break
    return found
