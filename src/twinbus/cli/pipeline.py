"""`twinbus pipeline run`: ingest a ledger and keep the results of all jobs, in one Spark application."""

from __future__ import annotations

import json as json_text
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Annotated, Final

import typer

from twinbus.cli.engine import Master, refuse_no_folder, refuse_unusable_tables, spark_session
from twinbus.cli.errors import Debug, errors_reported
from twinbus.cli.interrupts import stop_on_signals
from twinbus.cli.ledger import DEAD_AFTER, DeadAfter, LedgerLocation
from twinbus.cli.ledger_audit import spark_errors_explained
from twinbus.cli.ledger_spark import Every, Horizon, TablesFolder
from twinbus.cli.spinner import shown_meanwhile
from twinbus.cli.terminal import console, still_protected
from twinbus.pipeline import TableStorage

if TYPE_CHECKING:
    from twinbus.pipeline import CommittedBatch, PipelineRun

app = typer.Typer(help="Tables and results of a ledger, on Spark.", no_args_is_help=True)
_POLL_SECONDS: Final = 1
_REDRAW_SECONDS: Final = 0.25
# How Spark's message about a stream begins while there is nothing to do.
_WAITING: Final = "Waiting"
_LAST_MILLISECOND: Final = 253_402_300_799_000


@app.callback()
def _pipeline() -> None:
    """Tables and results of a ledger, on Spark."""


@app.command()
def run(
    ledger: LedgerLocation,
    tables: TablesFolder,
    follow: Annotated[bool, typer.Option("--follow", help="Keep running: a batch for new entries.")] = False,
    every: Every = 10.0,
    dead_after: DeadAfter = DEAD_AFTER,
    horizon: Horizon = timedelta(days=30),
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each batch.")] = False,
    master: Master = None,
    debug: Debug = False,
) -> None:
    """Ingest the new entries of a ledger, and compute the results of all jobs, in one Spark application.

    Tables and results are committed together: the last snapshot names the versions that belong together.

    It can be interrupted and repeated. With --follow, Ctrl-C ends it after the batch; a second Ctrl-C at once.

    Prints a line for each batch.

    Examples:
      twinbus pipeline run ./ledger ./tables
      twinbus pipeline run ./ledger ./tables --follow --every 60
      twinbus pipeline run ./ledger ./tables --master spark://head:7077 --json
    """
    with errors_reported(debug=debug):
        refuse_no_folder("the ledger", ledger)
        refuse_unusable_tables(tables)
        TableStorage(tables).refuse_old_format()
        spark = spark_session("twinbus pipeline", master)
        from twinbus.pipeline import PipelineRun  # noqa: PLC0415 - needs Spark

        found: SimpleQueue[CommittedBatch] = SimpleQueue()
        silence = timedelta(seconds=dead_after)
        made = PipelineRun(spark, ledger, tables, silence=silence, horizon=horizon, report=found.put)
        idle = "waiting for new entries" if follow else "looking for new entries"
        with _shown(made, found, idle, json=json):
            _run(made, every if follow else None)


def _run(made: PipelineRun, every: float | None) -> None:
    """Run the pipeline until the ledger is ingested; with `every`, until a signal."""
    if every is None:
        with spark_errors_explained():
            made.start().awaitTermination()
            made.update()
        return
    follow_ledger(made, every, stop_on_signals())


def follow_ledger(made: PipelineRun, every: float, stopping: threading.Event, *, to_the_end: bool = False) -> None:
    """Run the pipeline until `stopping` is set. With `to_the_end`, first ingest all entries that are there by then."""
    with spark_errors_explained():
        query, looked, has_begun = made.start(every=every), time.monotonic(), False
        while not query.awaitTermination(_POLL_SECONDS):
            if stopping.is_set():
                if to_the_end:
                    query.processAllAvailable()
                    made.update(to_the_end=True)
                made.stop(query)
                return
            # Until then, the first batch is being prepared.
            has_begun = has_begun or str(query.status["message"]).startswith(_WAITING) or bool(query.lastProgress)
            if has_begun and time.monotonic() - looked >= every:
                made.update(stopping=stopping)
                looked = time.monotonic()


# --- progress -------------------------------------------------------------------------------------------------------


def _shown(
    made: PipelineRun, found: SimpleQueue[CommittedBatch], idle: str, *, json: bool
) -> AbstractContextManager[None]:
    """Print a line for each batch inside the block. On a terminal, show below what the run does now, or `idle`."""
    if sys.stdout.isatty() and not json:
        return shown_meanwhile(partial(_show_status, made, found, idle))
    return shown_meanwhile(partial(_print_lines, found, json))


def _print_lines(found: SimpleQueue[CommittedBatch], json: bool, over: threading.Event) -> None:
    while not over.wait(_REDRAW_SECONDS) or not found.empty():
        for batch in _taken(found):
            typer.echo(json_text.dumps(_as_json(batch)) if json else batch_text(batch))
            sys.stdout.flush()


def _show_status(made: PipelineRun, found: SimpleQueue[CommittedBatch], idle: str, over: threading.Event) -> None:
    from rich.text import Text  # noqa: PLC0415 - slow, and needed on a terminal only

    screen = console()
    began, phase = time.monotonic(), made.phase
    with screen.status("") as status, still_protected():
        while not over.wait(_REDRAW_SECONDS) or not found.empty():
            for batch in _taken(found):
                screen.print(Text(batch_text(batch)), soft_wrap=True)
            if made.phase != phase:
                began, phase = time.monotonic(), made.phase
            status.update(Text(f"{phase or idle} … {time.monotonic() - began:.0f} s"))


def _taken(found: SimpleQueue[CommittedBatch]) -> Iterator[CommittedBatch]:
    while True:
        try:
            yield found.get_nowait()
        except Empty:
            return


def batch_text(batch: CommittedBatch) -> str:
    """Return the line about a batch."""
    added = f"{batch.operations:,} operations, {batch.entries:,} other entries"
    until = f", the newest of {_time(batch.newest):%Y-%m-%d %H:%M:%S}Z" if batch.newest else ""
    return f"{datetime.now(UTC):%H:%M:%S}Z snapshot {batch.snapshot}: {added}{until}; {batch.seconds:.1f} s"


def _as_json(batch: CommittedBatch) -> dict[str, object]:
    newest = _time(batch.newest).isoformat(timespec="milliseconds") if batch.newest else None
    return {**asdict(batch), "newest": newest, "seconds": round(batch.seconds, 3)}


def _time(milliseconds: int) -> datetime:
    # An entry may have any number as its time.
    return datetime.fromtimestamp(min(max(milliseconds, 0), _LAST_MILLISECOND) / 1000, UTC)
