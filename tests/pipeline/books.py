"""Random ledgers with every problem: losses, duplicates, unknown results, late lines, ends of days, cut segments."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from tests.ledger.world import World
from twinbus.ledger import (
    SIGHTINGS,
    Closed,
    Dropped,
    Ended,
    Entry,
    Fact,
    Gap,
    Intent,
    Metered,
    Move,
    Movement,
    Operation,
    Outcome,
    Role,
    SegmentHeader,
    Stage,
    State,
    encode_entry,
)

MIDNIGHT = 1_790_035_200_000  # 2026-09-22T00:00Z
HOUR = 3_600_000
QUEUE = "contoso/x-servicebus-transfer/3"
_HOME = (Stage.SEND_PRIMARY, Stage.SCHEDULE_PRIMARY, Stage.RETURN_PRIMARY)
_numbers = itertools.count()


def writer(number: int) -> str:
    return f"{number:016x}"


def operation(
    stage: Stage,
    *ids: str,
    at: int = MIDNIGHT,
    to: str = "orders",
    result: str = "ok",
    failed: tuple[str, ...] = (),
    by: int = 0,
    seconds: float = 0.25,
    broker_at: int | None = None,
    waited: tuple[int, ...] = (),
) -> Operation:
    home = stage in _HOME
    return Operation(
        at=at, id=f"{writer(by)}-{next(_numbers)}", stage=stage, namespace="Contoso" if home else "paris",
        entity=to if home else QUEUE, destination=None if home else f"contoso/{to}", ids=ids, bytes=100 * len(ids),
        units=max(1, len(ids)), seconds=seconds, result=result, cause="timeout" if result == "unknown" else None,
        failed=failed, broker_at=broker_at, waited=waited,
    )  # fmt: skip


def halves(whole: Operation) -> tuple[Intent, Outcome]:
    begun = ("stage", "namespace", "entity", "ids", "bytes", "units", "destination", "broker_at", "waited")
    intent = Intent(at=whole.at, id=whole.id, **{name: getattr(whole, name) for name in begun})
    ended = {name: getattr(whole, name) for name in ("seconds", "result", "cause", "failed")}
    return intent, Outcome(at=whole.at + round(whole.seconds * 1000), id=whole.id, **ended)


def movement(move: Move, *ids: str, at: int = MIDNIGHT, to: str = "orders", source: str = f"paris/{QUEUE}") -> Movement:
    number = f"{writer(0)}-m{next(_numbers)}"
    return Movement(at=at, id=number, move=move, ids=ids, source=source, destination=f"Contoso/{to}", reason="why")


def state(event: str, at: int, *, to: str = "orders", by: int = 0, episode: int = 1, cause: str = "timeout") -> State:
    facts: dict[str, Fact] = {"entity": to, "episode": episode}
    facts |= {"cause": cause} if event == "failover_engaged" else {"outage": 1.5, "diverted": 3, "forced": False}
    return State(at=at, id=f"{writer(by)}-s{next(_numbers)}", event=event, pair="contoso", facts=facts)


def history(seed: int, worlds: int = 4, steps: int = 200) -> list[Entry]:
    """Return the entries of several entities over three days. Times are random, and many are at the ends of days."""
    chance = Random(seed)
    found: list[Entry] = []
    instants: dict[str, int] = {}  # a line that is written twice has the same time both times
    for number in range(worlds):
        world = World(seed * 100 + number, careless=number % 2 == 1)
        world.run(steps)
        found += [_placed(entry, number, instants.setdefault(entry.id, _instant(chance))) for entry in world.entries]
    for to in ("orders0", "orders1"):
        found += _several(chance, to)
        found += _failovers(chance, to)
    found += [
        Metered(
            at=MIDNIGHT, id=f"{writer(9)}-1", namespace="contoso", entity="orders0", operation="send", count=3, bytes=9,
            units=3, since=MIDNIGHT - HOUR, until=MIDNIGHT,
        ),
        Gap(at=MIDNIGHT, id=f"{writer(9)}-2", count=3, since=0, until=1, reason="No space left on device"),
        Dropped(at=MIDNIGHT, id=f"{writer(9)}-3", count=2, bytes=10, since=0, until=1),
        Outcome(at=MIDNIGHT, id=f"{writer(9)}-4", seconds=1.0, result="ok"),
    ]  # fmt: skip
    chance.shuffle(found)
    return found


def _instant(chance: Random) -> int:
    days = chance.choice([-1, 0, 0, 1]) * 24 * HOUR
    return MIDNIGHT + days + chance.choice([-1, 0, 1, chance.randrange(24 * HOUR)])


def _placed(entry: Entry, number: int, at: int) -> Entry:
    named = replace(entry, at=at + (entry.at if isinstance(entry, Outcome) else 0), id=f"{writer(number)}-{entry.id}")
    if isinstance(named, Intent | Operation):
        toward = f"CONTOSO/ORDERS{number}" if named.destination else None
        return replace(named, destination=toward, entity=f"orders{number}" if toward is None else named.entity)
    return replace(named, destination=f"contoso/orders{number}") if isinstance(named, Movement) else named


def _several(chance: Random, to: str) -> Iterable[Entry]:
    """Return operations with several messages, some of which fail, and messages that are redirected."""
    for number in range(30):
        ids = tuple(f"b{chance.randrange(40)}" for _ in range(chance.randrange(5)))
        stage = chance.choice([*Stage])
        failed = tuple(chance.choices(ids, k=chance.randrange(3))) if ids else ()
        result = chance.choice(["ok", "unknown", "server_busy"])
        at = MIDNIGHT + chance.randrange(-24 * HOUR, 24 * HOUR)
        # Some entries have the time of the broker's clock, too.
        broker_at = at + chance.randrange(HOUR) if stage is Stage.COMPLETE_BACKLOG and number % 2 else None
        whole = operation(stage, *ids, at=at, to=to, result=result, failed=failed, by=5, broker_at=broker_at)
        yield from halves(whole) if number % 3 == 0 else [whole]
    for move in Move:
        source = f"CONTOSO/{to}" if move is Move.REDIRECTED else f"paris/{QUEUE}"
        elsewhere = "elsewhere" if move is Move.REDIRECTED else to
        at = MIDNIGHT + chance.randrange(HOUR)
        moved = movement(move, "b1", "b2", f"r{move}", at=at, to=elsewhere, source=source)
        yield replace(moved, broker_at=at - 12 * HOUR) if move in SIGHTINGS and to == "orders0" else moved


def _failovers(chance: Random, to: str) -> Iterable[Entry]:
    """Return failovers of several processes: some overlap, some have no restore, and some restores have no failover."""
    for by in range(10, 14):
        at = MIDNIGHT + chance.randrange(HOUR)
        for episode in range(1, 4):
            at += chance.randrange(1, HOUR)
            if chance.random() < 0.9:
                yield state("failover_engaged", at, to=to, by=by, episode=episode, cause=f"cause{episode}")
            for number in range(3):
                name = f"{to}-{by}-{episode}-{number}"
                sent = at + chance.randrange(HOUR // 2)
                yield operation(Stage.SEND_BACKLOG, name, at=sent, to=to, by=by)
                if chance.random() < 0.8:
                    later = sent + chance.randrange(6 * HOUR)
                    yield operation(Stage.RETURN_PRIMARY, name, at=later, to=to, by=20)
            at += chance.randrange(1, HOUR)
            if chance.random() < 0.7:
                yield state("restored", at, to=to, by=by, episode=episode)


def segment_name(number: int, part: int = 0) -> str:
    return f"client-host-7-{writer(number)}-{part}.jsonl"


def write_segments(directory: Path, entries: Sequence[Entry], seed: int, count: int = 6) -> None:
    """Write the lines to random segments, some lines twice. The last segment is open, and all end with a cut line."""
    chance = Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    shares: list[list[str]] = [[] for _ in range(count)]
    for entry in entries:
        for share in chance.sample(shares, 2 if chance.random() < 0.1 else 1):
            share.append(encode_entry(entry))
    for number, share in enumerate(shares):
        name = f"client-host-7-{writer(100 + number)}"
        first = SegmentHeader(
            at=MIDNIGHT, id=f"{writer(100 + number)}-h", writer=name, role=Role.CLIENT, host="host", pid=7, version="1",
            segment=number % 2, durability="process" if number % 3 else None,
        )  # fmt: skip
        last = [encode_entry(Closed(at=MIDNIGHT, id=f"{writer(100 + number)}-c", writer=name))] if number else []
        if number == 1:
            ended = Ended(at=MIDNIGHT, id=f"{writer(101)}-ended-1", writer=name, by=segment_name(102), segment=1)
            last.append(encode_entry(ended))
        ending = ".jsonl" if number else ".jsonl.open"
        text = "".join([encode_entry(first), *share, *last]) + encode_entry(entries[0])[: 40 + number]
        (directory / f"{name}-{number % 2}{ending}").write_text(text)
