"""L1: what the balance says of messages that a dead writer was about to deliver, and of what it delivered last."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

import pytest

from tests.ledger.test_balance import COMPLETE, DIVERT, RETURN, counts, halves, movement, operation
from tests.tiers import budget
from twinbus.ledger import Balance, Verdict, balance, judge_ledger
from twinbus.ledger.entries import (
    Closed,
    Ended,
    Entry,
    Gap,
    Intent,
    Move,
    Operation,
    Outcome,
    Role,
    SegmentHeader,
    Stage,
)

DEAD, ALIVE = "00000000000000dd", "00000000000000aa"
NUMBERS = count()


def intent(name: str, at: int, writer: str = DEAD, stage: Stage = RETURN) -> Intent:
    begun, _ = halves(operation(stage, name))
    return Intent(
        at=at, id=f"{writer}-{next(NUMBERS)}", stage=stage, namespace=begun.namespace, entity=begun.entity,
        ids=begun.ids, bytes=1, units=1, destination=begun.destination,
    )  # fmt: skip


def ended(begun: Intent, result: str = "ok") -> tuple[Intent, Outcome]:
    return begun, Outcome(at=begun.at + 1, id=begun.id, seconds=0.001, result=result)


def header(writer: str, segment: int = 0, durability: str | None = "process") -> SegmentHeader:
    return SegmentHeader(
        at=0, id=f"{writer}-segment-{segment}", writer=f"syphon-h-1-{writer}", role=Role.SYPHON, host="h", pid=1,
        version="1", segment=segment, durability=durability,
    )  # fmt: skip


def sealed(writer: str, segment: int = 0) -> Ended:
    return Ended(
        at=9, id=f"{writer}-ended-{segment}", writer=f"syphon-h-1-{writer}", by="syphon-h-2-b", segment=segment
    )


def closed(writer: str) -> Closed:
    return Closed(at=9, id=f"{writer}-closed", writer=f"syphon-h-1-{writer}")


# --- an intent without an outcome ------------------------------------------------------------------------------------

UNKNOWN = {"accepted": 1, "unknown": 1}
IN_BACKLOG = {"accepted": 1, "in_backlog": 1}
TWICE = {"possibly_duplicated": 1}


@pytest.mark.parametrize(
    ("booked", "expected"),
    [
        pytest.param([], UNKNOWN, id="nothing else"),
        pytest.param(ended(intent("a", 4), "server_busy"), UNKNOWN, id="an earlier delivery that was refused"),
        pytest.param([movement(Move.KEPT, "a", at=4)], UNKNOWN, id="kept before"),
        pytest.param(ended(intent("a", 6, ALIVE), "server_busy"), IN_BACKLOG, id="a later delivery that was refused"),
        pytest.param(ended(intent("a", 6, ALIVE), "unknown"), IN_BACKLOG | TWICE, id="a later unknown delivery"),
        pytest.param([intent("a", 6, ALIVE)], IN_BACKLOG | TWICE, id="a later delivery that is in flight"),
        pytest.param([intent("a", 6)], UNKNOWN | TWICE, id="a later delivery that died, too"),
        pytest.param([movement(Move.KEPT, "a", at=6)], IN_BACKLOG, id="kept later"),
        pytest.param([movement(Move.FOUND, "a", at=6)], IN_BACKLOG, id="found by a later audit"),
        pytest.param([movement(Move.FOUND, "a", at=4)], UNKNOWN, id="found by an earlier audit"),
        pytest.param(
            [movement(Move.DEAD_LETTERED, "a", at=6)], {"accepted": 1, "dead_lettered": 1}, id="dead-lettered later"
        ),
        pytest.param([operation(COMPLETE, "a")], UNKNOWN, id="completed, delivered or not"),
        pytest.param(
            [*ended(intent("a", 6, ALIVE)), operation(COMPLETE, "a")],
            {"accepted": 1, "delivered": 1, "possibly_duplicated": 1},
            id="delivered by another",
        ),
    ],
)
def test_l1_a_message_that_a_dead_writer_was_about_to_deliver_is_unknown_until_it_is_booked_again(
    booked: list[Entry], expected: dict[str, int]
) -> None:
    entries = [operation(DIVERT, "a"), intent("a", 5), *booked]
    for order in (entries, entries[::-1]):
        assert counts(balance(order, {f"syphon-h-1-{DEAD}"})) == expected


@pytest.mark.parametrize("ahead", [-1_200_000, 1_200_000])
def test_l1_l5_the_brokers_clock_decides_which_delivery_was_the_last(ahead: int) -> None:
    """The clock of the dead syphon is 20 minutes wrong. The other syphon had the message before it."""
    died = replace(intent("a", 5_000_000 + ahead), broker_at=5_000_000)
    refused = replace(intent("a", 4_000_000, ALIVE), broker_at=4_000_000)
    entries: list[Entry] = [operation(DIVERT, "a"), died, *ended(refused, "server_busy")]
    assert counts(balance(entries, {f"syphon-h-1-{DEAD}"})) == UNKNOWN
    later = replace(intent("a", 6_000_000 - ahead, ALIVE), broker_at=6_000_000)
    assert counts(balance([*entries, *ended(later, "server_busy")], {f"syphon-h-1-{DEAD}"})) == IN_BACKLOG


@pytest.mark.parametrize("ahead", [-1_200_000, 1_200_000])
@pytest.mark.parametrize("move", [Move.KEPT, Move.FOUND, Move.REAPPEARED])
@pytest.mark.parametrize("doubt", ["delivery", "completion"])
def test_l1_l5_the_brokers_clock_decides_whether_a_message_was_seen_after_it_was_perhaps_removed(
    doubt: str, move: Move, ahead: int
) -> None:
    """Two writers whose clocks are 20 minutes apart. By their own clocks the order would be the other way round."""
    died = replace(intent("a", 5_000_000 - ahead), broker_at=5_000_000)
    unanswered = replace(operation(COMPLETE, "a", result="unknown"), at=5_000_000 - ahead, broker_at=5_000_000)
    back = [operation(COMPLETE, "a")] if move is Move.REAPPEARED else []
    entries: list[Entry] = [operation(DIVERT, "a"), *back, died if doubt == "delivery" else unanswered]
    before = replace(movement(move, "a", at=4_000_000 + ahead), broker_at=4_000_000)
    after = replace(movement(move, "a", at=6_000_000 - ahead), broker_at=6_000_000)
    dead = {f"syphon-h-1-{DEAD}"}
    assert counts(balance([*entries, before], dead)) == UNKNOWN
    assert counts(balance([*entries, after], dead)) == IN_BACKLOG


@pytest.mark.parametrize(
    ("booked", "dead", "expected"),
    [
        pytest.param([], [], IN_BACKLOG, id="at work"),
        pytest.param([], None, IN_BACKLOG, id="nobody looked"),
        pytest.param([], [f"syphon-h-1-{DEAD}"], UNKNOWN, id="its lock is free"),
        pytest.param([closed(DEAD)], None, UNKNOWN, id="closed"),
        pytest.param([sealed(DEAD)], None, UNKNOWN, id="sealed by another"),
        pytest.param([sealed(DEAD), header(DEAD, 1)], None, IN_BACKLOG, id="sealed while it was silent"),
        pytest.param([sealed(ALIVE), closed(ALIVE)], [], IN_BACKLOG, id="another ended"),
    ],
)
def test_l1_a_writer_is_dead_if_it_closed_or_was_sealed_or_its_lock_is_free(
    booked: list[Entry], dead: list[str] | None, expected: dict[str, int]
) -> None:
    entries = [header(DEAD), operation(DIVERT, "a"), intent("a", 5), *booked]
    assert counts(balance(entries, dead)) == expected


def test_l1_sends_of_a_dead_application_stay_unconfirmed() -> None:
    entries = [intent("a", 5, stage=DIVERT), intent("b", 5, stage=Stage.SEND_PRIMARY)]
    assert counts(balance(entries, [f"client-h-1-{DEAD}"])) == {"unconfirmed": 2}


def test_l1_delivered_with_a_completion_that_is_not_booked_is_possibly_duplicated_and_not_in_the_backlog() -> None:
    entries: list[Entry] = [operation(DIVERT, "a", "b"), operation(RETURN, "a", "b"), operation(COMPLETE, "b")]
    found = balance(entries)
    assert counts(found) == {"accepted": 2, "delivered": 2, "possibly_duplicated": 1}
    assert [message.id for message in found.possibly_duplicated] == ["a"]
    assert counts(balance([*entries, operation(RETURN, "a"), operation(COMPLETE, "a")])) == {
        "accepted": 2, "delivered": 2, "duplicated": 1,
    }  # fmt: skip


# --- what is missing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "dead", "missing", "at_work"),
    [
        pytest.param([header(DEAD)], [f"syphon-h-1-{DEAD}"], None, False, id="process, killed"),
        pytest.param([header(DEAD), sealed(DEAD)], None, None, False, id="process, killed and sealed"),
        pytest.param([header(DEAD)], None, None, True, id="process, nobody looked"),
        pytest.param([header(DEAD, durability="lazy"), closed(DEAD)], None, None, False, id="lazy, closed"),
        pytest.param([header(DEAD, durability="lazy")], [], None, True, id="lazy, at work"),
        pytest.param(
            [header(DEAD, durability="lazy")], [f"syphon-h-1-{DEAD}"], "ended without", False, id="lazy, killed"
        ),
        pytest.param(
            [header(DEAD), header(DEAD, 1, None), sealed(DEAD, 1)],
            [],
            "ended without",
            False,
            id="older, killed",
        ),
        pytest.param([header(DEAD, durability=None)], None, "may have ended", True, id="lazy, nobody looked"),
    ],
)
def test_l1_entries_of_a_killed_writer_may_be_missing_only_if_it_was_lazy(
    entries: list[Entry], dead: list[str] | None, missing: str | None, at_work: bool
) -> None:
    found = balance(entries, dead)
    assert [missing in reason for reason in found.incomplete] == [True] if missing else found.incomplete == []
    assert found.at_work == ([f"syphon-h-1-{DEAD}"] if at_work else [])


def test_l6_meter_readings_that_are_missing_leave_nothing_unproven() -> None:
    meter = "00000000000000ee"
    entries: list[Entry] = [
        replace(header(meter, 1, durability=None), role=Role.NAMESPACE),
        Gap(at=0, id=f"{meter}-gap-0", count=3, since=0, until=0, reason="No space left on device"),
        sealed(meter, 1),
    ]
    found = balance(entries)
    assert (found.incomplete, len(found.unmetered)) == ([], 3)
    assert judge_ledger({}, found.incomplete).verdict is Verdict.PROVEN


# --- syphons that are killed at any step -----------------------------------------------------------------------------


class KilledError(Exception):
    """The syphon is gone."""


@dataclass
class KilledSyphons:
    """A backlog that syphons empty, each killed at a random step. It knows where every copy is.

    `books_first`: the outcome of a delivery is booked before the completion, as L1 demands.
    """

    seed: int
    books_first: bool
    messages: int = 12
    entries: list[Entry] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    primary: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._chance = Random(self.seed)
        self._clock = count(1)
        self.backlog = [f"m{number}" for number in range(self.messages)]
        self.entries.append(operation(DIVERT, *self.backlog))

    def run(self, lives: int) -> None:
        for life in range(lives):
            try:
                self._syphon(f"{life:016x}", steps=self._chance.randrange(20))
            except KilledError:
                continue
            finally:
                self.dead.append(f"syphon-h-1-{life:016x}")

    def drain(self) -> None:
        self._syphon("f" * 16, steps=10**6)

    def _syphon(self, writer: str, steps: int) -> None:
        left = iter(range(steps))

        def step() -> None:
            if next(left, None) is None:
                raise KilledError

        for name in self._chance.sample(self.backlog, len(self.backlog)):
            begun = intent(name, next(self._clock), writer)
            step()
            self.entries.append(begun)
            step()
            if self._chance.random() < 0.1:
                self.entries.append(ended(begun, self._chance.choice(["server_busy", "unknown"]))[1])
                continue
            self.primary[name] += 1
            step()
            completed = Operation(
                at=next(self._clock), id=f"{writer}-{next(NUMBERS)}", stage=COMPLETE, namespace="paris", entity="q",
                ids=(name,), bytes=1, units=1, destination="contoso/orders", seconds=0.0, result="ok",
            )  # fmt: skip
            if self.books_first:
                self.entries.append(ended(begun)[1])
            step()
            self.backlog.remove(name)
            step()
            if not self.books_first:
                self.entries.append(ended(begun)[1])
            self.entries.append(completed)

    def contradictions(self, found: Balance) -> list[str]:
        wrong = []
        for message in found.accepted:
            name, copies = message.id, self.primary[message.id]
            if found.lost[message]:
                wrong.append(f"{name} is lost")
            if found.in_backlog[message] and name not in self.backlog:
                wrong.append(f"{name} is in the backlog for ever")
            if found.delivered[message] and not copies:
                wrong.append(f"{name} is delivered, and not on the primary")
            if copies - 1 > found.duplicated[message] + found.possibly_duplicated[message]:
                wrong.append(f"{name} has {copies} copies")
            if self.books_first and name not in self.backlog and not found.delivered[message]:
                wrong.append(f"{name} was completed, and is not delivered")
            if name in self.backlog and found.delivered[message] and not found.possibly_duplicated[message]:
                wrong += [f"{name} will come again"] if not found.duplicated[message] else []
        return wrong


@pytest.mark.parametrize("books_first", [True, False], ids=["outcome first", "completion first"])
def test_l1_the_balance_is_true_after_every_kill(books_first: bool) -> None:
    unknown = 0
    for seed in range(budget(50, 300, 3000)):
        world = KilledSyphons(seed, books_first)
        for lives in range(1, 4):
            world.run(lives)
            found = balance(world.entries, world.dead)
            assert world.contradictions(found) == [], seed
            unknown += found.unknown.total()
        if books_first:
            while world.backlog:
                world.drain()
            found = balance(world.entries, world.dead)
            assert world.contradictions(found) == [], seed
            assert (found.delivered.total(), found.unknown.total()) == (world.messages, 0), seed
    assert unknown, "and some are unknown in between"
