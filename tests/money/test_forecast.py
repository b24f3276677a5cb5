"""M4, M2, Y2: forecasts compared with numbers that were computed by hand."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

from twinbus.ledger import Stage
from twinbus.money import (
    CostPhase,
    Forecast,
    OutageKind,
    PingKind,
    Prices,
    Scenario,
    ScenarioError,
    SharedStateIn,
    SyphonRuns,
    Usage,
    bill,
    forecast,
)

PRICES = Prices.default()
QUIET: dict[str, Any] = {"rate": 0, "outages": 0, "count_interval": timedelta(0)}
DRILL: dict[str, Any] = {
    "rate": 10,
    "outage": timedelta(minutes=10),
    "ping_jitter": 0,
    "syphon": SyphonRuns.AFTER,
    "outage_kind": OutageKind.UNREACHABLE,
}


def foreseen(**asked: Any) -> Forecast:
    return forecast(Scenario(**asked), PRICES)


def units(found: Forecast, phase: CostPhase | None, stage: str) -> int:
    return found.bill.of(phase=phase, stage=stage).units


def test_y2_m4_ten_idle_backlog_queues_are_40_receives_an_hour_960_a_day_28800_in_30_days() -> None:
    found = foreseen(backlog_queues=10, **QUIET)
    assert (found.idle.hour, found.idle.day, found.idle.thirty_days) == (40, 960, 28_800)
    assert (
        units(found, CostPhase.IDLE, Stage.EMPTY_RECEIVE)
        == found.bill.of(stage=Stage.EMPTY_RECEIVE).operations
        == 28_800
    )


@pytest.mark.parametrize(("asked", "hourly"), [({"backlog_queues": 3}, 12), ({"syphons": 2}, 80), ({"syphons": 0}, 0)])
def test_y2_idle_receives_are_four_an_hour_for_each_queue_and_syphon(asked: dict[str, int], hourly: float) -> None:
    assert foreseen(**QUIET, **asked).idle.hour == hourly


def test_m4_a_syphon_that_runs_only_after_an_outage_costs_nothing_idle() -> None:
    found = foreseen(**QUIET, syphon=SyphonRuns.AFTER)
    assert found.idle.thirty_days == 0
    assert found.bill.units == 0


def test_m1_m2_a_diverted_message_costs_six_operations_and_eight_if_it_was_put_aside() -> None:
    found = foreseen()
    assert sum(one.clause for one in found.message_units) == 4
    assert sum(one.billed for one in found.message_units) == 6
    assert sum(one.put_aside for one in found.message_units) == 8
    assert [one.stage for one in found.message_units if one.clause] == [
        Stage.SEND_BACKLOG,
        Stage.RECEIVE_BACKLOG,
        Stage.RETURN_PRIMARY,
        Stage.RECEIVE_PRIMARY,
    ]


def test_m4_an_outage_is_diverted_from_the_failover_to_the_ping_that_succeeds() -> None:
    # 10 minutes: failover after one, pings at 2, 3 … 10, the ninth of them good.
    found = foreseen(**DRILL)
    assert found.outage.pings == 9
    assert found.outage.diverted == 10 * 540
    for stage in (Stage.SEND_BACKLOG, Stage.RECEIVE_BACKLOG, Stage.RETURN_PRIMARY, Stage.COMPLETE_BACKLOG):
        assert units(found, None, stage) == 5400
    assert units(found, CostPhase.DRAIN, Stage.RECEIVE_PRIMARY) == 5400 + 54  # and messages sent meanwhile
    # An outage that ends a second later is found at the next ping.
    later = foreseen(**{**DRILL, "outage": timedelta(seconds=601)})
    assert later.outage.diverted == 10 * 600


def test_m4_pings_are_charged_if_the_primary_answers_and_only_the_last_one_if_it_is_unreachable() -> None:
    asked = {**DRILL, "entities": 3, "clients": 2}
    assert units(foreseen(**asked), None, Stage.PING) == 3 * 2
    assert units(foreseen(**{**asked, "outage_kind": OutageKind.ANSWERING}), None, Stage.PING) == 3 * 2 * 9
    assert units(foreseen(**{**asked, "ping": PingKind.LINK}), None, Stage.PING) == 0


def test_s3_an_outage_shorter_than_the_failover_interval_diverts_nothing() -> None:
    found = foreseen(**{**DRILL, "outage": timedelta(seconds=59), "outage_kind": OutageKind.ANSWERING})
    assert found.outage.diverted == 0
    assert found.bill.of(phase=CostPhase.DRAIN).units == 0
    assert found.bill.of(phase=CostPhase.OUTAGE).units == units(found, CostPhase.OUTAGE, Stage.SEND_PRIMARY) == 590 * 4


def test_s3_without_sends_nothing_fails_over() -> None:
    found = foreseen(**{**DRILL, "rate": 0, "outage_kind": OutageKind.ANSWERING})
    assert found.bill.of(phase=CostPhase.OUTAGE).units == 0


def test_y5_a_standing_syphon_puts_aside_what_it_receives_meanwhile() -> None:
    found = foreseen(**{**DRILL, "syphon": SyphonRuns.STANDING})
    # Pauses of 1, 2, 4 … s, by chance a quarter shorter: the tenth try, after 767 s, is the first that succeeds.
    assert found.outage.probes == 10
    assert found.outage.put_aside == found.outage.diverted
    assert units(found, CostPhase.OUTAGE, Stage.SETTLE_BACKLOG) == 5400 + 10
    assert units(found, CostPhase.DRAIN, Stage.RECEIVE_DEFERRED) == 5400
    assert units(found, CostPhase.DRAIN, Stage.RECEIVE_BACKLOG) == 0
    answering = foreseen(**{**DRILL, "syphon": SyphonRuns.STANDING, "outage_kind": OutageKind.ANSWERING})
    assert units(answering, CostPhase.OUTAGE, Stage.RETURN_PRIMARY) == 10


def more_with_state(**asked: Any) -> dict[tuple[CostPhase, str], int]:
    """The units that a forecast has more if the state is shared in the secondary."""
    without, shared = foreseen(**asked), foreseen(**asked, state=SharedStateIn.SECONDARY)
    more = {
        (phase, stage): units(shared, phase, stage) - units(without, phase, stage)
        for phase in CostPhase
        for stage in Stage
    }
    return {key: count for key, count in more.items() if count}


@pytest.mark.parametrize(
    ("asked", "peeks_idle", "writes", "peeks_in_outage", "peeks_in_drain"),
    [
        # A failover, 9 pings that begin, 8 that fail and a restore are written; a look of 2 peeks follows the ping that
        # succeeds. The syphon drains 5,400 messages in 5.4 s: a look every 2 s.
        ({}, 1, 19, 2, 3 * 2),
        ({"clients": 3}, 3, 3 * 19, 3 * 2, 3 * 2),
        # The changes of two entities at the same time are written at once, or one of them a second later.
        ({"entities": 2}, 1, round(19 * 1.5), 2 * 2, 3 * 2),
        # A standing syphon looks every 2 s while messages arrive, and while it moves those that it has put aside.
        ({"syphon": SyphonRuns.STANDING}, 1, 19, 2 + 600, 3 * 2),
        ({"syphons": 0}, 1, 19, 2, 0),
        ({"outages": 2}, 1, 2 * 19, 2 * 2, 2 * 3 * 2),
        ({"rate": 0}, 1, 0, 0, 0),
    ],
)  # fmt: skip
def test_s16_m4_a_state_in_the_secondary_costs_looks_and_writes(
    asked: dict[str, Any], peeks_idle: int, writes: int, peeks_in_outage: int, peeks_in_drain: int
) -> None:
    expected = {
        (CostPhase.IDLE, Stage.PEEK_BACKLOG): peeks_idle,
        (CostPhase.OUTAGE, Stage.MANAGE): writes,
        (CostPhase.OUTAGE, Stage.PEEK_BACKLOG): peeks_in_outage,
        (CostPhase.DRAIN, Stage.PEEK_BACKLOG): peeks_in_drain,
    }
    assert more_with_state(**{**DRILL, **asked}) == {key: count for key, count in expected.items() if count}


def test_s4_a_call_that_finds_the_primary_away_fails_with_its_whole_batch() -> None:
    found = foreseen(**DRILL, batch=20, clients=3, entities=2, tries=1)
    assert units(found, CostPhase.OUTAGE, Stage.SEND_PRIMARY) == 20 * 3 * 2


def test_m4_several_outages_are_as_many_times_one() -> None:
    asked = {**DRILL, "count_interval": timedelta(0), "backlog_check_interval": timedelta(0)}
    one, four = foreseen(**asked), foreseen(**asked, outages=4)
    for phase in (CostPhase.OUTAGE, CostPhase.DRAIN):
        assert four.bill.of(phase=phase).units == 4 * one.bill.of(phase=phase).units


@pytest.mark.parametrize(("size", "each"), [(0, 1), (65_536, 1), (65_537, 2), (200_000, 4)])
def test_m2_a_unit_is_64_kb_or_a_part_of_it_in_every_stage_that_carries_the_message(size: int, each: int) -> None:
    found = foreseen(**DRILL, message_size=size)
    assert units(found, CostPhase.DRAIN, Stage.RETURN_PRIMARY) == 5400 * each
    assert units(found, CostPhase.DRAIN, Stage.COMPLETE_BACKLOG) == 5400


def test_m2_aliases_may_make_a_unit_more_in_the_backlog() -> None:
    found = foreseen(**DRILL, message_size=65_530)
    assert units(found, None, Stage.SEND_BACKLOG) == 2 * 5400
    assert units(found, CostPhase.DRAIN, Stage.RETURN_PRIMARY) == 5400


def test_m2_a_message_to_a_topic_is_received_and_completed_by_each_subscription() -> None:
    found = foreseen(rate=1, outages=0, subscriptions=3, period=timedelta(seconds=100))
    assert units(found, CostPhase.IDLE, Stage.SEND_PRIMARY) == 100
    assert (
        units(found, CostPhase.IDLE, Stage.RECEIVE_PRIMARY)
        == units(found, CostPhase.IDLE, Stage.COMPLETE_PRIMARY)
        == 300
    )


def test_m4_lines_add_up_and_phases_take_the_bands_one_after_the_other() -> None:
    found = foreseen(**DRILL, bandwidth="none", other_operations=12_999_990)
    scale = PRICES.tier("standard").operations
    assert scale is not None
    whole = scale.cost(Decimal(12_999_990 + found.bill.units))
    assert abs(found.bill.cost - whole) < Decimal("1e-15")
    drain = found.bill.of(phase=CostPhase.DRAIN)
    assert abs(drain.cost - drain.units * Decimal("0.80") / 1_000_000) < Decimal("1e-15")


def test_m4_premium_charges_messaging_units_of_both_namespaces_and_no_operations() -> None:
    found = foreseen(tier="premium", messaging_units=2, period=timedelta(hours=10), bandwidth="none")
    assert found.bill.cost == 0
    assert found.base_cost == Decimal("0.9275") * 2 * 2 * 10
    assert found.without_pair == found.base_cost / 2


def test_m4_connections_beyond_the_included_ones_are_charged_for_the_hours_they_are_there() -> None:
    few, many = foreseen(**QUIET, clients=100), foreseen(**QUIET, clients=5000, period=timedelta(hours=730))
    assert few.connections_cost == 0
    # A sender and a receiver each, and two of the syphon.
    assert many.connections == 10_002
    assert many.connections_cost == 9002 * Decimal("0.03")


def test_m4_bandwidth_is_charged_in_every_stage_that_carries_the_message() -> None:
    near, far = foreseen(**DRILL, bandwidth="none"), foreseen(**DRILL, bandwidth="inter_region")
    assert far.bill.cost - near.bill.cost == pytest.approx(Decimal(far.bill.bytes) * Decimal("0.02") / 10**9)
    assert all(line.bandwidth_cost for line in far.bill.lines if line.usage.stage == Stage.SEND_BACKLOG)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"backlog_queues": 0}, "backlog-queues is 0, and must be 1 or more"),
        ({"ping_interval": timedelta(0)}, "ping-interval is 0 s"),
        ({"rate": float("inf")}, "rate is inf"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"ping_jitter": 2}, "ping-jitter is 2"),
        ({"tier": "basic", "subscriptions": 1}, "has no topics"),
        ({"message_size": 300_000}, "largest message of the tier standard"),
        ({"outages": 1000}, "outages is 1000"),
    ],
)
def test_m4_an_impossible_scenario_is_refused_with_the_name_of_the_field(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        foreseen(**asked)


def test_m4_known_traffic_replaces_rate_and_pings() -> None:
    found = foreseen(**DRILL, sent=1000, diverted=300)
    assert units(found, CostPhase.IDLE, Stage.SEND_PRIMARY) == 1000
    assert units(found, None, Stage.SEND_BACKLOG) == units(found, None, Stage.RETURN_PRIMARY) == 300
    assert units(found, None, Stage.RECEIVE_PRIMARY) == 1300


def test_m4_actual_usage_is_priced_like_a_forecast() -> None:
    found = foreseen(**DRILL)
    used = [replace(line.usage, phase="") for line in found.bill.lines]
    again = bill(used, PRICES, "standard")
    assert (again.units, again.bytes) == (found.bill.units, found.bill.bytes)
    assert abs(again.cost - found.bill.cost) < Decimal("1e-15")
    assert bill([Usage(stage="ping", operations=0, units=0)], PRICES).cost == 0
