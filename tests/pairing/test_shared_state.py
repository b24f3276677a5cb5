"""The watch on the backlog, with real timers (Y1)."""

import logging
import threading
import time
from datetime import timedelta

import pytest

from twinbus.backlog import FailureKind
from twinbus.pairing.decide.backlog_watch import CheckDue, MessageDiverted, PeekFailed
from twinbus.pairing.shared_state import SharedBacklogWatch
from twinbus.pairing.sync.timeout_thread import ThreadTimer, TimeoutThread
from twinbus.pairing.sync.timeouts import Workers


class ClosingHandler(logging.Handler):
    """Closes the watch in another thread, and waits for that."""

    def __init__(self, watch: SharedBacklogWatch) -> None:
        super().__init__(logging.WARNING)
        self._watch = watch
        self.text = ""
        self.closed = False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
        closing = threading.Thread(target=self._watch.close, daemon=True)
        closing.start()
        closing.join(2.0)
        self.closed = not closing.is_alive()


def test_y1_a_log_handler_that_blocks_does_not_hold_the_lock_of_the_watch(request: pytest.FixtureRequest) -> None:
    thread = TimeoutThread("time", Workers("work").run)
    hour = timedelta(hours=1)
    passed = timedelta(0)
    watch = SharedBacklogWatch(
        hour,
        hour,
        lambda due: ThreadTimer(thread, due),
        lambda *_: None,
        lambda _: None,
        now=lambda: time.monotonic() + passed.total_seconds(),
    )
    request.addfinalizer(thread.stop)
    handler = ClosingHandler(watch)
    log = logging.getLogger("twinbus.pairing")
    log.addHandler(handler)
    request.addfinalizer(lambda: log.removeHandler(handler))
    watch.advance(MessageDiverted("b0"))
    passed = hour
    watch.advance(CheckDue())
    watch.advance(PeekFailed("b0", FailureKind.UNAUTHORIZED))
    assert "b0 cannot be checked" in handler.text
    assert handler.closed
    assert watch.watch.closed
