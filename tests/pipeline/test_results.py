"""The result tables (D7): what they have, and that answers from them are those of Spark and of the plain balance."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from tests.pipeline.books import HOUR, MIDNIGHT, history, operation, segment_name, write_segments
from tests.test_extras import PROJECT, make_site
from tests.test_extras import run as run_with_packages
from twinbus.answers import HourWindow, Results, report_data
from twinbus.ledger import LISTED_SUMS, Stage, balance, encode_entry, list_segments, read_ledger
from twinbus.money import Prices, Scenario
from twinbus.pipeline import collect_report_data, compute_actual_cost, latency
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.jobs import JOBS, current_result, follow_jobs, read_history, result_over_history, why_incomplete
from twinbus.pipeline.result_tables import JUDGED, PARTS, RESULTS, read_as_of, read_result
from twinbus.pipeline.results import write_results
from twinbus.pipeline.tables import Tables
from twinbus.pipeline.time_window import TimeWindow
from twinbus.pipeline.writer_states import WriterStates

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]  # Spark is slow on a busy machine
DAY = datetime(2026, 9, 22, tzinfo=UTC)
WINDOWS = [(None, None), (DAY, DAY + timedelta(hours=5)), (DAY - timedelta(hours=7), None), (None, DAY)]
PRICES = Prices.default()


@dataclass(frozen=True)
class Books:
    ledger: Path
    tables: Tables
    writers: WriterStates

    @property
    def results(self) -> Results:
        return Results(self.tables.storage)


@pytest.fixture(scope="module")
def books(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Books:
    """A ledger with odd entries, and its tables with results. The jobs are followed."""
    folder = tmp_path_factory.mktemp("results")
    # The clock of a syphon was days behind: the return of a message seems to be long before its diversion.
    wrong_clock = [
        operation(Stage.SEND_BACKLOG, "early", at=MIDNIGHT + HOUR),
        operation(Stage.RETURN_PRIMARY, "early", at=MIDNIGHT - 100 * HOUR, by=1),
    ]
    write_segments(folder / "ledger", [*history(3), *wrong_clock], seed=3)
    tables = Tables(spark, folder / "tables")
    made = Books(folder / "ledger", tables, WriterStates.in_ledger(folder / "ledger"))
    ingest_ledger(spark, made.ledger, tables.root, extend=follow_jobs(tuple(JOBS))).awaitTermination()
    write_results(tables, made.writers)
    return made


def counted(rows: Iterable[Mapping[str, Any]], keys: tuple[str, ...], sums: tuple[str, ...]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for row in rows:
        for name in sums:
            found[(*(row[key] for key in keys), name)] += row[name]
    return +found


def test_d7_the_result_tables_have_what_the_jobs_find_and_say_what_they_contain(books: Books) -> None:
    version, storage = books.tables.version(), books.tables.storage
    assert {RESULTS + part for parts in PARTS.values() for part in parts} <= version.tables.keys()

    def stored(name: str) -> list[dict[str, Any]]:
        found = read_result(storage, version, name)
        assert found is not None
        rows: list[dict[str, Any]] = found.to_pylist()
        return rows

    for job, keys, sums in (
        ("cost", ("day", "stage", "namespace", "entity"), ("operations", "units", "bytes", "unknown", "refused")),
        ("incidents", ("destination", "began"), ("diverted", "returned", "processes")),
        ("latency", ("destination", "day"), ("diverted", "returned", "unknown_clock")),
    ):
        expected = [row.asDict() for row in result_over_history(books.tables, JOBS[job]).collect()]
        assert counted(stored(job), keys, sums) == counted(expected, keys, sums)
    as_of = read_as_of(storage, version)
    assert {name for parts in PARTS.values() for name in parts} == as_of.keys()
    (ingested,) = books.tables.segments.ledgers(as_of["cost"].segments)
    assert ingested.ledger == str(books.ledger)
    sizes = {one.sealed_path.name: one.path.read_bytes().rindex(b"\n") + 1 for one in list_segments(books.ledger)}
    assert ingested.segments == sizes
    assert 0 < ingested.looked_at <= as_of["cost"].computed_at


def assert_alike(found: Any, expected: Any) -> None:
    """Compare values of any depth. Spark adds fractions in another order, so these may differ in the last digits."""
    if is_dataclass(expected):
        for one in fields(expected):
            assert_alike(getattr(found, one.name), getattr(expected, one.name))
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_alike(found[key], expected[key])
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9)
    else:
        assert found == expected


def test_d7_over_all_time_the_answer_is_the_plain_balance(books: Books) -> None:
    found = balance(read_ledger(books.ledger, lambda _: None), books.writers.dead)
    answer = books.results.balance(HourWindow())
    assert {name: answer.sums[name] for name in found.sums()} == found.sums()
    for name in LISTED_SUMS:
        assert dict(answer.listed[name]) == dict(getattr(found, name)), name
    assert found.lost, "a ledger without a loss shows nothing"
    assert {name: sum(row[name] for row in answer.by_destination) for name in JUDGED} == answer.sums
    assert Counter(books.results.incomplete()) == Counter(why_incomplete(books.tables, books.writers))


@pytest.mark.parametrize(("since", "until"), WINDOWS)
def test_d7_answers_for_whole_hours_are_those_of_spark(
    books: Books, since: datetime | None, until: datetime | None
) -> None:
    window, hours, results = TimeWindow(since, until), HourWindow.of(since, until), books.results
    assert hours is not None
    for job, order in (
        ("cost", ("day", "stage", "namespace", "entity")),
        ("incidents", ("began", "destination")),
        ("latency", ("day", "destination")),
    ):
        rows = current_result(books.tables, JOBS[job], window, books.writers).orderBy(*order).collect()
        assert rows, "a window without rows shows nothing"
        assert_alike(getattr(results, job)(hours), [row.asDict() for row in rows])
    judged = current_result(books.tables, JOBS["reconcile"], window, books.writers).collect()
    answer = results.balance(hours)
    assert answer.sums == {name: sum(row[name] for row in judged) for name in JUDGED}
    for name in LISTED_SUMS:
        assert dict(answer.listed[name]) == {(row.destination, row.id): row[name] for row in judged if row[name]}


@pytest.mark.parametrize(("since", "until"), WINDOWS[:2])
def test_d7_the_bill_and_the_report_are_those_of_spark(
    books: Books, since: datetime | None, until: datetime | None
) -> None:
    window, hours = TimeWindow(since, until), HourWindow.of(since, until)
    assert hours is not None
    bill = books.results.actual_cost(hours).result(PRICES)
    assert bill == compute_actual_cost(books.tables, window, books.writers).result(PRICES)
    found = report_data(books.results, PRICES, Scenario(), hours)
    expected = collect_report_data(books.tables, PRICES, Scenario(), window, books.writers)
    assert expected.timeline is not None
    assert_alike(found, expected)


def test_d7_an_hour_with_very_many_latencies_keeps_them_rounded_to_one_part_in_8192(books: Books) -> None:
    tallies = latency.tally(*read_history(books.tables, books.tables.version(), F.lit(True)))

    def hours(most: int) -> dict[tuple[str, int], tuple[int, list[int]]]:
        rows = latency.stored(tallies, 0, most).collect()
        spread = {
            (row.destination, row.hour): [
                value for value, count in zip(row.milliseconds, row.counts, strict=True) for _ in range(count)
            ]
            for row in rows
        }
        return {(row.destination, row.hour): (row.total, spread[row.destination, row.hour]) for row in rows}

    exact, rounded = hours(10**6), hours(1)
    assert exact.keys() == rounded.keys()
    assert exact != rounded
    for key, (total, values) in exact.items():
        assert rounded[key][0] == total
        assert rounded[key][1] == pytest.approx(values, rel=1 / 8192)


# --- the verbs -------------------------------------------------------------------------------------------------------

Verb = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def verb(tmp_path_factory: pytest.TempPathFactory) -> Verb:
    """Return a function that runs a verb with the packages of the extras `cli` and `tables` only.

    Without pyspark there is no JVM.
    """
    extras = PROJECT["optional-dependencies"]
    assert [one for one in extras["tables"] if one.startswith("twinbus[")] == ["twinbus[storage]"]
    named = [one for extra in ("cli", "tables", "storage") for one in extras[extra] if not one.startswith("twinbus[")]
    site = make_site(tmp_path_factory.mktemp("site"), *PROJECT["dependencies"], *named)
    assert not (site / "pyspark").exists()
    return lambda *arguments: run_with_packages(site, "-m", "twinbus", *map(str, arguments))


def test_d7_the_verbs_answer_without_a_jvm_and_say_as_of_when(books: Books, verb: Verb, tmp_path: Path) -> None:
    tables, ledger = books.tables.root, books.ledger
    done = verb("ledger", "reconcile", tables, "--ledger", ledger, "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["verdict"], told["up_to_date"]) == (1, "lost", True), done.stderr
    found = balance(read_ledger(ledger, lambda _: None), books.writers.dead)
    assert {name: told[name] for name in found.sums()} == found.sums()
    as_of = datetime.fromisoformat(told["as_of"])
    assert as_of > datetime.now(UTC) - timedelta(minutes=10), "the verb has looked at the ledger itself"
    for name in ("cost", "incidents", "latency"):
        done = verb(
            "ledger", name, ledger, "--tables", tables, "--since", "2026-09-22", "--until", "2026-09-22T05:00:00"
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("as of 20")
    done = verb("cost", "actual", tables, "--json")
    assert (done.returncode, json.loads(done.stdout)["up_to_date"]) == (0, True), done.stderr
    page = tmp_path / "page.html"
    done = verb("report", tables, "-o", page)
    assert (done.returncode, "as of 20" in page.read_text()) == (0, True), done.stderr


NEEDS_SPARK = "pip install 'twinbus[spark]'"


@pytest.mark.parametrize(
    "arguments",
    [
        ("ledger", "cost", "TABLES", "--master", "local[1]"),
        ("ledger", "incidents", "TABLES", "--jdbc", "jdbc:postgresql://127.0.0.1:1/none"),
        ("ledger", "latency", "TABLES", "--ledger", "LEDGER", "--follow"),
        ("ledger", "reconcile", "TABLES", "--ledger", "LEDGER", "--audit", "--secondary", "Endpoint=sb://nowhere"),
        ("ledger", "reconcile", "TABLES", "--since", "2026-09-22T00:30:00"),
        ("cost", "actual", "TABLES", "--master", "local[1]"),
        ("report", "TABLES", "--master", "local[1]"),
    ],
    ids=lambda arguments: " ".join(arguments[1:4]),
)
def test_d7_spark_answers_with_these_options_although_results_are_up_to_date(
    books: Books, verb: Verb, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    own: dict[str, str | Path] = {"TABLES": books.tables.root, "LEDGER": books.ledger}
    page = ("-o", tmp_path / "page.html") if arguments[0] == "report" else ()
    done = verb(*(own.get(word, word) for word in arguments), *page)
    assert (done.returncode, NEEDS_SPARK in done.stderr) == (1, True), done.stdout + done.stderr


def test_d7_open_segments_that_grew_are_new_enough_for_max_age(spark: SparkSession, verb: Verb, tmp_path: Path) -> None:
    ledger, tables = tmp_path / "ledger", tmp_path / "tables"
    ledger.mkdir()
    path = ledger / f"{segment_name(1)}.open"
    path.write_text(encode_entry(operation(Stage.SEND_PRIMARY, "a")))
    ingest_ledger(spark, ledger, tables).awaitTermination()
    write_results(Tables(spark, tables), WriterStates.in_ledger(ledger), ("cost",))
    with path.open("a") as segment:
        segment.write(encode_entry(operation(Stage.SEND_PRIMARY, "b")))
    done = verb("ledger", "cost", tables, "--max-age", "3600", "--json")
    assert (done.returncode, [row["operations"] for row in json.loads(done.stdout)]) == (0, [1]), done.stderr
    done = verb("ledger", "cost", tables, "--max-age", "0")
    assert (done.returncode, NEEDS_SPARK in done.stderr) == (1, True), done.stdout + done.stderr


def test_d7_results_that_are_not_up_to_date_are_shown_only_as_they_are(
    spark: SparkSession, verb: Verb, tmp_path: Path
) -> None:
    ledger, tables = tmp_path / "ledger", tmp_path / "tables"
    ledger.mkdir()
    (ledger / segment_name(1)).write_text(encode_entry(operation(Stage.SEND_PRIMARY, "a")))
    ingest_ledger(spark, ledger, tables).awaitTermination()
    write_results(Tables(spark, tables), WriterStates.in_ledger(ledger), ("cost",))
    assert verb("ledger", "cost", tables).returncode == 0
    (ledger / segment_name(2)).write_text(encode_entry(operation(Stage.SEND_PRIMARY, "b")))
    done = verb("ledger", "cost", tables)
    assert (done.returncode, "pip install" in done.stderr) == (1, True), "Spark has to compute, and is not installed"
    assert f"the results do not have all of {segment_name(2)}: Spark is started; --as-is" in done.stderr
    done = verb("ledger", "cost", tables, "--as-is", "--json")
    assert (done.returncode, [row["operations"] for row in json.loads(done.stdout)]) == (0, [1])
    age = r"as of 20[-\d]+ [:\d]+ UTC, \d+ (s|min) ago; not up to date: the results do not have all of "
    assert re.search(age + re.escape(segment_name(2)), done.stderr)
    done = verb("ledger", "reconcile", tables, "--as-is")
    assert (done.returncode, "there are no results in" in done.stderr) == (1, True)
    done = verb("ledger", "cost", ledger, "--as-is")
    assert (done.returncode, "there are no results that --as-is could show" in done.stderr) == (1, True)
    done = verb("ledger", "cost", tables, "--as-is", "--since", "2026-09-22T00:30:00")
    assert (done.returncode, "--as-is needs a window of whole hours" in done.stderr) == (2, True)
    done = verb("ledger", "cost", tables, "--as-is", "--master", "local[1]")
    assert (done.returncode, "--as-is cannot be combined with --master" in done.stderr) == (2, True)


def test_d7_results_computed_from_an_earlier_snapshot_do_not_have_later_segments(
    spark: SparkSession, tmp_path: Path
) -> None:
    ledger, tables = tmp_path / "ledger", Tables(spark, tmp_path / "tables")
    ledger.mkdir()
    (ledger / segment_name(1)).write_text(encode_entry(operation(Stage.SEND_PRIMARY, "a", at=MIDNIGHT)))
    ingest_ledger(spark, ledger, tables.root).awaitTermination()
    write_results(tables, names=("cost",))
    before = tables.version()
    (ledger / segment_name(2)).write_text(encode_entry(operation(Stage.SEND_PRIMARY, "b", at=MIDNIGHT + HOUR)))
    ingest_ledger(spark, ledger, tables.root).awaitTermination()
    assert tables.version().tables["results/cost"] == before.tables["results/cost"], "the snapshot has the old result"
    results = Results(tables.storage)
    as_of = results.as_of("cost")
    assert as_of is not None
    assert as_of.snapshot == 1
    assert [one.segments.keys() for one in results.ledgers(as_of)] == [{segment_name(1)}]
