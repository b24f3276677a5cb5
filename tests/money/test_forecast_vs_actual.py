"""M4: the parts of a difference between forecast and actual. The sum of the parts is the difference."""

from datetime import timedelta
from decimal import Decimal

import pytest

from twinbus.ledger import Stage
from twinbus.money import OutageKind, Prices, Scenario, SyphonRuns, forecast
from twinbus.money.forecast_vs_actual import EMPTY_PRIMARY, StageDifference, StageSpending, compare

FORECAST = forecast(
    Scenario(
        rate=10,
        outage=timedelta(minutes=10),
        ping_jitter=0,
        failover_interval=timedelta(0),
        backlog_check_interval=timedelta(0),
        outage_kind=OutageKind.UNREACHABLE,
        syphon=SyphonRuns.AFTER,
        sent=1000,
        diverted=600,
    ),
    Prices.default(),
)


def spent(stage: str, units: int, *, messages: int = 0, failed: int = 0, unsent: int = 0) -> StageSpending:
    return StageSpending(
        stage=stage, messages=messages, units=units, failed_units=failed, unsent_units=unsent, cost=Decimal(0)
    )


def compared(*actual: StageSpending) -> dict[str, StageDifference]:
    found = {one.stage: one for one in compare(FORECAST, actual).differences}
    assert all(sum(part.units for part in one.parts) == one.units for one in found.values())
    return found


def parts(one: StageDifference) -> list[tuple[int, str]]:
    return [(part.units, part.why) for part in one.parts]


def test_m4_a_stage_that_agrees_has_no_explanation() -> None:
    found = compared(spent(Stage.SEND_BACKLOG, 600, messages=600))
    assert parts(found[Stage.SEND_BACKLOG]) == []


def test_m4_more_traffic_than_in_the_forecast_explains_a_part_in_each_of_its_stages() -> None:
    found = compared(
        spent(Stage.SEND_BACKLOG, 660, messages=660),
        spent(Stage.RETURN_PRIMARY, 663, messages=660),
        spent(Stage.SEND_PRIMARY, 904, messages=900, failed=4),
    )
    assert parts(found[Stage.SEND_BACKLOG]) == [(60, "60 messages more were diverted than in the forecast")]
    assert parts(found[Stage.RETURN_PRIMARY])[0] == (60, "60 messages more were diverted than in the forecast")
    assert parts(found[Stage.RETURN_PRIMARY])[1][0] == 3
    # The forecast has the first call of the outage, with its four tries.
    assert parts(found[Stage.SEND_PRIMARY]) == [(-100, "100 messages fewer were sent than in the forecast")]


def test_m4_failed_calls_are_a_part_of_their_own() -> None:
    found = compared(
        spent(Stage.SEND_BACKLOG, 600, messages=600), spent(Stage.RECEIVE_BACKLOG, 607, messages=0, failed=5)
    )
    assert [units for units, _ in parts(found[Stage.RECEIVE_BACKLOG])] == [5, 2]


def test_m4_calls_that_were_never_sent_are_named_and_not_counted() -> None:
    found = compared(
        spent(Stage.SEND_BACKLOG, 600, messages=600), spent(Stage.RETURN_PRIMARY, 600, messages=600, unsent=50)
    )
    assert found[Stage.RETURN_PRIMARY].units == 0
    assert "50 more were tried without a connection" in parts(found[Stage.RETURN_PRIMARY])[0][1]


def test_m4_stages_that_only_the_forecast_or_only_the_ledger_has_are_compared_too() -> None:
    found = compared(
        spent(Stage.SEND_BACKLOG, 600, messages=600), spent(Stage.RENEW_BACKLOG, 7), spent(EMPTY_PRIMARY, 3)
    )
    assert parts(found[Stage.RENEW_BACKLOG]) == [(7, "locks renewed while a batch waited: not in the forecast")]
    assert found[Stage.COMPLETE_BACKLOG].actual == 0
    assert found[Stage.COMPLETE_BACKLOG].units == -600
    assert found[EMPTY_PRIMARY].units == 3


def test_m4_a_receiver_stage_without_a_record_is_not_compared() -> None:
    result = compare(FORECAST, [spent(Stage.SEND_BACKLOG, 600, messages=600)])
    received = next(one for one in result.differences if one.stage == Stage.RECEIVE_PRIMARY)
    assert received.actual is None
    assert received.units == 0
    whole = compare(FORECAST, [spent(Stage.SEND_BACKLOG, 600, messages=600), spent(Stage.RECEIVE_PRIMARY, 1600)])
    assert whole.forecast - result.forecast == 1600


def test_m4_the_share_counts_all_units_that_are_compared() -> None:
    stages = {line.usage.stage: FORECAST.bill.of(stage=line.usage.stage).units for line in FORECAST.bill.lines}
    exact = [spent(stage, units, messages=units) for stage, units in stages.items()]
    assert compare(FORECAST, exact).share == 0
    more = compare(FORECAST, [*exact, spent(Stage.RENEW_BACKLOG, 100)])
    assert more.share == pytest.approx(100 / (sum(stages.values()) + 100))
