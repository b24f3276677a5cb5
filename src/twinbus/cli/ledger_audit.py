"""`twinbus ledger audit`: compare a ledger with the backlog queues, and print what is missing there.

`twinbus syphon --drain` and `twinbus ledger reconcile --audit` use the functions of this module.
"""

from __future__ import annotations

import asyncio
import json as json_text
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from twinbus.cli import connections
from twinbus.cli.connections import NOT_TYPED, PrimaryName, Secondary, Seconds
from twinbus.cli.errors import Debug, errors_reported
from twinbus.cli.ledger import (
    LISTED,
    DeadAfter,
    ledger_readable,
    listed_messages,
    messages_as_json,
    refuse_no_ledger,
    refuse_unwritable,
    report,
    show,
    show_message,
)

if TYPE_CHECKING:
    from twinbus.ledger import Ledger, MessageKey
    from twinbus.syphon import AuditResult

_SHOWN: Final = 20
# Words of the audit that are not words of the balance, in the order in which they are printed.
AUDITED: Final = {
    "there": "seen where the ledger has them",
    "absent": "not seen where the ledger has them",
    "come_again": "delivered or stored twice: a syphon will deliver them again",
    "unconfirmed": "seen, but never reported safe",
    "found": "seen; before, the ledger did not know where they were",
    "moving": "on the way while the audit ran: the next audit decides",
    "not_looked_at": "not seen; they may be where the audit cannot look",
}
_LISTED: Final = ("absent", "come_again", "unconfirmed", "not_looked_at")
OptionalPrimary = Annotated[
    str | None,
    typer.Option(
        "--primary",
        envvar="TWINBUS_PRIMARY_CONNECTION_STRING",
        show_envvar=True,
        show_default="as named in the ledger",
        help=f"Connection string of the primary. Only its name is used. {NOT_TYPED}",
    ),
]
Wait = Annotated[
    float,
    typer.Option(
        "--wait", min=0, help="Seconds from the first look to the second, if longer than the queues' lock duration."
    ),
]


def audit(
    directory: Annotated[Path, typer.Argument(help="Directory of the ledger.", show_default=False)],
    secondary: Secondary,
    primary: OptionalPrimary = None,
    primary_name: PrimaryName = None,
    wait: Wait = 0.0,
    dead_after: DeadAfter = 900.0,
    seconds: Seconds = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every id.")] = False,
    debug: Debug = False,
) -> None:
    """Compare the ledger with the backlog queues. Peeks at every message there, and moves none.

    Senders and syphons may go on meanwhile.

    A message is lost if the ledger has it in the backlog and two looks do not show it.

    The looks are one lock duration apart. There is no second look if the first look agrees with the ledger.

    Records in the ledger what it saw. For ledgers that fit in memory.

    The first line is the verdict: proven, proven with possible duplicates, not proven, or lost.

    Exit code: 0 if proven, also with possible duplicates; 3 if not proven; 1 if a message is lost or on an error.

    Examples:
      twinbus ledger audit ./ledger
      twinbus ledger audit ./ledger --json
    """
    with errors_reported(debug=debug):
        if primary is not None:
            connections.require_two_namespaces(primary, secondary)
        name = None if primary is None and primary_name is None else _name(primary, primary_name)
        found = run_audit(directory, secondary, name, wait, seconds, timedelta(seconds=dead_after))
        if json:
            typer.echo(json_text.dumps({**balance_json(found), "audit": audit_json(found)}))
        else:
            show_balance(found)
            show_audit(found)
        if code := found.judgement.exit_code:
            raise typer.Exit(code)


def _name(primary: str | None, given: str | None) -> str:
    if given is not None and primary is None:
        from twinbus.pairing import SendAvailabilityOptions  # noqa: PLC0415 - slow

        return SendAvailabilityOptions(primary_name=given).primary_name or given
    assert primary is not None
    return connections.backlog_name(primary, given)


def run_audit(
    directory: Path,
    secondary: str,
    name: str | None = None,
    wait: float = 0.0,
    seconds: float = 10.0,
    silence: timedelta | None = None,
) -> AuditResult:
    """Audit a ledger. Raises OperatorError if there is no ledger or the secondary does not answer."""
    from twinbus.ledger import Ledger, Role  # noqa: PLC0415 - slow

    with ledger_readable(directory):
        refuse_no_ledger(directory)
        refuse_unwritable(directory)
        with Ledger(directory, Role.AUDIT) as ledger:
            return asyncio.run(audited(ledger, secondary, name, wait, seconds, announce, silence))


async def audited(
    ledger: Ledger,
    secondary: str,
    name: str | None,
    wait: float,
    seconds: float,
    second_look: Callable[[float], None],
    silence: timedelta | None = None,
) -> AuditResult:
    """Audit the ledger of an open writer. `name` is the primary's name; None if only the ledger knows it.

    Calls `second_look` with the seconds until the second look, if one is needed. A writer of another host counts as
    dead after `silence`.
    """
    from twinbus.backlog import primary_name  # noqa: PLC0415 - slow
    from twinbus.connect import ServiceBusError, connect  # noqa: PLC0415
    from twinbus.ledger import SILENCE  # noqa: PLC0415
    from twinbus.pairing import OperationRecorder  # noqa: PLC0415
    from twinbus.syphon import Audit, AuditedQueues, find_audited_queues  # noqa: PLC0415

    space = primary_name(connections.endpoint("secondary", secondary))

    async def find_queues(names: Collection[str]) -> AuditedQueues:
        administration = connections.aio_administration(secondary, seconds)
        administration.recorder = OperationRecorder(ledger, space)
        try:
            found = await find_audited_queues(administration, names)
        except Exception as error:
            raise connections.connection_error("secondary", error) from error
        finally:
            await administration.close()
        return replace(found, lock_duration=max(found.lock_duration, timedelta(seconds=wait)))

    async with connect(secondary, timeout=seconds) as bus:
        try:
            return await Audit(
                bus, ledger, find_queues, secondary=space, primary=name or "", silence=silence or SILENCE
            ).run(second_look)
        except ServiceBusError as error:
            raise connections.connection_error("secondary", error) from error


def announce(seconds: float) -> None:
    """Print that a second look follows."""
    typer.echo(f"the backlog and the ledger differ; second look in {seconds:g} s", err=True)


# --- printing --------------------------------------------------------------------------------------------------------


def balance_json(found: AuditResult) -> dict[str, Any]:
    return report(found.sums, listed_messages(found.balance), list(found.missing))


def show_balance(found: AuditResult) -> None:
    show(found.sums, listed_messages(found.balance), list(found.missing))


def audit_json(found: AuditResult) -> dict[str, Any]:
    """Return what the audit saw as a dict for JSON."""
    return {
        "queues": list(found.queues),
        "looks": found.looks,
        "peeks": found.peeks,
        "seconds": round(found.seconds, 3),
        "seen": found.look.messages,
        "dead_letters": found.look.dead_letters,
        **{name: getattr(found.findings, name).total() for name in AUDITED},
        "messages": {name: _rows(getattr(found.findings, name)) for name in _LISTED},
    }


def drain_audit(found: AuditResult) -> dict[str, Any]:
    """Return what the audit after a drain found: the counts, the lost messages, and a text for the summary.

    The text and the list have only messages that this audit did not see. They do not repeat an earlier loss.
    """
    findings = found.findings
    lost = Counter({message: min(count, findings.absent[message]) for message, count in found.balance.lost.items()})
    absent, gone = findings.absent.total(), (+lost).total()
    text = "nothing is missing"
    if gone:
        text = f"{gone:,} lost"
    elif absent:
        why = "entries are missing from the ledger" if found.missing else "they may have been delivered"
        text = f"{absent:,} not found in the backlog; not proven: {why}"
    return {**audit_json(found), "lost": _rows(+lost), "text": text}


def show_lost(audited: Mapping[str, Any]) -> None:
    """Print the lost messages of `drain_audit`."""
    typer.echo(f"\n{LISTED['lost']}")
    for one in audited["lost"]:
        show_message(((one["destination"], one["id"]), one["count"]))


def show_audit(found: AuditResult) -> None:
    """Print what the audit saw as text."""
    looks = "one look" if found.looks == 1 else f"{found.looks} looks"
    total = found.look.messages + found.look.dead_letters
    messages = "1 message" if total == 1 else f"{total:,} messages"
    typer.echo(f"\naudit: {messages} in {len(found.queues)} backlog queues, {looks}, {found.peeks:,} peeks")
    for name, label in AUDITED.items():
        counted: Counter[MessageKey] = getattr(found.findings, name)
        if not counted and name != "there":
            continue
        typer.echo(f"{counted.total():>12,}  {label}")
        listed = sorted(counted.items()) if name in _LISTED else []
        # The balance lists every lost message. Here all absent ones are listed too if they are not called lost.
        shown = listed if name == "absent" and found.missing else listed[:_SHOWN]
        for message in shown:
            show_message(message, indent=14)
        if len(listed) > len(shown):
            typer.echo(f"{'':14}… and {len(listed) - len(shown):,} more; --json lists them all")


def _rows(counted: Counter[MessageKey]) -> list[dict[str, Any]]:
    return messages_as_json(sorted(counted.items()))
