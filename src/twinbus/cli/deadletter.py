"""`twinbus deadletter`: list dead-lettered messages of the backlog and resubmit them (Y6)."""

from __future__ import annotations

import asyncio
import json as json_text
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from twinbus.cli import connections
from twinbus.cli.connections import Primary, PrimaryName, Secondary, Seconds
from twinbus.cli.errors import Debug, WrongUsageError, errors_reported
from twinbus.cli.ledger import refuse_unwritable
from twinbus.cli.network import network_options
from twinbus.cli.tables import Cell, print_table
from twinbus.cli.terminal import console
from twinbus.errors import OperatorError
from twinbus.printable import printable

if TYPE_CHECKING:
    from twinbus.syphon import DeadLetter, DeadLetterCensus, DeadLetters

# Rows of one printed table. A longer list is printed as several tables.
_ROWS: Final = 500
# From this terminal width on, the table also shows backlog queue and sequence number.
_WIDE: Final = 130
app = typer.Typer(help="Messages that could not be delivered: list and resubmit them.", no_args_is_help=True)
Ids = Annotated[list[str] | None, typer.Option("--id", help="Only this message id; may be repeated.")]
Destinations = Annotated[
    list[str] | None, typer.Option("--destination", help="Only messages for this entity, - for none; may be repeated.")
]


@app.command("list")
@network_options
def list_(
    primary: Primary,
    secondary: Secondary,
    ids: Ids = None,
    destinations: Destinations = None,
    limit: Annotated[int, typer.Option(min=0, help="Show at most this many; 0 for all.")] = 100,
    after: Annotated[
        str | None, typer.Option(help="Continue after this message: QUEUE:NUMBER, as printed by the last page.")
    ] = None,
    primary_name: PrimaryName = None,
    seconds: Seconds = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: one object per line.")] = False,
    debug: Debug = False,
) -> None:
    """List dead-lettered messages: reason, destination, id and age.

    Locks and moves nothing.

    Examples:
      twinbus deadletter list
      twinbus deadletter list --destination orders --limit 20
    """
    with errors_reported(debug=debug):
        wanted = _Selection(ids, destinations)
        cursor = _cursor(after)
        asyncio.run(_list(_Backlog(primary, secondary, primary_name, seconds), wanted, limit, cursor, json=json))


@app.command("resubmit")
@network_options
def resubmit(
    primary: Primary,
    secondary: Secondary,
    ids: Ids = None,
    destinations: Destinations = None,
    everything: Annotated[bool, typer.Option("--all", help="All messages.")] = False,
    to: Annotated[
        str | None, typer.Option(help="Send them to this entity instead.", show_default="their own destination")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Directory of the ledger that records every move.", show_default="none")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    primary_name: PrimaryName = None,
    seconds: Seconds = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: one object per line.")] = False,
    debug: Debug = False,
) -> None:
    """Put dead-lettered messages back into the backlog. The syphon then delivers them.

    Remove the cause of the failure first.

    Exit code: 0 if all selected messages are back in the backlog, else 1.

    Examples:
      twinbus deadletter resubmit --id 4711
      twinbus deadletter resubmit --destination orders --to orders-v2
      twinbus deadletter resubmit --all --yes
    """
    with errors_reported(debug=debug):
        if everything == bool(ids or destinations):
            raise WrongUsageError(
                "no message is selected", "Give --all, --id or --destination. `twinbus deadletter list` shows them."
            )
        if json and not yes:
            raise WrongUsageError("resubmit asks for confirmation, and --json cannot ask", "Add --yes.")
        if ledger is not None:
            refuse_unwritable(ledger)
        backlog = _Backlog(primary, secondary, primary_name, seconds)
        asyncio.run(_resubmit(backlog, _Selection(ids, destinations), to, ledger, yes=yes, json=json))


class _Selection:
    """Selects messages by id and by destination. An empty list of ids selects all ids; the same for destinations."""

    def __init__(self, ids: list[str] | None, destinations: list[str] | None) -> None:
        self._ids = set(ids or ())
        self._destinations = {one.strip("/").lower() for one in destinations or ()}

    @property
    def all(self) -> bool:
        return not self._ids and not self._destinations

    def __contains__(self, letter: DeadLetter) -> bool:
        path = "-" if letter.destination is None else letter.destination.strip("/").lower()
        return (not self._ids or letter.id in self._ids) and (not self._destinations or path in self._destinations)


class _Backlog:
    """The backlog of one pair, and the connection strings to reach it."""

    def __init__(self, primary: str, secondary: str, primary_name: str | None, seconds: float) -> None:
        connections.require_two_namespaces(primary, secondary)
        self.name = connections.backlog_name(primary, primary_name)
        self._primary = primary
        self._secondary = secondary
        self._seconds = seconds

    async def refuse_missing(self, entity: str) -> None:
        """Raise OperatorError if the primary answers that it has no such queue or topic."""
        await connections.refuse_missing_on_primary(self._primary, entity, self._seconds)

    @asynccontextmanager
    async def opened(self, ledger: Path | None = None) -> AsyncIterator[DeadLetters]:
        from twinbus.backlog import primary_name  # noqa: PLC0415
        from twinbus.ledger import Ledger, Role  # noqa: PLC0415
        from twinbus.syphon import DeadLetters  # noqa: PLC0415

        async with AsyncExitStack() as stack:
            transport = connections.native_transport(self._primary, self._secondary, self._seconds)
            stack.push_async_callback(transport.close)
            book = None if ledger is None else stack.enter_context(Ledger(ledger, role=Role.DEADLETTER))
            discovery = connections.discovery(self.name, self._secondary, transport, self._seconds, book)
            stack.push_async_callback(discovery.close)
            try:
                queues = await discovery.queues()
            except Exception as error:
                raise connections.connection_error("secondary", error) from error
            if not queues:
                raise connections.no_backlog_error(self._secondary, self.name)
            secondary = connections.access(self._secondary, side="secondary")
            yield DeadLetters(
                await stack.enter_async_context(secondary.connect(timeout=self._seconds)),
                queues,
                primary=self.name,
                secondary=primary_name(connections.endpoint("secondary", self._secondary)),
                ledger=book,
            )


async def _list(
    backlog: _Backlog, wanted: _Selection, limit: int, after: tuple[str, int] | None, *, json: bool
) -> None:
    shown, last = 0, ""
    page: list[DeadLetter] = []
    async with backlog.opened() as dead:
        async for letter in dead.found(after):
            if letter not in wanted:
                continue
            if limit and shown == limit:
                typer.echo(f"more: --after {last}", err=True)
                break
            shown, last = shown + 1, f"{letter.queue}:{letter.sequence_number}"
            if json:
                typer.echo(json_text.dumps(_as_json(letter)))
                continue
            page.append(letter)
            if len(page) == _ROWS:
                _print(page)
                page = []
    if not json:
        if page or not shown:
            _print(page)
        typer.echo("1 dead-lettered message" if shown == 1 else f"{shown} dead-lettered messages")


async def _resubmit(
    backlog: _Backlog, wanted: _Selection, to: str | None, ledger: Path | None, *, yes: bool, json: bool
) -> None:
    def print_resubmitted(letter: DeadLetter) -> None:
        row = {**_as_json(letter), "resubmitted_to": to or letter.destination}
        line = printable(f"resubmitted  {letter.id} to {to or letter.destination}")
        typer.echo(json_text.dumps(row) if json else line)

    if to is not None:
        await backlog.refuse_missing(to)
    async with backlog.opened(ledger) as dead:
        census = await dead.census(wanted.__contains__)
        if to is None and (nowhere := census.destinations[None]):
            raise OperatorError(f"{nowhere} of them have no destination", "Give one with --to.")
        if not census.total and not wanted.all:
            raise OperatorError("no dead-lettered message matches", "`twinbus deadletter list` shows them.")
        if not census.total:
            typer.echo("there are no dead-lettered messages", err=True)
            return
        if not yes:
            # The question may block the event loop, because no other task runs on the loop yet.
            messages = "1 message" if census.total == 1 else f"{census.total} messages"
            typer.confirm(f"Put {messages} back into the backlog, {_destinations_text(census, to)}?", abort=True)
        done = await dead.resubmit(census, to=to, tell=print_resubmitted)
    if not json:
        typer.echo("1 message is back in the backlog" if done == 1 else f"{done} messages are back in the backlog")


def _cursor(after: str | None) -> tuple[str, int] | None:
    if after is None:
        return None
    queue, _, number = after.rpartition(":")
    if not queue or not number.isdigit():
        raise WrongUsageError(
            f"--after {after!r} is not QUEUE:NUMBER", "Copy it from the last line of the page before."
        )
    return queue, int(number)


def _destinations_text(census: DeadLetterCensus, to: str | None) -> str:
    if to is not None:
        return printable(f"all for {to}")
    paths = sorted(path or "" for path in census.destinations)
    return printable(f"for {', '.join(paths[:5])}{f' and {len(paths) - 5} more' if len(paths) > 5 else ''}")


def _as_json(letter: DeadLetter) -> dict[str, Any]:
    return {
        "queue": letter.queue,
        "sequence_number": letter.sequence_number,
        "message_id": letter.id,
        "destination": letter.destination,
        "reason": letter.reason,
        "description": letter.description,
        "enqueued_time": letter.enqueued_time.isoformat(),
        "size": letter.size,
    }


def _print(letters: list[DeadLetter]) -> None:
    shown = console()
    wide = shown.width >= _WIDE
    rows: list[list[Cell]] = []
    for letter in letters:
        # By the broker's clock: an age would compare it with the clock of this machine (L5).
        arrived = f"{letter.enqueued_time:%Y-%m-%d %H:%M:%S}"
        cells: list[Cell] = [letter.id, letter.destination or "-", letter.reason, letter.description, arrived]
        rows.append(cells + ([letter.queue, str(letter.sequence_number)] if wide else []))
    columns = ("id", "destination", "reason", "description", "arrived, UTC", *(("queue", "number") if wide else ()))
    print_table(columns, rows, wrapped={"reason", "description"})
    if not wide and letters:
        shown.print("--json, or a wider terminal, also shows queue and sequence number", style="dim")
