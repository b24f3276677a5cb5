"""`twinbus doctor` reports what is wrong with a pair: cause, next step and exit code. Against real namespaces."""

import itertools
import json
import re
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from typer.testing import CliRunner, Result

from tests import fake_clock
from tests.cli import running
from tests.pairing.drivers.conftest import set_stored_size
from twinbus.backlog import FailureKind
from twinbus.cli.doctor_checks import first_look, second_look
from twinbus.cli.main import app
from twinbus.connect import connect
from twinbus.ledger import Ledger, Role
from twinbus.pairing import Administration
from twinbus.pairing.decide.known_state import FailoverRecord
from twinbus.pairing.findings import RIGHTS
from twinbus.pairing.provisioning import PROPERTIES
from twinbus.pairing.state_folder import FolderState
from twinbus.testing import LocalNamespace

from .running import Serving, authorization_rule, pair_environment, run, serving_config

RULES = f"""
[[namespaces]]
name = "primary"
port = 0
[[namespaces.queues]]
name = "orders"
{authorization_rule("all", "Manage")}
{authorization_rule("sender", "Send")}
{authorization_rule("reader", "Listen")}
[[namespaces]]
name = "secondary"
port = 0
{authorization_rule("all", "Manage")}
{authorization_rule("app", "Send", "Listen")}
{authorization_rule("sender", "Send")}
{authorization_rule("reader", "Listen")}
"""
NUMBERS = itertools.count()
PRIMARY, SECONDARY = "TWINBUS_PRIMARY_CONNECTION_STRING", "TWINBUS_SECONDARY_CONNECTION_STRING"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving_config(tmp_path_factory.mktemp("doctor"), RULES) as server:
        yield server


@pytest.fixture
def strings(server: Serving) -> dict[str, str]:
    """Return the connection strings as environment variables. Each test has two backlog queues of its own."""
    made = {**pair_environment(server, f"doctor-{next(NUMBERS)}"), "TWINBUS_BACKLOG_QUEUE_COUNT": "2"}
    assert invoke("provision", **made).exit_code == 0
    return made


def invoke(*arguments: str, **environment: str) -> Result:
    return running.invoke(*arguments, **{"COLUMNS": "80", **environment})


def examined(strings: dict[str, str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the exit code, the findings that are no notes by their check, and the whole report."""
    done = invoke("doctor", "--no-ping", "--json", *arguments, **strings)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    found = {one["check"]: one for one in report["findings"] if one["severity"] != "note"}
    return done.exit_code, found, report


def checks(report: dict[str, Any]) -> list[str]:
    # Queues of other tests are orphans here.
    return [one["check"] for one in report["findings"] if one["check"] != "orphans"]


def with_key(text: str, rule: str) -> str:
    return text.replace("=all;", f"={rule};").replace("key-of-all", f"key-of-{rule}")


def backlog_queue(strings: dict[str, str], index: int = 0) -> str:
    return f"{strings['TWINBUS_PRIMARY_NAME']}/x-servicebus-transfer/{index}"


def divert(strings: dict[str, str], messages: int, *, dead: int = 0) -> None:
    """Put messages into the first backlog queue, as a pair does. The first `dead` messages are dead-lettered."""
    queue = backlog_queue(strings)
    with ServiceBusClient.from_connection_string(strings[SECONDARY]) as client:
        with client.get_queue_sender(queue) as sender:
            sender.send_messages(
                [ServiceBusMessage("x", application_properties={"x-ms-path": "orders"}) for _ in range(messages)]
            )
        if dead:
            with client.get_queue_receiver(queue) as receiver:
                for message in receiver.receive_messages(max_message_count=dead, max_wait_time=10):
                    receiver.dead_letter_message(message, reason="gone")


def at_port(port: int) -> str:
    return f"Endpoint=sb://localhost:{port};SharedAccessKeyName=a;SharedAccessKey=b;UseDevelopmentEmulator=true"


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_doctor_a_wrong_key_of_the_primary_is_broken(strings: dict[str, str]) -> None:
    strings[PRIMARY] = strings[PRIMARY].replace("key-of-all", "another-key")
    code, found, _ = examined(strings)
    assert code == 4
    assert found["primary_refused"]["severity"] == "broken"
    assert "another-key" not in json.dumps(found)


def test_doctor_a_primary_that_is_away_needs_attention(strings: dict[str, str]) -> None:
    strings[PRIMARY] = at_port(unused_port())
    code, found, _ = examined(strings)
    assert code == 3
    assert found["primary_unreachable"]["severity"] == "attention"


def test_y1_y6_doctor_messages_that_nobody_moves_and_dead_letters_need_attention(strings: dict[str, str]) -> None:
    divert(strings, 78, dead=2)
    code, found, report = examined(strings, "--wait", "0.1")
    assert code == 3
    assert set(found) == {"backlog_waits", "dead_letters"}
    assert found["backlog_waits"]["what"].startswith("76 messages")
    assert "orders" in found["backlog_waits"]["what"]
    assert found["dead_letters"]["what"].startswith("2 messages")
    assert "twinbus deadletter list" in found["dead_letters"]["next_step"]
    assert report["state"] == "attention"
    assert len(report["problems"]) == 2
    assert abs(report["clock_offset_seconds"]) < 5

    shown = invoke("doctor", "--no-ping", "--wait", "0.1", **strings)
    assert shown.exit_code == 3
    assert "76 messages are in the backlog" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "attention: 2 findings"
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_doctor_a_secondary_that_refuses_the_key_is_broken(strings: dict[str, str]) -> None:
    strings[SECONDARY] = strings[SECONDARY].replace("key-of-all", "another-key")
    code, found, report = examined(strings)
    assert code == 4
    assert list(found) == ["secondary_refused"]
    assert report["state"] == "broken"


@pytest.mark.thorough
def test_doctor_a_pair_without_fault_is_well_and_what_was_not_tested_is_a_note(strings: dict[str, str]) -> None:
    done = invoke("doctor", "--json", **strings)
    assert done.exit_code == 0
    # The scratch queue of the ping test also shows that the key may send.
    assert checks(json.loads(done.stdout)) == ["pings"]
    code, found, report = examined(strings)
    assert (code, found) == (0, {})
    assert checks(report) == ["primary_send_untested"]
    code, found, report = examined(strings, "--entity", "orders")
    assert (code, checks(report), report["state"]) == (0, [], "well")
    assert invoke("doctor", "--no-ping", **strings).stdout.endswith("all is well\n")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("side", "rule", "code", "checks"),
    [
        (SECONDARY, "app", 3, {"secondary_manage_missing"}),
        (SECONDARY, "sender", 3, {"secondary_manage_missing", "secondary_listen_missing"}),
        (SECONDARY, "reader", 4, {"secondary_manage_missing", "secondary_send_missing"}),
        (PRIMARY, "sender", 0, set()),
        (PRIMARY, "reader", 4, {"primary_send_missing"}),
    ],
)
def test_doctor_names_the_right_that_is_missing(
    strings: dict[str, str], side: str, rule: str, code: int, checks: set[str]
) -> None:
    strings[side] = with_key(strings[side], rule)
    done, found, report = examined(strings, "--entity", "orders")
    assert (done, set(found)) == (code, checks)
    assert [queue["path"] for queue in report["queues"]] == [backlog_queue(strings, index) for index in range(2)]
    for one in found.values():
        assert "needed by" in one["next_step"]


@pytest.mark.thorough
def test_doctor_without_the_manage_right_still_sees_messages_dead_letters_and_missing_queues(
    strings: dict[str, str],
) -> None:
    divert(strings, 3, dead=1)
    strings[SECONDARY] = with_key(strings[SECONDARY], "app")
    code, found, report = examined(strings, "--wait", "0.1", "--count", "3")
    assert code == 3
    assert set(found) == {"secondary_manage_missing", "backlog_waits", "dead_letters", "queues_missing"}
    assert report["missing"] == [backlog_queue(strings, 2)]
    strings["TWINBUS_PRIMARY_NAME"] = "nobody"
    code, found, _ = examined(strings)
    assert (code, found["queues_missing"]["severity"]) == (4, "broken")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("nowhere.invalid", "does not resolve"),
        ("localhost:{unused}", "accepts no connection"),
        ("localhost:{tls}", "is not trusted"),
    ],
)
def test_doctor_says_in_plain_words_why_the_secondary_cannot_be_reached(
    server: Serving, strings: dict[str, str], host: str, words: str
) -> None:
    tls = server.namespaces["secondary"]["port"]
    given = host.format(unused=unused_port(), tls=tls)
    strings[SECONDARY] = f"Endpoint=sb://{given};SharedAccessKeyName=all;SharedAccessKey=key-of-all"
    code, found, _ = examined(strings)
    assert code == 4
    assert words in next(iter(found.values()))["what"]


@pytest.mark.thorough
def test_doctor_a_secondary_that_says_nothing_was_silent(strings: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        strings[SECONDARY] = at_port(silent.getsockname()[1])
        code, found, _ = examined(strings, "--timeout", "0.5")
    assert code == 4
    assert "was silent" in found["secondary_unreachable"]["what"]


@pytest.mark.thorough
def test_p6_doctor_reports_what_is_wrong_with_the_queues(strings: dict[str, str]) -> None:
    with Administration.from_connection_string(strings[SECONDARY]) as administration:
        unsafe = {**PROPERTIES, "auto_delete_on_idle": timedelta(days=1), "lock_duration": "PT30S"}
        administration.request(administration.client.create_queue, backlog_queue(strings, 3), **unsafe)
    code, found, _ = examined(strings, "--count", "5")
    assert code == 3
    assert set(found) == {"queues_missing", "queue_loses_messages", "queue_differs"}
    assert "auto_delete_on_idle is 1 day" in found["queue_loses_messages"]["cause"]
    assert "lock_duration is 0:00:30, not PT1M" in found["queue_differs"]["cause"]
    again = invoke("provision", "--count", "4", "--json", **strings)
    assert again.exit_code == 3
    assert [one["property"] for one in json.loads(again.stdout)["unsafe"]] == ["auto_delete_on_idle"]


@pytest.mark.thorough
def test_y5_doctor_names_the_destinations_of_messages_that_were_put_aside(strings: dict[str, str]) -> None:
    divert(strings, 3)
    with (
        ServiceBusClient.from_connection_string(strings[SECONDARY]) as client,
        client.get_queue_receiver(backlog_queue(strings)) as receiver,
    ):
        for message in receiver.receive_messages(max_message_count=2, max_wait_time=10):
            receiver.defer_message(message)
    code, found, _ = examined(strings, "--wait", "0.1")
    assert code == 3
    assert set(found) == {"messages_put_aside", "backlog_waits"}
    assert found["messages_put_aside"]["cause"] == "For orders (2)."


@pytest.mark.thorough
async def test_y1_a_message_that_left_between_the_two_looks_has_moved(strings: dict[str, str]) -> None:
    divert(strings, 2)
    queue = backlog_queue(strings)
    async with connect(strings[SECONDARY]) as bus:
        first = await first_look(bus, queue, time.time())
        assert (first.look.destination, first.look.moved) == ("orders", False)
        assert (await second_look(bus, first)).moved is False
        receiver = await bus.receiver(queue)
        await receiver.complete(await receiver.receive(1))
        assert (await second_look(bus, first)).moved is True


@pytest.mark.thorough
def test_doctor_finds_a_wrong_clock(strings: dict[str, str]) -> None:
    done = run("doctor", "--no-ping", "--json", **strings, **fake_clock.environment(timedelta(minutes=5)))
    assert done.returncode == 3, done.stderr
    found = {one["check"]: one["what"] for one in json.loads(done.stdout)["findings"]}
    assert "5 minutes ahead" in found["clock_offset"]


@pytest.mark.thorough
def test_doctor_looks_at_a_ledger_and_finds_its_syphons(strings: dict[str, str], tmp_path: Path) -> None:
    divert(strings, 1)
    code, found, report = examined(strings, "--wait", "0.1", "--ledger", str(tmp_path / "none"))
    assert (code, report["syphons"]) == (3, [])
    assert found["ledger_unusable"]["cause"] == "It does not exist."
    with Ledger(tmp_path, role=Role.SYPHON) as ledger:
        ledger.state("syphon_started", {})
        assert ledger.flush()
        _, found, report = examined(strings, "--wait", "0.1", "--ledger", str(tmp_path))
        assert set(found) == {"backlog_waits"}
        assert len(report["syphons"]) == 1
        assert "A syphon that writes this ledger runs" in found["backlog_waits"]["cause"]
    _, found, report = examined(strings, "--wait", "0.1", "--ledger", str(tmp_path))
    assert report["syphons"] == []
    assert "No syphon that writes this ledger runs" in found["backlog_waits"]["cause"]


@pytest.mark.thorough
def test_s15_doctor_names_holds_and_a_syphon_that_runs_without_the_state(
    strings: dict[str, str], tmp_path: Path
) -> None:
    state = str(tmp_path / "state")
    held = CliRunner().invoke(app, ["drill", "--hold", "--entity", "orders", "--state", state, "--yes"], env=strings)
    assert held.exit_code == 0, held.output
    with Ledger(tmp_path / "ledger", role=Role.SYPHON) as ledger:
        ledger.state("syphon_started", {"poll": 900.0, "drain": False, "state": False})
        assert ledger.flush()
        arguments = ("--wait", "0.1", "--ledger", str(tmp_path / "ledger"), "--state", state)
        code, found, report = examined(strings, *arguments)
    assert (code, report["held"]) == (3, ["orders"])
    assert "held" in [one["check"] for one in report["findings"]]
    assert found["syphon_without_state"]["severity"] == "attention"
    assert report["syphons"][0] in found["syphon_without_state"]["what"]
    (tmp_path / "state" / strings["TWINBUS_PRIMARY_NAME"] / "holds.json").write_text("{")
    code, found, _ = examined(strings, *arguments)
    assert (code, "holds.json" in found["state_unreadable"]["cause"]) == (3, True)


def test_s16_doctor_names_a_failover_of_the_shared_state(strings: dict[str, str], tmp_path: Path) -> None:
    now = time.time()
    record = FailoverRecord("orders", FailureKind.QUOTA_EXCEEDED, now - 7200, now + 900, 1800.0, 12, now - 10, "h:1:x")
    FolderState(tmp_path, strings["TWINBUS_PRIMARY_NAME"]).write([record])
    code, found, _ = examined(strings, "--entity", "orders", "--state", str(tmp_path))
    assert (code, set(found)) == (3, {"failed_over"})
    assert found["failed_over"]["what"] == "orders has been failed over for 2 hours (quota_exceeded)."


def test_s14_doctor_names_a_full_queue_although_its_links_open(tmp_path: Path) -> None:
    queues = [{"name": "orders"}, {"name": "bills"}]
    config = {"namespaces": [{"name": "primary", "queues": queues, "topics": [{"name": "events"}]}]}
    with LocalNamespace("primary", data=tmp_path, config=config) as primary, LocalNamespace("secondary") as secondary:
        primary.kill()
        set_stored_size(tmp_path / "primary.sqlite", "orders", 1024 * 2**20)
        primary.start()
        environment = {PRIMARY: primary.connection_string, SECONDARY: secondary.connection_string}
        assert invoke("provision", "--count", "1", **environment).exit_code == 0
        entities = [part for entity in ("orders", "bills", "events") for part in ("--entity", entity)]
        code, found, report = examined(environment, "--count", "1", *entities)
    assert (code, set(found), checks(report)) == (3, {"entity_nearly_full"}, ["entity_nearly_full"])
    assert found["entity_nearly_full"]["what"] == "orders on the primary is 100% full."


def test_the_guide_has_every_check_and_every_right() -> None:
    root = Path(__file__).resolve().parents[2]
    code = (root / "src/twinbus/pairing/findings.py").read_text(encoding="utf-8")
    guide = (root / "docs/guides/doctor.md").read_text(encoding="utf-8")
    named = set(re.findall(r'Finding\(\s*_[A-Z]+,\s*"(\w+)"', code)) | set(re.findall(r'"(secondary_\w+)"', code))
    named |= {f"{side}_{right.lower()}_missing" for side, right in RIGHTS}
    assert len(named) > 25
    assert [check for check in sorted(named) if f"`{check}`" not in guide] == []
    for side, right in RIGHTS:
        assert f"| {right} on the {side} |" in guide
