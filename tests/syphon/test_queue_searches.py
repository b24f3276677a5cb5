"""When a syphon searches for backlog queues (Y1, Y2), without I/O."""

from __future__ import annotations

from math import inf

from twinbus.syphon.plan import QueueSearches


def test_y1_the_first_search_is_due_at_once() -> None:
    assert QueueSearches().due == -inf


def test_y1_while_no_queue_is_known_the_pauses_grow_to_a_minute_and_stay_there() -> None:
    searches = QueueSearches()
    assert [searches.succeeded(100.0, known=0, new=0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert searches.due == 160.0


def test_y1_a_search_that_found_a_new_queue_is_repeated_after_a_minute_and_then_every_hour() -> None:
    searches = QueueSearches()
    searches.succeeded(0.0, known=0, new=0)
    assert searches.succeeded(1.0, known=3, new=3) == 60
    assert searches.succeeded(61.0, known=10, new=7) == 60
    assert searches.succeeded(121.0, known=10, new=0) == 3600
    assert searches.due == 3721.0


def test_y1_the_pauses_after_failures_grow_anew_after_each_success() -> None:
    searches = QueueSearches()
    assert [searches.failed(0.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    searches.succeeded(0.0, known=2, new=2)
    assert searches.failed(5.0) == 1
    assert searches.due == 6.0


def test_y1_a_search_that_is_wanted_is_due_at_once_and_only_once() -> None:
    searches = QueueSearches()
    searches.succeeded(0.0, known=2, new=0)
    searches.search_now()
    assert searches.due == -inf
    searches.began()
    searches.succeeded(5.0, known=2, new=0)
    assert searches.due == 3605.0


def test_y1_a_search_that_is_wanted_during_a_search_follows_it() -> None:
    searches = QueueSearches()
    searches.began()
    searches.search_now()
    searches.succeeded(0.0, known=0, new=0)
    assert searches.due == -inf
