"""Writes a ledger: real pairs, a real syphon and real namespaces, then writers with every kind of entry.

The sealed part comes first (`ledger-sealed` is what the tables are made from), then writers that are killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from azure.servicebus import ServiceBusMessage

from tests.formats.sets import packed, write_expected
from tests.syphon.fixed_queues import FixedQueues
from twinbus import SendAvailabilityOptions, aio, pair_connection_strings
from twinbus.ledger import OPEN_SUFFIX, Ledger, Role
from twinbus.syphon import NativeTransport, Syphon, SyphonOptions
from twinbus.testing import LocalNamespaces

PRIMARY = "contoso"

# Prints a line of JSON for each entry, before the entry is recorded.
_TELLING = """
import json, resource, sys
from datetime import timedelta
from twinbus.ledger import Ledger, LedgerOptions, Move, Role, Stage

def told(kind, **said):
    print(json.dumps({"kind": kind, **said}), flush=True)
"""

EVERYTHING = (
    _TELLING
    + """
ledger = Ledger(sys.argv[1], Role.CLIENT, LedgerOptions(segment_bytes=4096))
ids = ["text", 7, b"\\x01\\xff", "uuid:looks like one"]
texts = ["text", "ulong:7", "binary:01ff", "string:uuid:looks like one"]
for stage in Stage:
    told("operation", stage=stage, ids=texts, bytes=70_010, units=5, result="ok", destination="contoso/orders")
    ledger.begin(stage, "paris", "q/0", ids, [10, 70_000, 0, 0], "contoso/orders").end()
for result, cause, failed in (("server_busy", None, []), ("unknown", "timeout", []), ("message_too_large", None, [7])):
    told("operation", stage="send_primary", ids=texts, bytes=4, units=4, result=result, cause=cause,
         failed=["ulong:7"] if failed else [])
    ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", ids, 4).end(result, cause=cause, failed=failed)
told("operation", stage="empty_receive", ids=[], bytes=0, units=1, result="ok")
ledger.done(Stage.EMPTY_RECEIVE, "paris", "q/0", seconds=900.0)
told("state", event="failover_engaged", pair="contoso", facts={"entity": "orders", "n": 3, "x": 1.5, "forced": True})
ledger.state("failover_engaged", {"entity": "orders", "n": 3, "x": 1.5, "forced": True}, pair="contoso")
for move in Move:
    told("movement", move=move, ids=["text"], source="paris/q/0", destination="contoso/orders", reason="why", op="op-1")
    ledger.moved(move, ["text"], "paris/q/0", "contoso/orders", "why", "op-1")
told("metered", namespace="paris", entity="q/0", operation="send", count=5, bytes=100, units=6, since=1000, until=2000)
ledger.metered("paris", "q/0", "send", 5, 100, 6, 1000, 2000)
told("intent", stage="return_primary", ids=["ended"], bytes=10, units=1)
ended = ledger.begin(Stage.RETURN_PRIMARY, "contoso", "orders", ["ended"], 10)
told("intent", stage="return_primary", ids=["never ended"], bytes=10, units=1)
never = ledger.begin(Stage.RETURN_PRIMARY, "contoso", "orders", ["never ended"], 10)
ledger.flush()
told("outcome", result="unknown", cause="connection_lost")
ended.end("unknown", cause="connection_lost")
ledger.flush()
print("flushed", flush=True)
sys.stdin.read()
"""
)

# The file cannot grow beyond its limit. Further entries wait in 4 KB of memory, and the rest count as missing.
GAP = (
    _TELLING
    + """
ledger = Ledger(sys.argv[1], Role.SYPHON, LedgerOptions(buffer_bytes=4096))
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (400, hard))
for number in range(60):
    told("operation", stage="return_primary", ids=[f"g{number}"], bytes=1, units=1, result="ok")
    ledger.begin(Stage.RETURN_PRIMARY, "contoso", "orders", [f"g{number}"], 1).end()
    if number % 3 == 2:
        ledger.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
ledger.close()
"""
)

DROPPED = (
    _TELLING
    + """
ledger = Ledger(sys.argv[1], Role.DEADLETTER, LedgerOptions(segment_bytes=4096, budget_bytes=8192))
for number in range(85):
    told("operation", stage="resubmit_backlog", ids=[f"d{number}"], bytes=1, units=1, result="ok")
    ledger.begin(Stage.RESUBMIT_BACKLOG, "paris", "q/0", [f"d{number}"], 1, "contoso/orders").end()
    if number % 10 == 9:
        ledger.flush()
ledger.close()
"""
)

TORN = (
    _TELLING
    + """
ledger = Ledger(sys.argv[1], Role.SYPHON)
for number in range(3):
    told("operation", stage="complete_backlog", ids=[f"t{number}"], bytes=1, units=1, result="ok")
    ledger.begin(Stage.COMPLETE_BACKLOG, "paris", "q/0", [f"t{number}"], 1, "contoso/orders").end()
ledger.flush()
print("flushed", flush=True)
sys.stdin.read()
"""
)


def make(folder: Path, work: Path) -> Path:
    """Write `ledger` into `folder`. Returns a folder that has only the sealed segments."""
    ledger, sealed = work / "ledger", work / "ledger-sealed"
    expected: dict[str, Any] = asyncio.run(_real(ledger))
    expected["gap"] = _ended(GAP, ledger)
    expected["dropped"] = _ended(DROPPED, ledger)
    sealed.mkdir()
    for path in ledger.glob("*.jsonl"):
        (sealed / path.name).write_bytes(path.read_bytes())
    assert not list(ledger.glob(f"*{OPEN_SUFFIX}"))
    killed = [_begun(program, ledger) for program in (EVERYTHING, TORN)]
    for name, (child, told) in zip(("everything", "torn"), killed, strict=True):
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        child.stdout.close()
        expected[name] = told
    (torn,) = ledger.glob(f"syphon-*{OPEN_SUFFIX}")
    lines = torn.read_bytes().splitlines(keepends=True)
    torn.write_bytes(b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    expected["torn"].pop()
    packed(ledger, folder / "ledger.tar.xz")
    write_expected(folder / "ledger.json", expected)
    return sealed


async def _real(ledger: Path) -> dict[str, Any]:
    """Send and divert with pairs, move all messages home with a syphon, and divert one more message."""
    queues = [{"name": "orders"}]
    config = {
        "namespaces": [
            {"name": "primary", "queues": queues, "ledger": str(ledger)},
            {"name": "secondary", "ledger": str(ledger)},
        ]
    }
    with LocalNamespaces("primary", "secondary", memory=True, config=config) as namespaces:
        strings = [namespaces[name].connection_string for name in ("primary", "secondary")]
        options = SendAvailabilityOptions(backlog_queue_count=2, primary_name=PRIMARY, ledger=ledger)
        await asyncio.to_thread(_sync, strings, options, "sync-1", "sync-2", "sync-3")
        await _aio(strings, options, "aio-1", "aio-2", "aio-3")
        with Ledger(ledger, Role.SYPHON) as book:
            async with Syphon(
                NativeTransport(*strings),
                FixedQueues([f"{PRIMARY}/x-servicebus-transfer/{number}" for number in range(2)]),
                primary=PRIMARY,
                secondary="secondary",
                options=SyphonOptions(drain=True),
                ledger=book,
            ) as syphon:
                await syphon.run()
        await asyncio.to_thread(_sync, strings, options, "late-1", "late-2")
        assert await asyncio.to_thread(namespaces.stop) == 0
    delivered = ["sync-1", "sync-2", "sync-3", "aio-1", "aio-2", "aio-3", "late-1"]
    return {"delivered": delivered, "in_backlog": ["late-2"]}


def _sync(strings: list[str], options: SendAvailabilityOptions, first: str, *diverted: str) -> None:
    with pair_connection_strings(*strings, options=options) as pair, pair.get_queue_sender("orders") as sender:
        sender.send_messages(ServiceBusMessage(b"x", message_id=first))
        pair.force_failover("orders")
        for name in diverted:
            sender.send_messages(ServiceBusMessage(b"x", message_id=name))
        pair.force_restore("orders")


async def _aio(strings: list[str], options: SendAvailabilityOptions, first: str, *diverted: str) -> None:
    pair = await aio.pair_connection_strings(*strings, options=options)
    async with pair, pair.get_queue_sender("orders") as sender:
        await sender.send_messages(ServiceBusMessage(b"x", message_id=first))
        pair.force_failover("orders")
        for name in diverted:
            await sender.send_messages(ServiceBusMessage(b"x", message_id=name))


def _ended(program: str, ledger: Path) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, "-c", program, ledger], check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _begun(program: str, ledger: Path) -> tuple[subprocess.Popen[str], list[dict[str, Any]]]:
    """Start a writer. When this returns, the writer has flushed its entries and still runs."""
    child = subprocess.Popen(
        [sys.executable, "-c", program, ledger], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    told: list[dict[str, Any]] = []
    while (line := child.stdout.readline()) != "flushed\n":
        assert line, "it ended"
        told.append(json.loads(line))
    return child, told
