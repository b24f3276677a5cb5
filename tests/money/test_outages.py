"""M4: forecast against actual for three outages, short, long and flapping, on real namespaces with a pair and a syphon.

The actual figures are those of the namespaces' own meters (N5), and of the ledgers of the pair and its syphon (M1).
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from tests.money.outages import BACKLOG, BATCH, PING, SIZE, STORIES, Run, Story, happened, metered, operations, unsent
from twinbus.ledger import OK, Stage
from twinbus.money import (
    STATE_WRITES,
    Forecast,
    LedgerFacts,
    Prices,
    Scenario,
    StageSpending,
    actual_bill,
    compare,
    forecast,
)

pytestmark = pytest.mark.timeout(300)
NAMES = [story.name for story in STORIES]
SENDS = (Stage.SEND_PRIMARY, Stage.RETURN_PRIMARY)
SPREAD = 50
"""Allowed difference for a stage with few operations: the number of polls, peeks and probes depends on timing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outages")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Run]:
    return happened(folder)


def foreseen(story: Story) -> Forecast:
    """Return the forecast from what is known before the run: the plan, and the options of the pair and its syphon."""
    scenario = Scenario(
        backlog_queues=BACKLOG,
        message_size=SIZE + 64,
        batch=BATCH,
        sent=story.sent,
        diverted=story.outages * story.diverted,
        outages=story.outages,
        outage=timedelta(seconds=2),
        outage_kind=story.kind,
        failover_interval=timedelta(0),
        ping_interval=PING,
        ping_jitter=0,
        tries=1,
        backlog_check_interval=timedelta(0),
        count_interval=timedelta(0),
        syphon=story.syphon,
        state=story.state,
        period=timedelta(minutes=1),
    )
    return forecast(scenario, Prices.default())


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_m4_n5_operations_agree_with_the_namespaces_own_meters_within_1_percent(
    runs: dict[str, Run], folder: Path, name: str
) -> None:
    actual = metered(folder / "meters", name)
    planned = dict.fromkeys(actual, 0)
    for line in foreseen(runs[name].story).bill.lines:
        stage, used = line.usage.stage, line.usage
        # A meter counts no sends during an outage, and no management calls but writes to the shared state. It counts a
        # return of the syphon as a send.
        if (stage == Stage.MANAGE and used.why != STATE_WRITES) or (stage in SENDS and not used.anyway):
            continue
        stage = Stage.SEND_PRIMARY if stage in SENDS else stage
        planned[stage] = planned.get(stage, 0) + used.units
    assert actual.total() == pytest.approx(sum(planned.values()), rel=0.01), (planned, actual)
    for stage, units in planned.items():
        assert actual[stage] == pytest.approx(units, rel=0.01, abs=SPREAD), (planned, actual)


@pytest.mark.parametrize("name", NAMES)
def test_m4_m1_operations_agree_with_the_ledger_within_1_percent_and_the_remainder_is_explained(
    runs: dict[str, Run], name: str
) -> None:
    story = runs[name].story
    used, facts = spent(runs[name].ledger)
    beside = foreseen(story)
    result = compare(beside, actual_bill({"2026-11": used}, 60, beside.prices, beside.scenario), facts)
    assert result.share < 0.01, result
    assert result.actual > 4 * story.diverted
    for one in result.differences:
        assert sum(part.units for part in one.parts) == one.units
        assert sum((part.cost for part in one.parts), Decimal(0)) == one.cost
        assert abs(one.units) <= max(SPREAD, 0.01 * one.forecast), one


def spent(ledger: Path) -> tuple[list[StageSpending], LedgerFacts]:
    """Return the use by stage and the messages of each stage, computed without Spark."""
    units, messages, never = Counter[str](), Counter[str](), Counter[str]()
    failed: dict[str, Counter[str]] = {}
    for one in operations(ledger):
        if unsent(one):
            never[one.stage] += one.units
            continue
        units[one.stage] += one.units
        if one.result == OK:
            messages[one.stage] += len(one.ids)
        else:
            failed.setdefault(one.stage, Counter())[one.result] += one.units
    used = [
        StageSpending(stage=stage, units=count, failed=failed.get(stage, {}), unsent_units=never[stage])
        for stage, count in units.items()
    ]
    facts = LedgerFacts(
        sent=messages[Stage.SEND_PRIMARY],
        diverted=messages[Stage.SEND_BACKLOG],
        returned=messages[Stage.RETURN_PRIMARY],
    )
    return used, facts
