"""What moves next (Y5, Y6): every kind of failure in every state, pauses, probes, and numbers that are never lost."""

from math import inf
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.backlog import FailureKind
from twinbus.syphon.plan import (
    SCAN_INTERVAL,
    DeferredMessages,
    DestinationRoute,
    Destinations,
    FailedSendAction,
    Readiness,
    RetryPolicy,
)
from twinbus.syphon.plan.deferred import RESCAN_AFTER_MISSING
from twinbus.syphon.plan.destinations import MAX_DESTINATIONS
from twinbus.syphon.progress import MAX_COUNTED_DESTINATIONS, OTHER_DESTINATIONS, ProgressCounter

POLICY = RetryPolicy(first_pause=1.0, longest_pause=8.0, gone_after=100.0)
MESSAGES_FAULT = {FailureKind.MESSAGE_TOO_LARGE, FailureKind.BAD_MESSAGE}
OWN_END = {FailureKind.CANCELLED, FailureKind.CLOSED}
RETRIED = {FailureKind.CONNECTION_LOST, FailureKind.DETACHED}
NOT_READY = set(FailureKind) - MESSAGES_FAULT - OWN_END


class Seen(NamedTuple):
    """A message of a scan."""

    sequence_number: int
    deferred: bool
    path: str | None
    scheduled: bool = False


def failed(
    found: Destinations, epoch: int, kind: FailureKind, now: float, *, retried: bool = True, messages: int = 5
) -> FailedSendAction:
    return found.failed("q", epoch, kind, now, 0.0, retried=retried, messages=messages)


def readiness(found: Destinations) -> Readiness:
    return found.statuses()[0].readiness


def put_aside(found: Destinations, kind: FailureKind = FailureKind.TIMEOUT, now: float = 0.0) -> int:
    failed(found, found.route("q", now).epoch, kind, now)
    return found.route("q", now).epoch


class TestDestinations:
    def test_an_unknown_destination_is_tried(self) -> None:
        assert Destinations().route("q", 0.0).route is DestinationRoute.SEND

    @pytest.mark.parametrize("kind", sorted(NOT_READY))
    def test_whatever_is_no_fault_of_a_message_puts_its_destination_aside(self, kind: FailureKind) -> None:
        found = Destinations(POLICY)
        assert failed(found, 0, kind, 0.0) is FailedSendAction.PUT_ASIDE
        assert readiness(found) is Readiness.ASIDE
        assert found.route("q", 0.5).route is DestinationRoute.PUT_ASIDE

    @pytest.mark.parametrize("kind", sorted(FailureKind))
    def test_a_broken_connection_is_tried_once_more_at_once_and_nothing_else_is(self, kind: FailureKind) -> None:
        verdict = failed(Destinations(POLICY), 0, kind, 0.0, retried=False)
        assert (verdict is FailedSendAction.RETRY) == (kind in RETRIED)

    @pytest.mark.parametrize("kind", sorted(MESSAGES_FAULT))
    def test_a_message_that_spoils_the_others_is_found_and_dead_lettered(self, kind: FailureKind) -> None:
        found = Destinations(POLICY)
        assert failed(found, 0, kind, 0.0, messages=2) is FailedSendAction.SPLIT
        assert failed(found, 0, kind, 0.0, messages=1) is FailedSendAction.DEAD_LETTER
        assert readiness(found) is Readiness.READY

    @pytest.mark.parametrize("kind", sorted(OWN_END))
    def test_messages_of_a_send_that_the_syphon_cancelled_are_abandoned(self, kind: FailureKind) -> None:
        found = Destinations(POLICY)
        assert failed(found, 0, kind, 0.0) is FailedSendAction.ABANDON
        assert readiness(found) is Readiness.READY

    def test_after_the_pause_one_message_probes_and_only_one(self) -> None:
        found = Destinations(POLICY)
        put_aside(found)
        assert found.route("q", 0.9).route is DestinationRoute.PUT_ASIDE
        assert found.route("q", 1.0).route is DestinationRoute.PROBE
        assert found.route("q", 1.0).route is DestinationRoute.PUT_ASIDE
        assert found.due("q") == inf

    def test_a_probe_that_succeeds_brings_the_destination_back(self) -> None:
        found = Destinations(POLICY)
        put_aside(found)
        probe = found.route("q", 1.0)
        assert found.succeeded("q", probe.epoch, 1.1)
        assert found.route("q", 1.1).route is DestinationRoute.SEND

    def test_a_probe_that_was_void_lets_another_go(self) -> None:
        found = Destinations(POLICY)
        put_aside(found)
        found.void("q", found.route("q", 1.0).epoch)
        assert found.route("q", 1.0).route is DestinationRoute.PROBE

    def test_pauses_grow_to_the_longest(self) -> None:
        found, now, pauses = Destinations(POLICY), 0.0, []
        put_aside(found)
        for _ in range(5):
            pauses.append(found.due("q") - now)
            now = found.due("q")
            failed(found, found.route("q", now).epoch, FailureKind.TIMEOUT, now)
        assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0]

    def test_chance_shortens_a_pause_by_half_at_most(self) -> None:
        found = Destinations(POLICY)
        found.failed("q", 0, FailureKind.TIMEOUT, 0.0, 1.0, retried=True, messages=1)
        assert found.due("q") == 0.5

    def test_a_destination_that_comes_and_goes_pauses_longer_each_time(self) -> None:
        found = Destinations(POLICY)
        put_aside(found)
        found.succeeded("q", found.route("q", 1.0).epoch, 1.0)
        put_aside(found, now=1.5)
        assert found.due("q") == 1.5 + 2.0

    def test_a_destination_that_was_ready_as_long_as_its_pause_starts_with_the_first_pause(self) -> None:
        found = Destinations(POLICY)
        put_aside(found)
        found.succeeded("q", found.route("q", 1.0).epoch, 1.0)
        put_aside(found, now=2.0)
        assert found.due("q") == 2.0 + 1.0

    def test_what_was_in_flight_when_it_was_put_aside_changes_nothing_more(self) -> None:
        found = Destinations(POLICY)
        put_aside(found)
        assert failed(found, 0, FailureKind.TIMEOUT, 0.5) is FailedSendAction.PUT_ASIDE
        assert not found.succeeded("q", 0, 0.6)
        assert found.due("q") == 1.0

    def test_paths_are_one_whatever_their_case(self) -> None:
        found = Destinations(POLICY)
        put_aside(found)
        assert found.route("/Q/", 0.5).route is DestinationRoute.PUT_ASIDE


class TestGone:
    def gone(self) -> Destinations:
        found, now = Destinations(POLICY), 0.0
        put_aside(found, FailureKind.ENTITY_NOT_FOUND)
        while readiness(found) is Readiness.ASIDE:
            now = found.due("q")
            verdict = failed(found, found.route("q", now).epoch, FailureKind.ENTITY_NOT_FOUND, now)
            assert (verdict is FailedSendAction.DEAD_LETTER) == (now >= POLICY.gone_after)
        assert now >= POLICY.gone_after
        return found

    def test_not_found_for_long_enough_it_is_gone_and_its_messages_are_dead_lettered(self) -> None:
        found = self.gone()
        assert found.route("q", found.statuses()[0].until - 0.1).route is DestinationRoute.DEAD_LETTER
        assert found.due("q") == -inf

    def test_a_destination_that_is_gone_is_probed_and_nothing_is_dead_lettered_meanwhile(self) -> None:
        found = self.gone()
        later = found.statuses()[0].until
        probe = found.route("q", later)
        assert probe.route is DestinationRoute.PROBE
        assert found.route("q", later).route is DestinationRoute.PUT_ASIDE
        found.succeeded("q", probe.epoch, later)
        assert found.route("q", later).route is DestinationRoute.SEND

    @pytest.mark.parametrize("kind", [FailureKind.TIMEOUT, FailureKind.UNAUTHORIZED])
    def test_another_failure_in_between_restarts_the_time_until_gone(self, kind: FailureKind) -> None:
        found = Destinations(POLICY)
        put_aside(found, FailureKind.ENTITY_NOT_FOUND)
        failed(found, found.route("q", 50.0).epoch, kind, 50.0)
        failed(found, found.route("q", 110.0).epoch, FailureKind.ENTITY_NOT_FOUND, 110.0)
        assert readiness(found) is Readiness.ASIDE


class TestDeferredMessages:
    def test_numbers_come_back_once_a_probe_of_one_has_succeeded(self) -> None:
        found = Destinations(POLICY)
        deferred = DeferredMessages(found)
        put_aside(found)
        deferred.add("q", range(1, 6))
        assert deferred.recall(0.5, 100) is None
        assert deferred.due(0.5) == 1.0
        probe = deferred.recall(1.0, 100)
        assert probe is not None
        assert probe.numbers == (1,)
        assert probe.probe is not None
        assert deferred.recall(1.0, 100) is None
        found.succeeded("q", probe.probe, 1.0)
        deferred.recall_ended(probe, 0, 1.0)
        rest = deferred.recall(1.0, 3)
        assert rest is not None
        assert rest.numbers == (2, 3, 4)

    def test_a_probe_whose_message_is_gone_lets_the_next_go(self) -> None:
        found = Destinations(POLICY)
        deferred = DeferredMessages(found)
        put_aside(found)
        deferred.add("q", range(1, 100))
        probe = deferred.recall(1.0, 100)
        assert probe is not None
        deferred.recall_ended(probe, 1, 1.0)
        again = deferred.recall(1.0, 100)
        assert again is not None
        # Not one by one: another syphon may have taken them all.
        assert again.numbers == (2, 3, 4, 5)
        assert again.probe is not None

    def test_nothing_put_aside_is_nothing_to_bring_back(self) -> None:
        found = Destinations(POLICY)
        deferred = DeferredMessages(found)
        put_aside(found)
        deferred.add("q", ())
        assert deferred.recall(1.0, 100) is None
        assert found.route("q", 1.0).route is DestinationRoute.PROBE

    def test_destinations_take_turns(self) -> None:
        deferred = DeferredMessages(Destinations(POLICY))
        deferred.add("a", range(10))
        deferred.add("b", range(10, 20))
        paths = [recall.path for _ in range(4) if (recall := deferred.recall(0.0, 2))]
        assert paths == ["a", "b", "a", "b"]

    def test_those_without_a_destination_come_back_to_be_dead_lettered(self) -> None:
        deferred = DeferredMessages(Destinations(POLICY))
        deferred.add(None, (5,))
        recall = deferred.recall(0.0, 10)
        assert recall is not None
        assert recall.numbers == (5,)

    def test_a_scan_runs_when_the_queue_is_first_empty_then_every_six_hours(self) -> None:
        deferred = DeferredMessages(Destinations(POLICY))
        assert deferred.next_scan(0.0) is None
        deferred.schedule_first_scan(10.0)
        assert deferred.next_scan(10.0) == 0
        deferred.scanned([Seen(3, True, "q"), Seen(4, False, "q"), Seen(9, True, "q")])
        assert deferred.next_scan(10.0) == 10
        deferred.scanned([])
        assert deferred.next_scan(11.0) is None
        recall = deferred.recall(11.0, 10)
        assert recall is not None
        assert recall.numbers == (3, 9)
        deferred.recall_ended(recall, 0, 12.0)
        deferred.schedule_first_scan(20.0)
        assert deferred.next_scan(20.0) is None
        assert deferred.due(20.0) == 10.0 + SCAN_INTERVAL
        assert deferred.next_scan(10.0 + SCAN_INTERVAL) == 0

    def test_nothing_is_recalled_during_a_scan_nor_scanned_during_a_recall(self) -> None:
        deferred = DeferredMessages(Destinations(POLICY))
        deferred.add("q", (1, 2))
        recall = deferred.recall(0.0, 1)
        assert recall is not None
        deferred.schedule_scan(0.0)
        assert deferred.next_scan(0.0) is None
        assert deferred.recall(0.0, 1) is None
        assert deferred.due(0.0) == inf
        deferred.recall_ended(recall, 0, 0.0)
        assert deferred.next_scan(0.0) == 0
        assert deferred.recall(0.0, 1) is None

    def test_messages_that_another_receiver_holds_are_scanned_for_again(self) -> None:
        deferred = DeferredMessages(Destinations(POLICY))
        deferred.add("q", (1, 2))
        recall = deferred.recall(0.0, 2)
        assert recall is not None
        deferred.recall_ended(recall, 1, 5.0)
        assert deferred.due(5.0) == 5.0 + RESCAN_AFTER_MISSING

    def test_kept_ones_are_not_brought_back(self) -> None:
        deferred = DeferredMessages(Destinations(POLICY))
        deferred.keep((4,))
        deferred.schedule_scan(0.0)
        deferred.next_scan(0.0)
        deferred.scanned([Seen(4, True, "q")])
        deferred.scanned([])
        assert deferred.recall(1.0, 10) is None
        assert deferred.is_known
        assert deferred.is_empty()
        assert not deferred.unavailable()
        assert deferred.kept == 1

    def test_the_destination_with_the_most_numbers_is_forgotten_first_and_found_by_a_scan(self) -> None:
        deferred = DeferredMessages(Destinations(POLICY), limit=100)
        deferred.add("small", range(1000, 1005))
        deferred.add("large", range(200))
        assert len(deferred) <= 100
        got: set[int] = set()
        while recall := deferred.recall(0.0, 50):
            got.update(recall.numbers)
            deferred.recall_ended(recall, 0, 0.0)
        assert {*range(1000, 1005)} < got
        start = deferred.next_scan(0.0)
        assert start is not None
        assert {*range(start)} <= got
        assert not deferred.is_empty()

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 10**12)), max_size=200), st.integers(1, 30))
    def test_every_number_comes_back_exactly_once(self, given: list[tuple[str, int]], count: int) -> None:
        deferred = DeferredMessages(Destinations(POLICY))
        for path, number in given:
            deferred.add(path, (number,))
        got: list[tuple[str, int]] = []
        while recall := deferred.recall(0.0, count):
            assert len(recall.numbers) <= count
            got += [(recall.path, number) for number in recall.numbers]
            deferred.recall_ended(recall, 0, 0.0)
        assert sorted(got) == sorted(set(given))
        assert deferred.is_empty()

    @given(st.sets(st.integers(1, 5000), max_size=400), st.integers(1, 50), st.integers(1, 40))
    def test_with_room_for_few_every_number_still_comes_back(self, numbers: set[int], limit: int, page: int) -> None:
        deferred, there, now = DeferredMessages(Destinations(POLICY), limit), set(numbers), 0.0
        deferred.add("q", sorted(numbers))
        for _ in range(20 * len(numbers) + 20):
            if (start := deferred.next_scan(now)) is not None:
                deferred.scanned([Seen(number, True, "q") for number in sorted(there) if number >= start][:page])
            elif recall := deferred.recall(now, 7):
                there -= set(recall.numbers)
                deferred.recall_ended(recall, 0, now)
        assert not there
        assert len(deferred) == 0


def test_of_destinations_that_were_never_left_aside_only_so_many_are_known() -> None:
    destinations = Destinations()
    routed = destinations.route("broken", 0.0)
    destinations.failed("broken", routed.epoch, FailureKind.ENTITY_DISABLED, 0.0, 0.0, retried=True, messages=1)
    for number in range(3 * MAX_DESTINATIONS):
        destinations.route(f"orders-{number}", 1.0)
    states = destinations.statuses()
    assert len(states) <= MAX_DESTINATIONS
    assert next(one for one in states if one.path == "broken").readiness is Readiness.ASIDE


def test_what_goes_to_very_many_destinations_is_counted_for_the_first_of_them_and_together() -> None:
    counts = ProgressCounter(0.0)
    for number in range(MAX_COUNTED_DESTINATIONS + 100):
        counts.returned(f"orders-{number}", 1, 10, 0.0)
    assert len(counts.by_destination) == MAX_COUNTED_DESTINATIONS + 1
    assert counts.by_destination[OTHER_DESTINATIONS].returned == 100
    assert counts.total.returned == MAX_COUNTED_DESTINATIONS + 100


# --- Y12 -------------------------------------------------------------------------------------------------------------


def test_y12_a_destination_that_is_said_to_work_again_is_probed_at_once_and_put_aside_as_before_if_it_fails() -> None:
    found = Destinations(POLICY)
    for at in (0.0, 10.0, 20.0):
        epoch = found.route("q", at).epoch
        failed(found, epoch, FailureKind.TIMEOUT, at)
    assert found.due("q") == 24.0
    found.retry_now("/Q", 21.0)
    assert found.due("q") == 21.0
    route, epoch = found.route("q", 21.0)
    assert route is DestinationRoute.PROBE
    failed(found, epoch, FailureKind.TIMEOUT, 22.0)
    assert found.due("q") == 30.0


def test_y12_a_probe_that_began_before_the_restore_is_followed_by_another_one_if_it_fails() -> None:
    found = Destinations(POLICY)
    failed(found, found.route("q", 0.0).epoch, FailureKind.TIMEOUT, 0.0)
    epoch = found.route("q", 5.0).epoch
    found.retry_now("q", 6.0)
    assert found.due("q") == inf
    failed(found, epoch, FailureKind.TIMEOUT, 7.0)
    assert found.due("q") == 7.0
    failed(found, found.route("q", 7.0).epoch, FailureKind.TIMEOUT, 8.0)
    assert found.due("q") > 8.0


def test_y12_a_ready_or_unknown_destination_stays_as_it_is() -> None:
    found = Destinations(POLICY)
    found.route("q", 0.0)
    for path in ("q", "unknown"):
        found.retry_now(path, 1.0)
        assert found.due(path) == -inf
