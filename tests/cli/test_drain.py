"""`twinbus syphon --drain` when messages cannot go home (Y11): it ends, says why, and exits with 3."""

from __future__ import annotations

import json
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from tests.cli.running import invoke, run, serving
from tests.cli.syphoned import Backlog, ids_of
from twinbus import SendAvailabilityOptions, pair_connection_strings
from twinbus.cli.progress import LineDisplay, TableDisplay
from twinbus.pairing import Administration
from twinbus.syphon import LeftMessages, MessageCounts, Progress
from twinbus.testing import LocalNamespaces


@pytest.fixture
def backlog(namespaces: LocalNamespaces) -> Backlog:
    return Backlog(namespaces)


def test_y11_a_drain_with_a_destination_gone_ends_with_3_and_says_why(backlog: Backlog) -> None:
    backlog.divert("1", "2")
    backlog.divert("3", "4", "5", path="gone", queue=1)
    done = invoke("syphon", "--drain", **backlog.environment)
    assert done.exit_code == 3, done.stdout + done.stderr
    _, _, table = done.stdout.partition("not home:")
    assert table.splitlines()[1] == "        3  gone: the entity does not exist on the primary"
    assert "Create the entity, then drain again." in table
    assert ids_of(backlog.arrived()) == ["1", "2"]
    assert ids_of(backlog.left()) == ["3", "4", "5"]


@pytest.mark.thorough
def test_y11_programs_get_each_cause_and_remaining_is_what_can_move(backlog: Backlog) -> None:
    backlog.divert("1")
    backlog.divert("2", "3", path="gone", queue=1)
    done = invoke("syphon", "--drain", "--json", "--every", "0.2", **backlog.environment)
    assert done.exit_code == 3, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["destination"], one["messages"], one["cause"]) for one in lines[-1]["left"]] == [
        ("gone", 2, "entity_not_found")
    ]
    assert lines[-1]["left"][0].keys() >= {"why", "next_step"}
    assert [line["remaining"] for line in lines if line["aside"] == 2 and not line["ended"]][-1] in (0, 1)
    assert all(line["left"] == [] for line in lines[:-1])


@pytest.mark.thorough
def test_y11_a_wait_for_destinations_is_a_span_and_needs_a_drain(backlog: Backlog) -> None:
    backlog.divert("1", path="gone")
    done = invoke("syphon", "--drain", "--wait-for-destinations", "3s", "--json", **backlog.environment)
    assert done.exit_code == 3, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["seconds"] >= 3.0
    assert invoke("syphon", "--drain", "--wait-for-destinations", "soon", **backlog.environment).exit_code == 2
    alone = invoke("syphon", "--wait-for-destinations", "10m", **backlog.environment)
    assert alone.exit_code == 2
    assert "--wait-for-destinations needs --drain" in alone.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["native", "sdk"])
def test_y11_for_real_two_servers_a_pair_of_the_sdk_and_a_queue_that_was_deleted(
    tmp_path: Path, transport: str
) -> None:
    """Messages for three queues are diverted. Then one queue is deleted and one is disabled for sending."""
    with ExitStack() as stack:
        texts = {}
        for name, queues in (("primary", ["orders", "gone", "closed"]), ("secondary", [])):
            given = [argument for queue in queues for argument in ("--queue", queue)]
            server = stack.enter_context(serving("--json", "--memory", "--namespace", f"{name}=0", *given))
            texts[name] = str(server.namespaces[name]["connection_string"])
        options = SendAvailabilityOptions(
            backlog_queue_count=2, primary_name="contoso", ping_interval=timedelta(minutes=30)
        )
        with pair_connection_strings(texts["primary"], texts["secondary"], options=options) as pair:
            for path in ("orders", "gone", "closed"):
                pair.force_failover(path)
                with pair.get_queue_sender(path) as sender:
                    sender.send_messages([ServiceBusMessage("x", message_id=f"{path}-{n}") for n in range(20)])
        with Administration.from_connection_string(texts["primary"]) as administration:
            administration.request(administration.client.delete_queue, "gone")
            closed = administration.request(administration.client.get_queue, "closed")
            closed.status = "SendDisabled"
            administration.request(administration.client.update_queue, closed)
        variables = {
            "TWINBUS_PRIMARY_CONNECTION_STRING": texts["primary"],
            "TWINBUS_SECONDARY_CONNECTION_STRING": texts["secondary"],
            "TWINBUS_PRIMARY_NAME": "contoso",
        }
        ledger = ("--ledger", str(tmp_path / "ledger"))
        done = run("syphon", "--drain", "--json", "--transport", transport, *ledger, **variables)
        assert done.returncode == 3, done.stdout + done.stderr
        ended = json.loads(done.stdout.splitlines()[-1])
        assert {one["destination"]: (one["messages"], one["cause"]) for one in ended["left"]} == {
            "gone": (20, "entity_not_found"),
            "closed": (20, "entity_disabled"),
        }
        assert ended["audit"]["verdict"] == "proven"
        assert ended["audit"]["absent"] == 0
        # Two queues: a look at each, and the poll that the end cut off. Each look follows the last received message.
        assert ended["operations"]["empty_receive"] <= 4
        with (
            ServiceBusClient.from_connection_string(texts["primary"]) as client,
            client.get_queue_receiver("orders") as receiver,
        ):
            home = receiver.receive_messages(50, max_wait_time=5)
        assert sorted(str(one.message_id) for one in home) == sorted(f"orders-{n}" for n in range(20))


# --- words -----------------------------------------------------------------------------------------------------------


def ended(*left: LeftMessages) -> Progress:
    given: dict[str, Any] = {"seconds": 1.0, "total": MessageCounts(), "by_destination": {}, "states": ()}
    given |= {"operations": {}, "rate": 0.0, "held": 0, "aside_by_destination": {}, "remaining": None}
    return Progress(**given, seconds_left=None, state="ended", left=left)


ROWS = (
    LeftMessages("orders", 1200, "server_busy", "the primary is busy", "Drain again."),
    LeftMessages(None, 1, "dead_lettered", "they were dead-lettered: NoDestination", "See the list."),
    LeftMessages(None, None, "timeout", "the queue does not answer", "Check it.", "q/0"),
)


def test_y11_a_terminal_is_shown_what_is_not_home_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with TableDisplay() as shown:
        shown.end(ended(*ROWS))
    told = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in told.splitlines() if line.count("│") == 5]
    assert [cells for cells in rows if any(cells)] == [["1,200", "orders"], ["1", "(none)"], ["?", "q/0"]]
    assert "what to do" in told


def test_y11_lines_show_what_is_not_home_and_at_most_twenty_rows(capsys: pytest.CaptureFixture[str]) -> None:
    many = [LeftMessages(f"orders-{n}", n, "server_busy", "the primary is busy", "Drain again.") for n in range(25)]
    LineDisplay().end(ended(*ROWS, *many))
    told = capsys.readouterr().out.splitlines()
    assert told[3] == "    1,200  orders: the primary is busy"
    assert told[4] == "           Drain again."
    assert "        ?  q/0: the queue does not answer" in told
    assert told[-1] == "           … and 8 more; --json lists them all"
    LineDisplay().end(ended())
    assert "not home" not in capsys.readouterr().out
