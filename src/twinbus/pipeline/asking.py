"""Several questions to Spark at once: while one is planned, another is computed.

The first that fails, or a Ctrl-C, ends the asking. What is asked is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from twinbus.pipeline.tables import Tables

_AT_ONCE: Final = 4


@contextmanager
def asking(tables: Tables) -> Iterator[ThreadPoolExecutor]:
    """Submit the questions, and take the results within the block."""
    pool = ThreadPoolExecutor(_AT_ONCE)
    with tables.settled():
        try:
            yield pool
        except BaseException:
            # Those that run are ended by Spark, or come to their end unheard.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
