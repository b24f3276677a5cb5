"""The comparison of a balance with a count finds every kind of contradiction, and nothing in a ledger that is right."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest

from tests.crash.ledger_oracle import contradictions, refused_returns
from twinbus.ledger import Balance, Intent, MessageKey, Outcome, Stage

A = MessageKey("contoso/orders", "a")


def booked(**words: int) -> Balance:
    """A balance in which the message `a` was accepted, and has these words."""
    found = Balance()
    for word, count in {"accepted": 1, **words}.items():
        getattr(found, word).update({A: count} if count else {})
    return found


def compared(
    found: Balance, arrived: Mapping[str, int], left: Collection[str] = (), *, is_over: bool = False
) -> list[str]:
    return contradictions(found, arrived=arrived, left=left, safe={"a"}, is_over=is_over)


@pytest.mark.parametrize(
    ("found", "arrived", "left"),
    [
        (booked(in_backlog=1), 0, True),
        (booked(unknown=1), 0, True),
        (booked(unknown=1), 1, True),
        (booked(delivered=1), 1, True),  # delivered, and not completed yet
        (booked(delivered=1), 1, False),
        (booked(delivered=1, possibly_duplicated=1), 1, False),
        (booked(delivered=1, possibly_duplicated=1), 2, False),
        (booked(delivered=1, duplicated=1), 2, False),
        (booked(delivered=1, duplicated=1, possibly_duplicated=1), 3, False),
    ],
)
def test_a_balance_that_agrees_with_the_count_has_no_contradictions(found: Balance, arrived: int, left: bool) -> None:
    assert compared(found, {"a": arrived}, {"a"} if left else ()) == []


@pytest.mark.parametrize(
    ("found", "arrived", "left", "says"),
    [
        (booked(accepted=0), 1, False, "a: reported safe, and the ledger has no acceptance"),
        (booked(in_backlog=1), 0, False, "a: is in no queue"),
        (booked(lost=1), 0, True, "a: lost by the ledger; 0 copies arrived, in the backlog: True"),
        (booked(delivered=1), 0, True, "a: delivered by the ledger, and not on the primary"),
        (booked(unknown=1), 1, False, "a: completed in the backlog, and not delivered by the ledger"),
        (booked(in_backlog=1), 1, False, "a: in the backlog by the ledger; 1 copies arrived, in the backlog: False"),
        (booked(in_backlog=1), 1, True, "a: in the backlog by the ledger; 1 copies arrived, in the backlog: True"),
        (booked(delivered=1), 2, False, "a: 2 copies, and 0 + 0 further ones by the ledger"),
        (booked(delivered=1, duplicated=1), 1, False, "a: 1 copies, and 1 certain duplicates by the ledger"),
    ],
)
def test_a_contradiction_is_found(found: Balance, arrived: int, left: bool, says: str) -> None:
    assert says in compared(found, {"a": arrived}, {"a"} if left else ())


def test_nothing_is_unknown_after_everything_was_brought_home() -> None:
    assert compared(booked(unknown=1), {"a": 1}, {"a"}, is_over=True) == [
        "a: unknown by the ledger, though a syphon delivered it since"
    ]


def test_a_message_whose_return_was_refused_may_be_in_the_backlog_and_on_the_primary() -> None:
    """A syphon was killed after it had delivered the message. The next one was refused."""
    intent = Intent(
        at=0, id="1", stage=Stage.RETURN_PRIMARY, namespace="contoso", entity="orders", ids=("a", "b"), bytes=2, units=2
    )
    refusal = Outcome(at=1, id="1", seconds=1.0, result="server_busy", failed=("a",))
    assert refused_returns([intent]) == set()
    assert refused_returns([intent, refusal]) == {"a"}
    assert refused_returns([intent, replace(refusal, failed=())]) == {"a", "b"}
    assert refused_returns([intent, replace(refusal, result="unknown")]) == set()
    found = booked(in_backlog=1)
    assert contradictions(found, arrived={"a": 1}, left={"a"}, safe={"a"}, is_over=False, refused={"a"}) == []
    assert contradictions(found, arrived={"a": 1}, left=(), safe={"a"}, is_over=False, refused={"a"}) != []
