"""`twinbus ledger audit`: compare a ledger with the backlog queues, and print what is missing there.

`twinbus syphon --drain` and `twinbus ledger reconcile --audit` use the functions of this module.
"""

from __future__ import annotations

import asyncio
import json as json_text
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from twinbus.cli import connections
from twinbus.cli.connections import NOT_TYPED, PrimaryName, Secondary, Seconds
from twinbus.cli.engine import Engine, Master, refuse_unusable_tables, spark_session
from twinbus.cli.errors import Debug, WrongUsageError, errors_reported
from twinbus.cli.ledger import (
    LISTED,
    ledger_readable,
    messages_as_json,
    refuse_no_ledger,
    refuse_unwritable,
    report,
    show,
    show_message,
)
from twinbus.cli.network import credential_name, network_of, network_options
from twinbus.errors import OperatorError
from twinbus.storage_location import StorageLocation

if TYPE_CHECKING:
    from twinbus.ledger import Ledger
    from twinbus.pipeline import Tables
    from twinbus.syphon import AuditedQueues, AuditSummary

_SHOWN: Final = 20
# The last line of a Python traceback: the class of the error and the text of the error.
_RAISED: Final = re.compile(r"^(?:\w+\.)*\w+(?:Error|Exception): (.+)$", re.MULTILINE)
# Words of the audit that are not words of the balance, in the order in which they are printed.
AUDITED: Final = {
    "there": "seen where the ledger has them",
    "absent": "not seen where the ledger has them",
    "come_again": "delivered or stored twice: a syphon will deliver them again",
    "unconfirmed": "seen, but never reported safe",
    "found": "seen; before, the ledger did not know where they were",
    "redirected": "resubmitted for another destination, without a record until now: the next audit decides",
    "moving": "on the way while the audit ran: the next audit decides",
    "not_looked_at": "not seen; they may be where the audit cannot look",
}
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
AuditDeadAfter = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Seconds of silence after which a writer of another host counts as dead.",
        show_default="900; in an audit never, if only copies of its segments are here",
    ),
]
Wait = Annotated[
    float,
    typer.Option(
        "--wait", min=0, help="Seconds from the first look to the second, if longer than the queues' lock duration."
    ),
]


@network_options
def audit(
    directory: Annotated[Path, typer.Argument(help="Directory of the ledger.", show_default=False)],
    secondary: Secondary,
    primary: OptionalPrimary = None,
    primary_name: PrimaryName = None,
    wait: Wait = 0.0,
    dead_after: AuditDeadAfter = None,
    seconds: Seconds = 10.0,
    engine: Annotated[
        Engine, typer.Option(help="native: in this process. spark: on Spark, for ledgers that do not fit in memory.")
    ] = Engine.NATIVE,
    tables: Annotated[
        Path | None,
        typer.Option(
            help="With --engine spark: directory that keeps the tables, so that the next audit reads only new entries. "
            "On a cluster: one that all machines share.",
            show_default="a temporary folder",
        ),
    ] = None,
    master: Master = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every id.")] = False,
    debug: Debug = False,
) -> None:
    """Compare the ledger with the backlog queues. Peeks at every message there, and moves none.

    Senders and syphons may go on meanwhile.

    A message is lost if the ledger has it in the backlog and two looks do not show it.

    The looks are one lock duration apart. There is no second look if the first look agrees with the ledger.

    Records in the ledger what it saw. Needs memory for each message of the ledger; with --engine spark it does not.

    The first line is the verdict: proven, proven with possible duplicates, not proven, or lost.

    Exit code: 0 if proven, also with possible duplicates; 3 if not proven; 1 if a message is lost or on an error.

    Examples:
      twinbus ledger audit ./ledger
      twinbus ledger audit ./ledger --json
      twinbus ledger audit ./ledger --engine spark --tables ./tables
    """
    with errors_reported(debug=debug):
        if engine is Engine.NATIVE and (tables is not None or master is not None):
            raise WrongUsageError("--tables and --master need --engine spark", "Add it, or leave them out.")
        if primary is not None:
            connections.require_two_namespaces(primary, secondary)
        name = None if primary is None and primary_name is None else _name(primary, primary_name)
        silence = None if dead_after is None else timedelta(seconds=dead_after)
        if engine is Engine.SPARK:
            refuse_no_ledger(directory)
            with _opened_tables(tables, master) as place:
                found = run_audit_on_spark(directory, secondary, place, name, wait, seconds, silence)
        else:
            found = run_audit(directory, secondary, name, wait, seconds, silence)
        if json:
            typer.echo(json_text.dumps({**balance_json(found), "audit": audit_json(found)}))
        else:
            show_balance(found)
            show_audit(found)
        if code := found.judgement.exit_code:
            raise typer.Exit(code)


@contextmanager
def _opened_tables(tables: Path | None, master: str | None) -> Iterator[Tables]:
    """Yield the tables in this folder, or in a temporary folder."""
    with TemporaryDirectory(prefix="twinbus-audit-") if tables is None else nullcontext(tables) as folder:
        refuse_unusable_tables(StorageLocation(str(folder)))
        spark = spark_session("twinbus ledger audit", master)
        from twinbus.pipeline import Tables  # noqa: PLC0415 - needs Spark

        yield Tables(spark, folder)


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
) -> AuditSummary:
    """Audit a ledger in this process. Raises OperatorError if there is no ledger or the secondary does not answer."""
    with _audit_writer(directory) as ledger:
        return asyncio.run(audited(ledger, secondary, name, wait, seconds, announce, silence))


def run_audit_on_spark(
    directory: Path,
    secondary: str,
    tables: Tables,
    name: str | None = None,
    wait: float = 0.0,
    seconds: float = 10.0,
    silence: timedelta | None = None,
) -> AuditSummary:
    """Audit a ledger on Spark, with these tables. Raises OperatorError as `run_audit` does."""
    from twinbus.connect import ServiceBusError  # noqa: PLC0415 - slow
    from twinbus.pipeline import SparkAudit  # noqa: PLC0415 - needs the extra `spark`

    with _audit_writer(directory) as ledger:

        def find_queues(names: Collection[str]) -> AuditedQueues:
            return asyncio.run(_found_queues(ledger, secondary, names, wait, seconds))

        made = SparkAudit(
            tables,
            ledger,
            find_queues,
            secondary,
            secondary=_space(secondary),
            primary=name or "",
            network=network_of("secondary"),
            credential=credential_name(),
            timeout=seconds,
            silence=silence,
        )
        try:
            with spark_errors_explained():
                return made.run(announce)
        except ServiceBusError as error:
            raise connections.connection_error("secondary", error) from error


@contextmanager
def spark_errors_explained() -> Iterator[None]:
    """Raise the cause of a failed stream, without the tracebacks that Spark adds to its text."""
    from pyspark.errors import StreamingQueryException  # noqa: PLC0415 - needs the extra `spark`

    try:
        yield
    except StreamingQueryException as error:
        raised = _RAISED.findall(str(error))
        if not raised:
            raise
        raise OperatorError(f"the ledger could not be read into the tables: {raised[-1]}") from error


@contextmanager
def _audit_writer(directory: Path) -> Iterator[Ledger]:
    from twinbus.ledger import Ledger, Role  # noqa: PLC0415 - slow

    with ledger_readable(directory):
        refuse_no_ledger(directory)
        refuse_unwritable(directory)
        with Ledger(directory, Role.AUDIT) as ledger:
            yield ledger


async def audited(
    ledger: Ledger,
    secondary: str,
    name: str | None,
    wait: float,
    seconds: float,
    second_look: Callable[[float], None],
    silence: timedelta | None = None,
) -> AuditSummary:
    """Audit the ledger of an open writer. `name` is the primary's name; None if only the ledger knows it.

    Calls `second_look` with the seconds until the second look, if one is needed. A writer of another host counts as
    dead after `silence`.
    """
    from twinbus.connect import ServiceBusError  # noqa: PLC0415 - slow
    from twinbus.syphon import Audit  # noqa: PLC0415

    async def find_queues(names: Collection[str]) -> AuditedQueues:
        return await _found_queues(ledger, secondary, names, wait, seconds)

    async with connections.access(secondary, side="secondary").connect(timeout=seconds) as bus:
        try:
            made = Audit(
                bus,
                ledger,
                find_queues,
                secondary=_space(secondary),
                primary=name or "",
                silence=silence,
            )
            return (await made.run(second_look)).summary
        except ServiceBusError as error:
            raise connections.connection_error("secondary", error) from error


def _space(secondary: str) -> str:
    """Return the name of the secondary in the ledger."""
    from twinbus.backlog import primary_name  # noqa: PLC0415 - slow

    return primary_name(connections.endpoint("secondary", secondary))


async def _found_queues(
    ledger: Ledger, secondary: str, names: Collection[str], wait: float, seconds: float
) -> AuditedQueues:
    """Return the backlog queues of the primaries with these names. The requests are recorded in the ledger (M1)."""
    from twinbus.pairing import OperationRecorder  # noqa: PLC0415 - slow
    from twinbus.syphon import find_audited_queues  # noqa: PLC0415

    administration = connections.aio_administration(secondary, seconds)
    administration.recorder = OperationRecorder(ledger, _space(secondary))
    try:
        found = await find_audited_queues(administration, names)
    except Exception as error:
        raise connections.connection_error("secondary", error) from error
    finally:
        await administration.close()
    return replace(found, lock_duration=max(found.lock_duration, timedelta(seconds=wait)))


def announce(seconds: float) -> None:
    """Print that a second look follows."""
    typer.echo(f"the backlog and the ledger differ; second look in {seconds:g} s", err=True)


# --- printing --------------------------------------------------------------------------------------------------------


def balance_json(found: AuditSummary) -> dict[str, Any]:
    return report(found.sums, found.listed, list(found.missing))


def show_balance(found: AuditSummary) -> None:
    show(found.sums, found.listed, list(found.missing))


def audit_json(found: AuditSummary) -> dict[str, Any]:
    """Return what the audit saw as a dict for JSON."""
    return {
        "queues": list(found.queues),
        "looks": found.looks,
        "peeks": found.peeks,
        "seconds": round(found.seconds, 3),
        "seen": found.seen,
        "dead_letters": found.dead_letters,
        **{name: found.counts[name] for name in AUDITED},
        "messages": {name: messages_as_json(messages) for name, messages in found.messages.items()},
    }


def drain_audit(found: AuditSummary) -> dict[str, Any]:
    """Return what the audit after a drain found: the verdict on the ledger (L6), the counts, the lost messages, and a
    text for the summary. The text has the verdict, and what the audit saw that differs from the ledger.
    """
    judged = found.judgement
    differences = [
        f"{found.counts[name]:,} {label}." for name, label in AUDITED.items() if found.counts[name] and name != "there"
    ]
    return {
        "verdict": judged.verdict,
        "sentence": judged.sentence,
        **audit_json(found),
        "lost": messages_as_json(found.listed["lost"]),
        "text": " ".join([str(judged), *differences]),
    }


def no_drain_audit(why: str, next_step: str) -> dict[str, Any]:
    """Return the same for a drain without an audit: no verdict, and a text with the reason and the next step."""
    return {"verdict": None, "lost": [], "text": f"not made: {why.rstrip('.')}. {next_step}"}


def show_lost(audited: Mapping[str, Any]) -> None:
    """Print the lost messages of `drain_audit`."""
    typer.echo(f"\n{LISTED['lost']}")
    for one in audited["lost"]:
        show_message(((one["destination"], one["id"]), one["count"]))


def show_audit(found: AuditSummary) -> None:
    """Print what the audit saw as text."""
    looks = "one look" if found.looks == 1 else f"{found.looks} looks"
    messages = "1 message" if found.seen == 1 else f"{found.seen:,} messages"
    dead_letters = "1 dead letter" if found.dead_letters == 1 else f"{found.dead_letters:,} dead letters"
    queues = "1 backlog queue" if len(found.queues) == 1 else f"{len(found.queues)} backlog queues"
    typer.echo(f"\naudit: {messages} and {dead_letters} in {queues}, {looks}, {found.peeks:,} peeks")
    for name, label in AUDITED.items():
        if not found.counts[name] and name != "there":
            continue
        typer.echo(f"{found.counts[name]:>12,}  {label}")
        listed = found.messages.get(name, ())
        # The balance lists every lost message. Here all absent ones are listed too if they are not called lost.
        shown = listed if name == "absent" and found.missing else listed[:_SHOWN]
        for message in shown:
            show_message(message, indent=14)
        if len(listed) > len(shown):
            typer.echo(f"{'':14}… and {len(listed) - len(shown):,} more; --json lists them all")
