"""Which thread changes the tables: that of the batches of a query, or another one. Ends a query between two batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql.streaming.query import StreamingQuery

from twinbus.errors import OperatorError


class BatchTurns:
    """The turns of the threads that change the tables."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by the thread that changes the tables."""
        self._is_stopped = False

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Has the turn inside the `with` block, for a batch. Raises OperatorError after `stop`."""
        with self.lock:
            if self._is_stopped:
                raise OperatorError("the query was stopped", "Start it again: it goes on with this batch.")
            yield

    def stop(self, query: StreamingQuery) -> None:
        """Stops the query when its batch has ended. Spark alone would cancel the batch."""
        with self.lock:
            self._is_stopped = True
        query.stop()
