"""Answers fit the screen: on 80, 110 and 160 columns no name is cut and no word is broken, also without colours."""

from __future__ import annotations

import io
import logging
import re
import sys
from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.color import Color
from rich.console import Console

from tests.cli.running import invoke, run
from tests.cli.test_whole import VERBS
from twinbus.cli import progress
from twinbus.cli.demo import finale, screen
from twinbus.cli.demo.display import LiveDisplay
from twinbus.cli.help_panels import fit_help
from twinbus.cli.job_answers import JobAnswer, print_rows
from twinbus.cli.tables import print_table
from twinbus.namespace import configure_logging
from twinbus.syphon import MessageCounts, Progress

WIDTHS = (80, 110, 160)


def test_the_help_of_a_verb_has_whole_names() -> None:
    shown = run("entity", "create", "--help", COLUMNS="80").stdout
    assert "[env var: TWINBUS_CONNECTION_STRING]" in shown
    assert "--forward-dead-letters-to <str>" in shown


@pytest.mark.thorough
@pytest.mark.parametrize("name", VERBS, ids=" ".join)
def test_help_shows_options_and_variables_whole_on_80_columns(name: tuple[str, ...]) -> None:
    fit_help()  # as the command line does; `invoke` does not call the command line itself
    shown = invoke(*name, "--help", COLUMNS="80").stdout
    assert max(map(len, shown.splitlines())) <= 80
    words = set(re.sub("[│╭╰─,]", " ", shown).replace("]", " ").split())
    for one in VERBS[name].params:
        if not getattr(one, "hidden", False):
            assert not {text for text in one.opts if text.startswith("-")} - words
        if getattr(one, "show_envvar", False) and isinstance(one.envvar, str):
            assert one.envvar in words


@pytest.mark.parametrize("name", VERBS, ids=" ".join)
def test_help_shows_examples_whole_and_paragraphs_filled_on_80_columns(name: tuple[str, ...]) -> None:
    fit_help()
    shown = invoke(*name, "--help", COLUMNS="80").stdout.partition("╭")[0].splitlines()
    lines = [line.removeprefix(" ").rstrip() for line in shown]
    examples = [line for line in VERBS[name].help.splitlines() if line.startswith("  ")]
    assert examples
    assert [line for line in examples if line not in lines] == []
    for line, following in pairwise(lines):
        if line and following and not following.startswith("  ") and line != "Examples:":
            assert len(line) + 1 + len(following.split()[0]) > 78, f"{following!r} begins too late"


INCIDENT = {
    "destination": "contoso-production/orders",
    "began": 1_763_300_000_123,
    "restored": 1_763_300_060_000,
    "drained": 1_763_390_070_000,
    "cause": "connection_lost",
    "processes": 3,
    "diverted": 12_345,
    "returned": 12_345,
    "seconds_to_restore": 59.877,
    "seconds_to_drain": 90_010.0,
}
LATENCY = {"destination": "contoso-production/orders", "day": date(2026, 11, 16), "diverted": 12_345, "returned": 9}
LATENCY |= dict.fromkeys(("mean", "least", "p50", "p75", "p90", "p99", "most"), 1_234.5) | {"unknown_clock": 0}


@pytest.mark.parametrize("width", WIDTHS)
def test_d3_incidents_and_latency_show_entity_and_times_whole(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_rows("incidents", JobAnswer([INCIDENT]), False)
    shown = capsys.readouterr().out
    for text in (
        "contoso-production/orders",
        "2025-11-16 13:33:20",
        "13:34:20",
        "2025-11-17 14:34:30",
        "connection_lost",
    ):
        assert text in shown
    print_rows("latency", JobAnswer([LATENCY]), False)
    shown += capsys.readouterr().out
    assert shown.count("contoso-production/orders") == 2
    assert "2026-11-16" in shown
    assert "1,234.500" in shown
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_m4_a_forecast_shows_what_each_line_is_for(width: int) -> None:
    shown = invoke("cost", "forecast", "--state", "secondary", COLUMNS=str(width)).stdout
    assert max(map(len, shown.splitlines())) <= width
    words = " ".join(shown.replace("│", " ").split())
    for why in (
        "the application's sends (without a pair, too)",
        "pings that succeed: each client per entity",
        "pings that fail",
        "a ping that succeeded: does an operator hold the entity?",
        "syphons look for holds before they move messages",
        "clients check whether a syphon works",
    ):
        assert why in words


words = st.text(alphabet="abcdefgh/-0123456789", min_size=1, max_size=24)
sentences = st.lists(words, min_size=1, max_size=8).map(" ".join)


@given(
    st.lists(st.tuples(words, sentences, words, st.integers(0, 10**9)), min_size=1, max_size=4), st.integers(60, 200)
)
def test_no_cell_is_cut_and_no_word_is_broken(rows: list[tuple[str, str, str, int]], width: int) -> None:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        patch.setattr(sys, "stdout", out)
        print_table(("entity", "cause", "began, UTC", "messages"), rows, wrapped={"cause"})
    lines = [re.sub("[│┃]", " ", line) for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    found = [word for line in lines for word in line.split()]
    for entity, cause, began, count in rows:
        for word in (entity, *cause.split(), began, f"{count:,}"):
            assert word in found


def test_a_table_in_a_file_has_no_width(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(["entity", "cause"], [["e" * 150, "two words"]], wrapped={"cause"})
    assert "e" * 150 + " │ two words" in capsys.readouterr().out


def test_k1_the_bars_of_the_demo_differ_without_colours() -> None:
    sent = [((10, screen.PRIMARY), (0, screen.BACKLOG)), ((0, screen.PRIMARY), (10, screen.BACKLOG))]
    lowest = screen._columns(sent, 3, shaded=screen.BACKLOG)[-1].plain
    assert lowest == "█▒"
    out = io.StringIO()
    times = {"began": "2026-01-01T00:00:00", "restored": "2026-01-01T00:00:10", "drained": "2026-01-01T00:00:20"}
    incident = {**times, "destination": "a/orders", "seconds_to_restore": 10.0, "returned": 5}
    finale._incidents(Console(file=out, no_color=True, width=80), [incident])
    assert "▓" * 18 + "░" * 18 in out.getvalue()


def test_k1_primary_and_backlog_have_one_colour_in_terminal_and_page() -> None:
    css = (Path(screen.__file__).parents[2] / "report" / "page.css").read_text(encoding="utf-8")
    for name, colour in (("primary", screen.PRIMARY), ("backlog", screen.BACKLOG)):
        light = re.search(rf"--{name}: light-dark\(#(\w\w)(\w\w)(\w\w)", css)
        assert light is not None
        page = [int(part, 16) for part in light.groups()]
        terminal = list(Color.parse(colour).get_truecolor())
        # The same hue: blue is strongest for the primary, red and green for the backlog.
        assert (page[2] == max(page)) == (terminal[2] == max(terminal)), name
        assert (page[2] == min(page)) == (terminal[2] == min(terminal)), name


def test_y9_the_live_table_of_a_syphon_shows_a_path_whole_on_80_columns() -> None:
    path = "region-europe/production/payments-incoming"
    counts = MessageCounts(returned=123_456)
    found = Progress(
        seconds=1.0,
        total=counts,
        by_destination={path: counts},
        states=(),
        operations={},
        rate=1.0,
        held=0,
        aside_by_destination={},
        remaining=1,
        seconds_left=1.0,
        state="running",
    )
    out = io.StringIO()
    Console(file=out, width=80).print(progress._drawn(found))
    assert f"│ {path} │  123,456 │ ready" in out.getvalue()
    assert "put aside" not in out.getvalue()


def test_k1_a_command_of_the_demo_is_broken_between_words() -> None:
    out = io.StringIO()
    line = "twinbus serve --namespace primary=12088 --data primary --config primary.json --ledger ledger"
    LiveDisplay(Console(file=out, width=80, no_color=True)).command(line)
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert out.getvalue().removeprefix("$ ").replace("\\\n", " ").split() == line.split()


@pytest.mark.usefixtures("logging_as_before")
def test_y9_log_lines_go_through_the_live_table(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging("warning")
    live = io.StringIO()
    monkeypatch.setattr(sys, "stderr", live)
    logging.getLogger("twinbus.test").warning("above the table")
    assert "above the table" in live.getvalue()
