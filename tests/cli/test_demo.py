"""`twinbus demo`, run as a user runs it: its verdict, its errors, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.cli.running import COMMAND, environment, in_terminal, invoke
from twinbus.backlog import backlog_queue_path
from twinbus.cli.connections import backlog_name
from twinbus.cli.demo import keep_page
from twinbus.cli.demo.application import BACKLOG_QUEUES, ENTITIES, PLACES, Records
from twinbus.cli.demo.finale import print_places, print_results
from twinbus.cli.demo.monitor import DemoEntity, DemoState, FlowCounts, SecondCounts
from twinbus.cli.demo.processes import DemoProcesses
from twinbus.cli.demo.screen import draw_screen
from twinbus.cli.demo.script import DemoResult
from twinbus.cli.demo.verdict import judge
from twinbus.cli.errors import ATTENTION
from twinbus.connect import connect
from twinbus.extras import install_line

pytestmark = pytest.mark.timeout(900)  # Spark is slow on a busy machine
PATIENCE = 800.0
ESCAPE = "\x1b"
CLEAN = {"accepted": 4, "delivered": 4, "in_backlog": 0, "dead_lettered": 0, "unknown": 0, "lost": 0, "duplicated": 0}


@contextlib.contextmanager
def started(*arguments: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, "demo", "--rate", "30", *arguments],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=PATIENCE)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=PATIENCE)
    return process.returncode, stdout, stderr


def living_in(folder: Path) -> list[str]:
    """Return the processes whose working directory is this folder, even if the folder was removed."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str((entry / "cwd").readlink()).startswith(f"{folder}/"):
                found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.thorough
def test_a_short_demo_on_spark_proves_that_nothing_is_lost(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    with started("--seconds", "3", "--keep", str(keep), "--json") as demo:
        code, stdout, stderr = ended(demo)
    assert code == 0, stderr
    told = json.loads(stdout)
    assert told["proven"]
    assert told["problems"] == []
    assert told["verdict"].startswith("proven"), told["sentence"]
    assert told["sentence"] == told["reconciliation"]["sentence"]
    assert f"{told['verdict']}: " in stderr
    assert told["received"] >= told["accepted"] > 0
    sums = told["reconciliation"]
    assert (sums["accepted"], sums["delivered"], sums["lost"]) == (told["accepted"], told["accepted"], 0)
    assert sums["up_to_date"], "the answer is from the results of the pipeline"
    assert "  pipeline: " in stderr, "which followed the ledger"
    assert {one["destination"].partition("/")[2] for one in told["incidents"]} <= set(ENTITIES)
    assert sum(one["diverted"] for one in told["incidents"]) == sum(one["returned"] for one in told["incidents"]) > 0
    assert told["cost"]["units"]["actual"] > told["accepted"]
    assert "<html" in Path(told["report"]).read_text().lower()
    assert Path(told["ledger"]) == keep / "ledger"
    # The commands that were run, and no key in any of them.
    assert "$ twinbus syphon --engine spark --drain --ledger ledger\n" in stderr
    assert "SharedAccessKey" not in stderr
    assert ESCAPE not in stdout + stderr
    assert living_in(tmp_path) == []


async def stolen(keep: Path) -> str:
    """The id of a message that somebody took from a backlog queue."""
    file = keep / "twinbus.toml"
    while not file.is_file() or "connections" not in file.read_text():  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.05)
    strings = tomllib.loads(file.read_text())["connections"]
    name = backlog_name(strings["primary"], None)
    async with connect(strings["secondary"], timeout=30) as bus:
        while True:
            for index in range(BACKLOG_QUEUES):
                with contextlib.suppress(Exception):  # not created yet
                    async with await bus.receiver(backlog_queue_path(name, index), prefetch=0) as receiver:
                        if found := await receiver.receive(1, 0.2):
                            await receiver.complete(found)
                            return str(found[0].message_id)


@pytest.mark.thorough
def test_a_message_that_vanishes_from_the_backlog_fails_the_demo_by_its_id(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    with started("--engine", "native", "--seconds", "4", "--keep", str(keep)) as demo:
        id_ = asyncio.run(asyncio.wait_for(stolen(keep), PATIENCE))
        code, stdout, _ = ended(demo)
    assert code == ATTENTION
    places = PLACES[id_.rpartition("-")[0]]
    assert any(f"{place} never received {id_}\n" in stdout for place in places)
    # The audit after the drain misses it. If a send of it had no answer when the primary died, it may have arrived.
    verdicts = {"the ledger has 1 lost\n": "lost", "the ledger has 1 of unknown fate\n": "not proven"}
    (verdict,) = [word for text, word in verdicts.items() if text in stdout]
    assert f"  The ledger: {verdict}: 1 of " in stdout
    assert "✓" not in stdout


@pytest.mark.thorough
def test_ctrl_c_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    """Ctrl-C while Spark is starting: at this time the most processes run."""
    with started(TMPDIR=str(tmp_path)) as demo:
        assert demo.stdout is not None
        while not (line := demo.stdout.readline()).startswith("$ kill -9"):
            assert line, demo.communicate()
        assert living_in(tmp_path)
        demo.send_signal(signal.SIGINT)
        code, stdout, stderr = ended(demo)
    assert (code, stderr) == (128 + signal.SIGINT, "")
    assert stdout.endswith("cancelled: all processes of the demo have ended\n")
    assert living_in(tmp_path) == []
    assert list(tmp_path.glob("twinbus-demo-*")) == []


def test_the_process_that_has_spark_ends_with_all_it_started_once_the_demo_is_gone() -> None:
    program = (
        "import subprocess, time\n"
        "from twinbus.cli.demo.spark_runner import read_commands\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "print(read_commands().get(), end='', flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"a command\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"a command\n"
        process.stdin.close()
        assert process.stdout.read() == b"", "to its end, which comes when the last that holds it is gone"
        assert process.wait(PATIENCE) == -signal.SIGKILL


@pytest.mark.thorough
def test_on_a_terminal_of_80_columns_it_is_a_draw_screen_that_lives(tmp_path: Path) -> None:
    options = ("--rate", "30", "--engine", "native", "--seconds", "3")
    code, seen = in_terminal("demo", *options, variables={"TMPDIR": str(tmp_path)}, patience=PATIENCE)
    assert code == 0, seen
    assert f"{ESCAPE}[2K" in seen, "it is drawn over"
    # Where no figures move, a spinner turns.
    for step in ("the namespaces start", "the application starts", "the application ends", "the namespaces end"):
        assert step in seen
    assert "failed over" in seen
    assert "accounted for" in seen


def test_without_pyspark_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    told = invoke("demo")
    assert told.exit_code == 1
    assert install_line("cli", "serve", "spark") in told.output
    assert "twinbus demo --engine native" in told.output


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dear.txt").touch()
    told = invoke("demo", "--keep", str(tmp_path))
    assert (told.exit_code, "is not empty" in told.output) == (1, True)
    assert (tmp_path / "dear.txt").exists()


async def test_the_primary_recognizes_a_second_copy_until_the_demo_ends(tmp_path: Path) -> None:
    async with DemoProcesses(tmp_path, print, print):
        (primary,) = json.loads((tmp_path / "primary.json").read_text())["namespaces"]
    windows = [one["duplicate_detection_history_time_window"] for one in (*primary["queues"], *primary["topics"])]
    assert windows == ["P1D"] * len(ENTITIES)


@pytest.mark.parametrize("unusable", ["a file", "no home"])
def test_the_report_is_kept_where_the_cache_cannot_be_written(
    unusable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.html").write_text("a report")
    (tmp_path / "file").touch()
    if unusable == "a file":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    else:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept_page = keep_page(tmp_path / "report.html")
    assert kept_page.is_relative_to(tmp_path)
    assert kept_page.parent != tmp_path  # the demo removes its own folder
    assert kept_page.read_text() == "a report"


def homeless() -> Path:
    """Fail as `Path.home` does for a user without a home folder."""
    raise RuntimeError("Could not determine home directory.")


# --- what is proof ---------------------------------------------------------------------------------------------------


def kept() -> Records:
    """Return records with one message for every place, received there."""
    made = Records(diverted=1)
    for number, place in enumerate(made.accepted):
        made.accepted[place].add("one")
        made.received[place]["one"].add(number)
    return made


def test_all_received_once_and_books_that_add_up_are_proof() -> None:
    found = judge(kept(), CLEAN)
    assert (found.problems, found.accepted, found.received) == ([], 4, 4)


def test_a_message_that_one_subscription_lacks_is_named() -> None:
    made = kept()
    del made.received["events/europe"]["one"]
    assert judge(made, CLEAN).problems == ["events/europe never received one"]


def test_the_same_id_under_two_numbers_is_a_duplicate() -> None:
    made = kept()
    made.received["orders"]["one"].add(77)
    assert judge(made, CLEAN).problems == ["orders received more than once one"]


def test_an_outage_that_diverted_nothing_is_no_proof() -> None:
    made = kept()
    made.diverted = 0
    (problem,) = judge(made, CLEAN).problems
    assert problem.startswith("no message was diverted")


@pytest.mark.parametrize("word", ["lost", "unknown", "in_backlog", "dead_lettered", "duplicated"])
def test_books_that_tell_of_trouble_are_no_proof(word: str) -> None:
    assert len(judge(kept(), {**CLEAN, word: 1}).problems) == 1


def test_a_ledger_with_fewer_messages_is_a_problem() -> None:
    (problem,) = judge(kept(), {**CLEAN, "accepted": 2}).problems
    assert problem == "the ledger has 2 accepted, the application 4"


# --- the screen ------------------------------------------------------------------------------------------------------


def drawn(width: int, **more: Any) -> list[str]:
    entities = tuple(
        DemoEntity(path, "failed_over", FlowCounts(12_345, 6_789, 98_765), (0.0, 166.6, 0.0)) for path in ENTITIES
    )
    state = DemoState(125.0, entities, {False: 123, True: 3}, 20_367, more.get("returned", 0), more.get("up", False))
    seconds = [SecondCounts(FlowCounts(60, 0, 80), 0, 0, {})] * 60 + [
        SecondCounts(FlowCounts(0, 60, 0), 600, 100, {False: 3})
    ] * 60
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(draw_screen(state, seconds, {"primary": 54_321, "secondary": 54_322}, width))
    return console.export_text().splitlines()


@pytest.mark.parametrize("more", [{}, {"returned": 20_367, "up": True}])
def test_the_draw_screen_fits_80_columns_and_a_short_terminal(more: dict[str, Any]) -> None:
    lines = drawn(80, **more)
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 20
    assert not any(line.rstrip().endswith("…") for line in lines), "nothing is cut off"


def test_the_draw_screen_shows_states_rates_depth_and_pings() -> None:
    text = "\n".join(drawn(80))
    for shown in ("DOWN", "● failed over", "500/s", "20,367 waiting", "123✕ 3✓"):
        assert shown in text


def test_the_results_are_indented_on_every_line_of_an_80_column_screen() -> None:
    steps = ("start", "healthy", "outage", "restore", "drain", "receive", "ledger", "report")
    sums = {**CLEAN, "accepted": 1_234_567, "possibly_duplicated": 3}
    found = DemoResult(kept(), sums, None, None, None, dict.fromkeys(steps, 123.4))
    console = Console(width=80, file=io.StringIO(), record=True)
    print_results(console, found, judge(kept(), CLEAN))
    print_places(console, found, None, None)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    starts = tuple(f"{label:8} " for label in ("ledger", "took", ""))
    after_verdict = lines[next(n for n, line in enumerate(lines) if line.startswith("✓")) + 1 :]
    assert any(line.startswith("took") for line in after_verdict)
    assert all(line.startswith(("  ", *starts)) for line in after_verdict if line)


@pytest.mark.parametrize("width", range(60, 100, 3))
def test_no_line_of_the_results_ends_between_a_number_and_its_unit(width: int) -> None:
    steps = ("start", "healthy", "outage", "restore", "drain", "receive", "ledger", "report")
    found = DemoResult(kept(), CLEAN, None, None, None, dict.fromkeys(steps, 123.4))
    console = Console(width=width, file=io.StringIO(), record=True)
    print_places(console, found, None, None)
    took = [line for line in console.export_text().splitlines() if "123.4" in line]
    assert max(map(len, took)) <= width
    assert all(line.rstrip().endswith((",", "123.4\N{NO-BREAK SPACE}s")) for line in took)
