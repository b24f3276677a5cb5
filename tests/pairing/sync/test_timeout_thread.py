"""A sync pair in a process that can start no more threads: S3, S12."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from twinbus.pairing.sync.timeout_thread import ThreadTimer, TimeoutThread
from twinbus.pairing.sync.timeouts import Workers

SOON = 10.0


class Limit:
    """While this is active, no thread with this name can be started, as with a limit of processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names = ""
        self.refused = threading.Event()
        start = threading.Thread.start

        def limited(thread: threading.Thread) -> None:
            if self.names and thread.name.startswith(self.names):
                self.refused.set()
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    return Limit(monkeypatch)


class Sender:
    """The attributes of a sender of the SDK that exist before its link is opened."""

    _handler = _credential = None

    def __init__(self) -> None:
        self.ended = threading.Event()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "given_up":
            self.ended.set()


def thread_with(workers: Workers) -> TimeoutThread:
    return TimeoutThread("time", workers.run)


def armed(thread: TimeoutThread, due: Callable[[], Any]) -> None:
    ThreadTimer(thread, due).arm(time.monotonic())


def test_s12_a_call_that_cannot_be_watched_is_refused_and_the_next_has_its_deadline(limit: Limit) -> None:
    thread = thread_with(Workers("work"))
    refused, watched = Sender(), Sender()
    limit.names = "time"
    with pytest.raises(RuntimeError, match="thread"):
        thread.run(refused, lambda *_: pytest.fail("it ran"), time.monotonic())
    limit.names = ""
    assert thread.run(watched, lambda *_: watched.ended.wait(SOON), time.monotonic())
    # The refused call has ended: later calls of its sender are not interrupted.
    assert not refused.ended.is_set()


def test_s3_a_timer_that_no_thread_could_be_started_for_is_due_with_the_next(limit: Limit) -> None:
    thread = thread_with(Workers("work"))
    first, second = threading.Event(), threading.Event()
    limit.names = "time"
    armed(thread, first.set)
    limit.names = ""
    armed(thread, second.set)
    assert first.wait(SOON)
    assert second.wait(SOON)


def test_s3_a_timer_that_finds_no_worker_is_due_again(limit: Limit) -> None:
    thread = thread_with(Workers("work"))
    due = threading.Event()
    limit.names = "work"
    armed(thread, due.set)
    assert limit.refused.wait(SOON)
    limit.names = ""
    assert due.wait(SOON)


def test_a_job_for_which_no_thread_can_be_started_is_done_when_one_can(limit: Limit) -> None:
    thread = thread_with(Workers("work"))
    done = threading.Event()
    limit.names = "work"
    thread.soon(done.set)
    assert limit.refused.is_set()
    limit.names = ""
    assert done.wait(SOON)


def test_c3_workers_of_which_one_could_not_be_started_can_be_stopped(limit: Limit) -> None:
    workers = Workers("work")
    limit.names = "work"
    with pytest.raises(RuntimeError, match="thread"):
        workers.run(lambda: None)
    workers.stop(SOON)
    assert limit.refused.is_set()
