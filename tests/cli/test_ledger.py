"""`twinbus ledger check`, run as a user runs it."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.cli.running import COMMAND, PATIENCE, environment, run, serving
from twinbus.cli.main import app
from twinbus.connect import connect
from twinbus.ledger import (
    Closed,
    Intent,
    Ledger,
    Metered,
    Role,
    SegmentHeader,
    Stage,
    encode_entry,
    list_segments,
    read_ledger,
)
from twinbus.message import Message


def divert(ledger: Ledger, *ids: str) -> None:
    ledger.begin(Stage.SEND_BACKLOG, "paris", "contoso/x-servicebus-transfer/0", ids, 10, "contoso/orders").end()


def complete(ledger: Ledger, *ids: str) -> None:
    ledger.begin(Stage.COMPLETE_BACKLOG, "paris", "contoso/x-servicebus-transfer/0", ids, 0, "contoso/orders").end()


def back(ledger: Ledger, *ids: str, result: str = "ok") -> None:
    ledger.begin(Stage.RETURN_PRIMARY, "contoso", "orders", ids, 10).end(result)


def test_l6_a_ledger_that_adds_up_is_proven_and_ends_with_0(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        divert(ledger, "a", "b", "c")
        back(ledger, "a", "b")
        complete(ledger, "a", "b")
    done = run("ledger", "check", str(tmp_path))
    assert done.returncode == 0, done.stderr
    verdict, *rest = done.stdout.splitlines()
    assert verdict == "proven: All 3 accepted messages are accounted for: 2 delivered, 1 in the backlog."
    lines = [line.split() for line in rest]
    assert ["accepted", "3"] in lines
    assert ["delivered", "2"] in lines
    assert ["in", "backlog", "1"] in lines
    assert ["lost", "0"] in lines
    assert "Entries are missing" not in done.stdout


def test_l6_a_lost_message_is_named_and_ends_with_1(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        divert(ledger, *(f"lost-{number}" for number in range(30)), "doubled", "doubted")
        complete(ledger, *(f"lost-{number}" for number in range(30)))
        back(ledger, "doubled")
        back(ledger, "doubled", "doubted")
        back(ledger, "doubted", result="unknown")
    done = run("ledger", "check", str(tmp_path))
    assert done.returncode == 1
    for number in range(30):
        assert f"  contoso/orders  lost-{number}\n" in done.stdout
    told = run("ledger", "check", "--json", str(tmp_path))
    assert told.returncode == 1
    report = json.loads(told.stdout)
    assert (report["accepted"], report["lost"], report["delivered"]) == (32, 30, 2)
    assert {"destination": "contoso/orders", "id": "lost-7", "count": 1} in report["messages"]["lost"]
    assert [one["id"] for one in report["messages"]["duplicated"]] == ["doubled"]
    assert [one["id"] for one in report["messages"]["possibly_duplicated"]] == ["doubted"]
    assert report["incomplete"] == []
    assert (report["verdict"], report["sentence"]) == (
        "lost",
        "30 of 32 accepted messages are in neither namespace. 1 was delivered more than once. "
        "1 may have been delivered more than once.",
    )
    assert done.stdout.splitlines()[0] == f"lost: {report['sentence']}"


def test_l6_a_ledger_with_missing_entries_is_not_proven_and_ends_with_3(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        divert(ledger, "a")
        ledger.flush()
        (segment,) = list_segments(tmp_path)
        with segment.path.open("ab") as file:
            file.write(b"rubbish\n")
        divert(ledger, "b")
    done = run("ledger", "check", str(tmp_path))
    assert done.returncode == 3
    assert done.stdout.startswith(
        "not proven: All 2 accepted messages are accounted for: 2 in the backlog. Entries are "
    )
    assert "\nEntries are missing from the ledger, so these figures may be wrong:\n" in done.stdout
    assert ", line 3: not JSON" in done.stdout
    report = json.loads(run("ledger", "check", str(tmp_path), "--json").stdout)
    assert (report["verdict"], report["in_backlog"]) == ("not proven", 2)


KILLED = """
import os, signal, sys
from twinbus.ledger import Ledger, Stage
ledger = Ledger(sys.argv[1], "syphon")
queue = "contoso/x-servicebus-transfer/0"
ledger.begin(Stage.SEND_BACKLOG, "paris", queue, ["a", "b", "c"], 30, "contoso/orders").end()
ledger.begin(Stage.RETURN_PRIMARY, "contoso", "orders", ["a"], 10).end()
ledger.begin(Stage.RETURN_PRIMARY, "contoso", "orders", ["b"], 10)
ledger.flush()
print("flushed", flush=True)
os.kill(os.getpid(), signal.SIGSTOP if sys.argv[2] == "lives" else signal.SIGKILL)
"""


def test_l1_what_a_syphon_was_about_to_deliver_is_in_flight_while_it_lives_and_unknown_when_it_was_killed(
    tmp_path: Path,
) -> None:
    for fate, places in (("lives", (1, 2, 0)), ("killed", (1, 1, 1))):
        folder = tmp_path / fate
        command = [COMMAND[0], "-c", KILLED, str(folder), fate]
        with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as syphon:
            assert syphon.stdout is not None
            assert syphon.stdout.readline() == "flushed\n"
            if fate == "killed":
                assert syphon.wait(PATIENCE) == -signal.SIGKILL
            done = run("ledger", "check", str(folder), "--json")
            report = json.loads(done.stdout)
            shown = run("ledger", "check", str(folder)).stdout
            syphon.kill()
        assert (report["delivered"], report["in_backlog"], report["unknown"]) == places
        assert [one["id"] for one in report["messages"]["possibly_duplicated"]] == ["a"], (
            "its completion is not recorded"
        )
        assert (len(report["at_work"]), "1 writer is at work." in shown) == (
            (1, True) if fate == "lives" else (0, False)
        )
        if fate == "killed":
            assert (report["verdict"], done.returncode) == ("not proven", 3)
            assert [one["id"] for one in report["messages"]["unknown"]] == ["b"]


@pytest.mark.parametrize(("options", "place"), [((), "in_backlog"), (("--dead-after", "0"), "unknown")])
def test_l1_a_writer_of_another_host_is_dead_after_the_time_of_silence_that_is_given(
    tmp_path: Path, options: tuple[str, ...], place: str
) -> None:
    with Ledger(tmp_path) as ledger:
        divert(ledger, "a")
    writer = "syphon-another-host-7-0123456789abcdef"
    first = SegmentHeader(
        at=1,
        id="0123456789abcdef-h",
        writer=writer,
        role=Role.SYPHON,
        host="another-host",
        pid=7,
        version="1",
        segment=0,
    )
    begun = Intent(
        at=2, id="0123456789abcdef-1", stage=Stage.RETURN_PRIMARY, namespace="contoso", entity="orders", ids=("a",),
        bytes=1, units=1,
    )  # fmt: skip
    (tmp_path / f"{writer}-0.jsonl.open").write_text(encode_entry(first) + encode_entry(begun))
    done = CliRunner().invoke(app, ["ledger", "check", str(tmp_path), "--json", *options])
    assert json.loads(done.stdout)[place] == 1


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_a_directory_without_a_ledger_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    done = run("ledger", "check", str(tmp_path / name))
    assert done.returncode == 1
    assert "is not a ledger" in done.stderr


def test_a_ledger_of_which_nothing_can_be_read_ends_with_1(tmp_path: Path) -> None:
    segment = tmp_path / "client-h-1-0123456789abcdef-0.jsonl"
    segment.write_text("garbage\n")
    done = run("ledger", "check", str(tmp_path))
    assert done.returncode == 1
    assert f"{segment}, line 1: not JSON" in done.stdout


def test_a_directory_in_the_place_of_a_segment_is_told_in_a_line(tmp_path: Path) -> None:
    segment = tmp_path / "client-h-1-0123456789abcdef-0.jsonl"
    segment.mkdir()
    done = run("ledger", "check", str(tmp_path))
    assert done.returncode == 1
    assert f"error: {segment} cannot be read: Is a directory" in done.stderr
    assert "unexpected error" not in done.stderr


def test_a_directory_without_read_permission_is_reported_in_one_line(tmp_path: Path) -> None:
    # Root may read every directory, unless it gives up these two capabilities.
    powers = "-dac_override,-dac_read_search"
    without_powers = ["setpriv", f"--bounding-set={powers}", f"--inh-caps={powers}"] if os.geteuid() == 0 else []
    tmp_path.chmod(0o300)
    done = subprocess.run(
        [*without_powers, *COMMAND, "ledger", "check", str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    tmp_path.chmod(0o700)
    assert done.returncode == 2
    assert f"'{tmp_path}' is not readable" in done.stderr


async def test_n5_a_server_with_a_ledger_meters_into_it_and_closes_it(tmp_path: Path) -> None:
    directory = tmp_path / "ledger"
    config = tmp_path / "config.toml"
    config.write_text('[[namespaces]]\nname = "one"\nport = 0\n[[namespaces.queues]]\nname = "q"\n')
    with serving("--json", "--memory", "--config", str(config), "--ledger", str(directory)) as server:
        async with connect(server.namespaces["one"]["connection_string"]) as bus:
            await (await bus.sender("q")).send([Message(b"x")] * 3)
        server.signal(signal.SIGTERM)
        code, errors = server.end()
    assert code == 0, errors
    entries = list(read_ledger(directory))
    assert [
        (each.entity, each.count) for each in entries if isinstance(each, Metered) and each.operation == "send"
    ] == [("q", 3)]
    assert isinstance(entries[-1], Closed)
