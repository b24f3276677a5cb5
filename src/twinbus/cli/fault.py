"""`twinbus fault`: set, clear and list the faults of a running local namespace."""

from __future__ import annotations

import re
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from twinbus.cli.connections import NOT_TYPED, namespace_name
from twinbus.cli.errors import Debug, WrongUsageError, errors_reported
from twinbus.cli.network import credential_name, credential_option
from twinbus.cli.option_values import span_option
from twinbus.cli.tables import Cell, print_table
from twinbus.printable import printable

if TYPE_CHECKING:
    from twinbus.namespace import FaultClient

_FIELD: Final = re.compile(r"^(entity|link|points|probability|count|duration|delay|seed|after): ")
_OPTIONS: Final = {"points": "on"}

app = typer.Typer(help="Inject faults into a running local namespace, repeatably.", no_args_is_help=True)

Connection = Annotated[
    str,
    typer.Option(
        "--connection-string",
        "-c",
        envvar="TWINBUS_CONNECTION_STRING",
        show_envvar=True,
        help="Connection string of the namespace, with a key that has the Manage claim, or its host with "
        f"--credential. {NOT_TYPED}",
    ),
]
Authority = Annotated[
    Path | None, typer.Option("--ca", envvar="TWINBUS_CA", help="File with the certificates to trust.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(name="set")
@credential_option
def set_fault(
    kind: Annotated[
        str,
        typer.Argument(
            help="refuse, black-hole, delay, server-busy, detach, internal-error, drop-ack or crash.",
            show_default=False,
        ),
    ],
    connection_string: Connection,
    entity: Annotated[str | None, typer.Option(help="Only this queue, topic or subscription.")] = None,
    link: Annotated[str | None, typer.Option(help="Only links of this name; * and ? are wildcards.")] = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            help="Operation it affects: connect, attach, send, receive, settle, request or http; may be repeated."
        ),
    ] = None,
    probability: Annotated[float | None, typer.Option(help="Probability of a hit, above 0 and up to 1.")] = None,
    count: Annotated[int | None, typer.Option(help="Ends after this many hits.")] = None,
    duration: Annotated[timedelta | None, span_option("Ends after this time: 30s, 5m.")] = None,
    delay: Annotated[timedelta | None, span_option("For kind delay: how long, 500ms or 2s.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed and operations: same hits.")] = None,
    after: Annotated[
        bool,
        typer.Option("--after", help="For a crash on send, settle or request: after storing, before acknowledging."),
    ] = False,
    ca: Authority = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Set a fault.

    Without --entity and --link it affects the whole namespace. A crash without --on ends the server immediately.

    Examples:
      twinbus fault set black-hole --duration 30s  # half a minute of silence
      twinbus fault set delay --delay 500ms --on send
      twinbus fault set server-busy --entity orders --probability 0.2 --seed 7
      twinbus fault set drop-ack --on send --count 1  # stored, not acknowledged
    """
    with errors_reported(debug=debug):
        from twinbus.namespace import NamespaceRequestError  # noqa: PLC0415 - `serve` starts without it

        if kind == "delay" and delay is None:
            raise WrongUsageError("a fault of kind delay needs --delay", "Give a span of time: --delay 500ms.")
        client = _client(connection_string, ca)
        if entity is not None and _is_missing(client, entity):
            where = namespace_name("connection-string", connection_string)
            warning = f"warning: {entity!r} is not on {where}. The fault is set, and waits for it."
            typer.echo(printable(warning), err=True)
        try:
            made = client.set(
                kind,
                entity=entity,
                link=link,
                points=on or (),
                probability=probability,
                count=count,
                duration=_seconds(duration),
                delay=_seconds(delay),
                seed=seed,
                after=after,
            )
        except NamespaceRequestError as error:
            if error.status == HTTPStatus.BAD_REQUEST:
                raise WrongUsageError(_FIELD.sub(_as_option, error.text), error.hint) from error
            raise
        if json:
            _print_json(made)
        elif not made:
            typer.echo("the namespace crashes now")
        else:
            typer.echo(f"fault {made['id']} is set: {made['kind']} (seed {made['seed']})")


def _seconds(span: timedelta | None) -> float | None:
    return None if span is None else span.total_seconds()


@app.command(name="clear")
@credential_option
def clear_faults(
    connection_string: Connection,
    id: Annotated[str | None, typer.Argument(help="Id of the fault; all faults if omitted.")] = None,
    ca: Authority = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Clear one fault, or all.


    Examples:
      twinbus fault clear
      twinbus fault clear 3
    """
    with errors_reported(debug=debug):
        cleared = _client(connection_string, ca).clear(id)
        if json:
            _print_json({"cleared": cleared})
        else:
            typer.echo(f"{cleared} cleared")
        if id is not None and not cleared:
            raise typer.Exit(1)


@app.command(name="list")
@credential_option
def list_faults(connection_string: Connection, ca: Authority = None, json: Json = False, debug: Debug = False) -> None:
    """List the faults that are set.


    Examples:
      twinbus fault list
      twinbus fault list --json
    """
    with errors_reported(debug=debug):
        faults = _client(connection_string, ca).list()
        if json:
            _print_json({"faults": faults})
        elif not faults:
            typer.echo("no fault is set")
        else:
            _print_table(faults)


def _as_option(field: re.Match[str]) -> str:
    """Return the option for the field at the start of an error: a request has `points`, the command line `--on`."""
    return f"--{_OPTIONS.get(field[1], field[1])}: "


def _is_missing(client: FaultClient, entity: str) -> bool:
    """Return whether the namespace has no such queue, topic or subscription. False if it does not answer that."""
    from twinbus.namespace import NamespaceRequestError  # noqa: PLC0415

    try:
        found = client.request("GET", "/$config")["config"]["UserConfig"]["Namespaces"]
    except NamespaceRequestError:
        return False  # another fault hits this request
    known: set[str] = set()
    for space in found:
        known |= {one["Name"].lower() for one in space.get("Queues", ())}
        for topic in space.get("Topics", ()):
            name = topic["Name"].lower()
            known |= {name, *(f"{name}/subscriptions/{one['Name'].lower()}" for one in topic.get("Subscriptions", ()))}
    return entity.strip("/").lower().partition("/$")[0] not in known


def _client(connection_string: str, ca: Path | None) -> FaultClient:
    from twinbus.connect import ConnectionStringError  # noqa: PLC0415 - `serve` starts without it
    from twinbus.namespace import FaultClient  # noqa: PLC0415

    try:
        return FaultClient(connection_string, ca=ca, credential=credential_name())
    except ConnectionStringError as error:
        raise WrongUsageError(str(error), "`twinbus serve` prints the connection string of each namespace.") from error


def _print_json(value: dict[str, Any]) -> None:
    import json  # noqa: PLC0415 - `json` is the name of an option here

    typer.echo(json.dumps(value))


def _print_table(faults: list[dict[str, Any]]) -> None:
    rows: list[list[Cell]] = []
    for fault in faults:
        hits = str(fault["hits"]) if fault["count"] is None else f"{fault['hits']} of {fault['count']}"
        kind = f"{fault['kind']} {fault['delay']:g} s" if fault["delay"] else fault["kind"]
        ends = "" if fault["ends_in"] is None else f"{fault['ends_in']:.0f} s"
        where = ("all" if fault["entity"] is None else fault["entity"], fault["link"] or "all")
        points = ", ".join(fault["points"])
        rows.append([fault["id"], kind, *where, points, hits, f"{fault['probability']:g}", ends, str(fault["seed"])])
    columns = ("id", "kind", "entity", "link", "on", "hits", "probability", "ends in", "seed")
    print_table(columns, rows, wrapped={"on"}, optional={"ends in"})
