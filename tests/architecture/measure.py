"""Figures of the source code: files, imports between them, and how many functions and modules one message uses.

Run: python -m tests.architecture.measure [--static]

The static figures come from the syntax trees and from the import graph (grimp, which import-linter brings). The four
ways are traced: each operation runs once for real, against namespaces on free ports, and each call of a function of
`twinbus` is counted.

    functions   different functions that ran
    modules     different modules they stand in
    switches    how often a call went into another module than the call before it, within one thread

No test runs this. It prints figures, and a person compares them before and after a change.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import importlib.util
import json
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Final

from .source import PACKAGE, Source, sources

SHOWN: Final = 12
NAMESPACES: Final = {"namespaces": [{"name": "primary", "queues": [{"name": "orders"}]}, {"name": "secondary"}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--static", action="store_true", help="leave out the four traced ways")
    arguments = parser.parse_args()
    print_files()
    print_graph()
    print_names()
    print_private_sdk()
    if not arguments.static:
        print_ways()


def print_row(name: str, figure: object) -> None:
    print(f"{name:<58} {figure:>12}" if not isinstance(figure, str) else f"{name:<58} {figure}")


# --- files and names -------------------------------------------------------------------------------------------------


def print_files() -> None:
    files = sources(PACKAGE)
    lines = {source.name: source.text.count("\n") for source in files}
    definitions = {
        source.name: sum(
            isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) for node in source.tree.body
        )
        for source in files
    }
    ordinary = [name for name in lines if not name.endswith("__init__.py")]
    print_row("source files", len(files))
    print_row("source lines", sum(lines.values()))
    print_row("files under 30 lines, without __init__", sum(lines[name] < 30 for name in ordinary))
    print_row("files with one definition or none, without __init__", sum(definitions[name] <= 1 for name in ordinary))
    rooms: Counter[str] = Counter(Path(name).relative_to("src/twinbus").parts[0] for name in lines)
    print_row("files by room", ", ".join(f"{room} {count}" for room, count in sorted(rooms.items()) if count > 1))


def print_names() -> None:
    classes: defaultdict[str, list[str]] = defaultdict(list)
    stems: Counter[str] = Counter()
    for source in sources(PACKAGE):
        stems[source.path.stem] += 1
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(source.name)
    repeated = {name: places for name, places in classes.items() if len(places) > 1}
    print_row("class names defined more than once", len(repeated))
    print("   " + ", ".join(f"{name} {len(places)}" for name, places in sorted(repeated.items())))
    print_row("file names that repeat", sum(count > 1 for stem, count in stems.items() if stem != "__init__"))


# --- the import graph ------------------------------------------------------------------------------------------------


def print_graph() -> None:
    import grimp  # noqa: PLC0415 - slow

    graph = grimp.build_graph("twinbus", cache_dir=None, exclude_type_checking_imports=True)
    typed = grimp.build_graph("twinbus", cache_dir=None)
    modules = graph.modules
    importers = {module: graph.find_modules_that_directly_import(module) for module in modules}
    packages = {module for module in modules if graph.find_children(module)}
    print_row("modules with exactly one importer", sum(len(importers[module]) == 1 for module in modules - packages))
    print_row("cycles at run time", len(cycles(graph)))
    print_row("cycles with TYPE_CHECKING", len(cycles(typed)))
    for cycle in cycles(typed):
        print(f"   {len(cycle)}: " + ", ".join(sorted(name.removeprefix("twinbus.") for name in cycle)))
    inside = [
        (importer, imported)
        for imported in modules
        for importer in importers[imported]
        if room_of(importer) != room_of(imported) and imported.count(".") > 1
    ]
    between = [
        (importer, imported)
        for imported in modules
        for importer in importers[imported]
        if room_of(importer) != room_of(imported) and room_of(imported) in {room_of(package) for package in packages}
    ]
    print_row("imports between rooms", len(between))
    print_row("imports that reach inside another room", len(inside))
    reached = Counter(f"{room_of(importer)} -> {room_of(imported)}" for importer, imported in inside)
    print("   " + ", ".join(f"{way} {count}" for way, count in reached.most_common(SHOWN)))


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def cycles(graph: Any) -> list[set[str]]:
    """Return the strongly connected components of more than one module (Tarjan, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []
    for root in sorted(graph.modules):
        if root in index:
            continue
        work: list[tuple[str, Iterator[str]]] = []

        def enter(module: str, work: list[tuple[str, Iterator[str]]] = work) -> None:
            index[module] = low[module] = len(index)
            stack.append(module)
            work.append((module, iter(sorted(graph.find_modules_directly_imported_by(module)))))

        enter(root)
        while work:
            module, following = work[-1]
            for imported in following:
                if imported not in index:
                    enter(imported)
                    break
                if imported in stack:
                    low[module] = min(low[module], index[imported])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[module])
                if low[module] == index[module]:
                    at = stack.index(module)
                    component, stack[at:] = set(stack[at:]), []
                    if len(component) > 1:
                        found.append(component)
    return found


# --- private parts of azure-servicebus -------------------------------------------------------------------------------


def print_private_sdk() -> None:
    names = private_sdk_names()
    found = {
        source.name: count
        for source in sources(PACKAGE)
        if "src/twinbus/sdk/" not in source.name and (count := private_accesses(source, names))
    }
    print_row("accesses to private parts of azure-servicebus outside sdk/", sum(found.values()))
    print("   " + ", ".join(f"{name.removeprefix('src/twinbus/')} {count}" for name, count in sorted(found.items())))


@cache
def private_sdk_names() -> set[str]:
    """Return every private attribute name that azure-servicebus assigns or defines."""
    spec = importlib.util.find_spec("azure.servicebus")
    assert spec is not None
    assert spec.origin is not None
    names: set[str] = set()
    for path in Path(spec.origin).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def private_accesses(source: Source, names: set[str]) -> int:
    """Count accesses to such names on objects other than `self` and `cls`, and imports of private SDK modules.

    Names that one of our own classes in the same file defines are ours.
    """
    ours = {
        node.attr
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    }
    ours |= {node.name for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    count = 0
    uses_sdk = "azure.servicebus" in source.text or "sdk" in source.path.stem
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("azure.servicebus._"):
            count += 1
        elif isinstance(node, ast.Attribute) and uses_sdk and node.attr in names - ours:
            count += not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        elif isinstance(node, ast.Call) and uses_sdk and getattr(node.func, "id", "") in ("getattr", "setattr"):
            text = node.args[1] if len(node.args) > 1 else None
            count += isinstance(text, ast.Constant) and text.value in names
    return count


# --- four ways -------------------------------------------------------------------------------------------------------


class Trace:
    """Records calls into `twinbus`, in every thread that starts after it was made."""

    def __init__(self) -> None:
        self.recording = False
        self._calls: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self.recording:
            return
        file = frame.f_code.co_filename
        if file.startswith(str(PACKAGE)):
            self._calls[threading.get_ident()].append((file, frame.f_code.co_qualname))

    def without(self, question: Callable[[], bool]) -> bool:
        """Return the result of a call, and leave this call out of the trace."""
        recording, self.recording = self.recording, False
        try:
            return question()
        finally:
            self.recording = recording

    @contextmanager
    def of(self, name: str, *, only_this_thread: bool = False) -> Iterator[None]:
        self._calls.clear()
        self.recording = True
        try:
            yield
        finally:
            self.recording = False
            threads = [self._calls[threading.get_ident()]] if only_this_thread else list(self._calls.values())
            calls = [call for thread in threads for call in thread]
            switches = sum(before[0] != after[0] for thread in threads for before, after in pairwise(thread))
            modules = {file for file, _ in calls}
            print_row(name, f"{len(set(calls)):>9} {len(modules):>9} {switches:>9}")


def print_ways() -> None:
    from twinbus.testing import LocalNamespaces  # noqa: PLC0415 - the static figures do not need it

    trace = Trace()
    print_row("way", "functions   modules  switches")
    with LocalNamespaces("primary", "secondary", config=NAMESPACES) as namespaces:
        strings = namespaces["primary"].connection_string, namespaces["secondary"].connection_string
        queue = trace_sends(trace, *strings)
        asyncio.run(trace_syphon(trace, *strings, queue))
    asyncio.run(trace_namespace(trace))


@contextmanager
def diverting(primary: str, secondary: str) -> Iterator[tuple[Any, Any]]:
    """Yield a pair and a sender of it."""
    from twinbus import SendAvailabilityOptions, pair_connection_strings  # noqa: PLC0415

    options = SendAvailabilityOptions(backlog_queue_count=1, ping_interval=timedelta(minutes=30))
    with (
        pair_connection_strings(primary, secondary, options=options) as pair,
        pair.get_queue_sender("orders") as sender,
    ):
        yield pair, sender


def trace_sends(trace: Trace, primary: str, secondary: str) -> str:
    """Trace the calling thread of a healthy and of a diverted send; return the backlog queue that was used."""
    from azure.servicebus import ServiceBusMessage  # noqa: PLC0415

    with diverting(primary, secondary) as (pair, sender):
        sender.send_messages(ServiceBusMessage("opens the link"))
        with trace.of("healthy send", only_this_thread=True):
            sender.send_messages(ServiceBusMessage("x"))
        pair.force_failover("orders")
        sender.send_messages(ServiceBusMessage("opens the link to the backlog"))
        with trace.of("diverted send", only_this_thread=True):
            sender.send_messages(ServiceBusMessage("x"))
        return str(pair.backlog_queues[0])


async def trace_syphon(trace: Trace, primary: str, secondary: str, queue: str) -> None:
    """Let a syphon empty the backlog, divert one more message, and trace how the syphon moves this message."""
    from azure.servicebus import ServiceBusMessage  # noqa: PLC0415

    from tests.syphon.fixed_queues import FixedQueues  # noqa: PLC0415
    from twinbus.syphon import NativeTransport, Syphon, SyphonOptions  # noqa: PLC0415

    def divert_one() -> None:
        with diverting(primary, secondary) as (pair, sender):
            pair.force_failover("orders")
            sender.send_messages(ServiceBusMessage("x"))

    def has_moved(count: int) -> bool:
        progress = syphon.progress()
        return progress.total.returned == count and not progress.held

    async def moved(count: int) -> None:
        # A syphon raises no event for a moved message, so this has to poll.
        while not trace.without(lambda: has_moved(count)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    transport = NativeTransport(primary, secondary, try_timeout=10.0)
    options = SyphonOptions()
    async with Syphon(
        transport, FixedQueues([queue]), primary="primary", secondary="secondary", options=options
    ) as syphon:
        running = asyncio.create_task(syphon.run())
        await moved(2)
        with trace.of("one message through the syphon", only_this_thread=True):
            await asyncio.to_thread(divert_one)
            await moved(3)
        syphon.stop()
        await running


async def trace_namespace(trace: Trace) -> None:
    """Trace every thread of a namespace while azure-servicebus sends one message to it."""
    from azure.servicebus import ServiceBusClient, ServiceBusMessage  # noqa: PLC0415

    from twinbus.namespace import NamespaceOptions, NamespaceServer, parse_config  # noqa: PLC0415

    entities = parse_config(json.dumps(NAMESPACES), toml=False, environment={})[0].entities
    with TemporaryDirectory() as folder:
        options = NamespaceOptions(name="primary", file=Path(folder, "primary"), tls=Path(folder), entities=entities)
        server = NamespaceServer(options)
        await server.start()
        try:
            with ServiceBusClient.from_connection_string(server.connection_string) as client:
                sender = client.get_queue_sender("orders")
                await asyncio.to_thread(sender.send_messages, ServiceBusMessage("opens the link"))
                with trace.of("one send into the namespace"):
                    await asyncio.to_thread(sender.send_messages, ServiceBusMessage("x"))
                await asyncio.to_thread(sender.close)
        finally:
            await server.stop()


if __name__ == "__main__":
    main()
