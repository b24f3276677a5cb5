"""The command line: registers the verbs. Each verb has its own file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from twinbus.cli import (
    cost,
    deadletter,
    demo,
    doctor,
    drill,
    entity,
    entity_messages,
    export,
    fault,
    ledger,
    ledger_audit,
    ledger_ship,
    ledger_spark,
    pipeline,
    provision,
    report,
    serve,
    settings,
    syphon,
)
from twinbus.cli.errors import errors_reported
from twinbus.cli.help_panels import fit_help
from twinbus.cli.local_paths import refuse_urls
from twinbus.cli.terminal import protect


class _Twinbus(typer.Typer):
    """The command line. Before it parses the arguments, it makes all later output printable (see `terminal`)."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        if "PYSPARK_GATEWAY_PORT" in os.environ:  # `spark-submit` has started this program
            from twinbus.pipeline import separate_stderr  # noqa: PLC0415 - needed there only

            separate_stderr()
        protect()
        fit_help()
        return super().__call__(*args, **options)


app = _Twinbus(
    name="twinbus",
    help="Paired Service Bus namespaces, and a local namespace that the official SDKs use unchanged.",
    epilog="Exit codes: 0 well, 1 failed, 2 wrong usage, 3 needs attention, 4 broken (docs/guides/exit-codes.md).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_START = "Start here"
app.command(rich_help_panel=_START)(demo.demo)

_NAMESPACE = "Namespaces and their entities"
app.command(rich_help_panel=_NAMESPACE)(serve.serve)
entity.app.command()(entity_messages.peek)
entity.app.command()(entity_messages.send)
entity.app.command()(entity_messages.purge)
app.add_typer(entity.app, name="entity", rich_help_panel=_NAMESPACE)
app.add_typer(fault.app, name="fault", rich_help_panel=_NAMESPACE)
app.command(rich_help_panel=_NAMESPACE)(export.export)

_PAIR = "A pair"
app.command(rich_help_panel=_PAIR)(provision.provision)
app.command(rich_help_panel=_PAIR)(doctor.doctor)
app.command(rich_help_panel=_PAIR)(drill.drill)

_BACKLOG = "The backlog"
app.command(rich_help_panel=_BACKLOG)(syphon.syphon)
app.add_typer(deadletter.app, name="deadletter", rich_help_panel=_BACKLOG)

_LEDGER = "What happened, and what it cost"
for verb in (
    ledger_audit.audit,
    ledger_ship.ship,
    ledger_spark.ingest,
    ledger_spark.reconcile,
    ledger_spark.cost,
    ledger_spark.incidents,
    ledger_spark.latency,
):
    ledger.app.command()(verb)
app.add_typer(ledger.app, name="ledger", rich_help_panel=_LEDGER)
app.add_typer(pipeline.app, name="pipeline", rich_help_panel=_LEDGER)
app.add_typer(cost.app, name="cost", rich_help_panel=_LEDGER)
app.command(rich_help_panel=_LEDGER)(report.report)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - slow, and rarely needed

        try:
            typer.echo(f"twinbus {version('twinbus')}")
        except PackageNotFoundError:
            typer.echo("twinbus (not installed: run from its sources)")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    given: Annotated[
        Path | None,
        typer.Option(
            "--settings",
            envvar="TWINBUS_SETTINGS",
            show_envvar=True,
            help="File with connection strings and default options.",
            show_default="twinbus.toml here, then in ~/.config/twinbus",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Paired Service Bus namespaces, and a local namespace that the official SDKs use unchanged."""
    with errors_reported(debug=False):
        refuse_urls(context.command)
        if (path := settings.find(given, os.environ)) is not None:
            settings.apply(context, path)
