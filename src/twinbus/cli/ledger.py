"""`twinbus ledger check`: reconcile a ledger in this process, and print the balance.

The verbs that run on Spark are in `ledger_spark`. They print a balance with the functions of this module.
"""

from __future__ import annotations

import json as json_text
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from twinbus.cli.errors import FAILED, Debug, errors_reported
from twinbus.cli.local_paths import path_or_url
from twinbus.cli.spinner import spinner
from twinbus.cli.terminal import console
from twinbus.errors import OperatorError
from twinbus.ledger import SILENCE
from twinbus.printable import printable
from twinbus.storage_location import StorageLocation

if TYPE_CHECKING:
    from twinbus.ledger import Balance, Judgement, LineProblem, MessageKey

Listed = tuple[tuple[str, str], int]
"""A message in a printed list: its destination and its id, and the number of its copies."""

DEAD_AFTER: Final = SILENCE.total_seconds()
"""Default of --dead-after."""
DeadAfter = Annotated[
    float, typer.Option(min=0, help="Seconds of silence after which a writer of another host counts as dead.")
]

LedgerLocation = Annotated[
    StorageLocation,
    typer.Argument(parser=path_or_url, help="Directory of the ledger, or its URL.", show_default=False),
]

app = typer.Typer(help="What the ledger of pairs, syphons and namespaces contains.", no_args_is_help=True)

_SHOWN: Final = 20
VERDICT_COLOURS: Final = {
    "proven": "green",
    "proven with possible duplicates": "yellow",
    "not proven": "magenta",
    "lost": "red",
}
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
    "possibly_duplicated": "possibly duplicated: perhaps delivered again, or still to come again",
    "unconfirmed": "unconfirmed: never reported safe, but there, or perhaps there",
}


@app.callback()
def ledger() -> None:
    """What the ledger of pairs, syphons and namespaces contains."""


@app.command()
def check(
    directory: LedgerLocation,
    dead_after: DeadAfter = DEAD_AFTER,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every id.")] = False,
    debug: Debug = False,
) -> None:
    """Check that every message is accounted for. For ledgers that fit in memory.

    accepted = delivered + in backlog + dead-lettered + unknown + lost. Lists lost and duplicated messages by id.

    The first line is the verdict: proven, proven with possible duplicates, not proven, or lost.

    Exit code: 0 if proven, also with possible duplicates; 3 if not proven; 1 if a message is lost or on an error.

    Examples:
      twinbus ledger check ./ledger
      twinbus ledger check s3://bucket/ledger --json
    """
    from twinbus.ledger import balance, dead_writers, judge_ledger, read_ledger  # noqa: PLC0415 - slow

    with errors_reported(debug=debug), ledger_readable(directory):
        refuse_no_ledger(directory)
        problems: list[LineProblem] = []
        # Called before the entries are read, so that everything that these writers wrote is read.
        dead = dead_writers(directory, silence=timedelta(seconds=dead_after))
        entries = read_ledger(directory, problems.append)
        first = next(entries, None)
        with spinner(f"reading {directory}"):
            found = balance(chain(() if first is None else (first,), entries), dead)
        found.incomplete += map(str, problems)
        sums = found.sums()
        listed = listed_messages(found)
        if json:
            typer.echo(json_text.dumps({**report(sums, listed, found.incomplete), "at_work": found.at_work}))
        else:
            show(sums, listed, found.incomplete)
            _show_at_work(found.at_work)
        judged = judge_ledger(sums, found.incomplete)
        if code := FAILED if first is None and problems else judged.exit_code:
            raise typer.Exit(code)


@contextmanager
def ledger_readable(directory: Path | StorageLocation) -> Iterator[None]:
    """Turn an error of the file system inside the `with` block into an OperatorError."""
    try:
        yield
    except OSError as error:
        raise OperatorError(
            f"{error.filename or directory} cannot be read: {error.strerror}",
            "A ledger is a directory of files. Check its permissions.",
        ) from error


def refuse_no_ledger(directory: Path | StorageLocation) -> None:
    """Raise OperatorError if this directory or URL has no segment of a ledger."""
    location = StorageLocation.parse(directory)
    if has_segments(location):
        return
    if location.is_url:
        raise OperatorError(f"{location} has no segment of a ledger", "Name the URL that `ledger ship` copied to.")
    raise OperatorError(f"{location} is not a ledger", "Give the directory that the option `ledger` names.")


def has_segments(location: StorageLocation) -> bool:
    """Return whether this directory or URL has a segment of a ledger."""
    from twinbus.ledger import ShippedLedger, list_segments  # noqa: PLC0415 - slow

    if location.is_url:
        return bool(ShippedLedger(location).segments())
    return Path(location).is_dir() and next(list_segments(Path(location)), None) is not None


def refuse_unwritable(directory: Path) -> None:
    """Raise OperatorError if a ledger cannot be written to this directory. Called before a verb moves messages."""
    from twinbus.ledger import make_ledger_folder  # noqa: PLC0415 - slow

    try:
        make_ledger_folder(directory)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise OperatorError(
            f"--ledger {directory} cannot be written: {error.strerror}",
            "Name an existing or new directory that you may write to.",
        ) from error


def report(sums: Mapping[str, int], listed: Mapping[str, Sequence[Listed]], incomplete: list[str]) -> dict[str, Any]:
    """Return a balance as a dict for JSON: the verdict, the sums, and the messages of each sum in `listed`."""
    from twinbus.ledger import judge_ledger  # noqa: PLC0415 - slow

    judged = judge_ledger(sums, incomplete)
    return {
        "verdict": judged.verdict,
        "sentence": judged.sentence,
        **sums,
        "messages": {name: messages_as_json(found) for name, found in listed.items()},
        "incomplete": incomplete,
    }


def show(sums: Mapping[str, int], listed: Mapping[str, Sequence[Listed]], incomplete: list[str]) -> None:
    """Print a balance as text, with the verdict first."""
    from twinbus.ledger import judge_ledger  # noqa: PLC0415 - slow

    show_judgement(judge_ledger(sums, incomplete))
    typer.echo()
    for name, label in SUMS.items():
        typer.echo(f"{label:20} {sums[name]:>12,}")
    for name, label in LISTED.items():
        messages = listed[name]
        if messages:
            typer.echo(f"\n{label}")
        # All lost messages are listed, because a person has to look for each lost message.
        shown = messages if name == "lost" else messages[:_SHOWN]
        for message in shown:
            show_message(message)
        if len(messages) > len(shown):
            typer.echo(f"  … and {len(messages) - len(shown):,} more; --json lists them all")
    if incomplete:
        typer.echo("\nEntries are missing from the ledger, so these figures may be wrong:")
    for reason in incomplete:
        typer.echo(printable(f"  {reason}"))


def _show_at_work(writers: Sequence[str]) -> None:
    if writers:
        count = "1 writer is" if len(writers) == 1 else f"{len(writers):,} writers are"
        typer.echo(f"\n{count} at work. A message in flight is in the backlog, or possibly duplicated until its")
        typer.echo("completion is recorded.")


def show_judgement(judged: Judgement) -> None:
    """Print verdict and sentence: on a terminal in the colour of the verdict and wrapped, elsewhere as one line."""
    if not sys.stdout.isatty():
        typer.echo(printable(str(judged)))
        return
    from rich.text import Text  # noqa: PLC0415 - slow, and needed on a terminal only

    console().print(Text.assemble((judged.verdict, f"bold {VERDICT_COLOURS[judged.verdict]}"), f": {judged.sentence}"))


def listed_messages(found: Balance) -> dict[str, list[Listed]]:
    """Return the messages of each sum in `LISTED`, sorted."""
    counters: dict[str, Counter[MessageKey]] = {name: getattr(found, name) for name in LISTED}
    return {name: sorted(counted.items()) for name, counted in counters.items()}


def messages_as_json(messages: Iterable[Listed]) -> list[dict[str, Any]]:
    return [{"destination": destination, "id": id_, "count": count} for (destination, id_), count in messages]


def show_message(message: Listed, indent: int = 2) -> None:
    (destination, id_), count = message
    typer.echo(printable(f"{'':{indent}}{destination}  {id_}{f'  × {count}' if count > 1 else ''}"))
