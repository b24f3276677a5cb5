"""Starting a stream on a machine that is busy.

Spark gives the Python of a source ten seconds to start, whatever it was told, and ends the query when it took longer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger(__name__)

_TOO_SLOW: Final = "Python worker failed to connect back"
_INITIALIZING: Final = "Initializing"
_TRIES: Final = 6
_LOOK_SECONDS: Final = 0.05


def started(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """A query whose source is at work, or that has ended for a reason of its own."""
    query = start()
    for _ in range(_TRIES - 1):
        while query.isActive and str(query.status["message"]).startswith(_INITIALIZING):
            time.sleep(_LOOK_SECONDS)
        if query.isActive or _TOO_SLOW not in str(query.exception()):
            break
        _log.warning("the Python of a source took too long to start, tried again")
        query = start()
    return query
