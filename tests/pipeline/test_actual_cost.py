"""M4: `twinbus cost actual` on a ledger whose every operation is known. Real outages are in tests/money."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner, Result

from tests.pipeline.books import segment_name, writer
from twinbus.cli.main import app
from twinbus.ledger import Entry, Fact, Metered, Operation, Stage, State, encode_entry

pytestmark = pytest.mark.timeout(600)  # Spark is slow on a busy machine
NOON = 1_790_078_400_000  # 2026-09-22T12:00Z
BACKLOG = "contoso/x-servicebus-transfer/{}"


class Books:
    """A ledger of one hour: the primary is down for ten minutes, and a standing syphon moves the diverted messages."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._number = 0

    def id(self, by: int = 0) -> str:
        self._number += 1
        return f"{writer(by)}-{self._number}"

    def did(
        self, stage: Stage, entity: str, messages: int = 0, *, second: float, result: str = "ok", units: int = 1
    ) -> None:
        at = NOON + int(second * 1000)
        self.entries.append(
            Operation(
                at=at,
                id=self.id(1 if "backlog" in stage or stage in (Stage.EMPTY_RECEIVE, Stage.RETURN_PRIMARY) else 0),
                stage=stage,
                namespace="contoso",
                entity=entity,
                destination=None if entity == "orders" else "contoso/orders",
                ids=tuple(f"m-{stage}-{second}-{n}" for n in range(messages)),
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
        books.did(Stage.SEND_BACKLOG, BACKLOG.format(0), 10, second=1001 + 10 * n)
        books.did(Stage.RECEIVE_BACKLOG, BACKLOG.format(0), second=1001 + 10 * n, units=10)
        books.did(Stage.SETTLE_BACKLOG, BACKLOG.format(0), second=1001 + 10 * n, units=10)
    books.did(Stage.RETURN_PRIMARY, "orders", 40, second=1001, result="connection_lost")
    books.did(Stage.PING, "orders", second=1600)
    books.told("restored", 1600)
    books.did(Stage.RECEIVE_DEFERRED, BACKLOG.format(0), second=1601, units=600)
    books.did(Stage.RETURN_PRIMARY, "orders", 600, second=1602)
    books.did(Stage.COMPLETE_BACKLOG, BACKLOG.format(0), 600, second=1603)
    for n in range(4):
        books.did(Stage.EMPTY_RECEIVE, BACKLOG.format(1), second=900 * n)
    books.did(Stage.EMPTY_RECEIVE, "orders", second=3600)
    books.metered("orders", "receive", 2600)
    books.metered("orders", "complete", 2600)
    books.metered(BACKLOG.format(0), "receive", 600)
    return books.entries


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    folder = tmp_path_factory.mktemp("spending")
    ledger = folder / "ledger"
    ledger.mkdir()
    (ledger / segment_name(1)).write_text("".join(map(encode_entry, history())))
    done = run("ledger", "ingest", str(ledger), str(folder / "tables"))
    assert done.exit_code == 0, done.output
    return folder / "tables"


def run(*arguments: str) -> Result:
    """Run the verb in this process, where it uses the Spark session of the tests."""
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "250", "NO_COLOR": "1"})


def actual(tables: Path, *options: str) -> Any:
    intervals = ("--failover-interval=0", "--ping-jitter=0", "--tries=1", "--count-interval=0")
    done = run("cost", "actual", str(tables), *intervals, "--backlog-check-interval=0", *options, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.thorough
def test_m4_d3_the_traffic_of_a_ledger_is_forecast_and_compared_stage_by_stage(tables: Path) -> None:
    found = actual(tables)
    seen = found["forecast"]["scenario"]
    assert (seen["sent"], seen["diverted"], seen["batch"], seen["message_size"]) == (2000, 600, 10, 1000)
    assert (seen["outages"], seen["entities"], seen["clients"], seen["backlog_queues"]) == (1, 1, 1, 2)
    assert (seen["syphon"], seen["outage_kind"], seen["outage"]) == ("standing", "unreachable", 570)
    assert seen["period"] == pytest.approx(3600.1)
    stages = {one["stage"]: one for one in found["stages"]}
    expected = {
        "send_primary": 2010,
        "send_backlog": 600,
        "receive_backlog": 600,
        "settle_backlog": 600,
        "receive_deferred": 600,
        "return_primary": 600,
        "complete_backlog": 600,
        "empty_receive": 4,
        "empty_receive_primary": 1,
        "ping": 1,
        "receive_primary": 2600,
        "complete_primary": 2600,
    }
    assert {stage: one["actual"] for stage, one in stages.items() if one["actual"]} == expected
    assert found["units"]["share"] < 0.01
    assert all(sum(part["units"] for part in one["parts"]) == one["difference"] for one in stages.values())
    assert "40 more were tried without a connection" in stages["return_primary"]["parts"][0]["why"]


@pytest.mark.thorough
def test_m4_an_earlier_forecast_is_compared_and_the_traffic_explains_the_difference(tables: Path) -> None:
    found = actual(tables, "--rate=2", "--outage=10m", "--ping-interval=60s", "--other-operations=13000000")
    stages = {one["stage"]: one for one in found["stages"]}
    assert stages["send_backlog"]["forecast"] == 1200
    why = "600 messages fewer were diverted than in the forecast"
    assert stages["send_backlog"]["parts"] == [{"why": why, "units": -600}]
    # Beyond the included amount: 0.80 for a million operations, and 0.02 for a GB.
    cost = Decimal(600) * Decimal("0.80") / 10**6 + Decimal(600_000) * Decimal("0.02") / 10**9
    assert stages["send_backlog"]["actual_cost"] == pytest.approx(float(cost), rel=1e-4)


@pytest.mark.thorough
def test_m4_a_window_without_operations_is_an_error_that_says_so(tables: Path) -> None:
    nothing = run("cost", "actual", str(tables), "--until", "2026-01-01")
    assert nothing.exit_code == 1
    assert "has no operations in this window" in nothing.stderr
