"""N4: which operations a fault hits, repeatably, and which faults are invalid."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.namespace.faults import FaultKind, FaultPoint, Faults, FaultSpecError


class HandClock:
    """A clock that shows the same instant until a test moves it."""

    def __init__(self) -> None:
        self.milliseconds = 1_000_000

    def now(self) -> int:
        return self.milliseconds


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def faults(clock: HandClock) -> Faults:
    return Faults(clock, new_seed=lambda: 7)


def hits(faults: Faults, point: FaultPoint = FaultPoint.SEND, times: int = 200, entity: str = "orders") -> list[bool]:
    return [faults.trigger(point, entity) is not None for _ in range(times)]


def test_a_namespace_without_faults_is_never_hit(faults: Faults) -> None:
    assert not faults.active
    assert [faults.trigger(point, "orders", "link") for point in FaultPoint] == [None] * len(FaultPoint)


def test_a_fault_hits_until_it_is_cleared(faults: Faults) -> None:
    made = faults.set({"kind": "server-busy"})
    struck = faults.trigger(FaultPoint.SEND, "orders")
    assert struck is not None
    assert struck.kind is FaultKind.SERVER_BUSY
    assert faults.clear(made["id"]) == 1
    assert faults.trigger(FaultPoint.SEND, "orders") is None
    assert not faults.active


def test_clearing_without_an_id_clears_all_and_an_unknown_id_clears_none(faults: Faults) -> None:
    faults.set({"kind": "server-busy"})
    faults.set({"kind": "detach"})
    assert faults.clear("17") == 0
    assert faults.clear() == 2
    assert faults.list() == []


@pytest.mark.parametrize(
    ("kind", "points"),
    [
        ("refuse", {"connect"}),
        ("black-hole", set(FaultPoint)),
        ("delay", set(FaultPoint) - {"connect"}),
        ("server-busy", {"attach", "send", "request"}),
        ("detach", {"send", "receive"}),
        ("internal-error", {"attach", "send", "settle", "request"}),
        ("drop-ack", {"send", "settle"}),
    ],
)
def test_a_kind_hits_its_own_points_when_none_are_named(faults: Faults, kind: str, points: set[str]) -> None:
    faults.set({"kind": kind, **({"delay": 1} if kind == "delay" else {})})
    assert {point for point in FaultPoint if faults.trigger(point, "orders", "link")} == points


def test_named_points_replace_the_defaults(faults: Faults) -> None:
    faults.set({"kind": "server-busy", "points": ["settle"]})
    assert [point for point in FaultPoint if faults.trigger(point, "orders")] == [FaultPoint.SETTLE]


@pytest.mark.parametrize(
    ("path", "struck"),
    [
        ("orders", True),
        ("Orders", True),
        ("orders/$deadletterqueue", True),
        ("orders/$management", True),
        ("orders/Subscriptions/audit", True),
        ("orders/2024", False),
        ("orders2", False),
        ("order", False),
        (None, False),
    ],
)
def test_a_fault_of_an_entity_hits_its_parts_and_no_entity_with_a_longer_name(
    faults: Faults, path: str | None, struck: bool
) -> None:
    faults.set({"kind": "server-busy", "entity": "orders"})
    assert (faults.trigger(FaultPoint.SEND, path) is not None) is struck


def test_a_fault_of_a_link_hits_that_link_and_takes_a_pattern(faults: Faults) -> None:
    faults.set({"kind": "detach", "link": "sender-1"})
    faults.set({"kind": "server-busy", "link": "receiver-*"})
    assert faults.trigger(FaultPoint.SEND, "orders", "sender-2") is None
    assert faults.trigger(FaultPoint.SEND, "orders", None) is None
    assert [
        fault.kind for link in ("sender-1", "receiver-9") if (fault := faults.trigger(FaultPoint.SEND, "orders", link))
    ] == [
        FaultKind.DETACH,
        FaultKind.SERVER_BUSY,
    ]


def test_a_count_is_used_up_by_hits_alone(faults: Faults) -> None:
    faults.set({"kind": "server-busy", "entity": "orders", "count": 2})
    assert hits(faults, times=3, entity="other") == [False] * 3
    assert hits(faults, times=4) == [True, True, False, False]
    assert not faults.active


def test_a_duration_ends_a_fault(faults: Faults, clock: HandClock) -> None:
    faults.set({"kind": "server-busy", "duration": 1.5})
    assert faults.next_end() == clock.now() + 1500
    clock.milliseconds += 1499
    assert hits(faults, times=1) == [True]
    clock.milliseconds += 1
    assert hits(faults, times=1) == [False]
    assert faults.next_end() is None


@given(seed=st.integers(0, 2**64), probability=st.floats(0.05, 0.95))
def test_the_same_seed_and_the_same_operations_give_the_same_hits(seed: int, probability: float) -> None:
    def run(noise: bool) -> list[bool]:
        faults = Faults(HandClock())
        faults.set({"kind": "drop-ack", "entity": "orders", "probability": probability, "seed": seed})
        struck = []
        for _ in range(50):
            if noise:
                faults.trigger(FaultPoint.SEND, "neighbour")
            struck += hits(faults, times=1)
        return struck

    assert run(noise=False) == run(noise=True)


def test_another_seed_gives_other_hits_at_about_the_probability_asked_for(clock: HandClock) -> None:
    def run(seed: int) -> list[bool]:
        faults = Faults(clock)
        faults.set({"kind": "server-busy", "probability": 0.25, "seed": seed})
        return hits(faults, times=2000)

    assert run(1) != run(2)
    assert 400 < sum(run(1)) < 600


def test_a_drawn_seed_is_returned_and_repeats_the_run(clock: HandClock) -> None:
    first, second = Faults(clock), Faults(clock)
    told = first.set({"kind": "server-busy", "probability": 0.5})
    second.set({"kind": "server-busy", "probability": 0.5, "seed": told["seed"]})
    assert hits(first) == hits(second)


def test_the_fault_set_first_wins_and_a_miss_goes_on_to_the_next(faults: Faults) -> None:
    faults.set({"kind": "server-busy", "points": ["attach"]})
    faults.set({"kind": "internal-error", "points": ["attach", "send"]})
    first, second = faults.trigger(FaultPoint.ATTACH), faults.trigger(FaultPoint.SEND)
    assert first is not None
    assert second is not None
    assert (first.kind, second.kind) == (FaultKind.SERVER_BUSY, FaultKind.INTERNAL_ERROR)


def test_only_a_black_hole_over_everything_blacks_out_the_namespace(faults: Faults, clock: HandClock) -> None:
    for narrower in ({"entity": "orders"}, {"link": "x"}, {"points": ["send"]}, {"probability": 0.5}, {"count": 1}):
        faults.set({"kind": "black-hole", **narrower})
        assert not faults.is_blacked_out
    faults.set({"kind": "black-hole", "duration": 2})
    assert faults.is_blacked_out
    clock.milliseconds += 2000
    assert not faults.is_blacked_out


def test_every_change_calls_the_listeners(faults: Faults, clock: HandClock) -> None:
    told: list[int] = []
    faults.on_change(lambda: told.append(len(faults.list())))
    faults.set({"kind": "black-hole", "duration": 1})
    clock.milliseconds += 1000
    faults.expire()
    faults.set({"kind": "server-busy", "count": 1})
    faults.trigger(FaultPoint.SEND)
    faults.set({"kind": "detach"})
    faults.clear()
    faults.clear()
    assert told == [1, 0, 1, 0, 1, 0]


def test_a_crash_without_points_is_immediate_and_one_with_points_waits(faults: Faults) -> None:
    faults.set({"kind": "crash", "points": ["send"], "after": True})
    assert not faults.crash_now
    struck = faults.trigger(FaultPoint.SEND)
    assert struck is not None
    assert struck.after
    faults.set({"kind": "crash"})
    assert faults.crash_now


def test_the_list_has_what_was_set_the_hits_and_the_remaining_time(faults: Faults, clock: HandClock) -> None:
    faults.set(
        {"kind": "delay", "delay": 0.2, "entity": "orders", "points": ["settle", "send"], "duration": 60, "count": 9}
    )
    faults.trigger(FaultPoint.SEND, "orders")
    clock.milliseconds += 15_000
    assert faults.list() == [
        {
            "id": "1",
            "kind": "delay",
            "entity": "orders",
            "link": None,
            "points": ["send", "settle"],
            "probability": 1.0,
            "count": 9,
            "duration": 60.0,
            "delay": 0.2,
            "seed": 7,
            "after": False,
            "hits": 1,
            "ends_in": 45.0,
        }
    ]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "kind: is missing; choose from refuse, black-hole,"),
        ({"kind": "flood"}, "kind: 'flood' is no kind of fault; choose from"),
        ({"kind": ["refuse"]}, "kind: "),
        ({"kind": "refuse", "points": ["send"]}, "points: 'refuse' cannot hit 'send'; it can hit connect"),
        ({"kind": "drop-ack", "points": [["send"]]}, "it can hit send, settle, request"),
        ({"kind": "drop-ack", "points": "send"}, "points: 'send' is not a list"),
        ({"kind": "refuse", "entity": "orders"}, "belong to no entity"),
        ({"kind": "server-busy", "probability": 0}, "probability: 0 is not a number above 0 and up to 1"),
        ({"kind": "server-busy", "probability": 1.1}, "probability: 1.1"),
        ({"kind": "server-busy", "probability": float("nan")}, "probability: nan"),
        ({"kind": "server-busy", "count": 0}, "count: 0 is not a whole number of 1 or more"),
        ({"kind": "server-busy", "count": True}, "count: True"),
        ({"kind": "server-busy", "duration": -1}, "duration: -1 is not a number of seconds above 0 and up to 604800"),
        ({"kind": "server-busy", "seed": "x"}, "seed: 'x'"),
        ({"kind": "server-busy", "entity": ""}, "entity: '' is not a name"),
        ({"kind": "server-busy", "delay": 1}, "only a fault of kind 'delay' has one, not 'server-busy'"),
        ({"kind": "delay"}, "needs its length in seconds"),
        ({"kind": "crash", "after": True}, "only a crash on send, settle or request can come after storing"),
        ({"kind": "crash", "points": ["send", "attach"], "after": True}, "only a crash on send"),
        ({"kind": "crash", "points": ["send"], "after": 1}, "after: 1 is neither true nor false"),
        ({"kind": "crash", "entity": "orders"}, "a crash that waits for an operation needs points"),
        ({"kind": "detach", "where": "x"}, "unknown: 'where'; a fault has kind, entity,"),
    ],
)
def test_an_invalid_fault_is_refused_with_the_wrong_field(faults: Faults, spec: dict[str, Any], said: str) -> None:
    with pytest.raises(FaultSpecError) as refused:
        faults.set(spec)
    assert said in str(refused.value)
    assert not faults.active
