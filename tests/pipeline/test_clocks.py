"""L5: what the jobs say of a ledger whose writers' clocks differ is what they say of one with right clocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession

from tests.pipeline.books import HOUR, MIDNIGHT, halves, movement, operation, state, write_segments, writer
from tests.report.documents import Document, made
from twinbus.answers import HourWindow, Results
from twinbus.ledger import PAIRED, Entry, Move, Operation, Role, SegmentHeader, Stage
from twinbus.money import Prices, Scenario
from twinbus.pipeline import (
    ActualCost,
    WriterClock,
    collect_report_data,
    compute_actual_cost,
    off_clocks,
    write_results,
)
from twinbus.pipeline.ingest import ingest_ledger
from twinbus.pipeline.jobs import JOBS, current_result, follow_jobs, result_over_history
from twinbus.pipeline.tables import Tables

pytestmark = pytest.mark.timeout(600)  # Spark is slow on a busy machine

MINUTE = 60_000
AHEAD = 20 * MINUTE
FIRST, SECOND, SYPHON, TOOL, THIRD = range(1, 6)
START = MIDNIGHT + 12 * HOUR


def returned(*ids: str, at: int, arrived: Iterable[int], to: str = "orders") -> Operation:
    waited = tuple(at - one for one in arrived)
    return operation(Stage.RETURN_PRIMARY, *ids, at=at, to=to, by=SYPHON, seconds=1.0, broker_at=at, waited=waited)


def outage() -> list[Entry]:
    """An outage as it was: all times are of one clock. Two clients divert, a syphon brings the messages home."""
    entries: list[Entry] = [
        *(
            header(number, role)
            for number, role in ((FIRST, Role.CLIENT), (SECOND, Role.CLIENT), (SYPHON, Role.SYPHON))
        ),
        state("failover_engaged", START, by=FIRST),
        state("failover_engaged", START + MINUTE, by=SECOND),
        operation(Stage.SEND_BACKLOG, "a", at=START + 2 * MINUTE, by=FIRST),
        operation(Stage.SEND_BACKLOG, "b", at=START + 3 * MINUTE, by=SECOND),
        # Not home yet.
        operation(Stage.SEND_BACKLOG, "c", at=START + 3 * MINUTE, by=SECOND, to="parcels"),
        state("restored", START + 4 * MINUTE, by=FIRST),
        state("restored", START + 5 * MINUTE, by=SECOND),
        *halves(
            returned("a", "b", at=START + 6 * MINUTE, arrived=(START + 2 * MINUTE + 100, START + 3 * MINUTE + 100))
        ),
    ]
    return entries


def header(number: int, role: Role) -> SegmentHeader:
    name = f"{role}-host-1-{writer(number)}"
    return SegmentHeader(
        at=START, id=f"{writer(number)}-segment-0", writer=name, role=role, host="host", pid=1, version="1", segment=0
    )


def shifted(entries: Iterable[Entry], ahead: Mapping[int, int]) -> list[Entry]:
    """What the writers write if their clocks are ahead by so many milliseconds."""
    by_id = {writer(number): by for number, by in ahead.items()}
    return [replace(entry, at=entry.at + by_id.get(entry.id[:16], 0)) for entry in entries]


def ingested(spark: SparkSession, folder: Path, entries: list[Entry], *follow: str) -> Tables:
    write_segments(folder / "ledger", entries, seed=1)
    tables = Tables(spark, folder / "tables")
    extend = follow_jobs(follow) if follow else None
    ingest_ledger(spark, folder / "ledger", tables.root, extend=extend).awaitTermination()
    return tables


def results(tables: Tables) -> dict[str, list[tuple[object, ...]]]:
    return {
        name: sorted((tuple(row) for row in result_over_history(tables, JOBS[name]).collect()), key=str)
        for name in ("latency", "incidents")
    }


@pytest.fixture(scope="module")
def right(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return ingested(spark, tmp_path_factory.mktemp("right"), outage())


@pytest.mark.thorough
def test_l5_right_clocks_are_not_named(right: Tables) -> None:
    assert off_clocks(right) == []
    (orders, parcels) = results(right)["latency"]
    assert orders[:6] == ("contoso/orders", parcels[1], 2, 2, 210.9, 180.9)
    assert orders[-1] == parcels[-1] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("ahead", [{FIRST: -AHEAD, SECOND: AHEAD, SYPHON: AHEAD}, {SYPHON: -AHEAD}], ids=str)
def test_l5_clocks_20_minutes_apart_change_no_result(
    spark: SparkSession, tmp_path: Path, right: Tables, ahead: dict[int, int]
) -> None:
    tables = ingested(spark, tmp_path, shifted(outage(), ahead), "latency", "incidents")
    assert {one.writer[-1]: round(one.least) for one in off_clocks(tables)} == {
        str(number): by // 1000 for number, by in ahead.items()
    }
    found, expected = results(tables), results(right)
    assert found["latency"] == expected["latency"]
    for one, other in zip(found["incidents"], expected["incidents"], strict=True):
        numbers = [position for position, value in enumerate(other) if isinstance(value, int | float)]
        assert [one[position] for position in numbers] == pytest.approx(
            [other[position] for position in numbers], abs=500
        )
    for name in ("latency", "incidents"):
        followed = current_result(tables, JOBS[name]).collect()
        assert sorted(map(tuple, followed), key=str) == found[name]


@pytest.mark.thorough
def test_l5_the_report_names_the_clock_and_its_timeline_is_right(
    spark: SparkSession, tmp_path: Path, right: Tables
) -> None:
    tables = ingested(spark, tmp_path, shifted(outage(), {FIRST: AHEAD, SYPHON: -AHEAD}))
    found = collect_report_data(tables, Prices.default(), Scenario())
    expected = collect_report_data(right, Prices.default(), Scenario())
    assert [(one.writer, round(one.least), one.was_set) for one in found.clocks] == [
        (f"client-host-1-{writer(FIRST)}", 1200, False),
        (f"syphon-host-1-{writer(SYPHON)}", -1200, False),
    ]
    assert found.timeline is not None
    assert expected.timeline is not None
    assert (found.timeline.start, found.timeline.waiting) == (expected.timeline.start, expected.timeline.waiting)
    assert found.spread == expected.spread
    said = Document(made(found)).said
    assert "The clock of writer client-host-1-0000000000000001 is 20 min ahead. Its times are corrected." in said
    assert not any("The clock of writer" in one for one in Document(made(expected)).said)


def two_pairs() -> list[Entry]:
    """Two clients with other options, the first one later. A syphon without options began after the restore."""
    early, late = ({"failover_interval": seconds} for seconds in (20.0, 10.0))
    return [
        *outage(),
        replace(state(PAIRED, START + MINUTE, by=FIRST), facts=late),
        replace(state(PAIRED, START, by=SECOND), facts=early),
        operation(Stage.EMPTY_RECEIVE, at=START + 5 * MINUTE + 30_000, by=SYPHON),
    ]


def bill_and_forecast(cost: ActualCost) -> tuple[list[object], list[float]]:
    """Returns what the bill has from a ledger: what is equal, and what depends on the length of the period."""
    found, (seen, notes) = cost.result(Prices.default()), cost.scenario()
    exact = [found.bill.stages, found.bill.notes, notes, seen["syphon"], seen["outages"], seen["failover_interval"]]
    lengths = [cost.seconds, found.bill.seconds, seen["period"].total_seconds(), seen["outage"].total_seconds()]
    assert found.forecast is not None
    return exact, [*lengths, *(float(one) for one in (found.bill.base_cost, found.bill.cost, found.forecast.bill.cost))]


@pytest.mark.thorough
@pytest.mark.parametrize("ahead", [{FIRST: AHEAD, SYPHON: -AHEAD}, {FIRST: -AHEAD}], ids=str)
def test_l4_l5_clocks_20_minutes_apart_change_no_bill(
    spark: SparkSession, tmp_path: Path, ahead: dict[int, int]
) -> None:
    right = compute_actual_cost(ingested(spark, tmp_path / "right", two_pairs()))
    assert right.seconds == 241
    tables = ingested(spark, tmp_path / "wrong", shifted(two_pairs(), ahead))
    found = compute_actual_cost(tables)
    (exact, lengths), (expected, expected_lengths) = bill_and_forecast(found), bill_and_forecast(right)
    assert exact == expected
    assert lengths == pytest.approx(expected_lengths, rel=0.005)
    write_results(tables)
    from_results = Results(tables.storage).actual_cost(HourWindow())
    assert from_results.result(Prices.default()) == found.result(Prices.default())


@pytest.fixture(scope="module")
def odd(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Cases that do not disturb each other, each with entities and a client of its own."""
    before = [operation(Stage.SEND_BACKLOG, f"b{n}", at=START + n, by=FIRST, to="set") for n in range(5)]
    after = [operation(Stage.SEND_BACKLOG, f"a{n}", at=START + AHEAD + n, by=FIRST, to="set") for n in range(5)]
    home = returned(
        *(f"{one}{n}" for one in "ba" for n in range(5)), at=START + MINUTE, arrived=[START + 100] * 10, to="set"
    )
    older = [
        operation(Stage.SEND_BACKLOG, "a", "b", at=START + AHEAD, by=SECOND, to="older"),
        operation(Stage.SEND_BACKLOG, "c", at=START, by=TOOL, to="older"),
        operation(Stage.RETURN_PRIMARY, "a", "b", "c", at=START + MINUTE, by=SECOND + 100, to="older"),
    ]
    resubmitted = [
        operation(Stage.SEND_BACKLOG, "a", "b", at=START + AHEAD, by=THIRD, to="again"),
        returned("b", at=START + MINUTE, arrived=[START + 100], to="again"),
        operation(Stage.RESUBMIT_BACKLOG, "a", at=START + HOUR, by=TOOL, to="again"),
        returned("a", at=START + HOUR + MINUTE, arrived=[START + HOUR + 100], to="again"),
    ]
    redirected: list[Entry] = [
        operation(Stage.SEND_BACKLOG, "a", at=START, by=TOOL, to="gone"),
        operation(Stage.RESUBMIT_BACKLOG, "a", at=START + HOUR, by=TOOL),
        movement(Move.REDIRECTED, "a", at=START + HOUR, source="contoso/gone"),
        returned("a", at=START + HOUR + MINUTE, arrived=[START + HOUR + 100]),
    ]
    entries: list[Entry] = [*before, *after, home, *older, *resubmitted, *redirected]
    return ingested(spark, tmp_path_factory.mktemp("odd"), entries)


@pytest.fixture(scope="module")
def latencies(odd: Tables) -> dict[str, Row]:
    return {row.destination.partition("/")[2]: row for row in result_over_history(odd, JOBS["latency"]).collect()}


def test_l5_a_clock_that_was_set_is_named_and_not_corrected(odd: Tables, latencies: dict[str, Row]) -> None:
    clocks = {one.writer: one for one in off_clocks(odd)}
    assert clocks.keys() == {writer(FIRST), writer(THIRD)}
    clock = clocks[writer(FIRST)]
    assert clock.was_set
    assert (round(clock.least), round(clock.most or 0)) == (0, 1200)
    row = latencies["set"]
    assert (row.returned, row.unknown_clock) == (10, 0)
    assert row.least == row.most == pytest.approx(60.9)


def test_l4_l5_the_bill_names_a_clock_that_was_set(odd: Tables) -> None:
    notes = compute_actual_cost(odd).result(Prices.default()).bill.notes
    (note,) = [one for one in notes if one.startswith("the clock of writer")]
    assert f"{writer(FIRST)} was set while it ran: it was between 0 s and 1,200 s ahead." in note


def test_l5_returns_of_an_older_twinbus_are_never_negative_but_counted(latencies: dict[str, Row]) -> None:
    row = latencies["older"]
    assert (row.diverted, row.returned, row.unknown_clock, row.least, row.most) == (3, 3, 2, 60.0, 60.0)


def test_l5_a_resubmitted_message_was_on_its_way_since_its_first_arrival(latencies: dict[str, Row]) -> None:
    """The message that came home arrived an hour later than the message that was diverted. Its client is ahead."""
    row = latencies["again"]
    assert (row.diverted, row.returned, row.unknown_clock, row.least) == (2, 2, 0, pytest.approx(60.9))
    assert row.most == pytest.approx(3661, abs=1)


def test_l5_a_redirected_message_is_on_its_way_to_its_new_entity_since_its_resubmission(
    latencies: dict[str, Row],
) -> None:
    assert latencies["gone"].most == pytest.approx(3600, abs=1)
    assert latencies["orders"].most == pytest.approx(60.9)


def test_a_clock_has_one_difference_unless_it_was_set() -> None:
    assert not WriterClock("w", 5.0).was_set
    assert WriterClock("w", 5.0, 9.0).was_set
