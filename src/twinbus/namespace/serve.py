"""Runs the namespaces of a plan in this process, until a signal arrives or stdin is closed.

The data directory is locked while the namespaces run, so that a second server fails before it creates a file.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import uvloop

from twinbus.errors import OperatorError
from twinbus.namespace.azure_ports import AzurePorts
from twinbus.namespace.logs import redact_also
from twinbus.namespace.resources import Resources
from twinbus.namespace.serve_plan import ServePlan
from twinbus.namespace.server import DEFAULT_RULES, NamespaceOptions, NamespaceServer, refuse_public_default_key
from twinbus.namespace.store import StoreInUseError, StoreLock, make_folder

_log = logging.getLogger(__name__)

_DRAIN_SECONDS: Final = 10.0
# During each statement of a commit, the writer thread releases the interpreter lock (GIL). If the event loop is busy,
# the thread waits up to this time until it gets the lock again. With Python's default of 5 ms, a commit of 100 rows
# took 22 ms instead of 5 ms (docs/decisions/0006).
_SWITCH_SECONDS: Final = 0.001
# The garbage collector runs after this many new objects. The objects of a message are in no reference cycle. With
# Python's default of 700, the garbage collector would examine waiting messages many times (docs/decisions/0016).
_COLLECT_AFTER: Final = 50_000
# Descriptors that are not for accepted connections: files of stores and ledgers, and connections that are refused.
_OWN_DESCRIPTORS: Final = 256
# Free memory is returned to the system after this many connections were closed, and the number of seconds between
# checks.
_TRIM_AFTER: Final = 100
_TRIM_SECONDS: Final = 5.0

Show = Callable[[Sequence[NamespaceServer], AzurePorts | None], None]


def serve_until_stopped(
    plan: ServePlan, show: Show, *, read_again: Callable[[], ServePlan], exit_with_stdin: bool = False
) -> None:
    """Run the namespaces of the plan. Calls `show` when all of them listen. Raises OperatorError.

    SIGUSR1 calls `read_again`, and the namespaces take the keys of the plan that it returns.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    _raise_descriptor_limit(plan.limits.max_connections)
    with _folder(plan) as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(plan, folder, show, read_again, exit_with_stdin))


def print_ready_json(servers: Sequence[NamespaceServer], azure: AzurePorts | None = None) -> None:
    """Print one line with a JSON object for each namespace, then the line `ready`. Programs read these lines."""
    lines = []
    for server in servers:
        file = server.options.file
        described = {
            "name": server.options.name,
            "connection_string": server.connection_string,
            "port": server.port,
            "ca": str(server.ca.absolute()),
            "data": None if file is None else str(file.absolute()),
        }
        if azure is not None and (names := azure.names_of(server.options.name)):
            described["azure"] = {
                "connection_strings": [azure.connection_string(name, server.options.rules[0]) for name in names],
                "ports": azure.ports,
                "ca": str(azure.ca.absolute()),
            }
        lines.append(json.dumps(described))
    sys.stdout.write("\n".join([*lines, "ready", ""]))
    sys.stdout.flush()


@contextmanager
def _folder(plan: ServePlan) -> Iterator[Path]:
    """Lock and return the data directory. If the plan has none, return a temporary directory for certificates."""
    if plan.data is None:
        with TemporaryDirectory(prefix="twinbus-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
        return
    try:
        make_folder(plan.data.absolute())
    except OSError as error:
        raise OperatorError(f"The data directory {plan.data} cannot be created: {error.strerror}") from error
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


def _options(plan: ServePlan, folder: Path, azure: AzurePorts | None) -> list[NamespaceOptions]:
    return [
        NamespaceOptions(
            name=found.name,
            host=plan.host,
            port=found.port or 0,
            file=None if plan.data is None else folder / f"{found.name}.sqlite",
            accept_damage=plan.accept_damage,
            tls=folder / "tls",
            rules=found.rules or DEFAULT_RULES,
            entities=found.entities,
            ledger=None if found.ledger is None else Path(found.ledger),
            host_names=found.host_names,
            azure_names=() if azure is None else azure.own_names(found.name),
            requested_by=found.requested_by,
            identity=plan.identity,
        )
        for found in plan.namespaces
    ]


def _raise_descriptor_limit(max_connections: int) -> None:
    """Raise the soft limit of open files to the number that the connections need, but not above the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _OWN_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(
    plan: ServePlan,
    folder: Path,
    show: Show,
    read_again: Callable[[], ServePlan],
    exit_with_stdin: bool,
) -> None:
    resources = Resources(plan.limits)
    stop_requested = asyncio.Event()
    azure: AzurePorts | None = None
    running: list[NamespaceServer] = []
    loop = asyncio.get_running_loop()
    _listen_to_signals(loop, stop_requested, exit_with_stdin)
    loop.add_signal_handler(signal.SIGUSR1, _take_new_keys, running, read_again)
    waiting: asyncio.Future[Any] = asyncio.ensure_future(stop_requested.wait())
    returning: asyncio.Future[None] | None = None
    try:
        if plan.azure is not None:
            azure = AzurePorts(plan.azure, plan.host, folder / "tls")
        for one in _options(plan, folder, azure):
            server = NamespaceServer(one, resources)
            await server.start()
            running.append(server)
        if azure is not None:
            azure.listen(running)
        # Loaded modules stay in memory until the process ends, so the garbage collector need not examine them.
        gc.freeze()
        gc.set_threshold(_COLLECT_AFTER)
        if not stop_requested.is_set():
            show(running, azure)
        returning = asyncio.ensure_future(_return_memory(resources))
        await asyncio.wait([waiting, *(server.ended for server in running)], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        if azure is not None:
            azure.close()
        if returning is not None:
            returning.cancel()
        failed = {server: server.ended.exception() for server in running if server.ended.done()}
        failed.update(await _drain(running))
    for server, cause in failed.items():
        if cause is not None:
            text, hint = (cause.text, cause.hint) if isinstance(cause, OperatorError) else (repr(cause), "")
            raise OperatorError(f"The namespace {server.options.name!r} had to stop: {text}", hint) from cause


def _take_new_keys(running: Sequence[NamespaceServer], read_again: Callable[[], ServePlan]) -> None:
    """Read the configuration again, and replace the keys of all namespaces. Entities and options stay as they are.

    If the new keys cannot be used, the error is logged, and all namespaces keep their keys.
    """
    try:
        plan = read_again()
        redact_also(plan.keys)
        new = {found.name: found.rules for found in plan.namespaces}
        for options in (server.options for server in running):
            if not new.get(options.name) and options.rules != DEFAULT_RULES:
                # Otherwise a mistake in the file would let everybody in with the well-known key.
                raise OperatorError(f"The configuration has no keys for the namespace {options.name!r}")
            new[options.name] = new.get(options.name) or DEFAULT_RULES
            refuse_public_default_key(replace(options, rules=new[options.name]))
    except OperatorError as error:
        _log.error("keys not changed: %s", error)
        return
    for server in running:
        server.replace_rules(new[server.options.name])
        if plan.identity is not None:
            server.replace_identity(plan.identity)
        _log.warning("keys read again", extra={"namespace": server.options.name})


async def _return_memory(resources: Resources) -> None:
    """Return free memory to the system after many connections were closed.

    Without this call, glibc does not return free memory that lies below the highest block in use: 90 MB after 1,000 TLS
    connections.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    closed = 0
    while trim is not None:
        await asyncio.sleep(_TRIM_SECONDS)
        if resources.closed_connections - closed >= _TRIM_AFTER:
            closed = resources.closed_connections
            await asyncio.to_thread(trim, 0)


async def _drain(running: Sequence[NamespaceServer]) -> dict[NamespaceServer, BaseException]:
    """Stop all servers at the same time, within 10 seconds. Returns the errors of servers that failed to stop.

    A peer that does not close its connection cannot delay the end. No message is lost: all acknowledged messages are on
    disk already.
    """
    stops = {asyncio.ensure_future(server.stop()): server for server in running}
    if not stops:
        return {}
    done, _ = await asyncio.wait(stops, timeout=_DRAIN_SECONDS)
    return {stops[stop]: error for stop in done if (error := stop.exception()) is not None}


def _listen_to_signals(loop: asyncio.AbstractEventLoop, stop_requested: asyncio.Event, exit_with_stdin: bool) -> None:
    def signalled(number: signal.Signals) -> None:
        if stop_requested.is_set():
            os._exit(128 + number)
        stop_requested.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled, number)
    if exit_with_stdin:
        stdin = sys.stdin.fileno()

        def stdin_readable() -> None:
            if not os.read(stdin, 4096):
                loop.remove_reader(stdin)
                stop_requested.set()

        loop.add_reader(stdin, stdin_readable)
