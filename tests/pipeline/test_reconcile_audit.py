"""`twinbus ledger reconcile --audit`: the audit records what is missing, and the job on Spark reconciles it (L3)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twinbus.backlog import Endpoint, backlog_queue_path, primary_name
from twinbus.cli.main import app
from twinbus.connect import ConnectionString, connect
from twinbus.ledger import Ledger, Stage
from twinbus.message import Message
from twinbus.testing import LocalNamespace

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]
QUEUE = backlog_queue_path("contoso", 0)
IDS = ("kept", "gone")


@pytest.fixture
def secondary() -> Iterator[str]:
    config = {"namespaces": [{"name": "secondary", "queues": [{"name": QUEUE, "lock_duration": "PT5S"}]}]}
    with LocalNamespace("secondary", memory=True, config=config) as found:
        yield found.connection_string


async def divert_and_take(secondary: str) -> None:
    async with connect(secondary) as bus:
        sent = [Message(b"x", message_id=one, application_properties={"x-ms-path": "orders"}) for one in IDS]
        await (await bus.sender(QUEUE)).send(sent)
        receiver = await bus.receiver(QUEUE, prefetch=0)
        held = await receiver.receive(2, 5)
        await receiver.complete([one for one in held if one.message_id == "gone"])
        await receiver.abandon([one for one in held if one.message_id == "kept"])


@pytest.mark.usefixtures("spark")
def test_l3_d3_reconcile_with_an_audit_names_what_was_removed(secondary: str, tmp_path: Path) -> None:
    asyncio.run(divert_and_take(secondary))
    parsed = ConnectionString.parse(secondary)
    space = primary_name(Endpoint.of(parsed.host, parsed.port))
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.begin(Stage.SEND_BACKLOG, space, QUEUE, IDS, [1, 1], "contoso/orders").end()
    arguments = ["ledger", "reconcile", str(tmp_path / "tables"), "--audit", "--json"]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "--audit needs a ledger" in refused.stderr
    done = CliRunner().invoke(
        app,
        [*arguments, "--ledger", str(tmp_path / "ledger")],
        env={"TWINBUS_SECONDARY_CONNECTION_STRING": secondary},
    )
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert (found["verdict"], found["lost"], found["in_backlog"]) == ("lost", 1, 1)
    assert found["messages"]["lost"] == [{"destination": "contoso/orders", "id": "gone", "count": 1}]
    assert (found["audit"]["there"], found["audit"]["absent"], found["audit"]["looks"]) == (1, 1, 2)
