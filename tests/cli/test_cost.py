"""`twinbus cost forecast|prices`, run as a user runs them. `cost actual` is in tests/pipeline."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import invoke
from twinbus.cli import cost_tables
from twinbus.money import (
    CostResult,
    LedgerFacts,
    MessageMix,
    Observed,
    ObservedOutage,
    Prices,
    Scenario,
    StageSpending,
    actual_bill,
    cost_result,
)


def told(*arguments: str) -> Any:
    done = invoke("cost", *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def cells(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│┃").split("│")] for line in output.splitlines()]


def test_y2_m4_an_idle_pair_of_ten_backlog_queues_shows_40_960_and_28800_receives() -> None:
    done = invoke("cost", "forecast", "--backlog-queues", "10", "--rate", "0", "--outages", "0")
    assert done.exit_code == 0, done.output
    assert "40 an hour, 960 a day, 28,800 in 30 days" in done.stdout
    assert ["idle", "empty_receive", "28,800", "28,800"] in [row[:4] for row in cells(done.stdout)]
    found = told("forecast", "--backlog-queues", "10", "--rate", "0", "--outages", "0")
    assert found["idle_receives"] == {"hour": 40, "day": 960, "thirty_days": 28_800}


def test_m4_a_forecast_shows_every_phase_by_stage_and_both_ways_to_count_a_message() -> None:
    done = invoke("cost", "forecast", "--rate", "50", "--outage", "1h")
    assert done.exit_code == 0, done.output
    rows = cells(done.stdout)
    phases = [row[0] for row in rows if row[0] in ("idle", "outage", "drain")]
    assert phases == ["idle", "outage", "drain"]
    assert ["", "4", "6", "8"] in rows, "the clause's four stages, six operations of today, eight where put aside"
    assert f"prices of {Prices.default().date}" in done.stdout
    assert "the same messages without a pair" in done.stdout


def test_m4_a_forecast_as_json_adds_up() -> None:
    found = told("forecast", "--rate", "50", "--outage", "15m", "--outages", "4", "--syphon", "after")
    assert found["scenario"]["outage"] == 900
    assert {line["phase"] for line in found["lines"]} == {"idle", "outage", "drain"}
    for phase, sums in found["phases"].items():
        mine = [line for line in found["lines"] if line["phase"] == phase]
        assert sum(line["units"] for line in mine) == sums["units"]
        assert sum(line["cost"] for line in mine) == pytest.approx(sums["cost"])
    whole = sum(sums["cost"] for sums in found["phases"].values()) + found["base_cost"] + found["connections_cost"]
    assert found["cost"] == pytest.approx(whole)
    assert found["prices"]["date"] == "2026-11-15"


def test_m4_options_that_change_the_bill_are_compared_side_by_side() -> None:
    done = invoke("cost", "forecast", "--rate", "50", "--compare", "backlog-queues=2,5,10,20")
    assert done.exit_code == 0, done.output
    assert ["idle receives a day", "192", "480", "960", "1,920"] in cells(done.stdout)
    found = told("forecast", "--compare", "syphon=standing,after")
    assert found["standing"]["idle_receives"]["day"] == 960
    assert found["after"]["idle_receives"]["day"] == 0
    sizes = told("forecast", "--compare", "message-size=1KB,65KB")
    assert sizes["65KB"]["phases"]["outage"]["units"] > sizes["1KB"]["phases"]["outage"]["units"]


@pytest.mark.parametrize("option", ["tier=basic,premium", "outage=1m,8h", "rate=1,2.5", "ping=link,message"])
def test_m4_any_option_may_be_compared(option: str) -> None:
    assert len(told("forecast", "--compare", option)) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compare", "backlog-queues"], "has no values"),
        (["--compare", "queues=1,2"], "'queues' is not an option of a forecast"),
        (["--compare", "outage=soon"], "outage=soon cannot be read"),
        (["--compare", "backlog-queues=0"], "backlog-queues is 0, and must be 1 or more"),
        (["--tier", "gold"], "has no tier 'gold'"),
        (["--tier", "basic", "--subscriptions", "2"], "the tier basic has no topics"),
        (["--bandwidth", "moon"], "has no bandwidth 'moon'"),
        (["--prices", "nowhere.toml"], "nowhere.toml cannot be read"),
    ],
)
def test_m4_what_cannot_be_forecast_is_told_in_a_line_with_a_hint(arguments: list[str], said: str) -> None:
    done = invoke("cost", "forecast", *arguments)
    assert done.exit_code == (1 if "--prices" in arguments else 2)
    assert said in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr


def test_m3_the_price_table_is_shown_with_its_date_its_origin_and_its_doubts() -> None:
    done = invoke("cost", "prices")
    assert done.exit_code == 0, done.output
    assert "Prices of 2026-11-15" in done.stdout
    assert Prices.default().origin in done.stdout.replace("\n", " ")
    assert "the dearer reading" in done.stdout
    assert ["premium: messaging unit", "", "0.9275", "hour"] in cells(done.stdout)
    found = told("prices")
    assert found["tiers"]["standard"]["operations"]["bands"][1] == {"up_to": 100_000_000, "price": 0.8}


def test_m3_a_copy_of_the_table_is_written_changed_and_used(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    done = invoke("cost", "prices", "--write", str(own))
    assert done.exit_code == 0, done.output
    again = invoke("cost", "prices", "--write", str(own))
    assert again.exit_code == 1, "a table that is there is not overwritten"
    assert "cannot be written: File exists" in again.stderr
    own.write_text(own.read_text().replace("base_per_month = 10.00", "base_per_month = 744"))
    assert told("forecast", "--prices", str(own), "--period", "10h")["base_cost"] == 10
    assert told("prices", "--prices", str(own))["file"] == str(own)


def result(units: int = 614, *, prices: Prices | None = None, **asked: Any) -> CostResult:
    used = StageSpending(stage="send_backlog", units=units, large_units=14, failed={"server_busy": units - 614})
    bill = actual_bill({"2026-11": [used]}, 24, prices, Scenario(), ["a note"])
    outages = tuple(ObservedOutage(seconds=seconds, diverted=300) for seconds in (5, 9))
    observed = Observed(outages=outages, diverted=MessageMix(600, 614, 1_000_000, 600, 614, 1_000_000))
    seen = {"period": timedelta(seconds=24), "outage": timedelta(seconds=7), "observed": observed}
    return cost_result(bill, LedgerFacts(diverted=600), seen, asked, prices)


def test_l4_the_bill_and_the_forecast_are_shown_side_by_side_and_differences_in_their_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = result(621, prices=Prices.default(), message_size=1000)
    cost_tables.show_result(found, Prices.default())
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown, "no column is cut"
    words = " ".join(shown.split())
    assert "Bill of 24s, standard, in USD" in shown
    assert "• a note" in shown
    assert "for outages of 5s + 9s, period 24s" in words
    rows = [line.split() for line in shown.splitlines()]
    assert ["send_backlog", "600", "621", "+21"] in [row[:4] for row in rows]
    assert ["send_backlog", "+14", "units", "beyond", "the", "first", "64", "KB:"] in [row[:8] for row in rows]
    assert ["+7", "calls", "that", "failed:", "7"] in [row[:5] for row in rows]
    assert ["receive_primary", "600", "–", "–"] in [row[:4] for row in rows]


def test_l4_a_bill_without_prices_and_without_a_forecast_is_shown_in_units(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cost_tables.show_result(result(), None)
    shown = capsys.readouterr().out
    assert "Bill of 24s, standard, in units" in shown
    assert ["send_backlog", "614", "", "0.0", "–"] in cells(shown)
    assert "• no forecast: a forecast needs prices" in shown
    plain = cost_tables.result_as_json(result())
    assert (plain["forecast"], plain["cost"], plain["stages"]) == (None, None, [])
    assert (plain["bill"]["units"], plain["bill"]["cost"]) == (614, None)


def test_l4_the_json_of_a_result_adds_up() -> None:
    plain = cost_tables.result_as_json(result(621, prices=Prices.default(), message_size=1000))
    [stored] = [one for one in plain["stages"] if one["stage"] == "send_backlog"]
    assert sum(part["units"] for part in stored["parts"]) == stored["difference"] == 21
    assert sum(part["cost"] for part in stored["parts"]) == pytest.approx(stored["cost_difference"], abs=1e-10)
    stages = [one["cost_difference"] for one in plain["stages"]]
    base = plain["base"]["actual"] - plain["base"]["forecast"]
    assert plain["cost"]["actual"] - plain["cost"]["forecast"] == pytest.approx(sum(stages) + base, abs=1e-9)
    assert plain["units"]["unexplained"] >= 0
    assert [one["seconds"] for one in plain["forecast"]["outages"]] == [5, 9]
