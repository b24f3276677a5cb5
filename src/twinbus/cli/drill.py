"""`twinbus drill`: a failover and a restore on purpose (S11), and what happened when. What it does is in `drilling`."""

from __future__ import annotations

import asyncio
import json as json_text
import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinbus.cli import connections
from twinbus.cli.connections import Count, Primary, PrimaryName, Secondary, Seconds
from twinbus.cli.errors import Debug, errors_reported
from twinbus.printable import printable

if TYPE_CHECKING:
    from twinbus.pairing import Drill, DrillMoment, SendAvailabilityOptions

NOT_AS_MEANT = 3


def drill(
    context: typer.Context,
    primary: Primary,
    secondary: Secondary,
    entity: Annotated[str, typer.Option(help="The queue or topic to drill.", show_default=False)],
    messages: Annotated[int, typer.Option(min=1, help="Messages sent before, while and after it is failed over.")] = 1,
    by_ping: Annotated[bool, typer.Option("--by-ping", help="Let a ping restore it instead of forcing it.")] = False,
    leave: Annotated[bool, typer.Option("--leave", help="Leave what was diverted to the syphon.")] = False,
    assume: Annotated[
        bool, typer.Option("--assume", help="The backlog queues are there: no Manage right is needed.")
    ] = False,
    count: Count = 10,
    primary_name: PrimaryName = None,
    seconds: Seconds = 10.0,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: one object with every moment.")] = False,
    debug: Debug = False,
) -> None:
    """Rehearse a failover: fail one entity over and restore it.

    In this process alone: other applications send as they did.

    Messages marked twinbus-drill reach the entity's receivers; those diverted are taken back out of the backlog.

    Ends with 0 when all went as it should, with 3 when it did not, with 1 when it could not be tried.

    Examples:
      twinbus drill --entity orders
      twinbus drill --entity orders --by-ping --messages 10 --yes
    """
    with errors_reported(debug=debug):
        connections.require_two_namespaces(primary, secondary)
        if not yes and not json:
            given = f"Receivers of {printable(entity)} will be given {2 * messages} messages of the drill."
            typer.confirm(f"{given} Go on?", abort=True)
        # What the pair logs is told as moments.
        logging.getLogger("twinbus").addHandler(logging.NullHandler())
        options = _options(context.obj, count, primary_name, seconds, by_ping=by_ping, assume=assume)
        done = asyncio.run(_run(primary, secondary, entity, messages, options, leave=leave, quiet=json))
        if json:
            moments = [{"after": round(moment.after, 3), "what": moment.what} for moment in done.moments]
            typer.echo(json_text.dumps({"entity": entity, "as_meant": done.as_meant, "moments": moments}))
        else:
            typer.echo("all went as it should" if done.as_meant else "this did not go as it should")
        if not done.as_meant:
            raise typer.Exit(NOT_AS_MEANT)


def _options(
    settings: Path | None, count: int, primary_name: str | None, seconds: float, *, by_ping: bool, assume: bool
) -> SendAvailabilityOptions:
    """The application's own options as far as the file and the environment know them."""
    from dataclasses import replace  # noqa: PLC0415 - other verbs start without it

    from twinbus.pairing import SendAvailabilityOptions  # noqa: PLC0415

    text = "" if settings is None else settings.read_text(encoding="utf-8")
    options = replace(
        SendAvailabilityOptions.from_environment(os.environ, defaults=SendAvailabilityOptions.from_file(text)),
        backlog_queue_count=count,
        primary_name=primary_name,
        try_timeout=timedelta(seconds=seconds),
        provision="assume" if assume else "create",
        on_secondary_down="raise",
        enable_syphon=False,
    )
    return replace(options, ping_interval=timedelta(seconds=1), ping_jitter=0.0) if by_ping else options


async def _run(
    primary: str,
    secondary: str,
    entity: str,
    messages: int,
    options: SendAvailabilityOptions,
    *,
    leave: bool,
    quiet: bool,
) -> Drill:
    from twinbus.pairing import run_drill  # noqa: PLC0415 - slow

    async with connections.aio_client(primary) as one, connections.aio_client(secondary) as other:
        return await run_drill(
            one,
            other,
            entity,
            messages=messages,
            options=options,
            leave=leave,
            tell=_silent if quiet else _say,
        )


def _say(moment: DrillMoment) -> None:
    typer.echo(printable(f"{moment.after:8.3f} s  {moment.what}"))


def _silent(_: DrillMoment) -> None:
    pass
