"""Answers of verbs from the result tables, without Spark (D7): whether the results are up to date, and as of when."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from twinbus.cli.engine import holds_tables
from twinbus.cli.errors import WrongUsageError
from twinbus.errors import OperatorError
from twinbus.pipeline import TableStorage
from twinbus.printable import printable
from twinbus.storage_location import StorageLocation

if TYPE_CHECKING:
    from twinbus.answers import Freshness, HourWindow, Results

MaxAge = Annotated[
    float,
    typer.Option(min=0, help="Seconds. Results of the pipeline that are not older are shown without starting Spark."),
]
_COMPUTE: Final = "Leave out --as-is: Spark computes them."
AsIs = Annotated[bool, typer.Option("--as-is", help="Show the last results at once, however old they are.")]


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asked for."""

    tables: StorageLocation
    ledger: StorageLocation | None
    since: datetime | None
    until: datetime | None
    max_age: float = 60.0
    as_is: bool = False
    silence: timedelta | None = None
    """For answers that depend on which writers are dead: the time of silence after which a writer is dead."""
    on_spark: str | None = None
    """The option that makes Spark answer, if one was given: `--follow`."""


@dataclass(frozen=True, slots=True)
class FoundResults:
    """Results that answer a request."""

    results: Results
    window: HourWindow
    freshness: Freshness
    now: int

    def text(self) -> str:
        """Return one line: as of when the answer is true, and why it is not up to date."""
        from twinbus.answers import age_text  # noqa: PLC0415 - slow

        as_of, reason = self.freshness.as_of, self.freshness.reason
        line = "as of a time that is not known" if as_of is None else f"as of {_utc(as_of):%Y-%m-%d %H:%M:%S} UTC"
        if as_of is not None and reason is not None:
            line += f", {age_text(self.now - as_of)} ago"
        return line if reason is None else f"{line}; not up to date: {reason}"

    def as_json(self) -> dict[str, Any]:
        """Return the same for JSON."""
        as_of = self.freshness.as_of
        return {
            "as_of": None if as_of is None else _utc(as_of).isoformat(timespec="milliseconds"),
            "up_to_date": self.freshness.is_up_to_date,
        }

    def show(self, *, json: bool) -> None:
        """Print the line: to stderr if stdout has JSON."""
        typer.echo(printable(self.text()), err=json)


def find_results(name: str, request: Request) -> FoundResults | None:
    """Return the results that answer a request; None if Spark has to compute the answer.

    If there are results that are not up to date, print to stderr why Spark is started. With --as-is, raise an error
    instead of returning None. Raise OperatorError if there are neither tables nor a ledger.
    """
    found_tables = holds_tables(request.tables)
    if request.ledger is None and not found_tables:
        raise OperatorError(
            f"{request.tables} contains neither a ledger nor tables",
            "Give the directory that the option `ledger` names, or the tables of `twinbus ledger ingest`.",
        )
    if request.on_spark is not None:
        if request.as_is:
            raise WrongUsageError(f"--as-is cannot be combined with {request.on_spark}", "Leave out one of them.")
        return None
    if not found_tables:
        if request.as_is:
            raise OperatorError("there are no results that --as-is could show", _COMPUTE)
        return None
    from twinbus.answers import HourWindow, Results  # noqa: PLC0415 - slow, and needs the extra `tables`

    window = HourWindow.of(request.since, request.until)
    if window is None:
        if request.as_is:
            raise WrongUsageError("--as-is needs a window of whole hours", "The results have rows by hour (UTC).")
        return None
    results, now = Results(TableStorage(request.tables)), int(time.time() * 1000)
    freshness = _freshness(results, name, request, now)
    if freshness.is_up_to_date:
        return FoundResults(results, window, freshness, now)
    as_of = results.as_of(name)
    if request.as_is:
        if as_of is None:
            raise OperatorError(f"there are no results in {request.tables}", _COMPUTE)
        return FoundResults(results, window, freshness, now)
    if as_of is not None:
        typer.echo(printable(f"{freshness.reason}: Spark is started; --as-is shows them at once"), err=True)
    return None


def _freshness(results: Results, name: str, request: Request, now: int) -> Freshness:
    from twinbus.answers import ResultState, judge_freshness, ledger_states  # noqa: PLC0415 - slow

    as_of = results.as_of(name)
    if as_of is None:
        return judge_freshness(None, [], now, request.max_age)
    silence = timedelta(seconds=as_of.silence)
    states = ledger_states(results.ledgers(as_of), request.ledger, as_of.dead, silence)
    state = ResultState(as_of.computed_at, as_of.silence, bool(as_of.undecided))
    wanted = None if request.silence is None else request.silence.total_seconds()
    return judge_freshness(state, states, now, request.max_age, wanted)


def _utc(instant: int) -> datetime:
    return datetime.fromtimestamp(instant / 1000, UTC)
