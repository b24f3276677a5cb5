"""M4: what a difference between forecast and actual is made of. Its parts add up to it."""

from datetime import timedelta
from decimal import Decimal

import pytest

from twinbus.ledger import Stage
from twinbus.money import OutageKind, Prices, Scenario, SyphonRuns, forecast
from twinbus.money.forecast_vs_actual import EMPTY_PRIMARY, StageDifference, StageSpending, compare

FORESEEN = forecast(
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


def spent(stage: str, units: int, *, messages: int = 0, vain: int = 0, unsent: int = 0) -> StageSpending:
    return StageSpending(stage=stage, messages=messages, units=units, vain=vain, unsent=unsent, cost=Decimal(0))


def compared(*actual: StageSpending) -> dict[str, StageDifference]:
    found = {one.stage: one for one in compare(FORESEEN, actual).differences}
    assert all(sum(part.units for part in one.parts) == one.units for one in found.values())
    return found


def parts(one: StageDifference) -> list[tuple[int, str]]:
    return [(part.units, part.why) for part in one.parts]


def test_m4_what_agrees_needs_no_explanation() -> None:
    found = compared(spent(Stage.SEND_BACKLOG, 600, messages=600))
    assert parts(found[Stage.SEND_BACKLOG]) == []


def test_m4_more_traffic_than_foreseen_is_told_in_every_stage_it_passes() -> None:
    found = compared(
        spent(Stage.SEND_BACKLOG, 660, messages=660),
        spent(Stage.RETURN_PRIMARY, 663, messages=660),
        spent(Stage.SEND_PRIMARY, 904, messages=900, vain=4),
    )
    assert parts(found[Stage.SEND_BACKLOG]) == [(60, "60 messages more were diverted than foreseen")]
    assert parts(found[Stage.RETURN_PRIMARY])[0] == (60, "60 messages more were diverted than foreseen")
    assert parts(found[Stage.RETURN_PRIMARY])[1][0] == 3
    # The call that finds the primary away, four tries of it, was foreseen.
    assert parts(found[Stage.SEND_PRIMARY]) == [(-100, "100 messages fewer were sent than foreseen")]


def test_m4_calls_in_vain_are_told_apart_from_the_rest() -> None:
    found = compared(
        spent(Stage.SEND_BACKLOG, 600, messages=600), spent(Stage.RECEIVE_BACKLOG, 607, messages=0, vain=5)
    )
    assert [units for units, _ in parts(found[Stage.RECEIVE_BACKLOG])] == [5, 2]


def test_m4_what_never_left_is_told_and_not_counted() -> None:
    found = compared(
        spent(Stage.SEND_BACKLOG, 600, messages=600), spent(Stage.RETURN_PRIMARY, 600, messages=600, unsent=50)
    )
    assert found[Stage.RETURN_PRIMARY].units == 0
    assert "50 more were intended" in parts(found[Stage.RETURN_PRIMARY])[0][1]


def test_m4_stages_that_only_one_of_them_has_are_there_too() -> None:
    found = compared(
        spent(Stage.SEND_BACKLOG, 600, messages=600), spent(Stage.RENEW_BACKLOG, 7), spent(EMPTY_PRIMARY, 3)
    )
    assert parts(found[Stage.RENEW_BACKLOG]) == [(7, "locks renewed while a load waited: not foreseen")]
    assert found[Stage.COMPLETE_BACKLOG].actual == 0
    assert found[Stage.COMPLETE_BACKLOG].units == -600
    assert found[EMPTY_PRIMARY].units == 3


def test_m4_what_nobody_recorded_is_not_compared() -> None:
    result = compare(FORESEEN, [spent(Stage.SEND_BACKLOG, 600, messages=600)])
    received = next(one for one in result.differences if one.stage == Stage.RECEIVE_PRIMARY)
    assert received.actual is None
    assert received.units == 0
    whole = compare(FORESEEN, [spent(Stage.SEND_BACKLOG, 600, messages=600), spent(Stage.RECEIVE_PRIMARY, 1600)])
    assert whole.forecast - result.forecast == 1600


def test_m4_the_share_is_that_of_all_units_compared() -> None:
    stages = {line.usage.stage: FORESEEN.bill.of(stage=line.usage.stage).units for line in FORESEEN.bill.lines}
    exact = [spent(stage, units, messages=units) for stage, units in stages.items()]
    assert compare(FORESEEN, exact).share == 0
    more = compare(FORESEEN, [*exact, spent(Stage.RENEW_BACKLOG, 100)])
    assert more.share == pytest.approx(100 / (sum(stages.values()) + 100))
