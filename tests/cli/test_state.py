"""Holds across processes, as operators and applications use them: real processes, the official SDK (S15)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from azure.servicebus import ServiceBusClient

from .running import COMMAND, Serving, environment, invoke, pair_environment, run, serving_config

CONFIG = """
[[namespaces]]
name = "primary"
port = 0
[[namespaces.queues]]
name = "orders"
[[namespaces.queues]]
name = "beside"
[[namespaces]]
name = "secondary"
port = 0
"""
# The application: orders are held, and bills fail over in this process only.
APPLICATION = """
import sys
from azure.servicebus import ServiceBusMessage
from twinbus import SendAvailabilityOptions, pair_connection_strings

primary, secondary, state = sys.argv[1:]
options = SendAvailabilityOptions.for_short_lived_processes(backlog_queue_count=1, primary_name="held", state=state)
with pair_connection_strings(primary, secondary, options=options) as pair:
    with pair.get_queue_sender("orders") as sender:
        for number in range(5):
            sender.send_messages(ServiceBusMessage("x", message_id=f"order {number}"))
    pair.force_failover("beside")
    with pair.get_queue_sender("beside") as sender:
        sender.send_messages(ServiceBusMessage("x", message_id="beside"))
    print([str(one.state) for one in pair.entities()])
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving_config(tmp_path_factory.mktemp("state"), CONFIG) as server:
        yield server


@pytest.fixture
def strings(server: Serving) -> dict[str, str]:
    return pair_environment(server, "held")


def received(connection_string: str, queue: str, count: int) -> list[str]:
    """Receive messages of the primary with the official SDK, until `count` have come."""
    found: list[str] = []
    with (
        ServiceBusClient.from_connection_string(connection_string) as client,
        client.get_queue_receiver(queue, max_wait_time=60) as receiver,
    ):
        for message in receiver:
            found.append(str(message.message_id))
            receiver.complete_message(message)
            if len(found) == count:
                break
    return found


def peeked(connection_string: str, queue: str) -> list[str]:
    with (
        ServiceBusClient.from_connection_string(connection_string) as client,
        client.get_queue_receiver(queue) as receiver,
    ):
        return [str(message.message_id) for message in receiver.peek_messages(100)]


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["folder", "secondary"])
def test_s15_a_standing_syphon_delivers_nothing_to_a_held_entity_until_it_is_released(
    strings: dict[str, str], place: str, tmp_path: Path
) -> None:
    state = str(tmp_path / "state") if place == "folder" else "secondary"
    primary, secondary = strings["TWINBUS_PRIMARY_CONNECTION_STRING"], strings["TWINBUS_SECONDARY_CONNECTION_STRING"]
    done = invoke("provision", "--count", "1", "--state", state, **strings)
    assert done.exit_code == 0, done.output
    # A syphon reads the state in the secondary at most every two seconds: there it starts after the hold.
    before = start_syphon(state, strings) if place == "folder" else None
    held = invoke("drill", "--hold", "--entity", "orders", "--state", state, "--yes", **strings)
    assert held.exit_code == 0, held.output
    assert "held there now: orders" in held.output
    syphon = before or start_syphon(state, strings)
    try:
        application = subprocess.run(
            [sys.executable, "-c", APPLICATION, primary, secondary, state],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert application.stdout == "['held', 'failed_over']\n", application.stderr
        # The message for the other queue stood behind the held ones.
        assert received(primary, "beside", 1) == ["beside"]
        assert peeked(primary, "orders") == []
        released = invoke("drill", "--release", "--entity", "orders", "--state", state, "--yes", "--json", **strings)
        assert json.loads(released.output)["held"] == []
        assert Counter(received(primary, "orders", 5)) == Counter(f"order {number}" for number in range(5))
    finally:
        syphon.terminate()
        syphon.wait(timeout=30)


def start_syphon(state: str, strings: dict[str, str]) -> subprocess.Popen[str]:
    """Start `twinbus syphon`, and return when it runs. A thread reads what it prints: a full pipe would stop it."""
    command = [*COMMAND, "syphon", "--json", "--every", "0.2", "--state", state]
    syphon = subprocess.Popen(command, env=environment(**strings), stdout=subprocess.PIPE, text=True)
    assert syphon.stdout is not None
    assert syphon.stdout.readline() != ""
    Thread(target=syphon.stdout.read, daemon=True).start()
    return syphon


@pytest.mark.thorough
def test_s15_y11_a_drain_leaves_the_messages_of_a_held_entity_and_says_why(
    strings: dict[str, str], tmp_path: Path
) -> None:
    state, name = str(tmp_path / "state"), "drained"
    strings["TWINBUS_PRIMARY_NAME"] = name
    primary, secondary = strings["TWINBUS_PRIMARY_CONNECTION_STRING"], strings["TWINBUS_SECONDARY_CONNECTION_STRING"]
    assert invoke("drill", "--hold", "--entity", "orders", "--state", state, "--yes", **strings).exit_code == 0
    program = APPLICATION.replace('"held"', f'"{name}"')
    command = [sys.executable, "-c", program, primary, secondary, state]
    subprocess.run(command, env=environment(), check=True, timeout=60)
    done = run("syphon", "--drain", "--json", "--state", state, **strings)
    assert done.returncode == 3, done.stderr
    assert received(primary, "beside", 1) == ["beside"]
    assert peeked(primary, "orders") == []
    left = json.loads(done.stdout.splitlines()[-1])["left"]
    assert [(one["destination"], one["messages"], one["cause"]) for one in left] == [("orders", 5, "held")]
    assert invoke("drill", "--release", "--state", state, "--yes", **strings).exit_code == 0
    assert run("syphon", "--drain", "--state", state, **strings).returncode == 0
    assert Counter(received(primary, "orders", 5)) == Counter(f"order {number}" for number in range(5))


def test_s15_a_hold_in_the_secondary_is_written_and_listed(strings: dict[str, str]) -> None:
    strings["TWINBUS_PRIMARY_NAME"] = "in-the-secondary"
    made = invoke("provision", "--count", "1", "--state", "secondary", "--json", **strings)
    assert "in-the-secondary/x-twinbus-state" in json.loads(made.output)["created"]
    state = ("--state", "secondary", "--yes", "--json")
    for verb, entity, held in (("hold", "a", ["a"]), ("release", "a", [])):
        done = invoke("drill", f"--{verb}", "--entity", entity, *state, **strings)
        assert json.loads(done.output)["held"] == held


@pytest.mark.parametrize("verb", ["--hold", "--release"])
def test_s15_a_hold_without_a_state_is_refused(strings: dict[str, str], verb: str) -> None:
    done = invoke("drill", verb, "--entity", "orders", "--yes", **strings)
    assert done.exit_code == 2
    assert f"{verb} needs --state" in done.output
    assert "or `secondary`" in done.output


def test_s15_a_wrong_folder_is_reported_and_not_made(strings: dict[str, str], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    done = invoke("drill", "--release", "--state", str(wrong), "--yes", **strings)
    assert (done.exit_code, f"the folder {wrong} does not exist" in done.output) == (1, True)
    assert not wrong.exists()
    held = invoke("drill", "--hold", "--state", str(wrong), "--yes", **strings)
    assert "note: the folder did not exist" in held.stderr
    assert "note" not in invoke("drill", "--release", "--state", str(wrong), "--yes", **strings).stderr


@pytest.mark.thorough
def test_s15_a_syphon_reports_a_folder_that_does_not_exist(strings: dict[str, str], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    assert invoke("provision", "--count", "1", **strings).exit_code == 0
    drained = run("syphon", "--drain", "--state", str(wrong), **strings)
    assert drained.returncode == 0, drained.stderr
    assert f"the folder {wrong} does not exist yet" in drained.stderr
    assert not wrong.exists()


def test_s15_a_hold_of_all_entities_is_shown_with_what_was_released(strings: dict[str, str], tmp_path: Path) -> None:
    state = ("--state", str(tmp_path / "state"), "--yes")
    assert "all entities of held: held in" in invoke("drill", "--hold", *state, **strings).output
    shown = invoke("drill", "--release", "--entity", "beside", *state, **strings).output
    assert "held there now: all entities, not beside" in shown
    assert "held there now: nothing" in invoke("drill", "--release", *state, **strings).output


def test_s15_a_state_that_cannot_be_written_is_an_error_with_a_hint(strings: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = invoke("drill", "--hold", "--state", str(tmp_path / "file"), "--yes", **strings)
    assert done.exit_code == 1
    assert "A folder must be writable" in done.output
    missing = invoke("drill", "--hold", "--state", "secondary", "--yes", **{**strings, "TWINBUS_PRIMARY_NAME": "new"})
    assert missing.exit_code == 1
    assert "twinbus provision --state secondary" in missing.output


def test_s15_a_hold_of_what_can_be_no_entity_is_refused_and_damages_no_other_hold(
    strings: dict[str, str], tmp_path: Path
) -> None:
    state = ("--state", str(tmp_path / "state"), "--yes", "--json")
    assert json.loads(invoke("drill", "--hold", "--entity", "orders", *state, **strings).output)["held"] == ["orders"]
    for entity in ("", "/", "x" * 300):
        refused = invoke("drill", "--hold", "--entity", entity, *state, **strings)
        assert (refused.exit_code, "--entity" in refused.output) == (2, True)
    again = invoke("drill", "--hold", "--entity", "bills", *state, **strings)
    assert json.loads(again.output)["held"] == ["bills", "orders"]


def test_a_drill_needs_an_entity_and_a_hold_excludes_its_release(strings: dict[str, str], tmp_path: Path) -> None:
    assert "needs --entity" in invoke("drill", "--yes", **strings).output
    both = invoke("drill", "--hold", "--release", "--state", str(tmp_path), **strings)
    assert (both.exit_code, "exclude each other" in both.output) == (2, True)
