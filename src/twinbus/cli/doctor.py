"""`twinbus doctor`: inspect the backlog queues of a pair (P6), and test whether the primary hides pings (G3)."""

from __future__ import annotations

import asyncio
import json as json_text
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinbus.cli import connections
from twinbus.cli.connections import Count, Primary, PrimaryName, Secondary, Seconds
from twinbus.cli.errors import Debug, errors_reported
from twinbus.cli.spinner import spinner
from twinbus.cli.terminal import console
from twinbus.errors import OperatorError
from twinbus.printable import printable

if TYPE_CHECKING:
    from twinbus.pairing import Administration, FoundQueue, Inspection, PingCheck

PROBLEMS = 3


def doctor(
    primary: Primary,
    secondary: Secondary,
    count: Count = 10,
    primary_name: PrimaryName = None,
    ping: Annotated[bool, typer.Option(help="Test in a scratch queue of the primary whether it hides pings.")] = True,
    ping_entity: Annotated[
        str | None, typer.Option(help="Test in this queue of the primary instead, if no queue may be created.")
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Remove empty extra queues, after a confirmation.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --clean: do not ask for confirmation.")] = False,
    seconds: Seconds = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Check the backlog queues of a pair.

    Changes nothing without --clean.

    Exit code: 0 if all is well, 3 if there are problems, 1 if the check failed.

    Examples:
      twinbus doctor
      twinbus doctor --count 5 --clean     # remove empty queues beyond five, after a confirmation
      twinbus doctor --no-ping --json
    """
    with errors_reported(debug=debug):
        if json and clean and not yes:
            raise OperatorError("--clean asks for confirmation, and --json cannot ask", "Add --yes.")
        connections.require_two_namespaces(primary, secondary)
        name = connections.backlog_name(primary, primary_name)
        with connections.administration(secondary, seconds) as administration:
            with spinner(f"inspecting {administration.namespace}"):
                inspection = _inspected(administration, name, count)
            with spinner("testing a ping"):
                pings = asyncio.run(_pings(primary, ping_entity, seconds)) if ping else None
            report = _report(inspection, pings)
            if not json:
                _print(inspection, pings)
            if clean:
                report["cleaned"] = _clean(administration, inspection, count, yes=yes, quiet=json)
        if json:
            typer.echo(json_text.dumps(report))
        if inspection.problems:
            raise typer.Exit(PROBLEMS)


def _inspected(administration: Administration, name: str, count: int) -> Inspection:
    from azure.core.exceptions import AzureError  # noqa: PLC0415 - slow

    from twinbus.pairing import inspect_backlog  # noqa: PLC0415

    try:
        return inspect_backlog(administration, name, count)
    except (AzureError, OSError) as error:
        raise connections.connection_error("secondary", error) from error


async def _pings(primary: str, entity: str | None, seconds: float) -> PingCheck:
    from twinbus.pairing import check_pings  # noqa: PLC0415 - slow

    async with (
        connections.aio_client(primary) as client,
        connections.aio_administration(primary, seconds) as administration,
    ):
        return await check_pings(client, administration, entity=entity, seconds=2 * seconds)


def _clean(
    administration: Administration, inspection: Inspection, count: int, *, yes: bool, quiet: bool
) -> dict[str, str]:
    """Remove empty extra queues. Each queue is checked again directly before the queue is removed.

    Returns a text with the result for each queue, by the path of the queue.
    """
    from twinbus.pairing import clean_extra  # noqa: PLC0415 - slow

    empty = [extra.path for extra in inspection.extras if not extra.depth.total]
    cleaned: dict[str, str] = {}
    if not empty:
        if not quiet:
            typer.echo("no extra queue is empty: nothing to remove")
        return cleaned
    if not yes:
        typer.echo(f"No sender with backlog_queue_count {count} uses these queues:")
        for path in empty:
            typer.echo(f"  {printable(path)}")
        typer.confirm(f"Remove {len(empty)} queues from {printable(administration.namespace)}?", abort=True)
    for path in empty:
        cleaned[path] = clean_extra(administration, inspection.primary, count, path)
        if not quiet:
            typer.echo(printable(f"{path}: {cleaned[path]}"))
    return cleaned


# --- output ---------------------------------------------------------------------------------------------------------


def _report(inspection: Inspection, pings: PingCheck | None) -> dict[str, Any]:
    return {
        "primary": inspection.primary,
        "secondary": inspection.secondary,
        "queues": [_queue(queue) for queue in inspection.queues],
        "missing": list(inspection.missing),
        "extras": [_queue(queue) for queue in inspection.extras],
        "orphans": [_queue(queue) for queue in inspection.orphans],
        "pings": None
        if pings is None
        else {"visibility": str(pings.visibility), "detail": pings.detail, "advice": pings.advice},
        "problems": inspection.problems,
    }


def _queue(queue: FoundQueue) -> dict[str, Any]:
    depth = queue.depth
    return {
        "path": queue.path,
        "messages": depth.active,
        "dead_lettered": depth.dead_lettered,
        "other": depth.other,
        "differences": [difference._asdict() for difference in queue.differences],
    }


def _print(inspection: Inspection, pings: PingCheck | None) -> None:
    from rich.table import Table  # noqa: PLC0415 - slow, and not needed with --json

    shown = console()
    table = Table("backlog queue", "what", "messages", "dead-lettered", "other", "differs in")
    for what, queues in (("used", inspection.queues), ("extra", inspection.extras), ("orphan", inspection.orphans)):
        for queue in queues:
            depth = queue.depth
            differs = "\n".join(f"{d.property}: {d.found}, not {d.wanted}" for d in queue.differences)
            counts = (str(depth.active), str(depth.dead_lettered), str(depth.other))
            table.add_row(queue.path, what, *counts, differs or "-")
    for path in inspection.missing:
        table.add_row(path, "missing", "", "", "", "")
    shown.print(table)
    if inspection.orphans:
        shown.print("Orphans belong to another primary. --clean never removes them: applications may use them.")
    if pings is not None:
        shown.print(f"pings are {pings.visibility} on the primary: {pings.detail}. {pings.advice}")
    for problem in inspection.problems:
        shown.print(f"- {problem}", soft_wrap=True)
    shown.print("problems were found" if inspection.problems else "all is well")
