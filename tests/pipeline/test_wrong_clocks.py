"""L5: sender, syphon, primary and secondary, each in turn with a clock that is 20 minutes wrong.

The truth is taken from the monotonic clock of the machine, which all processes share and nobody sets, and from the
enqueued times of the primary, whose error the test knows.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests import fake_clock
from tests.cli.running import COMMAND, environment
from tests.pipeline.clock_sender import COUNT, ENTITY, SHORT
from tests.tiers import Tier, current_tier
from twinbus.backlog import backlog_queue_path
from twinbus.connect import ReceivedMessage, connect
from twinbus.ledger import Balance, Intent, Move, Movement, Operation, Outcome, Stage, State, balance, read_ledger
from twinbus.pipeline import JOBS, Tables, ingest_ledger, off_clocks, result_over_history
from twinbus.testing import LocalNamespaces

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0
SENDER, SYPHON, PRIMARY, SECONDARY = "sender", "syphon", "primary", "secondary"
RIGHT = timedelta(0)
OFF = timedelta(minutes=20)
SUMS = (
    *("accepted", "delivered", "in_backlog", "dead_lettered", "unknown", "lost"),
    *("duplicated", "possibly_duplicated", "unconfirmed"),
)
CASES: list[dict[str, timedelta]] = [
    {},
    *({process: sign * OFF} for sign in (1, -1) for process in (SYPHON, SENDER, PRIMARY, SECONDARY)),
]
# The tier `quick` has the two cases that were wrong: a message expired, and a latency was negative.
CHOSEN = [one for one in CASES if current_tier() is not Tier.QUICK or one in ({SYPHON: OFF}, {SENDER: OFF})]


def name_of(case: Mapping[str, timedelta]) -> str:
    (found,) = case.items() or [("right", RIGHT)]
    return f"{found[0]}-{'behind' if found[1] < RIGHT else 'ahead'}" if found[1] else found[0]


@dataclass
class Outcomes:
    """What one run left behind. Times are seconds of the monotonic clock."""

    ledger: Path
    safe: dict[str, float]
    home: dict[str, float]
    dead: dict[str, str | None]
    arrivals: int

    @property
    def balance(self) -> Balance:
        return balance(read_ledger(self.ledger))

    @property
    def latencies(self) -> dict[str, float]:
        """The time in the backlog by the broker's clock, and the time of the send, as the ledger has them."""
        entries = list(read_ledger(self.ledger))
        outcomes = {one.id: one for one in entries if isinstance(one, Outcome | Operation)}
        returns = [one for one in entries if isinstance(one, Intent | Operation) and one.stage is Stage.RETURN_PRIMARY]
        return {
            name: waited / 1000 + outcomes[one.id].seconds
            for one in returns
            for name, waited in zip(one.ids, one.waited, strict=True)
        }

    @property
    def clocks(self) -> list[float]:
        states = [one for one in read_ledger(self.ledger) if isinstance(one, State) and one.event == "clock"]
        assert all(one.facts["lock_known"] for one in states), "the listing of the queues has the lock duration"
        return [float(one.facts["ahead"]) for one in states]

    @property
    def dead_lettered(self) -> list[tuple[float, int]]:
        """When messages were dead-lettered: by the clock of the syphon less that of the broker, in seconds, and ids."""
        moves = [one for one in read_ledger(self.ledger) if isinstance(one, Movement)]
        assert {one.move for one in moves} == {Move.DEAD_LETTERED}
        return [((one.at - (one.broker_at or 0)) / 1000, len(one.ids)) for one in moves]


class Grounds:
    """The namespaces. Cases with right servers share them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._started: dict[tuple[str, timedelta], str] = {}

    def __getitem__(self, wanted: tuple[str, timedelta]) -> str:
        if wanted not in self._started:
            name, ahead = wanted
            config = {"namespaces": [{"name": name, "queues": [{"name": ENTITY}] if name == PRIMARY else []}]}
            with pytest.MonkeyPatch.context() as patch:
                for variable, value in fake_clock.environment(ahead).items():
                    patch.setenv(variable, value)
                served = self._stack.enter_context(LocalNamespaces(name, config=config))
            self._started[wanted] = served[name].connection_string
        return self._started[wanted]


def run(case: Mapping[str, timedelta], grounds: Grounds, folder: Path) -> Outcomes:
    ahead = {process: case.get(process, RIGHT) for process in (SENDER, SYPHON, PRIMARY, SECONDARY)}
    primary, secondary = (grounds[side, ahead[side]] for side in (PRIMARY, SECONDARY))
    name, ledger = f"contoso-{name_of(case)}", folder / name_of(case)
    given = {"primary": primary, "secondary": secondary, "name": name, "ledger": str(ledger)}
    safe = program([sys.executable, "-m", "tests.pipeline.clock_sender"], ahead[SENDER], given=json.dumps(given))
    # Until the short time to live is over.
    time.sleep(1.2)
    strings = {
        "TWINBUS_PRIMARY_CONNECTION_STRING": primary,
        "TWINBUS_SECONDARY_CONNECTION_STRING": secondary,
        "TWINBUS_PRIMARY_NAME": name,
    }
    arguments = ["syphon", "--drain", "--ttl", "absolute", "--ledger", str(ledger)]
    # Exit code 3: some messages were dead-lettered.
    program([*COMMAND, *arguments], ahead[SYPHON], code=3, **strings)
    since_boot = datetime.now(UTC) - timedelta(seconds=time.monotonic())
    arrived = [one for one in peeked(primary, ENTITY) if str(one.message_id).startswith(f"{name}/")]
    home = {str(one.message_id): (_enqueued(one) - ahead[PRIMARY] - since_boot).total_seconds() for one in arrived}
    dead = peeked(secondary, f"{backlog_queue_path(name, 0)}/$DeadLetterQueue")
    return Outcomes(
        ledger, json.loads(safe), home, {str(one.message_id): one.dead_letter_reason for one in dead}, len(arrived)
    )


def program(command: list[str], ahead: timedelta, *, code: int = 0, given: str = "", **variables: str) -> str:
    found = subprocess.run(
        command,
        env=environment(**fake_clock.environment(ahead), **variables),
        cwd=ROOT,
        input=given,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert found.returncode == code, found.stdout + found.stderr
    return found.stdout


def peeked(connection_string: str, address: str) -> list[ReceivedMessage]:
    async def peek() -> list[ReceivedMessage]:
        async with connect(connection_string, timeout=10) as bus:
            return await bus.management(address.partition("/$")[0], address=address).peek(0, 500)

    return asyncio.run(peek())


def _enqueued(message: ReceivedMessage) -> datetime:
    assert message.enqueued_time is not None
    return message.enqueued_time


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Outcomes]]:
    with ExitStack() as stack:
        grounds, folder = Grounds(stack), tmp_path_factory.mktemp("ledgers")
        yield {name_of(case): run(case, grounds, folder) for case in CHOSEN}


each_case = pytest.mark.parametrize("case", CHOSEN, ids=name_of)


@each_case
def test_l5_y7_only_what_expired_by_the_brokers_clock_is_dead_lettered(
    runs: dict[str, Outcomes], case: dict[str, timedelta]
) -> None:
    found = runs[name_of(case)]
    short = {name for name in found.safe if f"/{SHORT}-" in name}
    assert len(short) == COUNT
    assert found.dead == dict.fromkeys(short, "TTLExpiredException")
    assert found.home.keys() == found.safe.keys() - short
    assert found.arrivals == len(found.home), "nothing came twice"


@each_case
def test_l5_latencies_are_right_to_a_second(runs: dict[str, Outcomes], case: dict[str, timedelta]) -> None:
    found = runs[name_of(case)]
    assert found.latencies == {name: pytest.approx(at - found.safe[name], abs=1) for name, at in found.home.items()}
    assert min(found.latencies.values()) > 1.0


@each_case
def test_l5_the_verdict_does_not_depend_on_clocks(runs: dict[str, Outcomes], case: dict[str, timedelta]) -> None:
    found = runs[name_of(case)].balance
    assert not found.incomplete
    sums = {name: sum(getattr(found, name).values()) for name in SUMS}
    assert sums == {**dict.fromkeys(SUMS, 0), "accepted": 3 * COUNT, "delivered": 2 * COUNT, "dead_lettered": COUNT}


@each_case
def test_l5_the_syphon_records_how_far_its_clock_is_ahead(
    runs: dict[str, Outcomes], case: dict[str, timedelta]
) -> None:
    ahead = case.get(SYPHON, RIGHT) - case.get(SECONDARY, RIGHT)
    assert runs[name_of(case)].clocks == [pytest.approx(ahead.total_seconds(), abs=1)]
    moves = runs[name_of(case)].dead_lettered
    assert sum(ids for _, ids in moves) == COUNT
    assert [seconds for seconds, _ in moves] == [pytest.approx(ahead.total_seconds(), abs=1)] * len(moves)


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_l5_the_jobs_name_each_wrong_clock_and_no_result_is_wrong(
    runs: dict[str, Outcomes], spark: SparkSession, tmp_path: Path
) -> None:
    ledger, tables = tmp_path / "ledger", Tables(spark, tmp_path / "tables")
    for found in runs.values():
        shutil.copytree(found.ledger, ledger, dirs_exist_ok=True)
    ingest_ledger(spark, ledger, tables.root).awaitTermination()
    rows = result_over_history(tables, JOBS["latency"]).collect()
    for name, found in runs.items():
        # Near midnight, a wrong clock makes two days of one.
        days = [row for row in rows if row.destination == f"contoso-{name}/{ENTITY}"]
        sums = [sum(row[one] for row in days) for one in ("diverted", "returned", "unknown_clock")]
        assert sums == [3 * COUNT, 2 * COUNT, 0]
        # The tables have milliseconds.
        latencies, known = found.latencies.values(), [row for row in days if row.returned]
        assert min(row.least for row in known) == pytest.approx(min(latencies), abs=0.002)
        assert max(row.most for row in known) == pytest.approx(max(latencies), abs=0.002)
    incidents = {row.destination: row for row in result_over_history(tables, JOBS["incidents"]).collect()}
    for name in runs:
        row = incidents[f"contoso-{name}/{ENTITY}"]
        assert (row.diverted, row.returned, row.processes) == (3 * COUNT, 2 * COUNT, 1)
        assert 0 <= row.seconds_to_restore < PATIENCE
    wrong = Counter((one.writer.partition("-")[0], round(one.least / 60)) for one in off_clocks(tables))
    # One sender and one syphon each, and those that a wrong secondary is the measure for.
    assert wrong == {(role, minutes): 2 for role in ("client", "syphon") for minutes in (20, -20)}
