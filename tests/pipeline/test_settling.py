"""Settled messages (D3): the followed balance keeps no row of finished messages, and still is the balance of all."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import polars
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from tests.pipeline.books import HOUR, MIDNIGHT, halves, history, movement, operation, segment_name
from tests.tiers import budget
from twinbus.ledger import Entry, Move, Stage, balance, encode_entry
from twinbus.pipeline import reconcile, settling
from twinbus.pipeline.audit_comparison import TablesReading
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.jobs import JOBS, current_result, follow_jobs, result_over_history
from twinbus.pipeline.result_tables import JUDGED
from twinbus.pipeline.settling import OPEN, SETTLED, Horizon, SettledState
from twinbus.pipeline.snapshots import Snapshots, TablesVersion
from twinbus.pipeline.tables import Tables, TablesChange
from twinbus.pipeline.time_window import TimeWindow
from twinbus.pipeline.writer_states import WriterStates

pytestmark = pytest.mark.timeout(900)  # Spark is slow on a busy machine
RECONCILE = JOBS["reconcile"]
DAY = 24 * HOUR


def later() -> float:
    """A clock after all entries."""
    return (MIDNIGHT + 400 * DAY) / 1000


def at(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


# --- the rules -------------------------------------------------------------------------------------------------------


def test_d3_the_limit_of_the_horizon_is_a_whole_hour_and_not_in_the_future() -> None:
    horizon = Horizon(timedelta(days=2), later)
    assert horizon.limit(MIDNIGHT + 10 * DAY + 1) == MIDNIGHT + 8 * DAY
    assert horizon.limit(MIDNIGHT + 10 * DAY - 1) == MIDNIGHT + 8 * DAY - HOUR
    assert horizon.limit(2**62) == MIDNIGHT + 398 * DAY, "one entry with a wrong time must not settle everything"
    assert Horizon(timedelta.max, later).limit(2**62) < 0, "nothing is ever settled"
    assert (Horizon(timedelta(days=30)).step, Horizon(timedelta(0)).step) == (DAY, HOUR)


def test_d3_only_a_window_that_ends_inside_an_hour_of_settled_messages_reads_the_history() -> None:
    state = SettledState(MIDNIGHT, is_any=True)
    before, hour = at(MIDNIGHT - HOUR // 2), at(MIDNIGHT - HOUR)
    assert state.splits(TimeWindow(before))
    assert state.splits(TimeWindow(None, before))
    assert not SettledState(MIDNIGHT).splits(TimeWindow(before)), "no message is settled"
    for window in (TimeWindow(), TimeWindow(hour), TimeWindow(hour, at(MIDNIGHT)), TimeWindow(at(MIDNIGHT + 1))):
        assert not state.splits(window)


@pytest.mark.thorough
def test_d3_the_verdicts_on_a_settled_part_and_on_the_entries_since_add_up(spark: SparkSession) -> None:
    """Random sums, most of them far from any real message."""
    chance, until = Random(19), MIDNIGHT

    def times(first: int, count: int) -> dict[str, int | None]:
        return {
            name: first + chance.randrange(4) if chance.random() < 0.7 else None
            for name in ("first_accepted", "last_accepted", "last", "doubted_at", "seen_at")[:count]
        }

    rows = []
    for number in range(budget(1, 20_000, 200_000)):
        name = {"destination": "contoso/orders", "id": str(number), "from_start": False}
        since = {sum_: chance.choice([0, 0, 0, 1, 1, 2, -1]) for sum_ in reconcile.SUMS}
        since |= {"accepted": chance.choice([0, 1, 1, 1, 2]), "redirected": 0, "away": 0}
        # The time of a doubt comes with an operation that perhaps removed a copy.
        seen = {**times(until - 1, 5), "doubted_at": until + chance.randrange(3) if since["maybe_removed"] else None}
        if since["found"] and seen["seen_at"] is None:
            seen["seen_at"] = until
        times_used, stored = chance.choice([1, 1, 2]), chance.choice([0, 1, 2])
        first = dict.fromkeys(reconcile.SUMS, 0) | {"stored": stored, "removed": stored}
        first |= {"accepted": times_used, "delivered": times_used}
        then = {**dict.fromkeys(seen), "seen_at": until - 1 if stored else None, "first_accepted": until - HOUR}
        rows += [{"part": 0, **name, **first, **then}, {"part": 1, **name, **since, **seen}]
    parts = spark.createDataFrame(rows, f"part int, {reconcile.TALLIES}").persist()
    verdict = [name for name in JUDGED if name not in ("delivered", "dead_lettered", "in_flight")]
    verdict += ["is_delivered", "is_dead_lettered", "hoped"]
    apart = (
        reconcile.with_verdict(parts)
        .groupBy("id")
        .agg(
            *(F.sum(one).alias(f"apart_{one}") for one in verdict),
            F.max((F.col("part") == 1) & F.coalesce(settling.adds_up(until), F.lit(False))).alias("adds_up"),
        )
    )
    both = reconcile.with_verdict(reconcile.merge(parts.drop("part"))).join(apart, "id")
    differs = F.expr(" or ".join(f"{one} != apart_{one}" for one in verdict))
    found = (
        both.groupBy("adds_up").agg(F.count("*").alias("rows"), F.count(F.when(differs, 1)).alias("wrong")).collect()
    )
    parts.unpersist()
    counts = {row.adds_up: (row.rows, row.wrong) for row in found}
    assert counts[True][1] == 0
    assert counts[True][0] > len(rows) // 100
    assert counts[False][1] > 0, "otherwise the rule is not needed"


# --- a followed ledger -----------------------------------------------------------------------------------------------


def judged(rows: list[Row]) -> dict[tuple[str, str | None], tuple[int, ...]]:
    """Return what each row says, without the number of its messages: an id that is used again may count again."""
    found = {(row.destination, row.id): tuple(row[name] for name in JUDGED) for row in rows}
    return {key: sums for key, sums in found.items() if any(sums)}


class Followed:
    """A ledger that is followed with a horizon. A batch has one segment."""

    def __init__(self, spark: SparkSession, folder: Path, horizon: timedelta) -> None:
        self.tables, self.ledger = Tables(spark, folder / "tables"), folder / "ledger"
        self.rows: list[int] = []
        """The number of rows by message after each batch."""
        self._follow = follow_jobs(["reconcile"], horizon, later)
        self._entries: list[Entry] = []
        self.dead = WriterStates(frozenset(segment_name(number).rpartition("-")[0] for number in range(200)))

    def ingest(self, *batches: Sequence[Entry], check: bool = True) -> None:
        """Ingest batches. With `check`, the followed result after each one is that of the whole history."""
        self.ledger.mkdir(exist_ok=True)
        for number, entries in enumerate(batches, self.tables.version().number):
            self._entries += entries
            (self.ledger / segment_name(number)).write_text("".join(map(encode_entry, entries)))

        def extend(change: TablesChange) -> None:
            change.ingested = None  # otherwise nothing would be settled before the last batch
            self._follow(change)
            self.rows.append(sum(file.rows for file in self.tables.files(OPEN, change.after())))
            if check:
                self.check(change.after())

        query = ingest_ledger(self.tables.spark, self.ledger, self.tables.root, most_bytes=1, extend=extend)
        query.awaitTermination()

    def check(self, version: TablesVersion, window: TimeWindow | None = None) -> None:
        followed = current_result(self.tables, RECONCILE, window, self.dead, version)
        anew = result_over_history(self.tables, RECONCILE, window, self.dead, version)
        assert judged(followed.collect()) == judged(anew.collect())

    def settled(self) -> int:
        return int(polars.read_delta(str(self.tables.root / SETTLED))["messages"].sum())

    def sums(self) -> dict[str, int]:
        rows = current_result(self.tables, RECONCILE, writers=self.dead).collect()
        return {name: sum(row[name] for row in rows) for name in JUDGED if name != "in_flight"}

    def balance(self) -> dict[str, int]:
        return balance(self._entries, self.dead.dead).sums()


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(budget(0, 1, 20)))
def test_d3_whenever_entries_arrive_the_balance_with_settled_messages_is_that_of_all_entries(
    seed: int, spark: SparkSession, tmp_path: Path
) -> None:
    """A fifth of the entries is up to two days late. Ids are used again after they were settled."""
    chance, entries = Random(seed), history(seed + 40)
    entries.sort(key=lambda entry: entry.at + (chance.randrange(2 * DAY) if chance.random() < 0.2 else 0))
    followed, size = Followed(spark, tmp_path, timedelta(hours=1)), -(-len(entries) // 4)
    followed.ingest(*(entries[start : start + size] for start in range(0, len(entries), size)))
    assert followed.settled() > 20
    assert followed.sums() == followed.balance()


class DiedError(Exception):
    """The ingest ends here."""


def die(*_: object) -> None:
    raise DiedError


def traffic(day: int, count: int = 40) -> list[Entry]:
    """Return a day: most messages are delivered, some after a diversion; one is lost, one stays in the backlog."""
    begins, found = MIDNIGHT + day * DAY, list[Entry]()
    for number in range(count):
        name, now = f"{day}-{number}", begins + number * HOUR // 3
        if number % 4:
            found.append(operation(Stage.SEND_PRIMARY, name, at=now, to=f"orders{number % 2}"))
            continue
        found.append(operation(Stage.SEND_BACKLOG, name, at=now))
        if number == 8:
            continue
        if number != 4:
            found.append(operation(Stage.RETURN_PRIMARY, name, at=now + HOUR, broker_at=now + HOUR + 5))
        found.append(operation(Stage.COMPLETE_BACKLOG, name, at=now + HOUR))
    return found


@pytest.mark.thorough
def test_d3_the_rows_of_a_followed_balance_depend_on_the_horizon_and_late_entries_are_still_right(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch with late entries is repeated after all its tables were committed, but not the snapshot."""
    followed, days = Followed(spark, tmp_path, timedelta(days=2)), 8
    followed.ingest(*map(traffic, range(days)), check=False)
    # The rows of the horizon, of the day that is not over, and the two of each day that are not finished.
    assert max(followed.rows) <= 3 * 40 + 2 * days
    assert followed.settled() >= (days - 3) * 38
    version = followed.tables.version()
    for since, until in ((DAY, None), (2 * HOUR + 1, 30 * HOUR - 1)):
        followed.check(version, TimeWindow(at(MIDNIGHT + since), None if until is None else at(MIDNIGHT + until)))
    # An audit may ask for any message, also for a settled one.
    (audited,) = TablesReading(followed.tables, version, followed.dead).sums().where("id = '2-1'").collect()
    assert (audited.accepted, audited.delivered) == (1, 1)
    now = MIDNIGHT + days * DAY
    begun, ended = halves(operation(Stage.SEND_PRIMARY, "3-5", at=now, to="orders1"))
    reopened: list[Entry] = [
        operation(Stage.RETURN_PRIMARY, "0-0", at=MIDNIGHT + HOUR, by=1),  # delivered twice
        operation(Stage.COMPLETE_BACKLOG, "0-12", at=now, result="unknown"),
        operation(Stage.SEND_PRIMARY, "0-1", at=now, to="orders1", result="unknown"),
        operation(Stage.SEND_PRIMARY, "0-3", at=MIDNIGHT + HOUR, to="orders1"),  # another one: settled again at once
        movement(Move.REDIRECTED, "1-0", at=now, to="elsewhere", source="contoso/orders"),
        movement(Move.POSSIBLE_DUPLICATE, "1-12", at=now),
        movement(Move.KEPT, "1-16", at=now),
        begun,
    ]
    used_again = [
        operation(stage, name, at=now, to="orders1")
        for stage, name in ((Stage.SEND_PRIMARY, "0-5"), (Stage.SEND_BACKLOG, "0-7"))
    ]
    late = [*reopened, *used_again, operation(Stage.RETURN_PRIMARY, "4-8", at=now)]
    with monkeypatch.context() as patch:
        patch.setattr(Snapshots, "add", die)
        with pytest.raises(StreamingQueryException, match="DiedError"):
            followed.ingest(late, check=False)
    followed.ingest()
    found = followed.tables.read(OPEN, reconcile.TALLIES).groupBy("id").agg(F.max("from_start")).collect()
    whole = dict(map(tuple, found))
    assert all(whole[name] for name in ("0-0", "0-12", "0-1", "1-0", "1-12", "1-16", "3-5", "4-8"))
    assert (whole["0-5"], whole["0-7"]) == (False, False), "the verdicts add up, so the history was not read"
    # The second message with this id is lost. Both messages have one line.
    followed.ingest([ended, operation(Stage.COMPLETE_BACKLOG, "0-7", at=now + 1, to="orders1")])
    assert followed.sums() == followed.balance()
    rows = {row.id: row for row in current_result(followed.tables, RECONCILE, writers=followed.dead).collect()}
    assert {"0-0", "0-1", "1-12", "0-4", "7-4"} <= rows.keys()
    assert (rows["0-7"].accepted, rows["0-7"].delivered, rows["0-7"].lost) == (2, 1, 1)
