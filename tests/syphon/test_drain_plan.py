"""The decisions of a drain (Y11), without I/O: when it ends, when a queue is scanned again, what is left and why."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.backlog import FailureKind
from twinbus.syphon.left_messages import DEAD_LETTERED, KEPT, SCHEDULED, UNAVAILABLE, QueueCounts, left_by_destination
from twinbus.syphon.plan import (
    DeferredMessages,
    Destinations,
    DestinationStatus,
    DrainEnd,
    QueueDrain,
    Readiness,
    RetryPolicy,
    WaitingDestination,
)
from twinbus.syphon.plan.queue_drain import SCAN_ANYWAY_AFTER
from twinbus.syphon.progress import MessageCounts, messages_that_can_move

POLICY = RetryPolicy(first_pause=1.0, longest_pause=300.0, gone_after=600.0)
PATIENCE = 65.0


class Seen(NamedTuple):
    """A message of a scan."""

    sequence_number: int
    deferred: bool
    path: str | None
    scheduled: bool = False


def put_aside(found: Destinations, path: str, now: float, kind: FailureKind = FailureKind.SERVER_BUSY) -> None:
    found.failed(path, found.route(path, now).epoch, kind, now, 0.0, retried=True, messages=1)


# --- when a drain ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failed_at", "failures", "is_over"),
    [
        (5.0, 1, False),  # before the drain was stuck
        (10.0, 5, False),  # the try that made the drain stuck
        (11.0, 1, False),  # the first try at all
        (11.0, 2, True),
    ],
)
def test_y11_a_drain_ends_once_each_destination_was_tried_again_after_nothing_else_could_move(
    failed_at: float, failures: int, is_over: bool
) -> None:
    end = DrainEnd()
    before = [WaitingDestination("a", 5.0, 1)]
    assert not end.is_over(9.0, 0, is_settled=False, waiting=before)
    assert end.last_try_at == inf
    assert not end.is_over(10.0, 0, is_settled=True, waiting=before)
    assert end.last_try_at == 10.0
    after = [WaitingDestination("a", failed_at, failures)]
    assert end.is_over(12.0, 0, is_settled=True, waiting=after) == is_over


def test_y11_one_destination_that_was_not_tried_again_keeps_a_drain_from_ending() -> None:
    end = DrainEnd()
    tried, untried = WaitingDestination("a", 11.0, 3), WaitingDestination("b", 9.0, 3)
    assert not end.is_over(10.0, 0, is_settled=True, waiting=[tried, untried])
    assert not end.is_over(12.0, 0, is_settled=True, waiting=[tried, untried])
    assert end.is_over(13.0, 0, is_settled=True, waiting=[tried, untried._replace(failed_at=12.5)])


def test_y11_without_a_waiting_destination_a_drain_does_not_wait() -> None:
    assert DrainEnd(600.0).is_over(1.0, 5, is_settled=True, waiting=[])


def test_y11_a_message_that_moves_starts_the_wait_anew() -> None:
    end = DrainEnd(100.0)
    waiting = [WaitingDestination("a", 9.0, 2)]
    end.is_over(10.0, 0, is_settled=True, waiting=waiting)
    assert end.last_try_at == 110.0
    assert not end.is_over(111.0, 1, is_settled=False, waiting=waiting)
    assert end.last_try_at == inf
    assert not end.is_over(112.0, 1, is_settled=True, waiting=[WaitingDestination("a", 111.0, 3)])
    assert end.last_try_at == 212.0


def test_y11_messages_that_are_only_put_aside_do_not_start_the_wait_anew() -> None:
    end = DrainEnd(100.0)
    waiting = [WaitingDestination("a", 9.0, 2)]
    end.is_over(10.0, 0, is_settled=True, waiting=waiting)
    end.is_over(50.0, 0, is_settled=False, waiting=waiting)
    assert end.last_try_at == 110.0


@given(
    wait=st.floats(0, 1000),
    steps=st.lists(st.tuples(st.floats(0.01, 50), st.booleans(), st.booleans(), st.booleans()), max_size=60),
)
def test_y11_a_drain_never_ends_before_its_wait_and_a_try_after_it(
    wait: float, steps: list[tuple[float, bool, bool, bool]]
) -> None:
    """Whatever happens: the last moved message, then at least `wait` seconds, then a failed try, then the end."""
    end, now, moved, last_move, one = DrainEnd(wait), 0.0, 0, 0.0, WaitingDestination("a", -inf, 0)
    for seconds, settled, moves, fails in steps:
        now += seconds
        if moves:
            moved, last_move = moved + 1, now
            one = WaitingDestination("a", -inf, 0)
        if fails:
            one = one._replace(failed_at=now, failures=one.failures + 1)
        if end.is_over(now, moved, is_settled=settled, waiting=[one]):
            assert one.failures >= 2
            assert one.failed_at > last_move + wait
            return


def test_y11_a_destination_is_probed_at_the_last_try_but_not_before_its_first_pause() -> None:
    found = Destinations(POLICY)
    for at in (0.0, 10.0, 20.0, 40.0, 80.0):
        put_aside(found, "q", at)
    assert found.due("q") == 96.0
    assert not found.retry_by("q", 100.0)
    assert found.retry_by("/Q", 70.0)
    assert found.due("q") == 81.0
    assert not found.retry_by("unknown", 0.0)
    assert found.waits("q") == WaitingDestination("q", 80.0, 5)
    assert found.waits("unknown") == WaitingDestination("unknown", -inf, 0)


# --- one queue -------------------------------------------------------------------------------------------------------


class Queue:
    """A queue of a drain, and its scans."""

    def __init__(self) -> None:
        self.destinations = Destinations(POLICY)
        self.deferred = DeferredMessages(self.destinations)
        self.drain = QueueDrain(self.deferred)

    def settled(self, now: float, moved: int = 0) -> bool:
        return self.drain.is_settled(now, moved, PATIENCE)

    def scan(self, now: float, *seen: Seen, moved: int = 0) -> None:
        assert self.deferred.next_scan(now) == 0
        self.drain.scan_began(moved)
        if seen:
            self.deferred.scanned(seen)
        self.deferred.scanned([])
        self.drain.scan_ended(now, has_failed=False)


def test_y11_a_queue_is_settled_only_after_a_scan_that_follows_its_last_move() -> None:
    queue = Queue()
    assert not queue.settled(10.0)
    queue.scan(10.0)
    assert queue.settled(10.0)
    assert not queue.settled(10.5, moved=1)
    assert queue.deferred.next_scan(10.5) is None  # the second scan has a pause before it
    assert queue.deferred.due(10.5) == 11.0
    queue.scan(11.0, moved=1)
    assert queue.settled(11.0, moved=1)


def test_y11_messages_that_are_put_aside_or_scheduled_are_settled_and_messages_that_can_move_are_not() -> None:
    queue = Queue()
    queue.settled(0.0)
    queue.scan(0.0, Seen(1, True, "away"), Seen(2, False, "away", True), Seen(3, True, "home"))
    put_aside(queue.destinations, "away", 0.0)
    assert not queue.settled(0.5)
    recall = queue.deferred.recall(0.5, 10)
    assert recall is not None
    assert recall.path == "home"
    queue.deferred.recall_ended(recall, 0, 0.6)
    assert queue.settled(0.6)
    assert queue.deferred.counts() == {"away": 1}
    assert queue.deferred.scheduled == {"away": 1}
    assert not queue.settled(1.0)  # the destination is due for a probe


def test_y11_messages_that_others_have_locked_are_looked_for_again_with_growing_pauses_and_then_given_up() -> None:
    queue, now, scans = Queue(), 0.0, []
    while not queue.settled(now):
        now = max(now, queue.deferred.due(now))
        scans.append(now)
        queue.scan(now, Seen(7, False, "home"))
    assert scans == [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 61.0, 65.0]
    assert queue.deferred.unavailable() == {"home": 1}


def test_y11_the_wait_for_locked_messages_starts_anew_while_they_get_fewer() -> None:
    queue = Queue()
    queue.settled(0.0)
    queue.scan(0.0, Seen(7, False, "home"), Seen(8, False, "home"))
    assert not queue.settled(0.0)
    queue.scan(60.0, Seen(8, False, "home"))
    assert not queue.settled(60.0)
    assert not queue.settled(124.9)
    assert queue.settled(125.0)


def test_y11_an_active_message_that_this_pump_receives_is_not_locked_by_another() -> None:
    queue = Queue()
    queue.settled(0.0)
    queue.scan(0.0, Seen(7, False, "home"))
    queue.deferred.received(iter([7]))
    assert queue.settled(0.0)


def test_y11_a_recall_that_missed_messages_counts_them_as_locked_until_a_scan() -> None:
    queue = Queue()
    queue.settled(0.0)
    queue.scan(0.0, Seen(7, True, "home"))
    recall = queue.deferred.recall(0.0, 10)
    assert recall is not None
    queue.deferred.recall_ended(recall, 1, 0.0)
    assert queue.deferred.unavailable() == {"home": 1}
    assert not queue.settled(0.0)
    queue.scan(1.0)
    assert not queue.deferred.unavailable()
    assert queue.settled(1.0)


def test_y11_a_settlement_without_an_answer_needs_another_scan() -> None:
    queue = Queue()
    queue.settled(0.0)
    queue.scan(0.0)
    queue.deferred.schedule_rescan(1.0)
    assert not queue.settled(1.0)
    queue.scan(1.0)
    assert queue.settled(1.0)


def test_y11_a_scan_that_failed_is_repeated_after_a_pause() -> None:
    queue = Queue()
    queue.settled(0.0)
    assert queue.deferred.next_scan(0.0) == 0
    queue.drain.scan_began(0)
    queue.deferred.schedule_rescan(0.0)
    queue.drain.scan_ended(0.0, has_failed=True)
    assert queue.deferred.due(0.0) == 1.0


def test_y11_a_queue_that_is_never_empty_is_scanned_once_nothing_was_moved_for_a_while() -> None:
    queue, now = Queue(), 100.0
    for number in range(1, 11):
        queue.drain.received(number, 3, now)
        assert queue.deferred.next_scan(now) is None
        now += 1.0
    queue.drain.received(11, 3, 100.0 + SCAN_ANYWAY_AFTER + 0.1)
    queue.scan(111.0, Seen(5, True, "away"), Seen(12, False, "away"), Seen(20, False, "home"), moved=3)
    assert not queue.drain.has_passed_scan(3)
    queue.drain.received(20, 3, 112.0)
    assert not queue.drain.has_passed_scan(3)  # number 20 was the last one of the scan
    queue.drain.received(21, 3, 113.0)
    assert queue.drain.has_passed_scan(3)
    assert not queue.drain.has_passed_scan(4)  # something moves again


def test_y11_forgotten_numbers_are_counted_too() -> None:
    deferred = DeferredMessages(Destinations(POLICY), limit=100)
    deferred.add("large", range(250))
    assert len(deferred) <= 100
    assert deferred.counts() == {"large": 250}


# --- what is left ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(FailureKind))
def test_y11_every_cause_has_plain_words_and_a_next_step(kind: FailureKind) -> None:
    status = DestinationStatus("Orders", Readiness.ASIDE, kind, 0.0, 2)
    (left,) = left_by_destination({"orders": 3}, [status], {}, [])
    assert (left.destination, left.messages, left.cause) == ("orders", 3, kind)
    assert left.why
    assert "_" not in left.why  # no name of the program
    assert "again" in left.next_step


def test_y11_each_destination_and_cause_has_a_row() -> None:
    counts = {
        "a": MessageCounts(returned=5, kept=1),
        "": MessageCounts(dead_lettered=3, dead_letter_reasons={"NoDestination": 2, "WrongAlias": 1}),
        "home": MessageCounts(returned=9),
    }
    queues = [
        QueueCounts("q0", Counter(a=1), Counter(b=2)),
        QueueCounts("q1", Counter(a=1), Counter(), FailureKind.TIMEOUT),
    ]
    left = left_by_destination({"a": 4}, [], counts, queues)
    assert [(one.destination, one.messages, one.cause, one.queue) for one in left] == [
        (None, 2, DEAD_LETTERED, None),
        (None, 1, DEAD_LETTERED, None),
        ("a", 4, "", None),
        ("a", 1, KEPT, None),
        ("a", 2, UNAVAILABLE, None),
        ("b", 2, SCHEDULED, None),
        (None, None, "timeout", "q1"),
    ]


@pytest.mark.parametrize(("backlog", "stuck", "expected"), [(None, 5, None), (100, 30, 70), (5, 7, 0)])
def test_y11_remaining_is_what_can_move(backlog: int | None, stuck: int, expected: int | None) -> None:
    assert messages_that_can_move(backlog, stuck) == expected
