"""The command line as a whole: its verbs, and how a mistake is told. What a verb does is in its own file."""

from __future__ import annotations

from typing import Annotated

import typer

from twinbus.cli import deadletter, doctor, drill, export, fault, ledger, ledger_jobs, provision, serve, syphon

app = typer.Typer(
    name="twinbus",
    help="Paired Service Bus namespaces, and a local namespace that the official SDKs use unchanged.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(name="serve", help=serve.serve.__doc__)(serve.serve)
app.add_typer(fault.app, name="fault")
app.command(name="export", help=export.export.__doc__)(export.export)
app.command(name="provision", help=provision.provision.__doc__)(provision.provision)
app.command(name="doctor", help=doctor.doctor.__doc__)(doctor.doctor)
app.command(name="drill", help=drill.drill.__doc__)(drill.drill)
app.command(name="syphon", help=syphon.syphon.__doc__)(syphon.syphon)
app.add_typer(deadletter.app, name="deadletter")
for verb in (
    ledger_jobs.ingest,
    ledger_jobs.reconcile,
    ledger_jobs.cost,
    ledger_jobs.incidents,
    ledger_jobs.latency,
):
    ledger.app.command()(verb)
app.add_typer(ledger.app, name="ledger")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - slow, and nearly never wanted

        try:
            typer.echo(f"twinbus {version('twinbus')}")
        except PackageNotFoundError:
            typer.echo("twinbus (not installed: run from its sources)")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Paired Service Bus namespaces, and a local namespace that the official SDKs use unchanged."""
