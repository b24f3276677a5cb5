"""The steps of the demo: the application runs, the primary is killed and restarted, the backlog is moved home.

Then the ledger is reconciled. Every step is a command that a user can type or a call that an application can make.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from twinbus.cli import connections
from twinbus.cli.demo.application import (
    BACKLOG_QUEUES,
    QUEUES,
    SUBSCRIPTIONS,
    TOPIC,
    Application,
    Records,
    running,
)
from twinbus.cli.demo.display import TextDisplay
from twinbus.cli.demo.monitor import Monitor
from twinbus.cli.demo.processes import LEDGER, TABLES, DemoProcesses, Process
from twinbus.cli.engine import Engine
from twinbus.cli.errors import ATTENTION
from twinbus.errors import OperatorError
from twinbus.ledger import EXIT_CODES
from twinbus.pairing import AioAdministration, EntityMode, FailoverEngaged, Restored
from twinbus.syphon import ListedDiscovery

# The time before the outage, and the time after the drain. If the outage is shorter, both are as long as the outage.
_HEALTHY_SECONDS: Final = 5.0
_AFTER_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.2
_BACK_SECONDS: Final = 60.0
_QUIET_POLLS: Final = 60
_PAGE: Final = "report.html"
# Exit codes of a command that could read the ledger. The demo shows the verdict itself.
_JUDGED: Final = tuple(sorted(set(EXIT_CODES.values())))


@dataclass(frozen=True, slots=True)
class DemoOptions:
    rate: float
    seconds: float
    seed: int
    engine: Engine


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The result of a demo. `incidents`, `cost` and `page` need Spark; they are None if the demo ran without Spark."""

    kept: Records
    sums: dict[str, Any]
    incidents: list[dict[str, Any]] | None
    cost: dict[str, Any] | None
    page: Path | None
    took: dict[str, float]


async def run_demo(options: DemoOptions, world: DemoProcesses, show: TextDisplay) -> DemoResult:
    """Run all steps. Raises OperatorError if a step fails."""
    clock = _Stopwatch()
    show.chapter("1  Two namespaces, and an application that sends and receives")
    with show.busy("the namespaces start"):
        primary, secondary = await asyncio.gather(world.serve("primary"), world.serve("secondary"))
    world.connect()
    if options.engine is Engine.SPARK:
        world.begin_pipeline(show.pipeline)
    clock.lap("start")
    kept, primary = await _outage(options, world, show, clock, primary)
    show.chapter("5  The ledger")
    with show.busy("the namespaces end"):
        await asyncio.gather(primary.stop(), secondary.stop())
    return await _run_reports(options, world, show, clock, kept)


async def _outage(
    options: DemoOptions, world: DemoProcesses, show: TextDisplay, clock: _Stopwatch, primary: Process
) -> tuple[Records, Process]:
    strings = world.connection_strings
    watches: list[Monitor] = []

    def on_event(notice: Any) -> None:
        if (text := _event_text(notice)) is not None:
            show.event(f"{watches[0].age():5.1f} s  {text}")

    show.event(f"queues {' and '.join(QUEUES)}, topic {TOPIC} with subscriptions {' and '.join(SUBSCRIPTIONS)}")
    show.event(
        f"{BACKLOG_QUEUES} backlog queues; {options.rate:g} messages a second through a pair; seed {options.seed}"
    )
    books = world.folder / LEDGER
    async with AsyncExitStack() as stack:
        with show.busy("the application starts"):
            application = await stack.enter_async_context(
                running(strings["primary"], strings["secondary"], books, options.rate, options.seed, on_event)
            )
        watch = Monitor(application.pair, application.kept)
        watches.append(watch)
        with show.live(world.ports):
            async with _monitoring(watch, strings, show) as backlog:
                await asyncio.sleep(min(_HEALTHY_SECONDS, options.seconds))
                clock.lap("healthy")
                primary = await _kill_primary(options, world, show, clock, watch, primary)
                await _drain_backlog(options, world, show, watch)
                clock.lap("drain")
                await asyncio.sleep(min(_AFTER_SECONDS, options.seconds))
                await application.stop_sending()
                if await backlog.remaining():
                    # A send that started during the outage was diverted after the first drain had ended.
                    await _drain_backlog(options, world, show, watch)
                await _wait_for_receivers(application, strings["primary"])
                clock.lap("receive")
        application.kept.diverted = watch.read_state().flow.diverted
        with show.busy("the application ends"):
            await stack.aclose()
    return application.kept, primary


async def _kill_primary(
    options: DemoOptions, world: DemoProcesses, show: TextDisplay, clock: _Stopwatch, watch: Monitor, primary: Process
) -> Process:
    """Kill the primary, start it again after the outage, and wait until senders use it. Returns the new process."""
    show.chapter("2  The primary is gone; the application goes on sending")
    show.command(f"kill -9 {primary.pid}")
    await primary.kill()
    watch.primary_up = False
    await asyncio.sleep(options.seconds)
    clock.lap("outage")
    show.chapter("3  The primary comes back; a ping notices, and senders use it again")
    again = await world.serve("primary")
    watch.primary_up = True
    await _until(
        lambda: all(one.state is EntityMode.HEALTHY for one in watch.pair.entities()), "the primary was not used again"
    )
    clock.lap("restore")
    return again


async def _drain_backlog(options: DemoOptions, world: DemoProcesses, show: TextDisplay, watch: Monitor) -> None:
    before = watch.returned

    has_ended = False

    def on_output(line: str) -> None:
        nonlocal has_ended
        told = json.loads(line)
        watch.returned = before + told["total"]["returned"]
        has_ended = told["ended"]

    show.chapter(f"4  The syphon brings the backlog home, on {options.engine.value}")
    verb = ["syphon", "--engine", options.engine.value, "--drain", "--ledger", LEDGER]
    code, process = await world.run(*verb, "--json", "--every", "0.5", hidden=3, on_line=on_output, on_spark=True)
    # The verdict reports messages that were left behind, and those that the audit after the drain calls lost.
    if code not in (0, ATTENTION) and not has_ended:
        raise OperatorError(f"the syphon ended with {code}", process.error_text())
    show.event(f"{watch.age():5.1f} s  {watch.returned:,} messages are home")


async def _wait_for_receivers(application: Application, primary: str) -> None:
    """Wait until receivers have all messages, the primary is empty, or no message arrives for a minute."""
    kept, quiet = application.kept, 0
    async with AioAdministration.from_connection_string(primary) as administration:
        while not kept.has_all and quiet < _QUIET_POLLS:
            empty = not await _count_on_primary(administration)
            before = kept.count_received()
            await asyncio.sleep(1.0)
            quiet = 0 if kept.count_received() > before else _QUIET_POLLS if empty else quiet + 1


async def _count_on_primary(administration: AioAdministration) -> int:
    """Return the number of messages in queues and subscriptions of the primary, including locked messages."""

    async def walk(**keywords: Any) -> int:
        queues = administration.client.list_queues_runtime_properties(**keywords)
        subscriptions = administration.client.list_subscriptions_runtime_properties(TOPIC, **keywords)
        held = [one.active_message_count async for one in queues]
        held += [one.active_message_count async for one in subscriptions]
        return sum(count or 0 for count in held)

    return await administration.request(walk)


async def _run_reports(
    options: DemoOptions, world: DemoProcesses, show: TextDisplay, clock: _Stopwatch, kept: Records
) -> DemoResult:
    if options.engine is not Engine.SPARK:
        with show.busy("reconciling"):
            sums = await world.ask("ledger", "check", LEDGER, "--json", good=_JUDGED, hidden=1)
        clock.lap("ledger")
        return DemoResult(kept, sums, None, None, None, clock.laps)
    with show.busy("the pipeline reads the last entries"):
        await world.finish_pipeline()
        clock.lap("pipeline")
    with show.busy("reading the results"):
        sums, incidents, cost = await asyncio.gather(
            world.ask("ledger", "reconcile", TABLES, "--json", good=_JUDGED, hidden=1),
            world.ask("ledger", "incidents", TABLES, "--json", hidden=1),
            world.ask("cost", "actual", TABLES, "--json", hidden=1),
        )
        clock.lap("ledger")
        code, process = await world.run(
            "report", TABLES, "-o", _PAGE, "--title", "Twinbus demo", on_line=lambda _: None
        )
    if code:
        # A failed report is only shown as an event, because the result of the demo is complete without the report.
        show.event(f"the report failed: {process.error_text()}")
    clock.lap("report")
    return DemoResult(kept, sums, incidents, cost, None if code else world.folder / _PAGE, clock.laps)


# --- monitoring -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _monitoring(watch: Monitor, strings: dict[str, str], show: TextDisplay) -> AsyncIterator[ListedDiscovery]:
    """Update monitor and display inside the `async with` block. Yields the discovery that counts the backlog."""
    async with AioAdministration.from_connection_string(strings["secondary"]) as administration:
        backlog = ListedDiscovery(connections.backlog_name(strings["primary"], None), administration)
        tasks = [asyncio.create_task(_show_states(watch, show)), asyncio.create_task(_count_backlog(watch, backlog))]
        try:
            yield backlog
        finally:
            show.show_state(watch.read_state(), watch.seconds)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _show_states(watch: Monitor, show: TextDisplay) -> None:
    while True:
        show.show_state(watch.read_state(), watch.seconds)
        await asyncio.sleep(show.refresh_seconds)


async def _count_backlog(watch: Monitor, backlog: ListedDiscovery) -> None:
    while True:
        found = await backlog.remaining()
        watch.waiting = watch.waiting if found is None else found
        await asyncio.sleep(_POLL_SECONDS)


async def _until(holds: Callable[[], bool], otherwise: str) -> None:
    try:
        async with asyncio.timeout(_BACK_SECONDS):
            while not holds():  # noqa: ASYNC110 - a state, not an event: it may be so already
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise OperatorError(f"{otherwise} within {_BACK_SECONDS:.0f} s") from None


def _event_text(notice: Any) -> str | None:
    match notice:
        case FailoverEngaged():
            return f"{notice.entity}: failover engaged ({str(notice.cause).replace('_', ' ')})"
        case Restored():
            return (
                f"{notice.entity}: restored by a ping after {notice.outage:.1f} s, {notice.diverted:,} diverted so far"
            )
        case _:
            return None


class _Stopwatch:
    """Measures the duration of each step."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = asyncio.get_running_loop().time()

    def lap(self, name: str) -> None:
        now = asyncio.get_running_loop().time()
        self.laps[name] = round(now - self._last, 1)
        self._last = now
