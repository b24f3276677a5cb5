"""`twinbus drill`: force a failover and a restore of one entity, and print each event with its time (S11)."""

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
from twinbus.cli.connections import Count, Primary, PrimaryName, Secondary, Seconds, State
from twinbus.cli.errors import ATTENTION, Debug, WrongUsageError, errors_reported
from twinbus.cli.network import network_options
from twinbus.errors import OperatorError
from twinbus.printable import printable

if TYPE_CHECKING:
    from twinbus.pairing import Drill, DrillMoment, SendAvailabilityOptions


@network_options
def drill(
    context: typer.Context,
    primary: Primary,
    secondary: Secondary,
    entity: Annotated[
        str | None,
        typer.Option(help="The queue or topic. With --hold or --release: all entities, if it is left out."),
    ] = None,
    messages: Annotated[int, typer.Option(min=1, help="Messages to send before, during and after the failover.")] = 1,
    by_ping: Annotated[
        bool, typer.Option("--by-ping", help="Let a ping restore the entity instead of forcing it.")
    ] = False,
    leave: Annotated[bool, typer.Option("--leave", help="Leave the diverted messages to the syphon.")] = False,
    assume: Annotated[
        bool, typer.Option("--assume", help="Do not create backlog queues: no Manage right is needed.")
    ] = False,
    hold: Annotated[
        bool, typer.Option("--hold", help="Hold the failover in the shared state until --release. Sends nothing.")
    ] = False,
    release: Annotated[bool, typer.Option("--release", help="End a hold in the shared state. Sends nothing.")] = False,
    state: State = None,
    count: Count = 10,
    primary_name: PrimaryName = None,
    seconds: Seconds = 10.0,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: one object with every moment.")] = False,
    debug: Debug = False,
) -> None:
    """Rehearse a failover: fail one entity over and restore it.

    Only this process fails over; other applications are not affected.

    The entity's receivers get messages marked twinbus-drill. Diverted ones are removed from the backlog again.

    With --hold or --release there is no drill. They need --state, and affect other processes:

    --hold makes every process that pairs with this state from now on divert. A syphon with this state delivers nothing
    to what is held. A process that is paired already and healthy does not look again: call force_failover(hold=True)
    in it, or restart it.

    --release ends that. Processes that hold the failover return to the primary within their ping interval.

    Exit code: 0 if everything went as expected, 3 if not, 1 if the drill could not run.

    Examples:
      twinbus drill --entity orders
      twinbus drill --entity orders --by-ping --messages 10 --yes
      twinbus drill --hold --entity orders --state /var/lib/twinbus/state
      twinbus drill --release --entity orders --state /var/lib/twinbus/state
    """
    with errors_reported(debug=debug):
        connections.require_two_namespaces(primary, secondary)
        if hold or release:
            if hold and release:
                raise WrongUsageError("--hold and --release exclude each other", "Give one of them.")
            if state is None:
                raise WrongUsageError(
                    f"--{'hold' if hold else 'release'} needs --state: other processes learn of a hold only there",
                    "Give the application's option `state`: its folder, or `secondary`.",
                )
            _set_hold(primary, secondary, state, entity, primary_name, seconds, hold=hold, yes=yes, json=json)
            return
        if entity is None:
            raise WrongUsageError("a drill needs --entity", "Name a queue or topic of the primary.")
        if not yes and not json:
            asyncio.run(connections.refuse_missing_on_primary(primary, entity, seconds))
            effect = f"Receivers of {printable(entity)} will get {2 * messages} messages of the drill."
            typer.confirm(f"{effect} Continue?", abort=True)
        # The pair's log records are dropped, because the drill prints the same events.
        logging.getLogger("twinbus").addHandler(logging.NullHandler())
        options = _options(context.obj, count, primary_name, seconds, by_ping=by_ping, assume=assume)
        with connections.provisioning_explained():
            done = asyncio.run(_run(primary, secondary, entity, messages, options, leave=leave, quiet=json))
        if json:
            moments = [{"after": round(moment.after, 3), "what": moment.what} for moment in done.moments]
            typer.echo(json_text.dumps({"entity": entity, "as_meant": done.as_meant, "moments": moments}))
        else:
            typer.echo("everything went as expected" if done.as_meant else "something did not go as expected")
        if not done.as_meant:
            raise typer.Exit(ATTENTION)


def _options(
    settings: Path | None, count: int, primary_name: str | None, seconds: float, *, by_ping: bool, assume: bool
) -> SendAvailabilityOptions:
    """Return the application's options from settings file and environment. Options of this verb replace them."""
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
        # A drill is about this process alone: it neither follows nor changes what processes share.
        state=None,
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

    async with (
        connections.aio_client(primary, side="primary") as one,
        connections.aio_client(secondary, side="secondary") as other,
    ):
        return await run_drill(
            one,
            other,
            entity,
            messages=messages,
            options=options,
            leave=leave,
            tell=_ignore if quiet else _print,
        )


def _set_hold(
    primary: str,
    secondary: str,
    state: str,
    entity: str | None,
    primary_name: str | None,
    seconds: float,
    *,
    hold: bool,
    yes: bool,
    json: bool,
) -> None:
    """Write a hold, or its end, to the shared state (S15)."""
    from twinbus.pairing import LONGEST_PATH, StateLocation  # noqa: PLC0415 - slow

    if entity is not None and not 0 < len(entity.strip("/")) <= LONGEST_PATH:
        raise WrongUsageError(
            f"--entity {printable(entity[:30])!r} is no path of a queue or topic",
            f"Give 1 to {LONGEST_PATH} characters. Without --entity, all entities are meant.",
        )
    name = connections.backlog_name(primary, primary_name)
    which = "all entities" if entity is None else printable(entity)
    if not yes and not json:
        effect = "will divert to the backlog" if hold else "will return to the primary"
        typer.confirm(f"Processes with this state {effect}: {which} of {name}. Continue?", abort=True)
    is_new = StateLocation.of(state, name).is_missing()
    if is_new and not hold:
        raise OperatorError(
            f"the folder {state} does not exist: nothing is held there",
            "Give the folder that the applications have as their option `state`.",
        )
    held = asyncio.run(_write_hold(secondary, state, name, entity, seconds, hold=hold))
    if json:
        typer.echo(json_text.dumps({"entity": entity, "hold": hold, "state": state, "held": held}))
        return
    typer.echo(f"{which} of {name}: {'held' if hold else 'released'} in {printable(state)}")
    if is_new:
        typer.echo("note: the folder did not exist. Only processes with the same `state` learn of the hold.", err=True)
    typer.echo(f"held there now: {printable(', '.join(held)) if held else 'nothing'}")


async def _write_hold(
    secondary: str, state: str, name: str, entity: str | None, seconds: float, *, hold: bool
) -> list[str]:
    """Write the change, and return what is held after it."""
    async with connections.shared_state(state, name, secondary, seconds) as shared:
        done = False
        try:
            await (shared.hold(entity) if hold else shared.release(entity))
            done = True
            known = (await shared.read()).state
        except Exception as error:
            what = "was changed, but cannot be read" if done else "was not changed"
            raise OperatorError(
                f"the shared state in {state} {what}: {str(error) or type(error).__name__}",
                "A folder must be writable. For `secondary`: `twinbus provision --state secondary` creates its queue, "
                "and the key needs the Send and Listen rights.",
            ) from error
    return list(known.held_names())


def _print(moment: DrillMoment) -> None:
    typer.echo(printable(f"{moment.after:8.3f} s  {moment.what}"))


def _ignore(_: DrillMoment) -> None:
    pass
