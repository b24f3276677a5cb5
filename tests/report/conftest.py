"""Ledgers for reports, and their report data. Each is computed once, because Spark takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Event

import pytest
from azure.servicebus import ServiceBusMessage
from pyspark.sql import SparkSession

from tests.pipeline.books import HOUR, MIDNIGHT, movement, operation, segment_name, state
from twinbus import SendAvailabilityOptions, pair_connection_strings
from twinbus.ledger import Closed, Entry, Move, Role, SegmentHeader, Stage, encode_entry
from twinbus.money import Prices, Scenario
from twinbus.pipeline import ReportData, Tables, collect_report_data, ingest_ledger
from twinbus.testing import LocalNamespace

EVIL = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"
EVIL_CAUSE = "</script><script>document.title='owned'</script>"
EVIL_ID = "]]>--><svg onload=alert(3)>"
PATIENCE = 120.0
UNSEEN = "\u202egnp.exe\x00\n"


def write_ledger(folder: Path, entries: Sequence[Entry]) -> Path:
    name = segment_name(1).removesuffix("-0.jsonl")
    first = SegmentHeader(
        at=MIDNIGHT, id="1-h", writer=name, role=Role.CLIENT, host="host", pid=7, version="1", segment=0
    )
    last = Closed(at=MIDNIGHT, id="1-c", writer=name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / segment_name(1)).write_text("".join(map(encode_entry, [first, *entries, last])))
    return folder


def losses() -> list[Entry]:
    """Write entries for every part of a verdict, with names that contain markup and control characters."""
    minute = 60_000
    return [
        *(operation(Stage.SEND_PRIMARY, f"fine-{number}", at=MIDNIGHT + number * minute) for number in range(60)),
        operation(Stage.SEND_PRIMARY, "busy", at=MIDNIGHT + minute, result="server_busy"),
        state("failover_engaged", MIDNIGHT + 10 * minute, cause="timeout"),
        operation(Stage.SEND_BACKLOG, "home", "gone", at=MIDNIGHT + 11 * minute),
        state("restored", MIDNIGHT + 12 * minute),
        operation(Stage.RETURN_PRIMARY, "home", at=MIDNIGHT + 14 * minute),
        operation(Stage.RETURN_PRIMARY, "home", at=MIDNIGHT + 15 * minute),
        operation(Stage.COMPLETE_BACKLOG, "home", "gone", at=MIDNIGHT + 15 * minute),
        operation(Stage.SEND_BACKLOG, "who-knows", at=MIDNIGHT + 11 * minute),
        operation(Stage.COMPLETE_BACKLOG, "who-knows", at=MIDNIGHT + 20 * minute, result="unknown"),
        operation(Stage.SEND_BACKLOG, "dead", at=MIDNIGHT + 11 * minute),
        movement(Move.DEAD_LETTERED, "dead", at=MIDNIGHT + 21 * minute),
        state("failover_engaged", MIDNIGHT + 30 * minute, to=EVIL, by=2, cause=EVIL_CAUSE),
        operation(Stage.SEND_BACKLOG, EVIL_ID, at=MIDNIGHT + 31 * minute, to=EVIL, by=2),
        operation(Stage.COMPLETE_BACKLOG, EVIL_ID, at=MIDNIGHT + HOUR, to=EVIL, by=2),
        operation(Stage.SEND_PRIMARY, UNSEEN, at=MIDNIGHT + HOUR, to="x" * 5000 + UNSEEN),
    ]


@dataclass
class Books:
    """The tables of a ledger, and the report data from them."""

    tables: Tables
    found: ReportData


def survive_an_outage(ledger: Path) -> None:
    """Kill a primary and start it again. A syphon then moves the backlog home."""
    options = SendAvailabilityOptions(
        backlog_queue_count=1,
        failover_interval=timedelta(0),
        ping_interval=timedelta(seconds=1),
        try_timeout=timedelta(seconds=2),
        enable_syphon=True,
        ledger=ledger,
    )
    config = {"namespaces": [{"name": "primary", "queues": [{"name": "orders"}]}]}
    with (
        LocalNamespace("primary", config=config) as primary,
        LocalNamespace("secondary") as secondary,
        pair_connection_strings(primary.connection_string, secondary.connection_string, options=options) as pair,
    ):
        restored, drained = Event(), Event()
        pair.on("restored", lambda _: restored.set())
        pair.on("backlog_drained", lambda _: drained.set())
        with pair.get_queue_sender("orders") as sender:
            sender.send_messages(ServiceBusMessage("before", message_id="before"))
            primary.kill()
            for number in range(3):
                sender.send_messages(ServiceBusMessage("meanwhile", message_id=f"meanwhile-{number}"))
            primary.start()
            assert restored.wait(PATIENCE)
            assert drained.wait(PATIENCE)
            sender.send_messages(ServiceBusMessage("after", message_id="after"))


@pytest.fixture(scope="session")
def books(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Books:
    """A ledger with a real outage, and entries of every problem at an earlier time."""
    folder = tmp_path_factory.mktemp("books")
    ledger, tables = write_ledger(folder / "ledger", losses()), Tables(spark, folder / "tables")
    survive_an_outage(ledger)
    ingest_ledger(spark, ledger, tables.root).awaitTermination()
    return Books(tables, collect_report_data(tables, Prices.default(), Scenario()))


@pytest.fixture(scope="session")
def troubled(books: Books) -> ReportData:
    return books.found
