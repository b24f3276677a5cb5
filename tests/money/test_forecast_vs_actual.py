"""L4, M4: what a difference between forecast and actual is made of. Its parts add up to it, in units and in money."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.ledger import Stage
from twinbus.money import (
    EMPTY_PRIMARY,
    UNEXPLAINED,
    ActualBill,
    CopyFacts,
    Forecast,
    LedgerFacts,
    MessageMix,
    Observed,
    ObservedFailover,
    ObservedOutage,
    OutageKind,
    Prices,
    Scenario,
    SharedStateIn,
    StageDifference,
    StageSpending,
    SyphonRuns,
    actual_bill,
    compare,
    cost_result,
    forecast,
)

PRICES = Prices.default()
SCENARIO = Scenario(
    rate=10,
    outage=timedelta(minutes=10),
    ping_jitter=0,
    failover_interval=timedelta(0),
    backlog_check_interval=timedelta(0),
    outage_kind=OutageKind.UNREACHABLE,
    syphon=SyphonRuns.AFTER,
    sent=1000,
    diverted=600,
)
FORECAST = forecast(SCENARIO, PRICES)
ONE = (ObservedFailover(seconds=5),)
HOME = LedgerFacts(sent=1000, diverted=600, returned=600, deliverable=1600)


def spent(stage: str, units: int, **more: Any) -> StageSpending:
    return StageSpending(stage=stage, units=units, **more)


def billed(*stages: StageSpending, prices: Prices | None = PRICES, other: int = 0) -> ActualBill:
    return actual_bill({"2026-11": stages}, 3600, prices, replace(SCENARIO, other_operations=other))


def compared(
    *stages: StageSpending, facts: LedgerFacts = HOME, beside: Forecast = FORECAST
) -> dict[str, StageDifference]:
    result = compare(beside, billed(*stages), facts)
    adds_up(result.differences)
    return {one.stage: one for one in result.differences}


def adds_up(differences: tuple[StageDifference, ...]) -> None:
    for one in differences:
        assert sum(part.units for part in one.parts) == one.units, one
        assert sum((part.cost for part in one.parts), Decimal(0)) == one.cost, one


def parts(one: StageDifference) -> list[tuple[int, str]]:
    return [(part.units, part.why) for part in one.parts if part.units]


def test_l4_a_stage_that_agrees_has_no_explanation() -> None:
    assert parts(compared(spent(Stage.SEND_BACKLOG, 600))[Stage.SEND_BACKLOG]) == []


def test_l4_seven_messages_of_130_kb_are_14_further_units_and_nothing_else() -> None:
    """The comparison called these units messages that went to a second backlog queue."""
    found = compared(spent(Stage.SEND_BACKLOG, 614, large_units=14))
    assert parts(found[Stage.SEND_BACKLOG]) == [
        (14, "units beyond the first 64 KB: 14 in the ledger, 0 in the forecast")
    ]


def test_l4_receives_of_a_second_subscription_are_explained_by_the_subscription() -> None:
    """The comparison called these receives messages that came again."""
    facts = replace(HOME, deliverable=1644, subscriptions=2)
    found = compared(spent(Stage.RECEIVE_PRIMARY, 1644), facts=facts)
    assert parts(found[Stage.RECEIVE_PRIMARY]) == [(44, "receives of 2 subscriptions; 1 in the forecast")]


def test_l4_s16_writes_to_a_shared_state_are_compared_with_those_of_the_forecast() -> None:
    scenario = replace(SCENARIO, count_interval=timedelta(0), syphons=0, state=SharedStateIn.SECONDARY)
    beside = forecast(scenario, PRICES)
    writes = beside.bill.of(stage=Stage.MANAGE).units
    assert writes == 21, "a failover, 10 pings that begin, 9 that fail, and a restore"
    for calls, shown in ((writes, []), (writes + 5, [(5, "26 in the ledger, 21 in the forecast")])):
        facts = replace(HOME, manage={"client": calls})
        found = compared(spent(Stage.MANAGE, calls), facts=facts, beside=beside)[Stage.MANAGE]
        why = "management calls of a client, and writes to the shared state"
        assert parts(found) == [(units, f"{why}: {both}") for units, both in shown]


def test_l4_more_messages_than_in_the_forecast_explain_a_part_in_each_of_their_stages() -> None:
    again: dict[str, CopyFacts] = {Stage.RETURN_PRIMARY: CopyFacts(again=3)}
    facts = replace(HOME, sent=900, diverted=660, returned=663, copies=again)
    found = compared(
        spent(Stage.SEND_BACKLOG, 660),
        spent(Stage.RETURN_PRIMARY, 663),
        spent(Stage.RECEIVE_BACKLOG, 665),
        spent(Stage.SEND_PRIMARY, 904, failed={"server_busy": 4}),
        facts=facts,
    )
    more = (60, "60 messages more were diverted than in the forecast")
    resent = (3, "messages that were sent on again, by their ids")
    assert parts(found[Stage.SEND_BACKLOG]) == [more]
    assert parts(found[Stage.RETURN_PRIMARY]) == [more, resent]
    assert parts(found[Stage.RECEIVE_BACKLOG]) == [more, resent, (2, "receives that no send to the primary followed")]
    # The forecast has the first call of the outage, with its four tries: four failed units, as in the ledger.
    assert parts(found[Stage.SEND_PRIMARY]) == [
        (-100, "100 messages fewer were sent to the primary than in the forecast")
    ]


def test_l4_failed_calls_are_named_by_their_results() -> None:
    found = compared(spent(Stage.SEND_BACKLOG, 605, failed={"unknown timeout": 3, "server_busy": 2}))
    assert parts(found[Stage.SEND_BACKLOG]) == [
        (5, "calls that failed: 5 in the ledger (server_busy 2, unknown timeout 3), 0 in the forecast")
    ]


def test_l4_dead_letters_and_copies_that_wait_explain_why_fewer_were_sent_on() -> None:
    facts = replace(HOME, returned=590, dead_lettered=3, copies={
        Stage.RETURN_PRIMARY: CopyFacts(missing=10, dead_lettered=3),
        Stage.COMPLETE_BACKLOG: CopyFacts(missing=11, dead_lettered=3),
    })  # fmt: skip
    found = compared(
        spent(Stage.RETURN_PRIMARY, 590),
        spent(Stage.COMPLETE_BACKLOG, 589),
        spent(Stage.RECEIVE_BACKLOG, 593),
        facts=facts,
    )
    dead = (-3, "dead-lettered in the backlog, so not sent on")
    assert parts(found[Stage.RETURN_PRIMARY]) == [
        dead, (-7, "copies in the backlog that were not sent on in this ledger")
    ]  # fmt: skip
    assert parts(found[Stage.COMPLETE_BACKLOG]) == [
        dead, (-8, "copies in the backlog that were not completed in this ledger")
    ]  # fmt: skip
    assert parts(found[Stage.RECEIVE_BACKLOG]) == [(-7, "copies in the backlog that were not sent on in this ledger")]


def test_l4_receivers_that_abandon_and_dead_letter_explain_receives_and_completions() -> None:
    facts = replace(HOME, settled=9)
    found = compared(
        spent(Stage.RECEIVE_PRIMARY, 1609), spent(Stage.COMPLETE_PRIMARY, 1598), spent(Stage.SETTLE_PRIMARY, 9),
        facts=facts,
    )  # fmt: skip
    assert parts(found[Stage.RECEIVE_PRIMARY]) == [
        (9, "received again after they were abandoned, deferred, released or dead-lettered"),
    ]
    assert parts(found[Stage.COMPLETE_PRIMARY]) == [
        (9, "9 messages more were received than in the forecast"),
        (-9, "abandoned, deferred, released or dead-lettered instead of completed"),
        (-2, "receives without a completion in this ledger"),
    ]
    assert parts(found[Stage.SETTLE_PRIMARY]) == [(9, "in the ledger, and the forecast has none")]


def test_l4_what_no_entry_explains_is_called_unexplained_with_its_number() -> None:
    result = compare(FORECAST, billed(spent(Stage.PEEK_BACKLOG, 17), spent(Stage.RECEIVE_PRIMARY, 1607)), HOME)
    found = {one.stage: one for one in result.differences}
    assert parts(found[Stage.PEEK_BACKLOG]) == [(7, UNEXPLAINED)], "10 queues, one peek each"
    assert parts(found[Stage.RECEIVE_PRIMARY]) == [(7, UNEXPLAINED)], "more receives than messages, and none abandoned"
    explained = [part for one in result.differences for part in one.parts if part.explained]
    assert result.unexplained == sum(
        abs(part.units) for one in result.differences for part in one.parts if part not in explained
    )


def test_l4_calls_that_were_never_sent_are_named_and_not_counted() -> None:
    found = compared(spent(Stage.RETURN_PRIMARY, 600, unsent_units=50))
    assert found[Stage.RETURN_PRIMARY].units == 0
    assert "50 more were tried without a connection" in found[Stage.RETURN_PRIMARY].parts[-1].why


def test_m4_stages_that_only_the_forecast_or_only_the_ledger_has_are_compared_too() -> None:
    found = compared(spent(Stage.RENEW_BACKLOG, 7), spent(EMPTY_PRIMARY, 3))
    assert parts(found[Stage.RENEW_BACKLOG]) == [(7, "in the ledger, and the forecast has none")]
    assert (found[Stage.COMPLETE_BACKLOG].actual, found[Stage.COMPLETE_BACKLOG].units) == (0, -600)
    assert found[EMPTY_PRIMARY].units == 3


def test_m4_a_receiver_stage_without_a_record_is_not_compared() -> None:
    result = compare(FORECAST, billed(spent(Stage.SEND_BACKLOG, 600)), HOME)
    received = next(one for one in result.differences if one.stage == Stage.RECEIVE_PRIMARY)
    assert (received.actual, received.units, received.cost) == (None, 0, Decimal(0))
    whole = compare(FORECAST, billed(spent(Stage.SEND_BACKLOG, 600), spent(Stage.RECEIVE_PRIMARY, 1600)), HOME)
    assert whole.forecast - result.forecast == 1600
    assert whole.forecast_cost - result.forecast_cost == received.forecast_cost


# --- money -----------------------------------------------------------------------------------------------------------


def test_l4_bytes_are_a_part_of_their_own_in_money() -> None:
    """The demo's operations agreed within 0.2 %, its dollars within 6 %: the rest were bytes."""
    size = FORECAST.bill.of(stage=Stage.SEND_BACKLOG).bytes
    found = compared(spent(Stage.SEND_BACKLOG, 600, bytes=size + 1_000_000))[Stage.SEND_BACKLOG]
    [part] = found.parts
    assert part.why == f"bytes: {size + 1_000_000:,} in the ledger, {size:,} in the forecast"
    assert part.cost == found.cost == Decimal("0.00002")


def test_l4_another_price_band_is_a_part_of_its_own_in_money() -> None:
    beside = forecast(replace(SCENARIO, bandwidth="none"), PRICES)
    bill = actual_bill(
        {"2026-11": [spent(Stage.SEND_BACKLOG, 600)]}, 3600, PRICES,
        replace(SCENARIO, bandwidth="none", other_operations=13_000_000),
    )  # fmt: skip
    result = compare(beside, bill, HOME)
    adds_up(result.differences)
    found = next(one for one in result.differences if one.stage == Stage.SEND_BACKLOG)
    assert found.units == 0
    assert [part.why for part in found.parts] == [
        "price of a million units: 0.8000 in the bill, 0.0000 in the forecast"
    ]
    assert found.cost == 600 * Decimal("0.8") / 10**6


def test_l4_the_base_differs_by_the_length_of_the_period() -> None:
    result = compare(FORECAST, billed(spent(Stage.SEND_BACKLOG, 600)), HOME)
    assert result.actual_base == pytest.approx(Decimal(10) / 744)
    assert result.base_why == "3,600 s in the ledger, 2,592,000 s in the forecast"
    assert result.actual_cost - result.forecast_cost == sum(
        (one.cost for one in result.compared), result.actual_base - result.forecast_base
    )


# --- always a bill ---------------------------------------------------------------------------------------------------


def seen(seconds: float, **observed: Any) -> Mapping[str, Any]:
    return {"period": timedelta(seconds=seconds), "observed": Observed(**observed), "count_interval": timedelta(0)}


def test_l4_a_ledger_of_24_s_with_an_outage_has_a_bill_and_a_forecast() -> None:
    """`cost actual` refused: outages is 1, and must be fewer."""
    mix = MessageMix(600, 614, 1_000_000, 600, 614, 1_000_000)
    outage = ObservedOutage(seconds=9, drain_seconds=2, diverted=600, failovers=ONE)
    bill = billed(spent(Stage.SEND_BACKLOG, 614, large_units=14, bytes=1_000_000))
    found = cost_result(bill, HOME, seen(24, outages=(outage,), diverted=mix), {}, PRICES)
    assert found.comparison is not None
    [stored] = [one for one in found.comparison.differences if one.stage == Stage.SEND_BACKLOG]
    assert (stored.forecast, stored.actual, stored.parts) == (614, 614, ())
    assert stored.forecast_cost == stored.actual_cost


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"outages": 5, "outage": timedelta(hours=1)}, "outages is 5, and must be fewer"),
        ({"tier": "basic", "subscriptions": 2}, "the tier basic has no topics"),
        ({"bandwidth": "moon"}, "has no bandwidth 'moon'"),
    ],
)
def test_l4_a_forecast_that_cannot_be_made_is_a_note_beside_the_bill(asked: dict[str, Any], said: str) -> None:
    bill = billed(spent(Stage.SEND_BACKLOG, 600))
    found = cost_result(bill, HOME, seen(24), asked, PRICES)
    assert (found.forecast, found.comparison) == (None, None)
    assert found.bill.units == 600
    [note] = found.notes
    assert note.startswith("no forecast: ")
    assert said in note


def test_l4_without_prices_the_bill_is_in_units() -> None:
    bill = billed(spent(Stage.SEND_BACKLOG, 600), prices=None)
    assert (bill.units, bill.currency, bill.cost) == (600, None, Decimal(0))
    found = cost_result(bill, HOME, seen(24), {}, None)
    assert found.notes == ("no forecast: a forecast needs prices",)
    gold = actual_bill({"2026-11": [spent(Stage.PING, 1)]}, 1, PRICES, replace(SCENARIO, tier="gold"))
    assert (gold.units, gold.currency) == (1, None)
    assert "has no tier 'gold'" in gold.notes[0]


def test_l4_a_ledger_without_operations_has_an_empty_bill() -> None:
    bill = actual_bill({}, 0, PRICES, SCENARIO)
    assert (bill.units, bill.cost, bill.currency) == (0, Decimal(0), "USD")
    found = cost_result(bill, LedgerFacts(), seen(1), {}, PRICES)
    assert found.notes == ("no forecast: nothing to forecast",)


def test_l4_options_of_a_user_replace_what_the_ledger_shows() -> None:
    mix = MessageMix(600, 614, 1_000_000, 1200, 1228, 2_000_000)
    outage = ObservedOutage(seconds=9, diverted=600, failovers=ONE)
    given = seen(24, outages=(outage,), diverted=mix)
    bill = billed(spent(Stage.SEND_BACKLOG, 614, large_units=14))
    sized = cost_result(bill, HOME, given, {"message_size": 1000, "subscriptions": 1}, PRICES)
    assert sized.forecast is not None
    assert sized.forecast.bill.of(stage=Stage.SEND_BACKLOG).units == 600
    assert sized.forecast.bill.of(stage=Stage.RECEIVE_PRIMARY).units == 600
    earlier = cost_result(bill, HOME, given, {"rate": 1.0, "outages": 0}, PRICES)
    assert earlier.forecast is not None
    assert earlier.forecast.bill.of(stage=Stage.SEND_PRIMARY).units == 24


def test_l4_the_bands_of_each_month_begin_anew() -> None:
    months = {month: [spent(Stage.SEND_PRIMARY, 14_000_000)] for month in ("2026-11", "2026-12")}
    bill = actual_bill(months, 3600, PRICES, replace(SCENARIO, bandwidth="none"))
    assert (bill.units, bill.operations_cost) == (28_000_000, Decimal("1.6"))


# --- properties ------------------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 10**7)
STAGES = [*Stage, EMPTY_PRIMARY]
SPENT = st.dictionaries(
    st.sampled_from(STAGES),
    st.tuples(NUMBERS, NUMBERS, NUMBERS, st.dictionaries(st.sampled_from(["unknown", "server_busy"]), NUMBERS)),
)
COPIES = st.builds(
    lambda missing, dead, unsure, foreign, again: CopyFacts(
        missing=missing, dead_lettered=min(missing, dead), unsure=unsure, foreign=foreign, again=again
    ),
    NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS,
)  # fmt: skip
FACTS = st.builds(
    LedgerFacts,
    sent=NUMBERS, diverted=NUMBERS, scheduled=NUMBERS, returned=NUMBERS, resubmitted=NUMBERS, dead_lettered=NUMBERS,
    copies=st.dictionaries(st.sampled_from([Stage.RETURN_PRIMARY, Stage.COMPLETE_BACKLOG]), COPIES),
    short_polls=NUMBERS, manage=st.dictionaries(st.sampled_from(["client", "syphon", "deadletter"]), NUMBERS),
    deliverable=NUMBERS, subscriptions=st.integers(0, 9), settled=NUMBERS,
)  # fmt: skip
MIXES = st.builds(
    lambda messages, large, size, copies: MessageMix(
        messages, messages + large, size, messages * copies, (messages + large) * copies, size * copies
    ),
    st.integers(1, 10**6), NUMBERS, NUMBERS, st.integers(1, 4),
)  # fmt: skip
OUTAGES = st.builds(
    ObservedOutage,
    seconds=st.floats(0, 1e5), drain_seconds=st.floats(0, 1e4), diverted=st.integers(0, 10**5),
    failovers=st.lists(
        st.builds(ObservedFailover, seconds=st.floats(0, 1e5), processes=st.integers(1, 5), restored=st.booleans()),
        max_size=3,
    ).map(tuple),
)  # fmt: skip
OBSERVED = st.builds(
    Observed,
    outages=st.lists(OUTAGES, max_size=3).map(tuple), sent=st.none() | MIXES, diverted=st.none() | MIXES,
    syphon_seconds=st.none() | st.floats(0, 1e6), drains=st.none() | st.integers(0, 5),
)  # fmt: skip


@given(
    SPENT, FACTS, OBSERVED, st.sampled_from(["basic", "standard", "premium"]), st.sampled_from(SyphonRuns),
    st.sampled_from([0, 12_999_000, 10**9]), st.floats(0, 1e7),
)  # fmt: skip
def test_l4_parts_always_sum_to_the_difference_in_units_and_in_money(
    stages: dict[str, tuple[int, int, int, dict[str, int]]],
    facts: LedgerFacts,
    observed: Observed,
    tier: str,
    syphon: SyphonRuns,
    other: int,
    seconds: float,
) -> None:
    scenario = Scenario(
        tier=tier, syphon=syphon, other_operations=other, observed=observed, period=timedelta(seconds=max(seconds, 1))
    )
    used = [
        spent(stage, single + large + sum(failed.values()), large_units=large, failed=failed, bytes=size)
        for stage, (single, large, size, failed) in stages.items()
    ]
    bill = actual_bill({"2026-11": used, "2026-12": used[:2]}, seconds, PRICES, scenario)
    result = compare(forecast(scenario, PRICES), bill, facts)
    adds_up(result.differences)
    assert all(
        abs(part.units) or part.cost or "connection" in part.why for one in result.compared for part in one.parts
    )
    assert result.actual_cost == bill.cost
    assert result.actual == bill.units
    assert result.actual_cost - result.forecast_cost == sum(
        (one.cost for one in result.compared), result.actual_base - result.forecast_base
    )


@given(MIXES, MIXES, st.lists(st.floats(0, 1e5), min_size=1, max_size=4), st.sampled_from(SyphonRuns))
def test_l4_a_forecast_of_what_happened_has_exactly_the_messages_and_units_of_the_ledger(
    sent: MessageMix, diverted: MessageMix, lengths: list[float], syphon: SyphonRuns
) -> None:
    each, rest = divmod(diverted.messages, len(lengths))
    outages = tuple(
        ObservedOutage(seconds=length, diverted=each + (rest if not n else 0), failovers=ONE)
        for n, length in enumerate(lengths)
    )
    scenario = Scenario(syphon=syphon, observed=Observed(outages=outages, sent=sent, diverted=diverted))
    lines = [line.usage for line in forecast(scenario, PRICES).bill.lines if not line.usage.fails]

    def sums(stage: str) -> tuple[int, int]:
        mine = [one for one in lines if one.stage == stage]
        return sum(one.operations for one in mine), sum(one.units for one in mine)

    assert sums(Stage.SEND_PRIMARY) == (sent.messages, sent.units)
    for stage in (Stage.SEND_BACKLOG, Stage.RECEIVE_BACKLOG, Stage.RETURN_PRIMARY):
        assert sums(stage) == (diverted.messages, diverted.units)
    assert sums(Stage.COMPLETE_BACKLOG) == (diverted.messages, diverted.messages)
    received = (sent.copies + diverted.copies, sent.copy_units + diverted.copy_units)
    assert sums(Stage.RECEIVE_PRIMARY) == received


def test_l4_each_failover_is_pinged_for_its_own_length() -> None:
    failovers = (
        ObservedFailover(seconds=10, processes=2),
        ObservedFailover(seconds=0.5),
        ObservedFailover(seconds=10, processes=2),
        ObservedFailover(seconds=5, restored=False),
    )
    outage = ObservedOutage(seconds=10, diverted=5, failovers=failovers)
    second = timedelta(seconds=1)
    scenario = Scenario(observed=Observed(outages=(outage,)), ping_interval=second, ping_jitter=0)
    lines = [line.usage for line in forecast(scenario, PRICES).bill.of(stage=Stage.PING).lines]
    assert {one.fails: one.operations for one in lines} == {False: 5, True: 4 * 9 + 5}
