"""The audit on Spark finds what the audit in one process finds: on simulated worlds, and on real queues (L3)."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

from tests.ledger.audited_world import DESTINATION, QUEUE, SECONDARY, AuditedWorld, Writer, intent, movement, operation
from tests.tiers import budget
from twinbus.backlog import Endpoint, backlog_queue_path, primary_name
from twinbus.cli.main import app
from twinbus.connect import connect
from twinbus.ledger import (
    AUDIT_WORDS,
    AUDITED,
    AuditFindings,
    BacklogLook,
    Balance,
    Entry,
    Fact,
    Intent,
    Ledger,
    LedgerReading,
    MessageKey,
    Metered,
    Move,
    Movement,
    Operation,
    Role,
    Stage,
    State,
    compare_with_backlog,
    encode_entry,
    read_for_audit,
    read_ledger,
)
from twinbus.message import Message, MessageId
from twinbus.pipeline.audit_comparison import TablesReading, compare
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.tables import Tables
from twinbus.pipeline.writer_states import WriterStates
from twinbus.testing import LocalNamespace

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]
LOOK = "destination string, id string, copies long, dead_letters long"


# --- simulated worlds ------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What an audit read and saw: lines and dead writers, two looks, and lines and dead writers again."""

    readings: list[tuple[list[Entry], set[str]]] = field(default_factory=list)
    looks: list[BacklogLook] = field(default_factory=list)


class ObservedWorld(AuditedWorld):
    """A world that keeps what its audits read and saw. Each audit makes two looks."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, thieves=True)
        self.seen: list[Seen] = []

    def _audit(self) -> Generator[None, None, tuple[AuditFindings, Balance]]:
        self._now = Seen()
        yield from self._read()
        self._now.looks.append((yield from self._look()))
        self._now.looks.append((yield from self._look()))
        yield from self._read()
        self.seen.append(self._now)
        return AuditFindings(), Balance()

    def _read(self) -> Generator[None, None, LedgerReading]:
        dead, lines = set(self.dead_writers), list[Entry]()
        for place, writer in enumerate(list(self.writers)):
            lines += writer.lines
            if not place % 8:
                yield
        self._now.readings.append((lines, dead))
        return LedgerReading(Balance())


class ManyAudits:
    """Audits of several worlds as one audit of one ledger: each has messages and writers of its own."""

    def __init__(self) -> None:
        self.lines: list[list[Entry]] = [[], []]
        self.dead: list[set[str]] = [set(), set()]
        self.looks = [BacklogLook(), BacklogLook()]
        self.count = 0

    def add(self, seen: Seen) -> None:
        for place, (lines, dead) in enumerate(seen.readings):
            self.lines[place] += [self._moved(line) for line in lines]
            self.dead[place] |= {f"syphon-host-1-{self._digits(name.rpartition('-')[2])}" for name in dead}
        for mine, other in zip(self.looks, seen.looks, strict=True):
            for ours, theirs in ((mine.seen, other.seen), (mine.dead, other.dead)):
                for (to, id_), copies in theirs.items():
                    ours[MessageKey(f"{to}{self.count}", self._name(id_))] += copies
        self.count += 1

    def _name(self, id_: str) -> str:
        return f"{id_}.{self.count}"

    def _digits(self, digits: str) -> str:
        return f"{self.count:04x}{digits[4:]}"

    def _moved(self, line: Entry) -> Entry:
        own, _, rest = line.id.partition("-")
        line = replace(line, id=f"{self._digits(own)}-{rest}")
        if isinstance(line, Intent | Operation | Movement):
            line = replace(line, ids=tuple(map(self._name, line.ids)))
        if isinstance(line, Intent | Operation):
            home = line.destination is None
            line = replace(line, entity=f"{line.entity}{self.count}" if home else line.entity)
            return line if home else replace(line, destination=f"{line.destination}{self.count}")
        if isinstance(line, Movement):
            source = f"{line.source}{self.count}" if line.move is Move.REDIRECTED else line.source
            return replace(line, destination=f"{line.destination}{self.count}", source=source)
        return line

    def native(self, looks: int) -> AuditFindings:
        before, after = (read_for_audit(self.lines[place], self.dead[place]) for place in (0, 1))
        return compare_with_backlog(
            before, self.looks[0], after, self.looks[1] if looks > 1 else None, namespace=SECONDARY
        )


def special_cases() -> list[Seen]:
    """Messages on another secondary, redirects, and ids that are used at several destinations."""
    writer = Writer("0" * 16)

    def elsewhere(whole: Operation) -> Operation:
        return replace(whole, namespace="berlin")

    def other(whole: Operation) -> Operation:
        return replace(whole, destination=f"{DESTINATION}-b")

    diverted = operation(writer, Stage.SEND_BACKLOG, "a")
    dead_letter = movement(writer, Move.DEAD_LETTERED, "a")
    resubmitted = other(operation(writer, Stage.RESUBMIT_BACKLOG, "a"))
    redirected = replace(
        movement(writer, Move.REDIRECTED, "a"), source=DESTINATION, destination=f"{DESTINATION}-b", id="f-1"
    )
    nothing, there = BacklogLook(), BacklogLook()
    there.seen[MessageKey(f"{DESTINATION}-b", "a")] = 1
    dead = BacklogLook()
    dead.seen[MessageKey(DESTINATION, "a")] = dead.dead[MessageKey(DESTINATION, "a")] = 1
    refused = other(operation(writer, Stage.RESUBMIT_BACKLOG, "a", "not_tried"))
    perhaps = replace(intent(other(operation(writer, Stage.RESUBMIT_BACKLOG, "a"))), destination=f"{DESTINATION}-a")
    books: list[tuple[list[Entry], list[Entry], BacklogLook]] = [
        ([elsewhere(diverted)], [], nothing),
        ([elsewhere(diverted), operation(writer, Stage.SEND_BACKLOG, "a")], [], nothing),
        ([diverted, dead_letter, resubmitted], [], nothing),
        ([diverted, dead_letter, resubmitted, perhaps], [], nothing),
        ([diverted, dead_letter, refused], [], nothing),
        ([diverted], [], dead),
        ([diverted, movement(writer, Move.RESUBMITTED, "a"), dead_letter], [], dead),
        ([diverted, dead_letter], [], dead),
        ([diverted, dead_letter, resubmitted, redirected], [], nothing),
        ([diverted, dead_letter, resubmitted, redirected], [], there),
        ([diverted, dead_letter], [intent(resubmitted)], there),
        ([dead_letter, resubmitted, redirected], [], there),
        ([diverted, other(operation(writer, Stage.SEND_BACKLOG, "a"))], [], there),
        ([diverted, movement(writer, Move.LOST, "a")], [], nothing),
        ([], [], there),
        ([other(diverted), other(operation(writer, Stage.COMPLETE_BACKLOG, "a", "unknown"))], [], there),
        ([other(diverted), replace(movement(writer, Move.LOST, "a"), destination=f"{DESTINATION}-b")], [], there),
        ([other(operation(writer, Stage.SEND_BACKLOG, "a", "entity_disabled"))], [], there),
        ([], [other(operation(writer, Stage.SEND_BACKLOG, "a", "entity_disabled"))], there),
    ]
    return [Seen([(lines, set()), (lines + later, set())], [look, look]) for lines, later, look in books]


def observed() -> ManyAudits:
    audits = ManyAudits()
    for seen in special_cases():
        audits.add(seen)
    for seed in range(budget(4, 6, 60)):
        world = ObservedWorld(seed)
        for _ in world.run(1200):
            pass
        for seen in world.seen:
            audits.add(seen)
    return audits


def words_of(found: AuditFindings) -> dict[str, dict[MessageKey, int]]:
    return {word: dict(getattr(found, word)) for word in AUDIT_WORDS if word != "there"}


def test_l3_native_and_spark_audits_conclude_the_same_on_simulated_worlds(spark: SparkSession, tmp_path: Path) -> None:
    audits, tables, directory = observed(), Tables(spark, tmp_path / "tables"), tmp_path / "ledger"
    directory.mkdir()
    readings: list[TablesReading] = []
    written: set[tuple[str, str]] = set()
    for place, lines in enumerate(audits.lines):
        new = {(line.kind, line.id): line for line in lines if (line.kind, line.id) not in written}
        written |= new.keys()
        text = "".join(map(encode_entry, new.values()))
        (directory / f"client-host-7-{place:016x}-0.jsonl").write_text(text)
        ingest_ledger(spark, directory, tables.root).awaitTermination()
        readings.append(TablesReading(tables, tables.version(), WriterStates(frozenset(audits.dead[place]))))
    shown = [look_rows(spark, look) for look in audits.looks]
    for looks in (1, 2):
        expected = audits.native(looks)
        with compare(readings[0], shown[:looks], readings[1], SECONDARY) as found:
            assert found.counts() == {word: getattr(expected, word).total() for word in AUDIT_WORDS}
            words = {word: dict(messages) for word, messages in found.messages(*AUDIT_WORDS).items() if word != "there"}
            assert words == words_of(expected)
            if looks == 2:
                assert sorted(found.moves()) == sorted(expected.moves)
                assert all(words.values()), "a comparison without a finding of each word shows nothing"
    assert readings[0].queues(SECONDARY) == {QUEUE}
    assert readings[0].queues("berlin") == {QUEUE}


def look_rows(spark: SparkSession, look: BacklogLook) -> DataFrame:
    rows: Sequence[tuple[str | None, str | None, int, int]] = [
        (*key, copies, look.dead[key]) for key, copies in look.seen.items()
    ]
    return spark.createDataFrame([*rows, (None, None, len(rows), 0)], LOOK)


# --- real queues -----------------------------------------------------------------------------------------------------

QUEUES = [backlog_queue_path("contoso", number) for number in range(3)]
PEEK = Stage.PEEK_BACKLOG


@dataclass(frozen=True)
class Backlog:
    namespace: LocalNamespace
    meter: Path

    @property
    def text(self) -> str:
        return self.namespace.connection_string

    @property
    def name(self) -> str:
        return primary_name(Endpoint.of("localhost", self.namespace.port))


@pytest.fixture
def backlog(tmp_path: Path) -> Iterator[Backlog]:
    queues = [{"name": queue, "lock_duration": "PT5S"} for queue in QUEUES]
    config = {"namespaces": [{"name": "secondary", "queues": queues, "ledger": str(tmp_path / "meter")}]}
    with LocalNamespace("secondary", memory=True, config=config) as found:
        yield Backlog(found, tmp_path / "meter")


def message(id_: MessageId, path: str | None = "orders") -> Message:
    return Message(b"x", message_id=id_, application_properties={} if path is None else {"x-ms-path": path})


async def fill(text: str) -> None:
    """Send the messages of `book`, and let others take some of them."""
    async with connect(text) as bus:
        first, second = [await bus.sender(queue) for queue in QUEUES[:2]]
        names = ("kept", "gone", "twice", "twice", "dead", "again", "never", "back", "vanished", "hidden")
        await first.send([message(name) for name in names])
        await second.send([message(UUID(int=7)), message(b"binary"), message(5), message("nowhere", None)])
        await second.send([message(f"n{number:03}", "Events") for number in range(300)])
        receiver = await bus.receiver(QUEUES[0], prefetch=0)
        held = {one.message_id: one for one in await receiver.receive(len(names), 5)}
        taken = [held.pop(name) for name in ("gone", "twice", "vanished")]
        await receiver.complete(taken)
        await receiver.dead_letter([held.pop("dead")], "why", "how")
        await receiver.defer([held.pop("hidden")])
        await receiver.abandon([*held.values()])


def book(directory: Path, space: str) -> None:
    to, events = "contoso/orders", "contoso/events"
    with Ledger(directory) as ledger:

        def diverted(ids: Sequence[MessageId], queue: str = QUEUES[0], to: str = to) -> None:
            ledger.begin(Stage.SEND_BACKLOG, space, queue, ids, [1] * len(ids), to).end()

        diverted(["kept", "gone", "twice", "twice", "dead", "again", "back", "vanished", "hidden"])
        diverted([UUID(int=7), b"binary", 5], QUEUES[1])
        diverted([f"n{number:03}" for number in range(300)], QUEUES[1], events)
        diverted(["deleted"], backlog_queue_path("contoso", 9))
        ledger.begin(Stage.SEND_BACKLOG, "berlin", QUEUES[0], ["elsewhere"], [1], to).end()
    with Ledger(directory, Role.SYPHON) as ledger:
        ledger.begin(Stage.RETURN_PRIMARY, "contoso", "orders", ["again"], [1]).end()
        ledger.begin(Stage.COMPLETE_BACKLOG, space, QUEUES[0], ["again"], [0], to).end()
    if (child := os.fork()) == 0:  # what a syphon leaves that is killed during a delivery
        ledger = Ledger(directory, Role.SYPHON)
        ledger.begin(Stage.RETURN_PRIMARY, "contoso", "orders", ["back", "vanished"], [1, 1])
        ledger.flush()
        os._exit(0)
    os.waitpid(child, 0)


def run(directory: Path, text: str, *options: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, ["ledger", "audit", str(directory), "--secondary", text, "--json", *options])
    return done.exit_code, json.loads(done.stdout)


Recorded = tuple[Counter[tuple[Move, str, str, str | None, str]], list[Mapping[str, Fact]]]


def recorded(directory: Path) -> Recorded:
    """What audits have recorded: the copies of each message by move, and the facts of each audit."""
    entries = list(read_ledger(directory))
    moves = [one for one in entries if isinstance(one, Movement)]
    copies = Counter((one.move, one.source, one.destination, one.reason, id_) for one in moves for id_ in one.ids)
    return copies, [one.facts for one in entries if isinstance(one, State) and one.event == AUDITED]


def peeked(directory: Path) -> int:
    entries = [one for one in read_ledger(directory) if isinstance(one, Operation) and one.stage is PEEK]
    assert all(one.result == "ok" for one in entries)
    return len(entries)


@pytest.mark.usefixtures("spark")
def test_l3_m1_native_and_spark_audits_have_the_same_result_on_real_queues(backlog: Backlog, tmp_path: Path) -> None:
    asyncio.run(fill(backlog.text))
    book(tmp_path / "ledger", backlog.name)
    shutil.copytree(tmp_path / "ledger", tmp_path / "copy")
    native_code, native = run(tmp_path / "copy", backlog.text)
    code, found = run(tmp_path / "ledger", backlog.text, "--engine", "spark", "--tables", str(tmp_path / "tables"))
    assert code == native_code == 1
    # The driver also peeks to divide the queues among tasks.
    for result, directory in ((native, "copy"), (found, "ledger")):
        assert result["audit"].pop("peeks") == peeked(tmp_path / directory)
        del result["audit"]["seconds"]
    assert found == native
    assert [one["id"] for one in found["messages"]["lost"]] == ["deleted", "gone", "twice"]
    assert {word: found["audit"][word] for word in AUDIT_WORDS} == {
        "there": 307, "absent": 3, "come_again": 1, "unconfirmed": 2, "found": 1, "redirected": 0, "moving": 0,
        "not_looked_at": 1,
    }  # fmt: skip
    assert (found["audit"]["dead_letters"], found["dead_lettered"]) == (1, 1), "nobody has recorded the dead letter"
    assert recorded(tmp_path / "ledger") == recorded(tmp_path / "copy")
    assert not list((tmp_path / "tables" / "looks").iterdir()), "the looks are removed"
    backlog.namespace.stop()
    metered = [one for one in read_ledger(backlog.meter) if isinstance(one, Metered) and one.operation == "peek"]
    assert sum(one.count for one in metered) == peeked(tmp_path / "ledger") + peeked(tmp_path / "copy")


@pytest.mark.usefixtures("spark")
def test_l3_a_spark_audit_of_queues_that_refuse_is_an_error_and_no_loss(backlog: Backlog, tmp_path: Path) -> None:
    book(tmp_path / "ledger", backlog.name)
    refused = backlog.text.replace("SharedAccessKey=", "SharedAccessKey=wrong")
    texts = [
        CliRunner().invoke(app, ["ledger", "audit", str(tmp_path / "ledger"), "--secondary", refused, *more])
        for more in ([], ["--engine", "spark"])
    ]
    assert [one.exit_code for one in texts] == [1, 1]
    assert texts[0].stderr == texts[1].stderr
    assert "the key was refused by the secondary" in texts[1].stderr
    assert recorded(tmp_path / "ledger") == (Counter(), [])
