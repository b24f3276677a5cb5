"""The balance: single cases, a comparison with an oracle that tries every outcome, and simulated worlds."""

from collections import Counter
from dataclasses import replace
from itertools import count, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ledger.world import DESTINATION, World
from twinbus.ledger import Balance, MessageKey, balance
from twinbus.ledger.entries import (
    Dropped,
    Entry,
    Gap,
    Intent,
    Move,
    Movement,
    Operation,
    Outcome,
    Role,
    SegmentHeader,
    Stage,
)

NUMBERS = count()
NAMED = ("accepted", "delivered", "in_backlog", "dead_lettered", "unknown", "lost", "duplicated", "possibly_duplicated")


def operation(
    stage: Stage, *ids: str, result: str = "ok", failed: tuple[str, ...] = (), entity: str = "q"
) -> Operation:
    home = stage in (Stage.SEND_PRIMARY, Stage.SCHEDULE_PRIMARY, Stage.RETURN_PRIMARY)
    return Operation(
        at=0, id=f"op-{next(NUMBERS)}", stage=stage, namespace="contoso" if home else "paris",
        entity="orders" if home else entity, destination=None if home else DESTINATION, ids=ids, bytes=1, units=1,
        seconds=0.1, result=result, failed=failed,
    )  # fmt: skip


def halves(whole: Operation) -> tuple[Intent, Outcome]:
    begun = {
        name: getattr(whole, name) for name in ("stage", "namespace", "entity", "ids", "bytes", "units", "destination")
    }
    ended = {name: getattr(whole, name) for name in ("seconds", "result", "cause", "failed")}
    return Intent(at=0, id=whole.id, **begun), Outcome(at=1, id=whole.id, **ended)


def movement(move: Move, *ids: str, at: int = 0) -> Movement:
    return Movement(
        at=at, id=f"move-{next(NUMBERS)}", move=move, ids=ids, source="paris/q", destination=DESTINATION, reason="r"
    )


def counts(found: Balance) -> dict[str, int]:
    """Return the sums that are not 0."""
    totals = {name: getattr(found, name).total() for name in (*NAMED, "unconfirmed")}
    return {name: total for name, total in totals.items() if total}


SEND, DIVERT, RETURN = Stage.SEND_PRIMARY, Stage.SEND_BACKLOG, Stage.RETURN_PRIMARY
COMPLETE, RESUBMIT = Stage.COMPLETE_BACKLOG, Stage.RESUBMIT_BACKLOG


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param([], {}, id="nothing"),
        pytest.param([operation(SEND, "a", "b")], {"accepted": 2, "delivered": 2}, id="sent"),
        pytest.param(
            [operation(SEND, "a"), operation(SEND, "a")], {"accepted": 2, "delivered": 2}, id="an id used twice"
        ),
        pytest.param([operation(SEND, "a", result="server_busy")], {}, id="refused"),
        pytest.param([operation(SEND, "a", result="unknown")], {"unconfirmed": 1}, id="timed out"),
        pytest.param([halves(operation(SEND, "a"))[0]], {"unconfirmed": 1}, id="died on the way"),
        pytest.param([operation(Stage.SCHEDULE_PRIMARY, "a")], {"accepted": 1, "delivered": 1}, id="scheduled"),
        pytest.param([operation(DIVERT, "a")], {"accepted": 1, "in_backlog": 1}, id="diverted"),
        pytest.param(
            [operation(SEND, "a", result="unknown"), operation(DIVERT, "a")],
            {"accepted": 1, "in_backlog": 1},
            id="timed out and diverted",
        ),
        pytest.param(
            [operation(SEND, "a", result="unknown"), operation(DIVERT, "a"), operation(RETURN, "a")],
            {"accepted": 1, "delivered": 1, "possibly_duplicated": 1},
            id="timed out, diverted and returned",
        ),
        pytest.param(
            [operation(DIVERT, "a"), operation(RETURN, "a"), operation(COMPLETE, "a")],
            {"accepted": 1, "delivered": 1},
            id="diverted and returned",
        ),
        pytest.param(
            [operation(DIVERT, "a"), operation(COMPLETE, "a")], {"accepted": 1, "lost": 1}, id="completed undelivered"
        ),
        pytest.param(
            [operation(DIVERT, "a"), halves(operation(RETURN, "a"))[0], operation(COMPLETE, "a")],
            {"accepted": 1, "unknown": 1},
            id="completed, and nobody knows whether delivered",
        ),
        pytest.param(
            [operation(DIVERT, "a"), operation(RETURN, "a", result="entity_disabled"), operation(COMPLETE, "a")],
            {"accepted": 1, "lost": 1},
            id="completed though refused",
        ),
        pytest.param(
            [operation(DIVERT, "a"), operation(RETURN, "a"), operation(RETURN, "a"), operation(COMPLETE, "a")],
            {"accepted": 1, "delivered": 1, "duplicated": 1},
            id="returned twice",
        ),
        pytest.param(
            [
                operation(DIVERT, "a"),
                operation(RETURN, "a"),
                operation(COMPLETE, "a", result="unknown"),
                movement(Move.POSSIBLE_DUPLICATE, "a"),
            ],
            {"accepted": 1, "delivered": 1, "possibly_duplicated": 1},
            id="lock lost",
        ),
        pytest.param(
            [operation(DIVERT, "a"), movement(Move.DEAD_LETTERED, "a")],
            {"accepted": 1, "dead_lettered": 1},
            id="dead-lettered",
        ),
        pytest.param(
            [
                operation(DIVERT, "a"),
                movement(Move.DEAD_LETTERED, "a"),
                operation(RESUBMIT, "a"),
                operation(COMPLETE, "a"),
                movement(Move.RESUBMITTED, "a"),
            ],
            {"accepted": 1, "in_backlog": 1},
            id="resubmitted",
        ),
        pytest.param(
            [
                operation(DIVERT, "a"),
                movement(Move.DEAD_LETTERED, "a"),
                operation(RETURN, "a"),
                operation(COMPLETE, "a"),
                movement(Move.RESUBMITTED, "a"),
            ],
            {"accepted": 1, "delivered": 1},
            id="resubmitted to the primary",
        ),
        pytest.param([operation(DIVERT, "a"), movement(Move.KEPT, "a")], {"accepted": 1, "in_backlog": 1}, id="kept"),
        pytest.param(
            [operation(DIVERT, "a"), movement(Move.LOST, "a")],
            {"accepted": 1, "lost": 1},
            id="an audit did not find it",
        ),
        pytest.param(
            [operation(DIVERT, "a"), movement(Move.DEAD_LETTERED, "a"), movement(Move.LOST, "a")],
            {"accepted": 1, "lost": 1},
            id="an audit did not find it among the dead letters",
        ),
        pytest.param(
            [operation(DIVERT, "a"), operation(DIVERT, "a"), movement(Move.LOST, "a")],
            {"accepted": 2, "in_backlog": 1, "lost": 1},
            id="an audit found one of two copies",
        ),
        pytest.param(
            [operation(SEND, "a", result="unknown"), operation(DIVERT, "a"), movement(Move.LOST, "a")],
            {"accepted": 1, "unknown": 1},
            id="an audit did not find it, but an earlier send may have arrived",
        ),
        pytest.param(
            [operation(DIVERT, "a"), movement(Move.LOST, "a"), movement(Move.REAPPEARED, "a")],
            {"accepted": 1, "in_backlog": 1},
            id="a later audit saw it",
        ),
        pytest.param(
            [operation(DIVERT, "a"), movement(Move.LOST, "a"), operation(RETURN, "a"), operation(COMPLETE, "a")],
            {"accepted": 1, "delivered": 1},
            id="delivered after all",
        ),
        pytest.param(
            [operation(DIVERT, "a"), operation(COMPLETE, "a", result="unknown"), movement(Move.FOUND, "a", at=1000)],
            {"accepted": 1, "in_backlog": 1},
            id="unknown, and an audit saw it",
        ),
        pytest.param(
            [operation(DIVERT, "a"), movement(Move.FOUND, "a"), operation(COMPLETE, "a")],
            {"accepted": 1, "lost": 1},
            id="found, and completed undelivered",
        ),
        pytest.param([movement(Move.FOUND, "a")], {"unconfirmed": 1}, id="an audit saw what nobody reported safe"),
        pytest.param(
            [operation(SEND, "a", "b", "c", result="unknown", failed=("b",))],
            {"accepted": 2, "delivered": 2, "unconfirmed": 1},
            id="failed in part",
        ),
        pytest.param([operation(RETURN, "a")], {"unconfirmed": 1}, id="whose sender's ledger is elsewhere"),
        pytest.param([operation(Stage.PING, "a"), operation(Stage.RENEW_BACKLOG, "a")], {}, id="what moves nothing"),
    ],
)
def test_a_history_and_its_balance(entries: list[Entry], expected: dict[str, int]) -> None:
    assert counts(balance(entries)) == expected


def test_paths_are_case_insensitive_and_messages_differ_by_entity_and_id() -> None:
    upper = Operation(
        at=0, id="x", stage=RETURN, namespace="Contoso", entity="Orders", ids=("a",), bytes=1, units=1, seconds=0.1,
        result="ok",
    )  # fmt: skip
    found = balance([operation(DIVERT, "a", "A"), upper])
    assert found.delivered == Counter({MessageKey("contoso/orders", "a"): 1})
    assert found.in_backlog == Counter({MessageKey("contoso/orders", "A"): 1})


def test_a_dead_letter_redirected_to_another_entity_is_a_message_of_that_entity() -> None:
    elsewhere = MessageKey("contoso/elsewhere", "a")
    redirected = Movement(
        at=0, id="m", move=Move.REDIRECTED, ids=("a",), source=DESTINATION, destination=elsewhere.destination
    )
    history: list[Entry] = [operation(DIVERT, "a"), movement(Move.DEAD_LETTERED, "a"), redirected]
    history += [replace(operation(stage, "a"), destination=elsewhere.destination) for stage in (RESUBMIT, COMPLETE)]
    found = balance(history)
    assert counts(found) == {"accepted": 1, "in_backlog": 1}
    assert found.in_backlog == Counter({elsewhere: 1})
    home = replace(operation(RETURN, "a"), entity="elsewhere")
    gone = replace(operation(COMPLETE, "a"), destination=elsewhere.destination)
    assert balance([*history, home, gone]).delivered == Counter({elsewhere: 1})


@pytest.mark.parametrize("before", [[], ["unknown"], ["server_busy", "unknown"]])
def test_a_dead_letter_redirected_that_was_never_accepted_is_unconfirmed_at_the_other_entity(before: list[str]) -> None:
    elsewhere = MessageKey("contoso/elsewhere", "a")
    history: list[Entry] = [operation(DIVERT, "a", result=result) for result in before]
    history += redirection("a", DESTINATION, elsewhere.destination)
    assert balance(history).unconfirmed == Counter({elsewhere: 1})
    assert counts(balance(history)) == {"unconfirmed": 1}
    history += redirection("a", elsewhere.destination, "contoso/third")
    assert balance(history).unconfirmed == Counter({MessageKey("contoso/third", "a"): 1})
    assert counts(balance(history)) == {"unconfirmed": 1}


def test_more_redirects_than_acceptances_do_not_add_acceptances() -> None:
    history: list[Entry] = [operation(DIVERT, "a"), operation(DIVERT, "a", result="unknown")]
    history += [*redirection("a", DESTINATION, "contoso/one"), *redirection("a", DESTINATION, "contoso/two")]
    # The same id for an entity that nothing was redirected to is another message.
    history.append(replace(operation(Stage.SEND_PRIMARY, "a"), entity="aside"))
    found = balance(history)
    assert found.in_backlog == Counter({MessageKey("contoso/two", "a"): 1})
    assert found.unconfirmed == Counter({MessageKey("contoso/one", "a"): 1})
    assert found.delivered == Counter({MessageKey("contoso/aside", "a"): 1})
    assert counts(found) == {"accepted": 2, "in_backlog": 1, "delivered": 1, "unconfirmed": 1}


def redirection(name: str, source: str, destination: str) -> list[Entry]:
    """Return a redirect entry as `deadletter resubmit --to` writes it."""
    moved = Movement(
        at=0, id=f"{source}-{destination}", move=Move.REDIRECTED, ids=(name,), source=source, destination=destination
    )
    return [*(replace(operation(stage, name), destination=destination) for stage in (RESUBMIT, COMPLETE)), moved]


def test_missing_entries_segments_and_closings_are_reasons_for_an_incomplete_ledger() -> None:
    def header(segment: int) -> SegmentHeader:
        return SegmentHeader(
            at=0, id=f"h{segment}", writer="w", role=Role.CLIENT, host="h", pid=1, version="1", segment=segment
        )

    found = balance(
        [
            header(1),
            header(3),
            Gap(at=0, id="g", count=3, since=0, until=0, reason="No space left on device"),
            Dropped(at=0, id="d", count=2, bytes=10, since=0, until=0),
            halves(operation(SEND, "a"))[1],
        ]
    )
    assert found.incomplete[:2] == [
        "3 entries are missing: No space left on device",
        "2 segments were removed for the disk budget",
    ]
    assert found.incomplete[2:4] == [
        "segments 0, 2 of w are not there",
        "w may have ended without closing: its last entries may be missing",
    ]
    assert found.incomplete[4].startswith("1 outcomes have no intent: op-")


# --- against an oracle -----------------------------------------------------------------------------------------------

DOES = {
    SEND: ("accepted", "delivered"),
    DIVERT: ("accepted", "stored"),
    RESUBMIT: ("stored",),
    RETURN: ("delivered",),
    COMPLETE: ("removed",),
}


def every_way(name: str, operations: list[Operation]) -> list[Counter[str]]:
    """Yield what may have happened to one message: each combination of results of its operations of unknown outcome."""
    mine = [one for one in operations if name in one.ids]
    ways = []
    for went in product([True, False], repeat=sum(one.result == "unknown" for one in mine)):
        way, answers = Counter[str](), iter(went)
        for one in mine:
            if one.result == "ok":
                way.update(DOES[one.stage])
            elif one.result == "unknown" and next(answers):
                way.update(does for does in DOES[one.stage] if does != "accepted")
        ways.append(way)
    return ways


def expected_of(name: str, operations: list[Operation], dead: int) -> dict[str, int]:
    ways = every_way(name, operations)
    accepted = ways[0]["accepted"]
    surely = min(way["delivered"] for way in ways)
    short = [max(0, accepted - way["delivered"] - max(0, way["stored"] - way["removed"])) for way in ways]
    extra = [max(0, way["delivered"] - max(accepted, 1)) for way in ways]
    there = accepted - min(accepted, surely) - max(short)
    # Copies that are in the backlog in every way, although enough were delivered.
    left = min(max(0, way["stored"] - way["removed"]) for way in ways) - max(0, dead)
    comes_again = surely > 0 and left > accepted - min(accepted, surely) and not min(extra)
    return {
        "accepted": accepted,
        "delivered": min(accepted, surely),
        "in_backlog": there - min(there, max(0, dead)),
        "dead_lettered": min(there, max(0, dead)),
        "lost": min(short),
        "unknown": max(short) - min(short),
        "duplicated": min(extra),
        "possibly_duplicated": max(max(extra) - min(extra), comes_again),
    }


OPERATIONS = st.lists(
    st.builds(
        lambda stage, ids, result: operation(stage, *ids, result=result),
        st.sampled_from(list(DOES)),
        st.lists(st.sampled_from("ab"), min_size=1, max_size=2, unique=True),
        st.sampled_from(["ok", "ok", "ok", "unknown", "server_busy"]),
    ),
    max_size=9,
)
SHAPES = st.lists(st.sampled_from(["whole", "halves", "torn", "twice"]), min_size=9, max_size=9)


@given(OPERATIONS, SHAPES, st.lists(st.sampled_from([Move.DEAD_LETTERED, Move.RESUBMITTED]), max_size=2), st.randoms())
def test_the_balance_holds_whether_or_not_unknown_operations_happened(
    operations: list[Operation], shapes: list[str], moves: list[Move], chance: object
) -> None:
    entries: list[Entry] = [movement(move, "a") for move in moves]
    for one, shape in zip(operations, shapes, strict=False):
        if shape == "torn" and one.result == "unknown":
            entries.append(halves(one)[0])
        else:
            entries += halves(one) if shape == "halves" else [one] * (1 + (shape == "twice"))
    chance.shuffle(entries)  # type: ignore[attr-defined] # Hypothesis' own Random
    found = balance(entries)
    dead = sum(1 if move is Move.DEAD_LETTERED else -1 for move in moves)
    for name in "ab":
        message = MessageKey(DESTINATION, name)
        got = {each: getattr(found, each)[message] for each in NAMED}
        assert got == expected_of(name, operations, dead if name == "a" else 0)


# --- against worlds that know the truth ------------------------------------------------------------------------------


def names(counter: Counter[MessageKey]) -> Counter[str]:
    return Counter({message.id: count for message, count in counter.items()})


@pytest.mark.parametrize("seed", range(100))
def test_in_a_world_without_loss_nothing_is_called_lost_and_every_duplicate_is_announced(seed: int) -> None:
    world = World(seed)
    world.run(150)
    found = balance(world.entries)
    assert names(found.accepted) == world.accepted
    assert found.lost == found.unknown == Counter()
    parts = found.delivered + found.in_backlog + found.dead_lettered
    assert found.accepted == parts
    assert set(names(found.delivered)) <= set(world.primary)
    assert set(names(found.in_backlog)) <= set(world.backlog) | set(world.dead)
    doubled = {name for name, copies in world.primary.items() if copies > max(1, world.accepted[name])}
    assert set(names(found.duplicated)) <= doubled
    assert doubled <= set(names(found.duplicated)) | set(names(found.possibly_duplicated))
    arrived = set(world.primary) | set(world.backlog)
    assert arrived - set(world.accepted) <= set(names(found.unconfirmed))


@pytest.mark.parametrize("seed", range(100))
def test_in_a_world_that_drops_messages_exactly_those_are_lost_or_unknown(seed: int) -> None:
    world = World(seed, careless=True)
    world.run(150)
    found = balance(world.entries)
    gone = world.accepted - world.primary - Counter(world.backlog) - Counter(world.dead)
    lost, unknown = names(found.lost), names(found.unknown)
    assert lost <= gone <= world.thrown_away
    assert gone <= lost + unknown
    assert found.accepted == (found.delivered + found.in_backlog + found.dead_lettered + found.unknown + found.lost)
