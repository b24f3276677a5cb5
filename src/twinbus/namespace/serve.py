"""Namespaces of a plan in this process: started, shown, and drained when a signal comes or stdin is closed.

The data directory is held for as long as they run, so that a second server fails before anything is made.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import uvloop

from twinbus.errors import OperatorError
from twinbus.namespace.resources import Resources
from twinbus.namespace.serve_plan import ServePlan
from twinbus.namespace.server import DEFAULT_RULES, NamespaceOptions, NamespaceServer
from twinbus.namespace.store import StoreInUseError, StoreLock, make_folder

_DRAIN_SECONDS: Final = 10.0
# Each step of a commit gives the interpreter lock away, and waits this long at most to have it back from a busy loop:
# with Python's own 5 ms, a commit of 100 rows beside one took 22 ms instead of 5 (docs/decisions/0006).
_SWITCH_SECONDS: Final = 0.001
# A message on its way is a few objects, none in a cycle. With Python's own 700 they are looked through again and again
# while they wait; with this many, thousands of messages come and go without (docs/decisions/0016).
_COLLECT_AFTER: Final = 50_000
# Descriptors beside those of connections: files of the namespaces, ledgers, and refused connections.
_OWN_DESCRIPTORS: Final = 256
# Memory is returned to the system when so many connections were closed, looked at this often.
_TRIM_AFTER: Final = 100
_TRIM_SECONDS: Final = 5.0

Show = Callable[[Sequence[NamespaceServer]], None]


def serve_until_stopped(plan: ServePlan, show: Show, *, exit_with_stdin: bool = False) -> None:
    """Serve until told to end. `show` is called once all are listening. Raises OperatorError."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    _raise_descriptor_limit(plan.limits.max_connections)
    with _folder(plan) as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(_options(plan, folder), Resources(plan.limits), show, exit_with_stdin))


def print_ready_json(servers: Sequence[NamespaceServer]) -> None:
    """One JSON object a line for each namespace, then `ready`: for programs."""
    lines = []
    for server in servers:
        file = server.options.file
        told = {
            "name": server.options.name,
            "connection_string": server.connection_string,
            "port": server.port,
            "ca": str(server.ca.absolute()),
            "data": None if file is None else str(file.absolute()),
        }
        lines.append(json.dumps(told))
    sys.stdout.write("\n".join([*lines, "ready", ""]))
    sys.stdout.flush()


@contextmanager
def _folder(plan: ServePlan) -> Iterator[Path]:
    """The data directory, held against a second server; or one for certificates alone, gone at the end."""
    if plan.data is None:
        with TemporaryDirectory(prefix="twinbus-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
        return
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


def _options(plan: ServePlan, folder: Path) -> list[NamespaceOptions]:
    return [
        NamespaceOptions(
            name=found.name,
            host=plan.host,
            port=found.port or 0,
            file=None if plan.data is None else folder / f"{found.name}.sqlite",
            tls=folder / "tls",
            rules=found.rules or DEFAULT_RULES,
            entities=found.entities,
            ledger=None if found.ledger is None else Path(found.ledger),
            host_names=found.host_names,
            requested_by=found.requested_by,
        )
        for found in plan.namespaces
    ]


def _raise_descriptor_limit(max_connections: int) -> None:
    """Raise the soft limit of open files as far as the connections need, where the hard limit allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _OWN_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(options: Sequence[NamespaceOptions], resources: Resources, show: Show, exit_with_stdin: bool) -> None:
    asked = asyncio.Event()
    _listen_to_signals(asyncio.get_running_loop(), asked, exit_with_stdin)
    running: list[NamespaceServer] = []
    waiting: asyncio.Future[Any] = asyncio.ensure_future(asked.wait())
    returning: asyncio.Future[None] | None = None
    try:
        for one in options:
            server = NamespaceServer(one, resources)
            await server.start()
            running.append(server)
        # What was loaded stays: a full collection need not look at it again and again.
        gc.freeze()
        gc.set_threshold(_COLLECT_AFTER)
        if not asked.is_set():
            show(running)
        returning = asyncio.ensure_future(_return_memory(resources))
        await asyncio.wait([waiting, *(server.ended for server in running)], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        if returning is not None:
            returning.cancel()
        failed = {server: server.ended.exception() for server in running if server.ended.done()}
        failed.update(await _drain(running))
    for server, cause in failed.items():
        if cause is not None:
            text, hint = (cause.text, cause.hint) if isinstance(cause, OperatorError) else (repr(cause), "")
            raise OperatorError(f"The namespace {server.options.name!r} had to stop: {text}", hint) from cause


async def _return_memory(resources: Resources) -> None:
    """Return free memory to the system after many connections were closed.

    glibc keeps what was freed below the highest block in use. After 1,000 TLS connections that was 90 MB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    closed = 0
    while trim is not None:
        await asyncio.sleep(_TRIM_SECONDS)
        if resources.closed_connections - closed >= _TRIM_AFTER:
            closed = resources.closed_connections
            await asyncio.to_thread(trim, 0)


async def _drain(running: Sequence[NamespaceServer]) -> dict[NamespaceServer, BaseException]:
    """Stop all at once; what went wrong with those that could not.

    A peer that does not let go cannot hold the end back: what was acknowledged is on disk already.
    """
    stops = {asyncio.ensure_future(server.stop()): server for server in running}
    if not stops:
        return {}
    done, _ = await asyncio.wait(stops, timeout=_DRAIN_SECONDS)
    return {stops[stop]: error for stop in done if (error := stop.exception()) is not None}


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
