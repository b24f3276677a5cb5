"""Every job against two oracles that share no code with it: the ledger's balance, and DuckDB over the same files."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.errors import StreamingQueryException
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from tests.pipeline import oracle
from tests.pipeline.books import (
    HOUR,
    MIDNIGHT,
    halves,
    history,
    movement,
    operation,
    segment_name,
    state,
    write_segments,
    writer,
)
from twinbus.ledger import (
    LISTED_SUMS,
    Balance,
    Closed,
    Entry,
    Intent,
    MessageKey,
    Move,
    Movement,
    Operation,
    Outcome,
    Role,
    SegmentHeader,
    Stage,
    balance,
    encode_entry,
    read_ledger,
)
from twinbus.pipeline import latency, message_steps, timeline, timeline_buckets
from twinbus.pipeline.checkpoints import CHECKPOINTS_FOLDER
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.ingested_segments import SEGMENTS
from twinbus.pipeline.jobs import JOBS, current_result, follow_jobs, result_over_history, why_incomplete
from twinbus.pipeline.jobs import read_history as history_of
from twinbus.pipeline.report_data import LATENCY_EDGES
from twinbus.pipeline.result_tables import JUDGED
from twinbus.pipeline.settling import SCHEMA, SETTLED
from twinbus.pipeline.tables import ENTRIES, OPERATIONS, PENDING, PROBLEMS, SCHEMAS, STEPS, Tables, struct
from twinbus.pipeline.time_window import TimeWindow
from twinbus.pipeline.writer_states import WriterStates, dead_in_tables, writers_at_work

pytestmark = pytest.mark.timeout(600)  # Spark is slow on a busy machine

DAY = datetime(2026, 9, 22, tzinfo=UTC)
# All values of a result row, as a tuple.
Found = dict[tuple[str, str | None], tuple[int, ...]]


def expected_of(found: Balance) -> Found:
    """Return the expected rows: one for each listed message, and one for all other messages of a destination."""
    sums: defaultdict[tuple[str, str | None], list[int]] = defaultdict(lambda: [0] * len(JUDGED))
    named = [name for name in JUDGED if name != "in_flight"]
    counters: list[Counter[MessageKey]] = [getattr(found, name) for name in named]
    for message in set().union(*counters):
        listed = any(getattr(found, name)[message] for name in LISTED_SUMS)
        row = sums[message.destination, message.id if listed else None]
        for place, counter in enumerate(counters):
            row[place] += counter[message]
    return {key: tuple(row[:-1]) for key, row in sums.items() if any(row)}


def found_in(rows: list[Row]) -> Found:
    found = {(row.destination, row.id): tuple(row[name] for name in JUDGED if name != "in_flight") for row in rows}
    # Messages without a verdict are not in the balance.
    return {key: sums for key, sums in found.items() if any(sums)}


@dataclass
class Ingested:
    ledger: Path
    tables: Tables

    def balance(self, dead: frozenset[str] = frozenset()) -> Balance:
        return balance(read_ledger(self.ledger, lambda _: None), dead)

    def found(self, job: str, *, followed: bool = False, dead: frozenset[str] = frozenset()) -> list[Row]:
        run = current_result if followed else result_over_history
        return run(self.tables, JOBS[job], writers=WriterStates(dead)).collect()


@pytest.fixture(scope="module")
def books(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Ingested:
    """A history ingested in two runs. The second run has more lines of a segment that was open in the first."""
    folder = tmp_path_factory.mktemp("books")
    made = Ingested(folder / "ledger", Tables(spark, folder / "tables"))
    write_segments(made.ledger, history(1), seed=1)
    (being_written,) = made.ledger.glob("*.open")
    text = being_written.read_text()
    whole, torn = text[: text.rindex("\n") + 1], text[text.rindex("\n") + 1 :]
    lines = whole.splitlines(keepends=True)
    being_written.write_text("".join(lines[: len(lines) // 2]) + torn)
    ingest_ledger(spark, made.ledger, made.tables.root).awaitTermination()
    being_written.unlink()
    (made.ledger / being_written.name.removesuffix(".open")).write_text(
        "".join([*lines, "rubbish\n", '{"v":1,"kind":"gap","at":"no number"}\n', '{"v":2,"kind":"state"}\n']) + torn
    )
    ingest_ledger(spark, made.ledger, made.tables.root).awaitTermination()
    return made


def test_d3_the_tables_have_every_entry_once_and_join_intents_with_outcomes(books: Ingested) -> None:
    entries = {(entry.kind, entry.id): entry for entry in read_ledger(books.ledger, lambda _: None)}
    begun = {name for kind, name in entries if kind == "intent"}
    ended = {name for kind, name in entries if kind == "outcome"}
    whole = {name for kind, name in entries if kind == "operation"}
    done = [(row.id, row.whole) for row in books.tables.read(OPERATIONS).select("id", "whole").collect()]
    assert Counter(done) == Counter([*((name, True) for name in whole), *((name, False) for name in begun & ended)])
    waiting = [(row.kind, row.id) for row in books.tables.read(PENDING).select("kind", "id").collect()]
    assert Counter(waiting) == Counter(
        [*(("intent", name) for name in begun - ended), *(("outcome", name) for name in ended - begun)]
    )
    others = Counter((row.kind, row.id) for row in books.tables.read(ENTRIES).select("kind", "id").collect())
    assert others == Counter(key for key in entries if key[0] not in ("intent", "outcome", "operation"))


def test_d3_unreadable_lines_are_reported_with_file_and_line_as_the_ledger_does(books: Ingested) -> None:
    problems: list[str] = []
    read = read_ledger(books.ledger, lambda problem: problems.append(str(problem)))
    closed = dead_in_tables(books.tables, books.tables.version(), WriterStates())
    assert Counter(why_incomplete(books.tables)) == Counter([*balance(read, closed).incomplete, *problems])
    assert len(problems) == books.tables.read(PROBLEMS).count() == 3


@pytest.mark.thorough
def test_l7_d7_a_ledger_under_another_name_is_not_ingested_again(spark: SparkSession, tmp_path: Path) -> None:
    ledger, tables = tmp_path / "ledger", Tables(spark, tmp_path / "tables")
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to(ledger)
    for number, name in enumerate(("ledger", "sub/../ledger", "link")):
        write(ledger, number, [operation(Stage.SEND_PRIMARY, f"{number}")])
        with (ledger / segment_name(number)).open("a") as segment:
            segment.write("no entry\n")
        ingest_ledger(spark, tmp_path / name, tables.root).awaitTermination()
        (known,) = tables.segments.ledgers()
        assert (known.ledger, len(known.segments)) == (str(ledger), number + 1)
        assert tables.read(OPERATIONS).count() == tables.read(PROBLEMS).count() == number + 1
    assert len(list((tables.root / CHECKPOINTS_FOLDER).iterdir())) == 1
    version = tables.version()
    ingest_ledger(spark, tmp_path / "link", tables.root).awaitTermination()
    assert tables.version() == version, "there was nothing to read"


@pytest.mark.thorough
def test_d3_an_ingest_leaves_no_rows_in_memory_though_lines_were_rejected(spark: SparkSession, tmp_path: Path) -> None:
    def kept() -> int:
        context: Any = spark.sparkContext
        return int(context._jsc.getPersistentRDDs().size())

    before = kept()
    write(tmp_path / "ledger", 1, [operation(Stage.SEND_PRIMARY, "a")])
    with (tmp_path / "ledger" / segment_name(1)).open("a") as segment:
        segment.write("no entry\n")
    ingest_ledger(spark, tmp_path / "ledger", tmp_path / "tables").awaitTermination()
    assert Tables(spark, tmp_path / "tables").read(PROBLEMS).count() == 1
    assert kept() == before


def test_d5_the_steps_of_a_message_are_its_operations_and_movements_with_its_own_result(books: Ingested) -> None:
    entries = {(entry.kind, entry.id): entry for entry in read_ledger(books.ledger, lambda _: None)}
    expected: Counter[tuple[str, str, str | None]] = Counter()
    for (kind, name), entry in entries.items():
        if isinstance(entry, Movement):
            expected.update((name, message, None) for message in entry.ids)
        outcome = entry if kind == "operation" else entries.get(("outcome", name))
        if not isinstance(entry, Operation | Intent) or not isinstance(outcome, Operation | Outcome):
            continue
        failed = Counter(outcome.failed)
        for message in entry.ids:
            concerned = not outcome.failed or failed[message] > 0
            failed[message] -= 1
            expected[name, message, outcome.result if concerned else "ok"] += 1
    rows = DeltaTable(books.tables.root / STEPS).to_pyarrow_table().to_pylist()
    assert Counter((row["entry"], row["id"], row["result"]) for row in rows) == expected
    assert {len({row["result"] for row in rows if row["entry"] == name}) for name, *_ in expected} == {1, 2}
    assert all(row["prefix"] == hashlib.md5(row["id"].encode(), usedforsecurity=False).hexdigest()[:4] for row in rows)


@pytest.mark.thorough
def test_d5_operations_with_many_ids_have_their_steps_in_files_of_bounded_size(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 1000
    monkeypatch.setattr(message_steps, "_FILE_ROWS", most)
    tables = Tables(spark, tmp_path / "tables")
    many = [operation(Stage.SEND_PRIMARY, *(f"{number}-{one}" for one in range(200))) for number in range(20)]
    begun, ended = zip(*map(halves, many[10:]), strict=True)
    moved = movement(Move.DEAD_LETTERED, *(f"0-{one}" for one in range(200)), *(f"moved-{one}" for one in range(1800)))
    batches: list[tuple[Sequence[Entry], int]] = [(many[:10], 2000), (begun, 0), (ended, 2000), ([moved], 2000)]
    expected = 0
    for number, (entries, steps) in enumerate(batches):
        write(tmp_path / "ledger", number, [*entries])
        before = {file.path for file in tables.files(STEPS, tables.version())}
        ingest_ledger(spark, tmp_path / "ledger", tables.root).awaitTermination()
        files, expected = tables.files(STEPS, tables.version()), expected + steps
        new = sorted(file.limits["prefix"] for file in files if file.path not in before)
        assert sum(file.rows for file in files) == expected
        assert max(file.rows for file in files) < 1.2 * most, "prefixes are nearly even"
        assert (len(new) > 1) == bool(steps)
        assert all(one[1] < other[0] for one, other in pairwise(new)), "files of a run have no prefix in common"


@pytest.mark.thorough
def test_d5_a_query_for_one_id_reads_at_most_three_files(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query of docs/tables.md, while all files are gone but those that may have the id by the log's statistics."""
    monkeypatch.setattr(message_steps, "_FILE_ROWS", 100)
    tables, ids, batches = Tables(spark, tmp_path / "tables"), [f"order-{number}" for number in range(300)], 4
    for number in range(batches):
        write(tmp_path / "ledger", number, [operation(Stage.SEND_PRIMARY, *ids, at=MIDNIGHT + number, by=number)])
    ingest_ledger(spark, tmp_path / "ledger", tables.root, most_bytes=1).awaitTermination()
    files = tables.files(STEPS, tables.version())
    assert len(files) > 6

    def files_with(id_: str) -> set[str]:
        prefix = hashlib.md5(id_.encode(), usedforsecurity=False).hexdigest()[:4]
        return {one.path for one in files if one.limits["prefix"][0] <= prefix <= one.limits["prefix"][1]}

    assert {1, 2, 3} >= {len(files_with(id_)) for id_ in ids}
    kept = files_with("order-1")
    for file in files:
        if file.path not in kept:
            (tables.root / STEPS / file.path).unlink()
    prefix = hashlib.md5(b"order-1", usedforsecurity=False).hexdigest()[:4]
    query = f"select entry from rows where prefix = '{prefix}' and id = 'order-1'"  # noqa: S608 - digits
    rows = QueryBuilder().register("rows", DeltaTable(tables.root / STEPS)).execute(query).read_all()
    assert len(rows["entry"]) == batches


DEAD = frozenset(f"syphon-host-7-{writer(number)}" for number in (0, 1, 5))


@pytest.mark.parametrize("dead", [frozenset(), DEAD], ids=["all writers live", "some are dead"])
def test_d3_l1_reconcile_agrees_with_the_balance_by_id_and_with_duckdb(books: Ingested, dead: frozenset[str]) -> None:
    rows, expected = books.found("reconcile", dead=dead), books.balance(dead)
    assert found_in(rows) == expected_of(expected)
    assert expected.lost, "a history without a loss shows nothing"
    assert expected.unknown, "nor one without an unknown"
    assert (expected.unknown != books.balance().unknown) == bool(dead), "what dead writers began is unknown"
    sums = {name: sum(row[name] for row in rows) for name in ("messages", *JUDGED) if name != "in_flight"}
    assert sums == oracle.named(oracle.connect(books.tables.root, books.tables.version(), dead), oracle.RECONCILE)


@pytest.mark.thorough
def test_l1_l5_reconcile_orders_deliveries_by_the_brokers_clock_as_the_balance_does(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Pairs of messages that a syphon perhaps delivered or completed. Only the second was seen after that."""
    died, lives = MIDNIGHT + HOUR, {"seen-before": MIDNIGHT, "seen-after": MIDNIGHT + 2 * HOUR}
    entries: list[Entry] = [operation(Stage.SEND_BACKLOG, *lives)]
    entries += [halves(operation(Stage.RETURN_PRIMARY, *lives, at=MIDNIGHT, by=1, broker_at=died))[0]]
    for id_, seen in lives.items():
        # By its own clock, this syphon was always later.
        refused = operation(Stage.RETURN_PRIMARY, id_, at=MIDNIGHT + 3 * HOUR, result="server_busy", broker_at=seen)
        entries.append(refused)
    # The same with other entries: a completion without an answer, and messages that were kept or found.
    for move in (Move.KEPT, Move.FOUND):
        moved = {f"{move}-before": MIDNIGHT, f"{move}-after": MIDNIGHT + 2 * HOUR}
        entries.append(operation(Stage.SEND_BACKLOG, *moved))
        entries.append(
            operation(Stage.COMPLETE_BACKLOG, *moved, at=MIDNIGHT, result="unknown", broker_at=died, seconds=1.5)
        )
        for id_, seen in moved.items():
            entries.append(replace(movement(move, id_, at=MIDNIGHT + 3 * HOUR), broker_at=seen))
    write(tmp_path / "ledger", 1, entries)
    made = Ingested(tmp_path / "ledger", Tables(spark, tmp_path / "tables"))
    ingest_ledger(spark, made.ledger, made.tables.root).awaitTermination()
    found, expected = made.found("reconcile", dead=DEAD), made.balance(DEAD)
    assert sorted(message.id for message in expected.unknown) == ["found-before", "kept-before", "seen-before"]
    assert sorted(message.id for message in expected.in_backlog) == ["found-after", "kept-after", "seen-after"]
    assert found_in(found) == expected_of(expected)


def test_l1_a_writer_of_tables_is_dead_if_it_ended_or_is_silent_and_not_known_to_live(books: Ingested) -> None:
    version = books.tables.version()
    names = {f"client-host-7-{writer(100 + number)}" for number in range(6)}
    (open_one,) = names - dead_in_tables(books.tables, version, WriterStates(), now=MIDNIGHT / 1000)
    assert dead_in_tables(books.tables, version, WriterStates(), now=MIDNIGHT / 1000 + 16 * 60) == names
    patient = WriterStates(silence=timedelta(minutes=17))
    assert dead_in_tables(books.tables, version, patient, now=MIDNIGHT / 1000 + 16 * 60) == names - {open_one}
    assert writers_at_work(books.tables, version, WriterStates()) == [], "now it was silent for weeks"
    assert writers_at_work(books.tables, version, WriterStates(silence=timedelta(days=36_500))) == [open_one]
    alive = WriterStates(alive=frozenset({open_one}))
    assert dead_in_tables(books.tables, version, alive, now=MIDNIGHT / 1000 + 16 * 60) == names - {open_one}
    (reason,) = [one for one in why_incomplete(books.tables) if "without closing" in one]
    assert reason == f"{open_one} ended without closing: its last entries may be missing"
    assert not [one for one in why_incomplete(books.tables, alive) if "without closing" in one]


def test_m1_d3_cost_agrees_with_duckdb(books: Ingested) -> None:
    found = result_over_history(books.tables, JOBS["cost"])
    database = oracle.connect(books.tables.root, books.tables.version())
    assert sorted(map(tuple, found.collect())) == oracle.rows(database, oracle.COST)


@pytest.mark.thorough
def test_d3_latency_agrees_with_duckdb(books: Ingested) -> None:
    found = sorted(map(tuple, books.found("latency")))
    expected = oracle.rows(oracle.connect(books.tables.root, books.tables.version()), oracle.LATENCY)
    assert [row[:4] for row in found] == [row[:4] for row in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[4:] == pytest.approx(other[4:], nan_ok=True)


@pytest.mark.thorough
def test_d3_incidents_agree_with_duckdb(books: Ingested) -> None:
    def key(row: tuple[object, ...]) -> tuple[str, object]:
        return str(row[0]), row[1] or 0

    found = sorted(map(tuple, books.found("incidents")), key=key)
    expected = oracle.rows(oracle.connect(books.tables.root, books.tables.version()), oracle.INCIDENTS)
    assert found == sorted(expected, key=key)
    assert {row[2] is None for row in found} == {True, False}, "some restored, some not"
    assert any(row[6] == row[7] > 0 for row in found), "one of which all came home"


@pytest.mark.thorough
@pytest.mark.parametrize("width", [1000, HOUR, 24 * HOUR])
def test_d4_the_timeline_agrees_with_duckdb_and_its_depth_includes_earlier_messages(
    books: Ingested, width: int
) -> None:
    version = books.tables.version()
    first, last = MIDNIGHT + HOUR // 2, MIDNIGHT + 5 * HOUR
    found = timeline.count_buckets(*history_of(books.tables, version, F.lit(True)), width, first, last).collect()
    database = oracle.connect(books.tables.root, version)
    expected = oracle.rows(database, oracle.SERIES, width=width, first=first, last=last)
    assert sorted(map(tuple, found)) == expected
    assert any(row.bucket < first - first % width and row.came > row.left for row in found)
    assert all(any(row[name] for row in found) for name in timeline_buckets.COUNTS)


@pytest.mark.thorough
def test_d4_wide_buckets_at_both_ends_of_a_window_count_only_what_is_in_it(books: Ingested) -> None:
    tables = history_of(books.tables, books.tables.version(), F.lit(True))
    first, until = MIDNIGHT + HOUR // 2, MIDNIGHT + 5 * HOUR
    window = TimeWindow(*(datetime.fromtimestamp(instant / 1000, UTC) for instant in (first, until)))
    narrow = timeline.count_buckets(*tables, 1000, first, until - 1).collect()
    wide = timeline.count_buckets(*tables, 24 * HOUR, first, until - 1, window).collect()
    assert {row.bucket for row in wide} == {MIDNIGHT - 24 * HOUR, MIDNIGHT}
    for name in timeline_buckets.COUNTS:
        expected = Counter(row.bucket >= first for row in narrow for _ in range(row[name]))
        assert Counter(row.bucket >= MIDNIGHT for row in wide for _ in range(row[name])) == expected


def test_d4_the_latency_histogram_agrees_with_duckdb(books: Ingested) -> None:
    tallies = latency.tally(*history_of(books.tables, books.tables.version(), F.lit(True)))
    found = latency.spread(tallies, TimeWindow()).first()
    assert found is not None
    database = oracle.connect(books.tables.root, books.tables.version())
    seconds = [row[0] for row in oracle.rows(database, oracle.SECONDS)]
    assert (found.diverted, found.returned) == (len(seconds), sum(one is not None for one in seconds))
    home = sorted(one for one in seconds if one is not None and one >= 0)
    assert found.counts == [
        sum(low < one <= high for one in home) for low, high in pairwise([-math.inf, *LATENCY_EDGES, math.inf])
    ]
    assert sum(found.counts) == found.returned - found.unknown_clock
    assert found.unknown_clock == sum(one is not None and one < 0 for one in seconds)
    assert (found.least, found.p50, found.most) == (home[0], pytest.approx(statistics.median(home)), home[-1])


@pytest.mark.parametrize(
    ("first", "last", "width"),
    [(0, 0, 1000), (0, 239_999, 1000), (0, 240_000, 2000), (999, 240_000, 2000), (0, 30 * 24 * HOUR, 6 * HOUR)],
)
def test_d4_buckets_are_few_and_have_widths_that_people_count_time_in(first: int, last: int, width: int) -> None:
    assert timeline_buckets.width_for(first, last, 240) == width
    assert timeline_buckets.width_for(-(2**62), 2**62, 240) > 0, "any instant may stand in a ledger"


# --- followed --------------------------------------------------------------------------------------------------------


class BrokenOffError(Exception):
    """The stream is ended at this step."""


@pytest.mark.thorough
def test_d3_a_stream_that_dies_at_any_step_resumes_and_ends_with_the_result_of_the_batch(
    books: Ingested, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = Tables(spark, tmp_path / "tables")
    follow = follow_jobs(tuple(JOBS), timedelta(hours=1), lambda: DAY.timestamp() + 10**6)

    def run() -> bool:
        """Run the stream. Returns whether it ended normally."""
        query = ingest_ledger(spark, books.ledger, tables.root, most_bytes=200_000, extend=follow)
        try:
            query.awaitTermination()
        except StreamingQueryException as error:
            if "BrokenOffError" not in str(error):
                raise
            return False
        return True

    commit, write = Tables.commit, Tables.write

    def die_before_commit(*_: object) -> None:
        raise BrokenOffError

    def die_after_commit(*arguments: object) -> None:
        commit(*arguments)  # type: ignore[arg-type] # handed on as they come
        raise BrokenOffError

    def die_while_writing_tallies(tables: Tables, table: str, *rest: object) -> object:
        if table.startswith("tallies"):
            raise BrokenOffError
        return write(tables, table, *rest)  # type: ignore[arg-type] # handed on as they come

    deaths = [("commit", die_before_commit), ("write", die_while_writing_tallies), ("commit", die_after_commit)]
    for name, death in deaths:
        with monkeypatch.context() as patch:
            patch.setattr(Tables, name, death)
            assert not run()
    assert tables.version().number == 1, "what was not committed is not there"
    assert run()
    version = tables.version()
    assert version.number >= 2
    assert set(version.tables) == {*SCHEMAS, SEGMENTS, *(name for job in JOBS.values() for name in job.tables)}, (
        "every job is followed"
    )
    again = Ingested(books.ledger, tables)
    assert again.tables.read(SETTLED, SCHEMA).agg(F.sum("messages")).collect()[0][0] > 20, "messages are settled"
    for job in JOBS:
        # An id that is used again after it was settled is counted as two messages.
        names = [name for name in struct(JOBS[job].result).names if (job, name) != ("reconcile", "messages")]
        followed, anew = again.found(job, followed=True), books.found(job)
        assert sorted(str([row[name] for name in names]) for row in followed) == sorted(
            str([row[name] for name in names]) for row in anew
        )
    for table, number in version.tables.items():
        assert DeltaTable(tables.root / table).version() == number, "no table is ahead of the snapshot"


@pytest.mark.thorough
def test_d3_reading_a_ledger_again_from_the_beginning_adds_nothing_twice(books: Ingested, spark: SparkSession) -> None:
    before = {table: books.tables.read(table).count() for table in SCHEMAS}
    for folder in (books.tables.root / "checkpoints").iterdir():
        folder.rename(folder.with_suffix(".before"))
    ingest_ledger(spark, books.ledger, books.tables.root).awaitTermination()
    assert {table: books.tables.read(table).count() for table in SCHEMAS} == before


# --- windows and edges -----------------------------------------------------------------------------------------------


def write(directory: Path, number: int, entries: list[Entry], *, closed: bool = True) -> None:
    name = segment_name(number).removesuffix("-0.jsonl")
    first = SegmentHeader(
        at=MIDNIGHT, id=f"{number}-h", writer=name, role=Role.CLIENT, host="host", pid=7, version="1", segment=0
    )
    last: list[Entry] = [Closed(at=MIDNIGHT, id=f"{number}-c", writer=name)] if closed else []
    directory.mkdir(exist_ok=True)
    (directory / segment_name(number)).write_text("".join(map(encode_entry, [first, *entries, *last])))


@pytest.mark.thorough
def test_d3_messages_at_the_edges_of_a_window_are_in_flight_and_later_returns_are_not_losses(
    spark: SparkSession, tmp_path: Path
) -> None:
    before, late = MIDNIGHT - 48 * HOUR, MIDNIGHT + 30 * HOUR
    begun = operation(Stage.SEND_BACKLOG, "begun", at=late)
    intent = Intent(**{name: getattr(begun, name) for name in Intent.__dataclass_fields__ if name != "kind"})
    write(
        tmp_path / "ledger",
        1,
        [
            operation(Stage.SEND_BACKLOG, "long-ago", at=before),
            operation(Stage.RETURN_PRIMARY, "long-ago", at=MIDNIGHT + HOUR),
            operation(Stage.COMPLETE_BACKLOG, "long-ago", at=MIDNIGHT + HOUR),
            operation(Stage.SEND_BACKLOG, "home-next-day", at=MIDNIGHT + 23 * HOUR),
            operation(Stage.RETURN_PRIMARY, "home-next-day", at=MIDNIGHT + 25 * HOUR),
            operation(Stage.COMPLETE_BACKLOG, "home-next-day", at=MIDNIGHT + 25 * HOUR),
            operation(Stage.SEND_BACKLOG, "clock-ahead", at=MIDNIGHT),
            operation(Stage.RETURN_PRIMARY, "clock-ahead", at=MIDNIGHT - 1),
            operation(Stage.COMPLETE_BACKLOG, "clock-ahead", at=MIDNIGHT + 1),
            operation(Stage.SEND_BACKLOG, "lost", at=MIDNIGHT + HOUR),
            operation(Stage.COMPLETE_BACKLOG, "lost", at=MIDNIGHT + 2 * HOUR),
            operation(Stage.SEND_PRIMARY, "next-day", at=MIDNIGHT + 24 * HOUR),
            intent,
        ],
    )
    tables = Tables(spark, tmp_path / "tables")
    ingest_ledger(spark, tmp_path / "ledger", tables.root).awaitTermination()

    def found(window: TimeWindow) -> dict[str | None, dict[str, int]]:
        rows = result_over_history(tables, JOBS["reconcile"], window).collect()
        return {row.id: {name: row[name] for name in ("messages", *JUDGED) if row[name]} for row in rows}

    lost = {"messages": 1, "accepted": 1, "lost": 1}
    assert found(TimeWindow()) == {
        None: {"messages": 4, "accepted": 4, "delivered": 4},
        "lost": lost,
        "begun": {"messages": 1, "unconfirmed": 1, "in_flight": 1},
    }
    # The message was accepted before the days that are read: it must be marked as in flight, not only as unconfirmed.
    assert found(TimeWindow(DAY, DAY.replace(day=23))) == {
        None: {"messages": 2, "accepted": 2, "delivered": 2},
        "lost": lost,
        "long-ago": {"messages": 1, "unconfirmed": 1, "in_flight": 1},
    }
    assert found(TimeWindow(until=DAY)) == {None: {"messages": 1, "accepted": 1, "delivered": 1}}
    days = {
        row.day.day: row.operations
        for row in result_over_history(tables, JOBS["cost"], TimeWindow(DAY))
        .groupBy("day")
        .agg({"operations": "sum"})
        .withColumnRenamed("sum(operations)", "operations")
        .collect()
    }
    assert days == {22: 7, 23: 4}


def redirection(name: str, source: str, destination: str, at: int) -> list[Entry]:
    """Return a redirect entry as `deadletter resubmit --to` writes it."""
    moved = movement(Move.REDIRECTED, name, at=at, to=destination, source=f"CONTOSO/{source}")
    return [
        *(operation(stage, name, at=at, to=destination) for stage in (Stage.RESUBMIT_BACKLOG, Stage.COMPLETE_BACKLOG)),
        moved,
    ]


@pytest.mark.thorough
def test_d3_a_redirected_message_is_accepted_at_its_new_entity_as_often_as_before(
    spark: SparkSession, tmp_path: Path
) -> None:
    later = MIDNIGHT + 24 * HOUR
    first: list[Entry] = [
        operation(Stage.SEND_BACKLOG, "known", "twice", "lost", "aside"),
        operation(Stage.SEND_BACKLOG, "unsure", result="unknown"),
        operation(Stage.SEND_PRIMARY, "never", "unsure", to="aside"),
    ]
    second: list[Entry] = [
        entry
        for name in ("known", "unsure", "never", "twice", "lost")
        for entry in redirection(name, "orders", "elsewhere", later)
    ]
    second += redirection("twice", "orders", "another", later)
    second += [*redirection("never", "elsewhere", "another", later), *redirection("never", "another", "third", later)]
    second += [
        operation(stage, "known", at=later, to="elsewhere") for stage in (Stage.RETURN_PRIMARY, Stage.COMPLETE_BACKLOG)
    ]
    second += [operation(Stage.COMPLETE_BACKLOG, "lost", at=later, to="elsewhere")]
    tables, ledger = Tables(spark, tmp_path / "tables"), tmp_path / "ledger"
    for number, entries in enumerate((first, second), 1):
        write(ledger, number, entries)
        ingest_ledger(spark, ledger, tables.root, extend=follow_jobs(["reconcile"])).awaitTermination()
    found = balance(read_ledger(ledger))
    assert {(message.destination, message.id) for message in found.unconfirmed} == {
        ("contoso/elsewhere", "unsure"), ("contoso/third", "never"), ("contoso/another", "twice")
    }  # fmt: skip
    assert found.lost == {MessageKey("contoso/elsewhere", "lost"): 1}
    for run in (result_over_history, current_result):
        assert found_in(run(tables, JOBS["reconcile"]).collect()) == expected_of(found)
    sums = {name: getattr(found, name).total() for name in JUDGED if name != "in_flight"}
    said = oracle.named(oracle.connect(tables.root, tables.version()), oracle.RECONCILE)
    assert sums == {name: said[name] for name in sums}
    # A message that may have been accepted before the window must be marked as in flight, not only as unconfirmed.
    rows = (
        result_over_history(tables, JOBS["reconcile"], TimeWindow(DAY.replace(day=23)))
        .where("id is not null")
        .collect()
    )
    assert {(row.destination, row.id): (row.unconfirmed, row.in_flight, row.lost) for row in rows} == {
        ("contoso/elsewhere", "unsure"): (1, 1, 0),
        ("contoso/third", "never"): (1, 1, 0),
        ("contoso/another", "twice"): (1, 1, 0),
        ("contoso/elsewhere", "lost"): (0, 0, 1),
    }


@pytest.mark.thorough
def test_d3_operations_of_thousands_of_messages_with_many_failures_and_odd_ids_add_up(
    spark: SparkSession, tmp_path: Path
) -> None:
    ids = [f"{number}" for number in range(4_000)]
    long = "x" * 100_000
    write(
        tmp_path / "ledger",
        1,
        [
            operation(Stage.SEND_PRIMARY, *ids, result="server_busy", failed=tuple(ids[::2])),
            operation(Stage.SEND_BACKLOG, *ids[::2], *ids[:100:2], result="unknown", failed=tuple(ids[:100:2])),
            operation(Stage.RETURN_PRIMARY, *ids[::4]),
            operation(Stage.SEND_BACKLOG, long, "", "ü/'\"\\", long),
            operation(Stage.COMPLETE_BACKLOG, long),
        ],
    )
    tables = Tables(spark, tmp_path / "tables")
    ingest_ledger(spark, tmp_path / "ledger", tables.root).awaitTermination()
    found = balance(read_ledger(tmp_path / "ledger"))
    assert found.lost == {MessageKey("contoso/orders", long): 1}
    assert found_in(result_over_history(tables, JOBS["reconcile"]).collect()) == expected_of(found)


@pytest.mark.thorough
def test_d3_an_incident_of_two_processes_lasts_from_the_first_failover_to_the_last_return(
    spark: SparkSession, tmp_path: Path
) -> None:
    minute = 60_000
    write(
        tmp_path / "ledger",
        1,
        [
            state("failover_engaged", MIDNIGHT, by=1, cause="timeout"),
            state("failover_engaged", MIDNIGHT + minute, by=2, cause="connection_lost"),
            operation(Stage.SEND_BACKLOG, "a", "b", at=MIDNIGHT + minute, by=1),
            operation(Stage.SEND_BACKLOG, "c", at=MIDNIGHT + 2 * minute, by=2),
            state("restored", MIDNIGHT + 2 * minute, by=1),
            state("restored", MIDNIGHT + 3 * minute, by=2),
            operation(Stage.RETURN_PRIMARY, "a", "b", "c", at=MIDNIGHT + 4 * minute, seconds=1.0),
            # A day later, a process is killed while it diverts.
            state("failover_engaged", MIDNIGHT + 24 * HOUR, by=3, cause="dns"),
            operation(Stage.SEND_BACKLOG, "d", at=MIDNIGHT + 25 * HOUR, by=3),
        ],
    )
    tables = Tables(spark, tmp_path / "tables")
    ingest_ledger(spark, tmp_path / "ledger", tables.root).awaitTermination()
    first, second = result_over_history(tables, JOBS["incidents"]).orderBy("began").collect()
    assert first.asDict() == {
        "destination": "contoso/orders",
        "began": MIDNIGHT,
        "restored": MIDNIGHT + 3 * minute,
        "drained": MIDNIGHT + 4 * minute + 1000,
        "cause": "timeout",
        "processes": 2,
        "diverted": 3,
        "returned": 3,
        "seconds_to_restore": 180.0,
        "seconds_to_drain": 61.0,
    }
    assert (second.began, second.restored, second.drained, second.diverted) == (MIDNIGHT + 24 * HOUR, None, None, 1)
    (latency,) = result_over_history(tables, JOBS["latency"], TimeWindow(DAY, DAY.replace(day=23))).collect()
    assert (latency.diverted, latency.returned) == (3, 3)
    assert (latency.least, latency.p50, latency.most) == (120.75, 180.75, 180.75)
