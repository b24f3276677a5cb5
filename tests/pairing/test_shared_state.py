"""The cell of a pair's attendance, with real timers (Y1)."""

import logging
import threading
import time
from datetime import timedelta

import pytest

from twinbus.backlog import FailureKind
from twinbus.pairing.attending import SharedBacklogWatch
from twinbus.pairing.decide.backlog_watch import LookDue, QueueNotSeen
from twinbus.pairing.sync.timeout_thread import ThreadTimer, TimeoutThread
from twinbus.pairing.sync.timeouts import Workers


class ClosingHandler(logging.Handler):
    """Closes the cell in another thread, and waits for that."""

    def __init__(self, cell: SharedBacklogWatch) -> None:
        super().__init__(logging.WARNING)
        self._cell = cell
        self.told = ""
        self.closed = False

    def emit(self, record: logging.LogRecord) -> None:
        self.told = record.getMessage()
        closing = threading.Thread(target=self._cell.close, daemon=True)
        closing.start()
        closing.join(2.0)
        self.closed = not closing.is_alive()


def test_y1_a_log_handler_that_is_told_of_a_refusal_does_not_hold_up_the_pair(request: pytest.FixtureRequest) -> None:
    keeper = TimeoutThread("time", Workers("work").run)
    hour = timedelta(hours=1)
    passed = timedelta(0)
    cell = SharedBacklogWatch(
        hour,
        hour,
        lambda due: ThreadTimer(keeper, due),
        lambda *_: None,
        lambda _: None,
        now=lambda: time.monotonic() + passed.total_seconds(),
    )
    request.addfinalizer(keeper.stop)
    handler = ClosingHandler(cell)
    log = logging.getLogger("twinbus.pairing")
    log.addHandler(handler)
    request.addfinalizer(lambda: log.removeHandler(handler))
    cell.used("b0")
    passed = hour
    cell.advance(LookDue())
    cell.advance(QueueNotSeen("b0", FailureKind.UNAUTHORIZED))
    assert "b0 may not be looked at" in handler.told
    assert handler.closed
    assert cell.attendance.ended
