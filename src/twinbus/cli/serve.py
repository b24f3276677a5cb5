"""`twinbus serve`: namespaces started in this process, shown, and drained when a signal comes.

What is started is planned first, from options and file; heavy imports wait until it is known that they are needed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from twinbus.cli.telling import Debug, told
from twinbus.errors import OperatorError
from twinbus.namespace.logs import LogFormat

if TYPE_CHECKING:
    import asyncio

    from twinbus.namespace.config import NamespaceConfig
    from twinbus.namespace.server import NamespaceOptions, NamespaceServer

DEFAULT_NAMESPACES: Final = ("primary=5672", "secondary=5673")
DEFAULT_DATA: Final = Path("twinbus-data")
_FIRST_PORT: Final = 5672
_DRAIN_SECONDS: Final = 10.0
_LEVELS: Final = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be started. Every namespace has its port; no data means memory."""

    host: str
    data: Path | None
    namespaces: tuple[NamespaceConfig, ...]


def serve(
    data: Annotated[
        Path | None,
        typer.Option(help="Directory of the namespaces' files, made where missing.", show_default=str(DEFAULT_DATA)),
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Keep nothing: all is gone at the end.")] = False,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PORT",
            help="A namespace and its port, 0 for a free one; may be repeated.",
            show_default=" ".join(DEFAULT_NAMESPACES),
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. The default key is refused beyond loopback.")
    ] = "127.0.0.1",
    config: Annotated[
        Path | None,
        typer.Option(help="Namespaces, keys and entities: TOML or JSON of ours, or the Config.json of the emulator."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per namespace, then `ready`.")] = False,
    log_level: Annotated[str, typer.Option(help=f"One of {', '.join(_LEVELS)}.")] = "warning",
    log_format: Annotated[LogFormat, typer.Option(help="How lines on stderr look.")] = LogFormat.HUMAN,
    exit_with_stdin: Annotated[
        bool, typer.Option("--exit-with-stdin", help="Drain and end when stdin is closed: for a parent process.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Start namespaces and serve them until SIGTERM or Ctrl-C; a second signal ends at once."""
    with told(debug=debug):
        if log_level not in _LEVELS:
            raise OperatorError(f"--log-level {log_level!r} is unknown", f"Choose from {', '.join(_LEVELS)}.")
        plan = make_plan(data=data, memory=memory, namespaces=namespace or (), host=host, config=config)
        _configure_logs(plan, log_level, log_format)
        with _folder(plan) as folder:
            _run(_options(plan, folder), _show_json if json else _show, exit_with_stdin)


def make_plan(*, data: Path | None, memory: bool, namespaces: Sequence[str], host: str, config: Path | None) -> Plan:
    """Options and file, made into one; raises OperatorError for what does not fit together."""
    from twinbus.namespace.config import NamespaceConfig  # noqa: PLC0415 - `fault` starts without it

    if memory and data is not None:
        raise OperatorError("--data and --memory exclude each other", "Leave one of them away.")
    planned = {found.name: found for found in _read(config)} if config is not None else {}
    for index, (name, found) in enumerate(planned.items()):
        if found.port is None:
            planned[name] = replace(found, port=_FIRST_PORT + index)
    for text in namespaces or (() if planned else DEFAULT_NAMESPACES):
        name, port = _named_port(text)
        planned[name] = replace(planned.get(name, NamespaceConfig(name=name)), port=port)
    for found in planned.values():
        sharing = [other.name for other in planned.values() if found.port and other.port == found.port]
        if len(sharing) > 1:
            raise OperatorError(
                f"Port {found.port} is given to several namespaces: {', '.join(sharing)}", "Each needs its own."
            )
    return Plan(host=host, data=None if memory else data or DEFAULT_DATA, namespaces=tuple(planned.values()))


def _read(path: Path) -> tuple[NamespaceConfig, ...]:
    from twinbus.namespace.config import ConfigError, parse_config  # noqa: PLC0415

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"{path} cannot be read: {error}") from error
    try:
        return parse_config(text, toml=path.suffix.lower() == ".toml", environment=os.environ)
    except ConfigError as error:
        told = "\n".join(f"  {problem}" for problem in error.problems)
        raise OperatorError(f"{path} cannot be taken:\n{told}") from error


def _named_port(text: str) -> tuple[str, int]:
    from twinbus.namespace.config import namespace_name_fault  # noqa: PLC0415

    name, _, port = text.partition("=")
    if fault := namespace_name_fault(name):
        raise OperatorError(f"--namespace {text}: {fault}", "Write NAME=PORT, as in primary=5672.")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise OperatorError(f"--namespace {text}: {port!r} is not a port", "Write NAME=PORT, as in primary=5672.")
    return name, int(port)


def _configure_logs(plan: Plan, level: str, form: LogFormat) -> None:
    from twinbus.namespace import logs  # noqa: PLC0415

    rules = [rule for found in plan.namespaces for rule in found.rules]
    logs.configure(level, form, keys=[key for rule in rules for key in (rule.primary_key, rule.secondary_key)])


@contextmanager
def _folder(plan: Plan) -> Iterator[Path]:
    """The data directory, held against a second server; or one for certificates alone, gone at the end."""
    if plan.data is None:
        from tempfile import TemporaryDirectory  # noqa: PLC0415

        with TemporaryDirectory(prefix="twinbus-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
        return
    from twinbus.namespace.store.errors import StoreInUseError  # noqa: PLC0415
    from twinbus.namespace.store.lock import StoreLock, make_folder  # noqa: PLC0415

    try:
        make_folder(plan.data.absolute())
    except OSError as error:
        raise OperatorError(f"The data directory {plan.data} cannot be made: {error.strerror}") from error
    lock = StoreLock(plan.data / "serve")
    try:
        lock.take()
    except StoreInUseError as error:
        raise OperatorError(
            f"The data directory {plan.data} is in use by another server", f"{error.text}. {error.hint}"
        ) from error
    try:
        yield plan.data
    finally:
        lock.give_back()


def _options(plan: Plan, folder: Path) -> list[NamespaceOptions]:
    from twinbus.namespace.server import DEFAULT_RULES, NamespaceOptions  # noqa: PLC0415 - slow

    return [
        NamespaceOptions(
            name=found.name,
            host=plan.host,
            port=found.port or 0,
            file=None if plan.data is None else folder / f"{found.name}.sqlite",
            tls=folder / "tls",
            rules=found.rules or DEFAULT_RULES,
            entities=found.entities,
        )
        for found in plan.namespaces
    ]


Show = Callable[[Sequence["NamespaceServer"]], None]


def _run(options: Sequence[NamespaceOptions], show: Show, exit_with_stdin: bool) -> None:
    import asyncio  # noqa: PLC0415 - slow

    import uvloop  # noqa: PLC0415

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(options, show, exit_with_stdin))


async def _serve(options: Sequence[NamespaceOptions], show: Show, exit_with_stdin: bool) -> None:
    import asyncio  # noqa: PLC0415

    from twinbus.namespace.server import NamespaceServer  # noqa: PLC0415

    asked = asyncio.Event()
    _listen_to_signals(asyncio.get_running_loop(), asked, exit_with_stdin)
    running: list[NamespaceServer] = []
    waiting: asyncio.Future[Any] = asyncio.ensure_future(asked.wait())
    try:
        for one in options:
            server = NamespaceServer(one)
            await server.start()
            running.append(server)
        if not asked.is_set():
            show(running)
        await asyncio.wait([waiting, *(server.ended for server in running)], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        ended = [(server, server.ended.exception()) for server in running if server.ended.done()]
        # A peer that does not let go cannot hold the end back: what was acknowledged is on disk already.
        stops = [asyncio.ensure_future(server.stop()) for server in running]
        if stops:
            await asyncio.wait(stops, timeout=_DRAIN_SECONDS)
    for server, cause in ended:
        if cause is not None:
            text, hint = (cause.text, cause.hint) if isinstance(cause, OperatorError) else (repr(cause), "")
            raise OperatorError(f"The namespace {server.options.name!r} had to stop: {text}", hint) from cause


def _listen_to_signals(loop: asyncio.AbstractEventLoop, asked: asyncio.Event, exit_with_stdin: bool) -> None:
    def signalled(number: signal.Signals) -> None:
        if asked.is_set():
            os._exit(128 + number)
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)
    if exit_with_stdin:
        stdin = sys.stdin.fileno()

        def heard() -> None:
            if not os.read(stdin, 4096):
                loop.remove_reader(stdin)
                asked.set()

        loop.add_reader(stdin, heard)


def _show_json(servers: Sequence[NamespaceServer]) -> None:
    import json  # noqa: PLC0415 - `json` is the name of an option here

    for server in servers:
        file = server.options.file
        line = {
            "name": server.options.name,
            "connection_string": server.connection_string,
            "port": server.port,
            "ca": str(server.ca.absolute()),
            "data": None if file is None else str(file.absolute()),
        }
        typer.echo(json.dumps(line))
    typer.echo("ready")
    sys.stdout.flush()


def _show(servers: Sequence[NamespaceServer]) -> None:
    """For a person: each connection string alone on its line, unwrapped, so that it can be copied."""
    from rich.console import Console  # noqa: PLC0415 - slow, and not wanted with --json

    from twinbus.namespace.front.sas import DEFAULT_KEY  # noqa: PLC0415

    console = Console(highlight=False, soft_wrap=True)
    for server in servers:
        options = server.options
        console.print(f"[bold cyan]{options.name}[/] on {options.host}:{server.port}")
        key, shown = options.rules[0].primary_key, server.connection_string
        if key != DEFAULT_KEY:
            # A key of one's own does not belong on a screen or in the log of a container.
            shown = shown.replace(f"SharedAccessKey={key};", "SharedAccessKey=…;")
        console.print(f"  {shown}", markup=False)
        kept = "in memory: gone at the end" if options.file is None else str(options.file.absolute())
        console.print(f"  [dim]data[/] {kept}")
    console.print(f"[dim]CA[/] {servers[0].ca.absolute()}")
    console.print("[dim]   for the admin clients: REQUESTS_CA_BUNDLE (Python), NODE_EXTRA_CA_CERTS (Node)[/]")
    console.print("[bold green]ready[/]")
    sys.stdout.flush()
