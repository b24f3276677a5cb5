"""`twinbus ledger check`: whether everything in a ledger adds up. What adds up to what, the balance decides.

The verbs of the pipeline are in `ledger_jobs`, and tell of a balance as this one does.
"""

from __future__ import annotations

import json as json_text
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from twinbus.cli.errors import FAILED, Debug, errors_reported
from twinbus.cli.spinner import spinner
from twinbus.errors import OperatorError
from twinbus.printable import printable

if TYPE_CHECKING:
    from twinbus.ledger import Balance, LineProblem, MessageKey

Listed = tuple[tuple[str, str], int]
"""Destination and id of a message, and how many copies of it."""

app = typer.Typer(help="What the ledger of pairs, syphons and namespaces tells.", no_args_is_help=True)

_SHOWN: Final = 20
SUMS: Final = {
    "accepted": "accepted",
    "delivered": "  delivered",
    "in_backlog": "  in backlog",
    "dead_lettered": "  dead-lettered",
    "unknown": "  unknown",
    "lost": "  lost",
    "duplicated": "duplicated",
    "possibly_duplicated": "possibly duplicated",
    "unconfirmed": "unconfirmed",
}
LISTED: Final = {
    "lost": "lost: reported safe, and in neither namespace",
    "unknown": "unknown: reported safe; it depends on operations whose outcome nobody knows",
    "duplicated": "duplicated: delivered more often than sent",
    "possibly_duplicated": "possibly duplicated: delivered more often than sent, if unknown outcomes were good",
    "unconfirmed": "unconfirmed: never reported safe, but there, or perhaps there",
}


@app.callback()
def ledger() -> None:
    """What the ledger of pairs, syphons and namespaces tells."""


@app.command()
def check(
    directory: Annotated[Path, typer.Argument(help="Of the ledger.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every id.")] = False,
    debug: Debug = False,
) -> None:
    """Does everything add up? In this process, for ledgers that fit in memory.

    accepted = delivered + in backlog + dead-lettered; what is lost or doubled, by id.

    Ends with 1 when something is lost, or the ledger could not be read.

    Examples:
      twinbus ledger check ./ledger
      twinbus ledger check ./ledger --json
    """
    from twinbus.ledger import balance, list_segments, read_ledger  # noqa: PLC0415 - slow

    with errors_reported(debug=debug), _readable(directory):
        if not directory.is_dir() or next(list_segments(directory), None) is None:
            raise OperatorError(f"{directory} holds no ledger", "Name the directory that was given as `ledger`.")
        problems: list[LineProblem] = []
        entries = read_ledger(directory, problems.append)
        first = next(entries, None)
        with spinner(f"reading {directory}"):
            found = balance(chain(() if first is None else (first,), entries))
        found.incomplete += map(str, problems)
        sums = {name: getattr(found, name).total() for name in SUMS}
        listed = {name: _of(found, name) for name in LISTED}
        if json:
            typer.echo(json_text.dumps(report(sums, listed, found.incomplete)))
        else:
            show(sums, listed, found.incomplete)
        if found.lost or (first is None and problems):
            raise typer.Exit(FAILED)


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OperatorError(
            f"{error.filename or directory} cannot be read: {error.strerror}",
            "A ledger is a directory of files that this user may read.",
        ) from error


def refuse_unwritable(directory: Path) -> None:
    """For verbs that keep a ledger: told before anything is moved."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise OperatorError(
            f"--ledger {directory} cannot be written: {error.strerror}",
            "Name a directory, there or not yet, that this user may write.",
        ) from error


def report(sums: Mapping[str, int], listed: Mapping[str, Sequence[Listed]], incomplete: list[str]) -> dict[str, Any]:
    """A balance as JSON has it. Of each sum that is listed: the messages, and how many copies."""
    messages = {
        name: [{"destination": destination, "id": id_, "count": count} for (destination, id_), count in found]
        for name, found in listed.items()
    }
    return {**sums, "messages": messages, "incomplete": incomplete}


def show(sums: Mapping[str, int], listed: Mapping[str, Sequence[Listed]], incomplete: list[str]) -> None:
    """A balance for a person."""
    for name, label in SUMS.items():
        typer.echo(f"{label:20} {sums[name]:>12,}")
    for name, label in LISTED.items():
        messages = listed[name]
        if messages:
            typer.echo(f"\n{label}")
        # Each lost one has to be looked for by somebody.
        shown = messages if name == "lost" else messages[:_SHOWN]
        for (destination, id_), count in shown:
            typer.echo(printable(f"  {destination}  {id_}{f'  × {count}' if count > 1 else ''}"))
        if len(messages) > len(shown):
            typer.echo(f"  … and {len(messages) - len(shown):,} more; --json lists them all")
    if incomplete:
        typer.echo("\nThe ledger does not hold everything, so that what it says may be wrong:")
    for reason in incomplete:
        typer.echo(printable(f"  {reason}"))


def _of(found: Balance, name: str) -> list[Listed]:
    counted: Counter[MessageKey] = getattr(found, name)
    return sorted(counted.items())
