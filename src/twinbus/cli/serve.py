"""`twinbus serve`: run local namespaces, and print how to connect to them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from twinbus.cli.errors import Debug, WrongUsageError, errors_reported
from twinbus.cli.terminal import console
from twinbus.errors import OperatorError
from twinbus.namespace import (
    DEFAULT_AUDIENCE,
    DEFAULT_CONNECTIONS,
    DEFAULT_DATA,
    DEFAULT_MEGABYTES,
    DEFAULT_NAMESPACES,
    LogFormat,
    ResourceLimits,
    configure_logging,
    make_serve_plan,
)

if TYPE_CHECKING:
    from rich.console import Console

    from twinbus.namespace import AzurePorts, NamespaceServer

_LEVELS: Final = ("debug", "info", "warning", "error")


Data = Annotated[
    Path | None,
    typer.Option(help="Directory of the namespaces' files; created if missing.", show_default=str(DEFAULT_DATA)),
]
Memory = Annotated[bool, typer.Option("--memory", help="Keep everything in memory; nothing is stored.")]
Namespaces = Annotated[
    list[str] | None,
    typer.Option(
        "--namespace",
        metavar="NAME=PORT",
        help="A namespace and its port, 0 for a free port; may be repeated.",
        show_default=" ".join(DEFAULT_NAMESPACES),
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on. The default key is refused beyond loopback.")]
HostNames = Annotated[
    list[str] | None,
    typer.Option(
        "--host-name",
        metavar="NAME[:PORT]",
        help="Another name that clients use, and its port if that differs; may be repeated. "
        "Requests and tokens for any other name are refused.",
        show_default="localhost and addresses",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(help="Namespaces, keys and entities: our own TOML or JSON, or the Config.json of the emulator."),
]
Queues = Annotated[
    list[str] | None,
    typer.Option(
        "--queue",
        metavar="NAME",
        help="A queue to create if missing; may be repeated. It belongs to the first namespace; write "
        "NAMESPACE:NAME for another, as in secondary:orders.",
        show_default="none",
    ),
]
Topics = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        metavar="NAME[/SUBSCRIPTION]",
        help="A topic, or a topic with a subscription: the part after the last /. May be repeated; "
        "write NAMESPACE:NAME as with --queue.",
        show_default="none",
    ),
]
LedgerFolder = Annotated[
    Path | None,
    typer.Option(help="Directory of the ledger that records the namespaces' operations.", show_default="none"),
]
MaxConnections = Annotated[
    int, typer.Option(help="Connections of all namespaces together; more are refused.", metavar="COUNT")
]
ConnectionMemory = Annotated[
    int, typer.Option(help="Memory limit for all connections together, in megabytes.", metavar="MEGABYTES")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per namespace, then `ready`.")]
AcceptDamage = Annotated[
    bool,
    typer.Option(
        "--accept-damage",
        help="Start even if files are damaged: with what is intact. Lists what is lost, and keeps the damaged files.",
    ),
]
LogLevel = Annotated[str, typer.Option(help=f"One of {', '.join(_LEVELS)}.")]
LogLines = Annotated[LogFormat, typer.Option(help="Format of log lines on stderr.")]
ExitWithStdin = Annotated[
    bool, typer.Option("--exit-with-stdin", help="Drain and end when stdin closes: for a parent process.")
]


AzureNames = Annotated[
    list[str] | None,
    typer.Option(
        "--azure-names",
        metavar="NAME=NAMESPACE",
        help="Serve a namespace also as NAME.servicebus.windows.net, in TLS on 5671 and 443; may be repeated. Prints "
        "what to add to /etc/hosts and how to trust the CA.",
        show_default="none",
    ),
]
AzurePortNumbers = Annotated[
    str | None,
    typer.Option(
        "--azure-ports",
        metavar="AMQPS,HTTPS",
        help="Other ports for --azure-names; 0 is a free port.",
        show_default="5671,443",
    ),
]
KeySet = Annotated[
    Path | None,
    typer.Option(
        "--jwks",
        help="File with the public keys of an issuer (a JSON Web Key Set): its tokens are accepted, as with Entra ID.",
        show_default="none",
    ),
]
Audiences = Annotated[
    list[str] | None,
    typer.Option(
        "--audience",
        metavar="URL",
        help="Audience that a token of --jwks must have; may be repeated.",
        show_default=DEFAULT_AUDIENCE,
    ),
]
Issuers = Annotated[
    list[str] | None,
    typer.Option(
        "--issuer",
        metavar="URL",
        help="Issuer that a token of --jwks must have; may be repeated.",
        show_default="any",
    ),
]


def serve(
    data: Data = None,
    memory: Memory = False,
    namespace: Namespaces = None,
    host: Host = "127.0.0.1",
    host_name: HostNames = None,
    config: ConfigFile = None,
    queue: Queues = None,
    topic: Topics = None,
    ledger: LedgerFolder = None,
    max_connections: MaxConnections = DEFAULT_CONNECTIONS,
    connection_memory: ConnectionMemory = DEFAULT_MEGABYTES,
    accept_damage: AcceptDamage = False,
    azure_names: AzureNames = None,
    azure_ports: AzurePortNumbers = None,
    jwks: KeySet = None,
    audience: Audiences = None,
    issuer: Issuers = None,
    json: Json = False,
    log_level: LogLevel = "warning",
    log_format: LogLines = LogFormat.HUMAN,
    exit_with_stdin: ExitWithStdin = False,
    debug: Debug = False,
) -> None:
    """Start local namespaces that the official SDKs use unchanged.

    Runs until SIGTERM or Ctrl-C; a second signal ends it immediately. Acknowledged messages are on disk. After SIGUSR1
    the keys in --config and --jwks are read again; links of keys that are gone end.

    Examples:
      twinbus serve --queue orders --topic events/audit  # on 5672 and 5673
      twinbus serve --data ./bus --namespace orders=0    # one, on a free port
      twinbus serve --config Config.json                 # the emulator's entities
      twinbus serve --memory --json                      # for a program
    """
    with errors_reported(debug=debug):
        if log_level not in _LEVELS:
            raise WrongUsageError(f"--log-level {log_level!r} is unknown", f"Choose from {', '.join(_LEVELS)}.")
        read_plan = partial(
            make_serve_plan,
            data=data,
            memory=memory,
            namespaces=namespace or (),
            host=host,
            config=config,
            ledger=ledger,
            host_names=host_name or (),
            queues=queue or (),
            topics=topic or (),
            limits=ResourceLimits.of(max_connections=max_connections, megabytes=connection_memory),
            accept_damage=accept_damage,
            azure_names=azure_names or (),
            azure_ports=azure_ports,
            jwks=jwks,
            audiences=audience or (),
            issuers=issuer or (),
        )
        try:
            plan = read_plan()
        except OperatorError as error:
            # The plan is made from the options and the configuration file alone.
            raise WrongUsageError(error.text, error.hint) from error
        configure_logging(log_level, log_format, keys=plan.keys)
        # These imports are slow, so they are here, after the check of the options.
        from twinbus.namespace import print_ready_json, serve_until_stopped  # noqa: PLC0415

        show = print_ready_json if json else _show
        serve_until_stopped(plan, show, read_again=read_plan, exit_with_stdin=exit_with_stdin)


def _show(servers: Sequence[NamespaceServer], azure: AzurePorts | None) -> None:
    """Print the namespaces. Each connection string is on one line of its own, so that a user can copy it."""
    from rich.text import Text  # noqa: PLC0415 - slow, and not needed with --json

    from twinbus.namespace import DEFAULT_KEY  # noqa: PLC0415

    shown = console(soft_wrap=True)
    exports: list[str] = []
    for server in servers:
        options = server.options
        shown.print(Text.assemble((options.name, "bold cyan"), f" on {options.host}:{server.port}"))
        key, connection = options.rules[0].primary_key, server.connection_string
        if key != DEFAULT_KEY:
            # The user's own key must not appear on a screen or in a container's log.
            connection = connection.replace(f"SharedAccessKey={key};", "SharedAccessKey=…;")
        elif options.name in ("primary", "secondary"):
            exports.append(f"export TWINBUS_{options.name.upper()}_CONNECTION_STRING='{connection}'")
        shown.print(f"  {connection}")
        kept = "in memory, not stored" if options.file is None else str(options.file.absolute())
        shown.print(Text.assemble("  ", ("data", "dim"), f" {kept}"))
    shown.print(Text.assemble(("CA", "dim"), f" {servers[0].ca.absolute()}"))
    shown.print("   for the admin clients: REQUESTS_CA_BUNDLE (Python), NODE_EXTRA_CA_CERTS (Node)", style="dim")
    if exports:
        shown.print("for programs and commands, in another shell:", style="dim")
    for line in exports:
        shown.print(line)
    if azure is not None:
        _show_azure(servers, azure, shown)
    shown.print("ready", style="bold green")
    sys.stdout.flush()


def _show_azure(servers: Sequence[NamespaceServer], azure: AzurePorts, shown: Console) -> None:
    """Print the names in Azure with their connection strings, and what to do so that clients use them."""
    from rich.text import Text  # noqa: PLC0415 - slow

    from twinbus.namespace import DEFAULT_KEY  # noqa: PLC0415

    for server in servers:
        rule = server.options.rules[0]
        for name in azure.names_of(server.options.name):
            at = ", ".join(str(port) for port in azure.ports)
            shown.print(Text.assemble((server.options.name, "bold cyan"), f" as {name}, TLS on {azure.host}:{at}"))
            # The user's own key must not appear on a screen or in a container's log.
            shown_rule = rule if rule.primary_key == DEFAULT_KEY else replace(rule, primary_key="…")
            shown.print(f"  {azure.connection_string(name, shown_rule)}")
    for line in azure.set_up_lines():
        shown.print(Text(line))
