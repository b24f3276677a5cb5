"""L4: the bill of three odd outages is what both namespaces metered, and every difference is explained by entries."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from tests.pipeline.odd_outages import FIRST, GONE, HEALTHY, NEWS, SECOND, SUBSCRIPTIONS, THIRD, OddOutages
from twinbus.backlog import TRANSFER_SEGMENT
from twinbus.cli.main import app
from twinbus.ledger import Metered, Stage, billable_units, read_ledger
from twinbus.money import EMPTY_PRIMARY, UNEXPLAINED, CostResult, OutageKind, PingKind, Prices, SyphonRuns
from twinbus.pipeline import ActualCost, Tables, compute_actual_cost, ingest_ledger

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]
PRICES = Prices.default()
DIVERTED = len(FIRST) + len(SECOND) + len(THIRD) + 3 * NEWS + GONE
SENT = len(HEALTHY) + NEWS
MESSAGES = (Stage.SEND_PRIMARY, Stage.SEND_BACKLOG, Stage.RECEIVE_BACKLOG, Stage.RETURN_PRIMARY, Stage.COMPLETE_BACKLOG)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd") / "ledger"
    OddOutages(folder).run()
    return folder


@pytest.fixture(scope="module")
def tables(ledger: Path, spark: SparkSession) -> Tables:
    ingest_ledger(spark, ledger, ledger.parent / "tables").awaitTermination()
    return Tables(spark, ledger.parent / "tables")


@pytest.fixture(scope="module")
def cost(tables: Tables) -> ActualCost:
    return compute_actual_cost(tables)


@pytest.fixture(scope="module")
def result(cost: ActualCost) -> CostResult:
    return cost.result(PRICES)


@pytest.fixture(scope="module")
def planned(cost: ActualCost) -> CostResult:
    """Compared with a forecast for small messages to queues: sizes and subscriptions explain the difference."""
    return cost.result(PRICES, {"message_size": 1000, "subscriptions": 0, "other_operations": 12_999_900})


def metered(ledger: Path) -> Counter[str]:
    """What both namespaces counted, by stage; counted here and not by the pipeline."""
    stages = {
        ("send", False): "send_primary + return_primary",  # a namespace does not know who sends
        ("receive", False): Stage.RECEIVE_PRIMARY,
        ("receive_empty", False): EMPTY_PRIMARY,
        ("complete", False): Stage.COMPLETE_PRIMARY,
        ("abandon", False): Stage.SETTLE_PRIMARY,
        ("dead_letter", False): Stage.SETTLE_PRIMARY,
        ("release", False): Stage.SETTLE_PRIMARY,
        ("ping", False): Stage.PING,
        ("send", True): Stage.SEND_BACKLOG,
        ("receive", True): Stage.RECEIVE_BACKLOG,
        ("receive_empty", True): Stage.EMPTY_RECEIVE,
        ("receive_deferred", True): Stage.RECEIVE_DEFERRED,
        ("complete", True): Stage.COMPLETE_BACKLOG,
        ("abandon", True): Stage.SETTLE_BACKLOG,
        ("defer", True): Stage.SETTLE_BACKLOG,
        ("dead_letter", True): Stage.SETTLE_BACKLOG,
        ("release", True): Stage.SETTLE_BACKLOG,
        ("renew_lock", True): Stage.RENEW_BACKLOG,
        ("peek", True): Stage.PEEK_BACKLOG,
    }
    found: Counter[str] = Counter()
    for entry in read_ledger(ledger):
        if isinstance(entry, Metered):
            found[stages[entry.operation, f"/{TRANSFER_SEGMENT}/" in entry.entity.lower()]] += entry.units
    return found


def parts(found: CostResult, stage: str) -> dict[str, int]:
    assert found.comparison is not None
    [one] = [one for one in found.comparison.differences if one.stage == stage]
    return {part.why: part.units for part in one.parts if part.units}


def test_l4_the_bill_is_what_both_namespaces_metered_in_every_stage(result: CostResult, ledger: Path) -> None:
    billed: Counter[str] = Counter()
    sends = (Stage.SEND_PRIMARY, Stage.RETURN_PRIMARY)
    for one in result.bill.stages:
        if one.stage != Stage.MANAGE:  # on no meter, and so are calls that failed
            billed["send_primary + return_primary" if one.stage in sends else one.stage] += one.units - one.failed_units
    assert +billed == +metered(ledger)


@pytest.mark.parametrize("name", ["result", "planned"])
def test_l4_the_parts_of_each_difference_add_up_exactly(name: str, request: pytest.FixtureRequest) -> None:
    found: CostResult = request.getfixturevalue(name)
    assert found.comparison is not None
    for one in found.comparison.differences:
        assert sum(part.units for part in one.parts) == one.units, one
        assert sum((part.cost for part in one.parts), Decimal(0)) == one.cost, one
    assert found.comparison.actual_cost == found.bill.cost
    assert found.comparison.actual == found.bill.units


def test_l4_the_forecast_is_for_what_really_happened(result: CostResult) -> None:
    scenario, seen = result.scenario, result.scenario.observed
    assert seen is not None
    assert (scenario.backlog_queues, scenario.entities, scenario.clients) == (2, 3, 1)
    assert (scenario.failover_interval.total_seconds(), scenario.ping_interval.total_seconds()) == (0, 1)
    assert (scenario.ping, scenario.tries, scenario.syphon) == (PingKind.MESSAGE, 1, SyphonRuns.AFTER)
    assert (scenario.outage_kind, scenario.subscriptions) == (OutageKind.ANSWERING, len(SUBSCRIPTIONS))
    assert (len(seen.outages), seen.drains) == (3, 3)
    assert seen.sent is not None
    assert seen.diverted is not None
    assert (seen.sent.messages, seen.diverted.messages) == (SENT, DIVERTED)
    assert sum(one.diverted for one in seen.outages) == DIVERTED
    assert (seen.sent.copies, seen.diverted.copies) == (
        SENT + NEWS * (len(SUBSCRIPTIONS) - 1), DIVERTED + 3 * NEWS * (len(SUBSCRIPTIONS) - 1)
    )  # fmt: skip
    assert not [note for note in result.notes if "assumed" in note], result.notes


def test_l4_what_entries_with_ids_show_is_explained_and_nothing_is_invented(result: CostResult) -> None:
    dead = "dead-lettered in the backlog, so not sent on"
    for stage in (Stage.RETURN_PRIMARY, Stage.COMPLETE_BACKLOG):
        assert parts(result, stage)[dead] == -GONE
    settled = "received again after they were abandoned, deferred, released or dead-lettered"
    assert parts(result, Stage.RECEIVE_PRIMARY)[settled] == 2
    instead = "abandoned, deferred, released or dead-lettered instead of completed"
    assert parts(result, Stage.COMPLETE_PRIMARY)[instead] == -2
    left = {
        stage: units
        for stage in (*MESSAGES, Stage.RECEIVE_PRIMARY, Stage.COMPLETE_PRIMARY, Stage.SETTLE_PRIMARY)
        if (units := parts(result, stage).get(UNEXPLAINED))
    }
    assert left == {}


def test_l4_sizes_explain_the_units_above_64_kb(planned: CostResult) -> None:
    sizes = [size for size in (*FIRST, *SECOND, *THIRD) if size >= 1024]
    # The properties that diverting adds take the messages to the topic beyond the limit.
    large = sum(billable_units(1, [size + 200]) - 1 for size in sizes) + 3 * NEWS
    why = f"units beyond the first 64 KB: {large} in the ledger, 0 in the forecast"
    assert parts(planned, Stage.SEND_BACKLOG)[why] == large
    further = [
        why
        for why in parts(planned, Stage.RECEIVE_PRIMARY)
        if why.startswith("deliveries to queues and 3 subscriptions")
    ]
    assert [parts(planned, Stage.RECEIVE_PRIMARY)[why] for why in further] == [
        4 * NEWS * (len(SUBSCRIPTIONS) - 1) - GONE
    ]


def test_l4_money_beyond_the_included_operations_is_explained_too(planned: CostResult) -> None:
    assert planned.comparison is not None
    assert planned.bill.operations_cost > 0
    whys = {part.why.partition(":")[0] for one in planned.comparison.differences for part in one.parts}
    assert "bytes" in whys
    difference = planned.comparison.actual_cost - planned.comparison.forecast_cost
    assert difference == sum(
        (part.cost for one in planned.comparison.compared for part in one.parts),
        planned.comparison.actual_base - planned.comparison.forecast_base,
    )


@pytest.mark.parametrize(
    ("asked", "currency", "note"),
    [
        ({"tier": "premium"}, "USD", None),
        ({"tier": "basic"}, "USD", "no forecast: subscriptions is 3, and must be 0: the tier basic has no topics"),
        ({"tier": "gold"}, None, "has no tier 'gold'"),
    ],
)
def test_l4_every_tier_gives_a_bill_with_all_units(
    cost: ActualCost, result: CostResult, asked: dict[str, Any], currency: str | None, note: str | None
) -> None:
    found = cost.result(PRICES, asked)
    assert (found.bill.units, found.bill.currency) == (result.bill.units, currency)
    assert (found.comparison is None) == (note is not None)
    assert note is None or any(note in one for one in found.notes)
    if asked["tier"] == "premium":
        assert found.bill.operations_cost == 0
        assert found.bill.base_cost > 0


def test_l4_the_verb_shows_the_same_bill_and_fits_80_columns(tables: Tables, result: CostResult) -> None:
    done = CliRunner().invoke(app, ["cost", "actual", str(tables.root), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["bill"]["units"] == found["units"]["actual"] == result.bill.units
    assert found["cost"]["actual"] == pytest.approx(float(result.bill.cost), rel=1e-6)
    for one in found["stages"]:
        assert sum(part["units"] for part in one["parts"]) == one["difference"]
        assert sum(part["cost"] for part in one["parts"]) == pytest.approx(one["cost_difference"], abs=1e-7)
    shown = CliRunner().invoke(app, ["cost", "actual", str(tables.root)], env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "…" not in shown.stdout
    assert f"{result.comparison.unexplained if result.comparison else 0:,} of" in shown.stdout
