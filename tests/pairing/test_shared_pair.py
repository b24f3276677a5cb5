"""Which of the pairs of one process acts for all of them (P3)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from twinbus.backlog import Endpoint
from twinbus.pairing.decide.failover_events import FailoverForced
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.shared_pair import DEPUTY_SECONDS, SharedPair
from twinbus.pairing.shared_state import SharedEntity

ENDPOINTS = (Endpoint.of("primary", 5671), Endpoint.of("secondary", 5671))
FORCED_AT = 100.0


class Timer:
    def __init__(self, due: Callable[[], object]) -> None:
        self.due = due
        self.at: float | None = None

    def arm(self, at: float) -> None:
        self.at = at

    def disarm(self) -> None:
        self.at = None


class Member:
    """A pair with an event loop, and its driver."""

    state_access = None

    def __init__(self, shared: SharedPair) -> None:
        self.home, self.driver, self.is_alive = object(), self, True
        self.timers: list[Timer] = []
        self.pings: list[int] = []
        shared.join(cast(Any, self))
        shared.changed()

    def leave(self, shared: SharedPair) -> None:
        shared.leave(cast(Any, self), closes=True)

    def show_in_metrics(self) -> None:
        pass

    def timer(self, due: Callable[[], object]) -> Timer:
        self.timers.append(timer := Timer(due))
        return timer

    def ping(self, entity: SharedEntity, episode: int) -> None:
        self.pings.append(episode)

    def stop_ping(self, entity: SharedEntity) -> None:
        pass

    def emit(self, notice: object) -> None:
        pass

    def fire(self, now: float) -> None:
        for timer in self.timers:
            if timer.at is not None and timer.at <= now:
                timer.disarm()
                timer.due()


def failed_over_pair(now: Callable[[], float]) -> tuple[SharedPair, list[Member]]:
    """Returns a pair of three members, in an event loop each, whose one entity was just failed over."""
    options = SendAvailabilityOptions(ping_jitter=0.0)
    shared = SharedPair(ENDPOINTS, options, "primary", ("b0",), now=now)
    members = [Member(shared) for _ in range(3)]
    SharedEntity("orders", options.policy, shared, now=now).advance(FailoverForced())
    return shared, members


def test_p3_a_ping_replaces_a_deputy_whose_event_loop_was_closed() -> None:
    now = FORCED_AT
    shared, (acting, deputy, third) = failed_over_pair(lambda: now)
    deputy.is_alive = False
    now += 60.0
    acting.fire(now)
    assert (acting.pings, shared.drivers) == ([1], (acting, third))
    # The ping never ends, because its event loop was closed. The third member notices, and pings.
    acting.is_alive = False
    now += 60.0 + DEPUTY_SECONDS
    third.fire(now)
    third.fire(now + DEPUTY_SECONDS)
    assert third.pings == [1]


def test_p3_a_ping_goes_on_although_the_loops_of_the_acting_member_and_of_a_deputy_were_closed_together() -> None:
    now = FORCED_AT
    _, (acting, deputy, third) = failed_over_pair(lambda: now)
    acting.is_alive = deputy.is_alive = False
    now += 60.0 + 2 * DEPUTY_SECONDS
    third.fire(now)
    assert third.pings == [1]


@pytest.mark.parametrize("joins", ["before the end", "after the end"])
def test_p3_s16_a_pair_that_begins_while_the_last_one_closes_goes_on_with_the_shared_state(
    joins: str, tmp_path: Path
) -> None:
    shared = SharedPair(ENDPOINTS, SendAvailabilityOptions(state=tmp_path), "primary", ("b0",))
    assert shared.sharing is not None
    finished: list[bool] = []
    first = Member(shared)
    made = cast(Any, UnusedPair())
    shared.made.add(made)
    shared.sharing.on_finished.add(lambda: finished.append(True))
    shared.sharing.hold("orders")
    assert shared.sharing.finish() > 0
    if joins == "before the end":
        Member(shared)
        assert finished == [True]
    first.leave(shared)
    assert not shared.sharing._finishing


class UnusedPair:
    """A pair that was made, and whose namespaces are not paired yet."""
