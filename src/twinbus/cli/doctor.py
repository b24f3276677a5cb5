"""`twinbus doctor`: check both namespaces and the backlog of a pair (P6, Y1), and whether the primary hides pings (G3).

`doctor_checks` gathers the facts; `twinbus.pairing.findings` decides what the facts mean.
"""

from __future__ import annotations

import asyncio
import json as json_text
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from twinbus.cli import connections
from twinbus.cli.connections import Count, OptionalSecondary, Primary, PrimaryName, Seconds, State
from twinbus.cli.errors import ATTENTION, BROKEN, Debug, WrongUsageError, errors_reported
from twinbus.cli.network import network_options
from twinbus.cli.spinner import spinner
from twinbus.cli.terminal import console
from twinbus.errors import OperatorError
from twinbus.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from twinbus.cli.doctor_checks import DoctorChecks
    from twinbus.pairing import (
        Administration,
        Finding,
        FoundQueue,
        Inspection,
        LedgerFolderFacts,
        PrimaryFacts,
        SecondaryFacts,
        StateFacts,
    )

_CODES: Final = {"broken": BROKEN, "attention": ATTENTION, None: 0}
_COLOURS: Final = {"broken": "bold red", "attention": "bold yellow", "note": "dim"}

_Entities = Annotated[
    list[str] | None,
    typer.Option("--entity", help="An entity that applications send to: test it on the primary; may be repeated."),
]
_Ping = Annotated[bool, typer.Option(help="Test in a scratch queue of the primary whether it hides pings.")]
_PingEntity = Annotated[
    str | None, typer.Option(help="Test in this queue of the primary instead, if no queue may be created.")
]
_Ledger = Annotated[Path | None, typer.Option(help="Directory of a ledger: look at it, too.", show_default="none")]
_Wait = Annotated[float, typer.Option(min=0, help="Seconds between two looks at messages that wait.")]
_Conformance = Annotated[
    bool, typer.Option("--conformance", help="Compare the primary with what Twinbus assumes, in scratch entities.")
]
_Clean = Annotated[bool, typer.Option("--clean", help="Remove empty extra queues, after a confirmation.")]
_Yes = Annotated[bool, typer.Option("--yes", help="With --clean: do not ask for confirmation.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@network_options
def doctor(
    primary: Primary,
    secondary: OptionalSecondary = None,
    count: Count = 10,
    primary_name: PrimaryName = None,
    entity: _Entities = None,
    ping: _Ping = True,
    ping_entity: _PingEntity = None,
    ledger: _Ledger = None,
    state: State = None,
    wait: _Wait = 5.0,
    conformance: _Conformance = False,
    clean: _Clean = False,
    yes: _Yes = False,
    seconds: Seconds = 10.0,
    json: _Json = False,
    debug: Debug = False,
) -> None:
    """Check a pair: namespaces, rights, queues, messages.

    Each finding has a cause and a next step. Changes nothing without --clean, apart
    from a scratch queue for --ping, which is removed again.

    With --conformance, make scratch entities on the primary instead, and compare how they behave with what Twinbus
    assumes. Needs no secondary. The scratch entities are removed at the end.

    Exit code: 0 if all is well, 3 if something needs attention, 4 if the pair is broken, 1 if the check failed.

    Examples:
      twinbus doctor
      twinbus doctor --entity orders --ledger ./ledger --state ./state
      twinbus doctor --count 5 --clean     # remove empty queues beyond five
      twinbus doctor --no-ping --json
      twinbus doctor --conformance
    """
    with errors_reported(debug=debug):
        if json and clean and not yes:
            raise WrongUsageError("--clean asks for confirmation, and --json cannot ask", "Add --yes.")
        if conformance:
            if clean:
                raise WrongUsageError("--conformance and --clean do not go together", "Run two commands.")
            connections.endpoint("primary", primary)
            from twinbus.cli.conformance import check_conformance  # noqa: PLC0415 - slow

            check_conformance(primary, seconds, json=json)
            return
        if secondary is None:
            raise WrongUsageError("--secondary is missing", "Set TWINBUS_SECONDARY_CONNECTION_STRING.")
        connections.require_two_namespaces(primary, secondary)
        name = connections.backlog_name(primary, primary_name)
        from twinbus.cli.doctor_checks import DoctorChecks, ledger_facts, state_facts  # noqa: PLC0415 - slow
        from twinbus.pairing import findings_of, overall  # noqa: PLC0415

        checks = DoctorChecks(primary, secondary, name, count, seconds, wait)
        book = None if ledger is None else ledger_facts(ledger)
        with connections.administration(secondary, seconds) as administration:
            with spinner("examining the pair"):
                facts = checks.inspected(administration)
                ours, theirs = asyncio.run(_examined(checks, facts, entity or (), ping_entity, ping=ping))
                shared = None if state is None else asyncio.run(state_facts(state, name, secondary, seconds))
            found = findings_of(ours, theirs, book, shared)
            worst = overall(found)
            report = _report(name, ours, theirs, book, shared, found)
            if not json:
                _print(name, ours, theirs, found)
            listed = theirs.inspection if theirs.management is None else None
            if clean and listed is not None:
                report["cleaned"] = _clean(administration, listed, count, yes=yes, quiet=json)
        if json:
            typer.echo(json_text.dumps(report))
        if clean and listed is None:
            raise OperatorError("nothing was cleaned: the queues could not be listed", "The findings say why.")
        if worst is not None:
            raise typer.Exit(_CODES[worst])


async def _examined(
    checks: DoctorChecks, facts: SecondaryFacts, entities: list[str] | tuple[()], ping_entity: str | None, *, ping: bool
) -> tuple[PrimaryFacts, SecondaryFacts]:
    ours, theirs = await asyncio.gather(checks.primary_facts(entities), checks.looked_at(facts))
    if entities and ours.failure is None:
        ours = await checks.examined_entities(ours)
    if ping and ours.failure is None:
        ours = await checks.pings(ours, ping_entity)
    return ours, theirs


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


def _report(
    name: str,
    primary: PrimaryFacts,
    secondary: SecondaryFacts,
    ledger: LedgerFolderFacts | None,
    state: StateFacts | None,
    findings: tuple[Finding, ...],
) -> dict[str, Any]:
    from twinbus.pairing import Severity, overall  # noqa: PLC0415 - slow

    inspection, pings = secondary.inspection, primary.pings
    return {
        "primary": name,
        "secondary": secondary.host if inspection is None else inspection.secondary,
        "state": overall(findings) or "well",
        "findings": [one._asdict() for one in findings],
        "queues": [] if inspection is None else [_queue(queue) for queue in inspection.queues],
        "missing": [] if inspection is None else list(inspection.missing),
        "extras": [] if inspection is None else [_queue(queue) for queue in inspection.extras],
        "orphans": [] if inspection is None else [_queue(queue) for queue in inspection.orphans],
        "oldest_seconds": max((look.age for look in secondary.looks if look.age is not None), default=None),
        "clock_offset_seconds": secondary.clock,
        "syphons": None if ledger is None else list(ledger.syphons),
        "pings": None
        if pings is None
        else {"visibility": str(pings.visibility), "detail": pings.detail, "advice": pings.advice},
        "problems": [f"{one.what} {one.next_step}" for one in findings if one.severity is not Severity.NOTE],
        "held": None if state is None else list(state.held),
    }


def _queue(queue: FoundQueue) -> dict[str, Any]:
    depth = queue.depth
    return {
        "path": queue.path,
        "messages": depth.active,
        "dead_lettered": depth.dead_lettered,
        "other": depth.other,
        "size_bytes": queue.size,
        "max_bytes": queue.capacity,
        "differences": [difference._asdict() for difference in queue.differences],
    }


def _print(name: str, primary: PrimaryFacts, secondary: SecondaryFacts, findings: tuple[Finding, ...]) -> None:
    from rich.text import Text  # noqa: PLC0415 - slow, and not needed with --json

    from twinbus.pairing import overall  # noqa: PLC0415

    shown = console()
    shown.print(f"primary    {primary.host}")
    shown.print(f"secondary  {secondary.host}")
    shown.print(f"backlog    {_summary(name, secondary)}")
    if findings:
        shown.print()
        shown.print(_table(findings))
    match overall(findings):
        case None:
            text = Text("all is well", "bold green")
        case worst:
            needing = sum(one.severity != "note" for one in findings)
            text = Text(f"{worst}: {needing} finding{'' if needing == 1 else 's'}", _COLOURS[worst])
    shown.print()
    shown.print(text)


def _summary(name: str, facts: SecondaryFacts) -> str:
    found = facts.inspection
    if found is None:
        return f"unknown, of {name}"
    own = (*found.queues, *found.extras)
    depth = [sum(getattr(queue.depth, what) for queue in own) for what in ("active", "dead_lettered", "other")]
    at_least = "" if facts.counted else "at least "
    other = f", {depth[2]:,} scheduled or in transfer" if depth[2] else ""
    return f"{len(own)} queues of {name}: {at_least}{depth[0]:,} messages, {depth[1]:,} dead-lettered{other}"


def _table(findings: tuple[Finding, ...]) -> RenderableType:
    """Return the findings as a grid: severity on the left; what, why and what to do on the right."""
    from rich.table import Table  # noqa: PLC0415 - slow, and not needed with --json
    from rich.text import Text  # noqa: PLC0415

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    # A long word, such as a path, continues on the next line.
    grid.add_column(overflow="fold")
    for number, one in enumerate(findings):
        if number:
            grid.add_row("", "")
        grid.add_row(Text(one.severity, _COLOURS[one.severity]), Text(printable(one.what), "bold"))
        grid.add_row(Text("  why", "dim"), printable(one.cause))
        grid.add_row(Text("  next", "dim"), printable(one.next_step))
    return grid
