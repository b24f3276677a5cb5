"""`twinbus provision`: create the backlog queues, so that applications need no Manage right (P8)."""

from __future__ import annotations

import json as json_text
from typing import TYPE_CHECKING, Annotated

import typer

from twinbus.cli.connections import Count, Primary, PrimaryName, Secondary, Seconds, State
from twinbus.cli.errors import ATTENTION, Debug, errors_reported
from twinbus.cli.network import network_options
from twinbus.cli.spinner import spinner
from twinbus.printable import printable

if TYPE_CHECKING:
    from twinbus.pairing import Administration, Provisioned


@network_options
def provision(
    primary: Primary,
    secondary: Secondary,
    count: Count = 10,
    primary_name: PrimaryName = None,
    state: State = None,
    seconds: Seconds = 10.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Create the missing backlog queues on the secondary.

    With --state secondary, creates the queue of the shared state too.

    Does not contact the primary; only its name is used.

    Exit code: 0 if every queue exists, 3 if some are missing or would lose messages, 1 if none exists.

    Examples:
      twinbus provision
      twinbus provision --count 20 --json
    """
    with errors_reported(debug=debug):
        from twinbus.backlog import backlog_queue_paths  # noqa: PLC0415
        from twinbus.cli import connections  # noqa: PLC0415 - other verbs start without it
        from twinbus.pairing import IN_SECONDARY, provisioning_steps  # noqa: PLC0415

        connections.require_two_namespaces(primary, secondary)
        name = connections.backlog_name(primary, primary_name)
        paths = backlog_queue_paths(name, count)
        connections.endpoint("secondary", secondary)
        with connections.administration(secondary, seconds) as administration:
            with (
                connections.provisioning_explained(),
                spinner(f"creating backlog queues on {administration.namespace}"),
            ):
                done = administration.run(provisioning_steps(paths))
                if state == IN_SECONDARY:
                    done = _with_state_queue(administration, name, done)
            if json:
                _print_json(administration.namespace, done)
            else:
                _print(administration.namespace, done)
        if done.failed or done.losing:
            raise typer.Exit(ATTENTION)


def _with_state_queue(administration: Administration, name: str, done: Provisioned) -> Provisioned:
    """Create the queue of the shared state (S16), and add it to what was done."""
    from twinbus.pairing import provision_state_queue  # noqa: PLC0415

    state = provision_state_queue(administration, name)
    return done._replace(
        found=(*done.found, *state.found), created=(*done.created, *state.created), failed=(*done.failed, *state.failed)
    )


def _print_json(secondary: str, done: Provisioned) -> None:
    failed = [{"queue": cause.queue, "kind": str(cause.kind), "detail": cause.detail} for cause in done.failed]
    unsafe = [{"queue": queue, **one._asdict()} for queue, one in done.losing]
    existed = [path for path in done.found if path not in done.created]
    report = {
        "secondary": secondary,
        "created": list(done.created),
        "existed": existed,
        "failed": failed,
        "unsafe": unsafe,
    }
    typer.echo(json_text.dumps({**report, "failed": failed, "unsafe": unsafe}))


def _print(secondary: str, done: Provisioned) -> None:
    for path in done.found:
        typer.echo(f"{'created' if path in done.created else 'existed'}  {path}")
    for cause in done.failed:
        typer.echo(printable(f"failed   {cause.queue}: {cause.kind} ({cause.detail})"), err=True)
    for queue, one in done.losing:
        typer.echo(printable(f"unsafe   {queue}: {one}"), err=True)
    total = len(done.found) + len(done.failed)
    typer.echo(f"{len(done.found)} of {total} backlog queues exist on {secondary}")
