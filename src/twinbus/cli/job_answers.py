"""The answers of `twinbus ledger reconcile|cost|incidents|latency`: from result tables or from Spark; printing them.

Both ways give the same plain values, so that the output does not depend on the way.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, Final

import typer

from twinbus.cli.ledger import LISTED, SUMS, Listed, report, show
from twinbus.cli.ledger_audit import audit_json, show_audit
from twinbus.cli.result_answers import FoundResults
from twinbus.cli.tables import Cell, print_table
from twinbus.printable import printable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from twinbus.answers import HourWindow, Results
    from twinbus.pipeline import Tables, TimeWindow, WriterClock, WriterStates
    from twinbus.syphon import AuditSummary

COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "cost": ("day", "stage", "namespace", "entity", "operations", "messages", "units", "bytes", "unknown", "refused"),
    "incidents": (
        "destination", "began", "restored", "drained", "cause", "processes", "diverted", "returned",
        "seconds_to_restore", "seconds_to_drain",
    ),
    "latency": (
        "destination", "day", "diverted", "returned", "mean", "least", "p50", "p75", "p90", "p99", "most",
        "unknown_clock",
    ),
}  # fmt: skip
"""The columns of the rows that a verb prints."""
_ORDER: Final = {
    "cost": ("day", "stage", "namespace", "entity"),
    "incidents": ("began", "destination"),
    "latency": ("day", "destination"),
}
INSTANTS: Final = ("began", "restored", "drained")
# Titles of columns in a printed table; JSON has the names.
_TITLES: Final = {
    "destination": "entity",
    "began": "began, UTC",
    "seconds_to_restore": "to restore, s",
    "seconds_to_drain": "to drain, s",
}


@dataclass(frozen=True, slots=True)
class JobAnswer:
    """What a job found."""

    rows: Sequence[Mapping[str, Any]] = ()
    """Of all jobs but `reconcile`, in the order in which they are printed."""
    sums: Mapping[str, int] | None = None
    """Of `reconcile`, as the fields below."""
    listed: Mapping[str, Sequence[Listed]] | None = None
    incomplete: Sequence[str] = ()
    clocks: Sequence[WriterClock] = ()
    """Of `latency`: writers whose clocks differ from the broker's."""
    found: FoundResults | None = None
    """The results that the answer is from; None if Spark has computed it for this answer."""


def answer_from_results(name: str, results: Results, window: HourWindow, found: FoundResults | None) -> JobAnswer:
    """Return the answer of a job from the result tables."""
    if name == "reconcile":
        balance = results.balance(window)
        return JobAnswer((), balance.sums, balance.listed, results.incomplete(), found=found)
    rows = {"cost": results.cost, "incidents": results.incidents, "latency": results.latency}[name](window)
    return JobAnswer(rows, clocks=results.clocks() if name == "latency" else (), found=found)


def answer_from_spark(
    name: str, tables: Tables, rows: DataFrame, window: TimeWindow, writers: WriterStates
) -> JobAnswer:
    """Return the answer of a job from the rows that Spark has found for a window."""
    from pyspark.sql import functions as F  # noqa: N812, PLC0415 - its usual name

    from twinbus.pipeline import off_clocks, why_incomplete  # noqa: PLC0415 - needs the extra `spark`

    if name != "reconcile":
        found = [row.asDict() for row in rows.orderBy(*_ORDER[name]).collect()]
        return JobAnswer(found, clocks=off_clocks(tables, window) if name == "latency" else ())
    sums = rows.agg(*(F.coalesce(F.sum(word), F.lit(0)).alias(word) for word in (*SUMS, "in_flight"))).first()
    assert sums is not None, "an aggregate without keys has a row"
    named = rows.where("id is not null").orderBy("destination", "id").collect()
    listed = {word: [((row.destination, row.id), row[word]) for row in named if row[word]] for word in LISTED}
    return JobAnswer((), sums.asDict(), listed, why_incomplete(tables, writers))


# --- printing --------------------------------------------------------------------------------------------------------


def print_balance(answer: JobAnswer, json: bool, audited: AuditSummary | None = None) -> int:
    """Print the balance, and what an audit saw. Return the exit code of the balance's verdict."""
    from twinbus.ledger import judge_ledger  # noqa: PLC0415 - slow

    assert answer.sums is not None, "an answer of `reconcile`"
    assert answer.listed is not None, "an answer of `reconcile`"
    sums, missing = answer.sums, list(answer.incomplete)
    if audited is not None:
        # The tables lack some reasons that the audit has, such as a writer that has entries elsewhere.
        missing += [reason for reason in audited.missing if reason not in answer.incomplete]
    if json:
        more = {} if audited is None else {"audit": audit_json(audited)}
        more |= {} if answer.found is None else answer.found.as_json()
        typer.echo(json_text.dumps({**report(sums, answer.listed, missing), **more}))
    else:
        show(sums, answer.listed, missing)
        if audited is not None:
            show_audit(audited)
        if sums["in_flight"]:
            typer.echo(f"\nin flight: {sums['in_flight']:,} of the unknown and unconfirmed may still get an outcome")
        if answer.found is not None:
            typer.echo()
            answer.found.show(json=False)
    return judge_ledger(sums, missing).exit_code


def print_rows(name: str, answer: JobAnswer, json: bool) -> None:
    """Print the rows of a job, and what belongs to them."""
    instants = INSTANTS if name == "incidents" else ()
    found = [_plain(row, instants) for row in answer.rows]
    if json:
        typer.echo(json_text.dumps(found))
    else:
        columns = [_TITLES.get(column, column.replace("_", " ")) for column in COLUMNS[name]]
        print_table(columns, [_cells(row, instants) for row in found], wrapped={"cause"}, optional={"unknown clock"})
    if name == "latency":
        _print_clocks(answer, json)
    if answer.found is not None:
        answer.found.show(json=json)


def _print_clocks(answer: JobAnswer, json: bool) -> None:
    """Print which writers' clocks differ from the broker's (L5): to stderr if stdout has JSON."""
    from twinbus.report import clock_text, unknown_clock_text  # noqa: PLC0415 - slow

    if unknown := sum(row["unknown_clock"] for row in answer.rows):
        typer.echo(unknown_clock_text(unknown), err=json)
    for clock in answer.clocks:
        typer.echo(printable(clock_text(clock)), err=json)


def _plain(row: Mapping[str, Any], instants: Sequence[str]) -> dict[str, Any]:
    def plain(name: str, value: Any) -> Any:
        if name in instants and value is not None:
            return datetime.fromtimestamp(value / 1000, UTC).isoformat(timespec="milliseconds")
        return value.isoformat() if isinstance(value, date) else value

    return {name: plain(name, value) for name, value in row.items()}


def _cells(row: Mapping[str, Any], instants: Sequence[str]) -> list[Cell]:
    """Return the cells of a row. Instants are in UTC, to the second; one on the day of the first has no date."""
    days = [row[name][:10] for name in instants if row[name] is not None]

    def cell(name: str, value: Any) -> Cell:
        if name in instants and value is not None:
            day, time = value[:10], value[11:19]
            return time if name != instants[0] and day == days[0] else f"{day} {time}"
        return None if name == "unknown_clock" and not value else value

    return [cell(name, value) for name, value in row.items()]
