"""Lets one thread at a time change the tables: that of the batches of a query, or another one.

Also stops a query between two batches.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql.streaming.query import StreamingQuery

from twinbus.errors import OperatorError
from twinbus.pipeline.table_storage import TablesBusyError


class BatchTurns:
    """The turns of the threads that change the tables."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by the thread that changes the tables."""
        self.stopping = threading.Event()
        """Set by `stop`. From then on, no batch begins, and none waits for another process that writes the tables."""
        self._has_failed = False

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Holds the lock inside the `with` block, for a batch. Raises OperatorError after `stop`."""
        with self.lock:
            if self.stopping.is_set():
                raise OperatorError("the query was stopped", "Start it again: it goes on with this batch.")
            try:
                yield
            except Exception as error:
                # A batch that was stopped while it waited has not failed.
                self._has_failed = not (self.stopping.is_set() and isinstance(error, TablesBusyError))
                raise

    def stop(self, query: StreamingQuery) -> None:
        """Waits until the current batch has ended, and stops the query. Spark alone would cancel the batch.

        Raises StreamingQueryException if this batch has failed.
        """
        self.stopping.set()
        with self.lock:
            pass
        query.stop()
        if self._has_failed and (error := query.exception()) is not None:
            raise error
