"""M4: `twinbus cost actual` on a ledger whose every operation is known. Real outages are in tests/money."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner, Result

from tests.pipeline.books import segment_name, writer
from twinbus.cli.main import app
from twinbus.ledger import (
    NOT_BY_A_SYPHON,
    Entry,
    Fact,
    Metered,
    Move,
    Movement,
    Operation,
    Stage,
    State,
    encode_entry,
)
from twinbus.pipeline import TimeWindow
from twinbus.pipeline.bill_facts import METERS, BillFacts, metered_stage
from twinbus.pipeline.cost_facts import copies

pytestmark = pytest.mark.timeout(600)  # where others are at work, Spark takes its time
NOON = 1_790_078_400_000  # 2026-09-22T12:00Z
BACKLOG = "contoso/x-servicebus-transfer/{}"


def test_l4_s16_what_a_meter_counts_on_a_state_queue_is_not_billed_twice() -> None:
    """The ledger of a pair has its peeks as `peek_backlog`, and its sends there as `manage`."""
    counted = [("contoso/x-twinbus-state", "peek"), ("contoso/x-twinbus-state", "send"), ("orders", "peek")]
    rows = pa.table(
        {
            "day": [datetime(2026, 9, 22, tzinfo=UTC).date()] * 3,
            "entity": [entity for entity, _ in counted],
            "backlog": [False] * 3,
            "operation": [operation for _, operation in counted],
            **{name: [1, 2, 4] for name in ("count", "units", "bytes")},
        }
    )
    found = {metered_stage(row.operation, backlog=row.backlog): row.units for row in BillFacts({METERS: rows}).meters()}
    assert found == {Stage.PEEK_BACKLOG: 1, Stage.PEEK_PRIMARY: 4}


def test_l4_dead_letters_that_an_audit_recorded_explain_no_settlement(spark: SparkSession) -> None:
    """No syphon received or settled them."""
    day = datetime(2026, 9, 22, tzinfo=UTC).date()
    reasons = {"a": "MessageTooLarge", "b": NOT_BY_A_SYPHON, "c": None}
    entries = spark.createDataFrame(
        [(Movement.kind, Move.DEAD_LETTERED.value, reason, [name], day) for name, reason in reasons.items()],
        "kind string, move string, reason string, ids array<string>, day date",
    )
    operations = spark.createDataFrame(
        [], "day date, ids array<string>, stage string, result string, failed array<string>"
    )
    [found] = copies(operations, entries).collect()
    assert ([one.dead for one in found.days], found.messages) == ([1], 2)


class Books:
    """Of an hour: ten minutes of it the primary is away, and a standing syphon moves what is diverted."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._number = 0

    def id(self, by: int = 0) -> str:
        self._number += 1
        return f"{writer(by)}-{self._number}"

    def did(
        self,
        stage: Stage,
        entity: str,
        messages: int = 0,
        *,
        second: float,
        result: str = "ok",
        units: int = 1,
        first: int | None = None,
    ) -> None:
        """`first` is the number of the first message; by default the messages have ids of their own."""
        at = NOON + int(second * 1000)
        syphon = stage not in (Stage.SEND_PRIMARY, Stage.SEND_BACKLOG, Stage.PING)
        name = f"{stage}-{second}-" if first is None else "m-"
        self.entries.append(
            Operation(
                at=at,
                id=self.id(1 if syphon else 0),
                stage=stage,
                namespace="contoso",
                entity=entity,
                destination=None if entity in ("orders", "events") else "contoso/orders",
                ids=tuple(f"{name}{n}" for n in range(first or 0, (first or 0) + messages)),
                bytes=1000 * messages,
                units=messages or units,
                seconds=0.1,
                result=result,
                cause="timeout" if result == "unknown" else None,
            )
        )

    def told(self, event: str, second: float) -> None:
        facts: dict[str, Fact] = {"entity": "orders", "episode": 1, "cause": "timeout"}
        self.entries.append(State(at=NOON + int(second * 1000), id=self.id(), event=event, pair="contoso", facts=facts))

    def metered(self, entity: str, operation: str, count: int) -> None:
        self.entries.append(
            Metered(
                at=NOON, id=self.id(2), namespace="primary", entity=entity, operation=operation, count=count,
                bytes=1000 * count, units=count, since=NOON, until=NOON + 1000,
            )
        )  # fmt: skip


def history() -> list[Entry]:
    books = Books()
    for n in range(200):
        books.did(Stage.SEND_PRIMARY, "orders", 10, second=n)
    books.did(Stage.SEND_PRIMARY, "orders", 10, second=1000, result="unknown")
    books.told("failover_engaged", 1000)
    for n in range(60):
        books.did(Stage.SEND_BACKLOG, BACKLOG.format(0), 10, second=1001 + 10 * n, first=10 * n)
        books.did(Stage.RECEIVE_BACKLOG, BACKLOG.format(0), second=1001 + 10 * n, units=10)
        books.did(Stage.SETTLE_BACKLOG, BACKLOG.format(0), second=1001 + 10 * n, units=10)
    books.did(Stage.RETURN_PRIMARY, "orders", 40, second=1001, result="connection_lost")
    books.did(Stage.PING, "orders", second=1600)
    books.told("restored", 1600)
    books.did(Stage.RECEIVE_DEFERRED, BACKLOG.format(0), second=1601, units=600)
    books.did(Stage.RETURN_PRIMARY, "orders", 600, second=1602, first=0)
    books.did(Stage.RETURN_PRIMARY, "orders", 2, second=1603, first=0)
    books.did(Stage.COMPLETE_BACKLOG, BACKLOG.format(0), 600, second=1603, first=0)
    for n in range(4):
        books.did(Stage.EMPTY_RECEIVE, BACKLOG.format(1), second=900 * n)
    books.did(Stage.EMPTY_RECEIVE, "orders", second=3600)
    books.metered("orders", "receive", 2600)
    books.metered("orders", "complete", 2600)
    books.metered(BACKLOG.format(0), "receive", 600)
    return books.entries


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    return ingested(tmp_path_factory.mktemp("spending"), history())


def ingested(folder: Path, entries: list[Entry]) -> Path:
    ledger = folder / "ledger"
    ledger.mkdir()
    (ledger / segment_name(1)).write_text("".join(map(encode_entry, entries)))
    done = run("ledger", "ingest", str(ledger), str(folder / "tables"))
    assert done.exit_code == 0, done.output
    return folder / "tables"


def run(*arguments: str) -> Result:
    """In this process, whose Spark session the verb finds."""
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "250", "NO_COLOR": "1"})


def actual(tables: Path, *options: str) -> Any:
    intervals = ("--failover-interval=0", "--ping-jitter=0", "--tries=1", "--backlog-check-interval=0")
    done = run("cost", "actual", str(tables), *intervals, *options, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def explained(found: Any, stage: str) -> dict[str, int]:
    [one] = [one for one in found["stages"] if one["stage"] == stage]
    assert sum(part["units"] for part in one["parts"]) == one["difference"]
    return {part["why"]: part["units"] for part in one["parts"] if part["units"]}


@pytest.mark.thorough
def test_l4_m4_d3_what_happened_in_a_ledger_is_billed_forecast_and_compared_stage_by_stage(tables: Path) -> None:
    found = actual(tables)
    seen = found["forecast"]["scenario"]
    assert (seen["sent"], seen["diverted"], seen["batch"], seen["message_size"]) == (2000, 600, 10, 1000)
    assert (seen["outages"], seen["entities"], seen["clients"], seen["backlog_queues"]) == (1, 1, 1, 2)
    assert (seen["syphon"], seen["outage_kind"], seen["outage"]) == ("standing", "unreachable", 600)
    assert seen["period"] == pytest.approx(3600.1)
    expected = {
        "send_primary": 2010,
        "send_backlog": 600,
        "receive_backlog": 600,
        "settle_backlog": 600,
        "receive_deferred": 600,
        "return_primary": 602,
        "complete_backlog": 600,
        "empty_receive": 4,
        "empty_receive_primary": 1,
        "ping": 1,
        "receive_primary": 2600,
        "complete_primary": 2600,
    }
    assert {one["stage"]: one["units"] for one in found["bill"]["stages"]} == expected
    assert {one["stage"]: one["actual"] for one in found["stages"] if one["actual"]} == expected
    assert found["units"]["share"] < 0.01
    assert sum(one["cost"] for one in found["bill"]["stages"]) + found["bill"]["base_cost"] == pytest.approx(
        found["bill"]["cost"], abs=1e-9
    )
    # The base of 10 dollars in 744 hours, for the hour of the ledger.
    assert found["bill"]["base_cost"] == pytest.approx(10 / 744, rel=1e-3)
    assert explained(found, "return_primary") == {"messages that were sent on again, by their ids": 2}
    [returned] = [one for one in found["stages"] if one["stage"] == "return_primary"]
    assert any("40 more were tried without a connection" in part["why"] for part in returned["parts"])
    assert explained(found, "empty_receive_primary") == {"in the ledger, and the forecast has none": 1}
    # An older Twinbus wrote neither headers nor options: what is assumed is said.
    notes = " ".join(found["notes"])
    assert "default intervals are assumed" in notes
    assert "its long poll is assumed to be 15 minutes" in notes


@pytest.mark.thorough
def test_m4_an_earlier_forecast_is_compared_and_the_traffic_explains_the_difference(tables: Path) -> None:
    found = actual(tables, "--rate=2", "--outage=10m", "--ping-interval=60s", "--other-operations=13000000")
    stages = {one["stage"]: one for one in found["stages"]}
    assert stages["send_backlog"]["forecast"] == 1200
    assert explained(found, "send_backlog") == {"600 messages fewer were diverted than in the forecast": -600}
    # Beyond what is included: 0.80 for a million, and 0.02 for a GB.
    cost = Decimal(600) * Decimal("0.80") / 10**6 + Decimal(600_000) * Decimal("0.02") / 10**9
    assert stages["send_backlog"]["actual_cost"] == pytest.approx(float(cost), rel=1e-4)
    for one in found["stages"]:
        assert sum(part["cost"] for part in one["parts"]) == pytest.approx(one["cost_difference"], abs=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("received", "forecast"),
    [((60, 40), 100), ((100, 100), 200)],
    ids=["rules-divide-the-messages", "both-get-every-message"],
)
def test_l4_receives_of_a_topic_are_forecast_by_how_many_subscriptions_get_a_message(
    received: tuple[int, int], forecast: int, tmp_path: Path, spark: SparkSession
) -> None:
    books = Books()
    books.did(Stage.SEND_PRIMARY, "events", 100, second=0)
    for name, count in zip(("eu", "us"), received, strict=True):
        books.metered(f"events/subscriptions/{name}", "receive", count)
        books.metered(f"events/subscriptions/{name}", "complete", count)
    found = actual(ingested(tmp_path, books.entries))
    stages = {one["stage"]: (one["forecast"], one["actual"]) for one in found["stages"]}
    assert stages["receive_primary"] == stages["complete_primary"] == (forecast, forecast)


@pytest.mark.thorough
def test_l4_a_bill_is_given_without_operations_prices_or_a_possible_forecast(tables: Path, tmp_path: Path) -> None:
    nothing = actual(tables, "--until=2026-01-01")
    assert (nothing["bill"]["units"], nothing["bill"]["cost"], nothing["forecast"]) == (0, 0, None)
    assert "the ledger has no operation in this window" in nothing["notes"]
    broken = tmp_path / "prices.toml"
    broken.write_text("no prices = here")
    unpriced = actual(tables, f"--prices={broken}")
    assert (unpriced["bill"]["units"], unpriced["bill"]["cost"], unpriced["cost"]) == (10_818, None, None)
    assert any(note.startswith("no prices: ") for note in unpriced["notes"])
    impossible = actual(tables, "--outages=9", "--outage=1h")
    assert impossible["forecast"] is None
    assert impossible["bill"]["units"] == 10_818
    assert any(note.startswith("no forecast: outages is 9, and must be fewer") for note in impossible["notes"])


def test_l4_a_window_until_midnight_does_not_have_the_day_that_begins_then() -> None:
    november, december = datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 12, 1, tzinfo=UTC)
    assert TimeWindow(november, december).whole_days() == TimeWindow(november, december)
    noon = timedelta(hours=12)
    assert TimeWindow(november + noon, december - noon).whole_days() == TimeWindow(november, december)
    assert TimeWindow().whole_days() == TimeWindow()
