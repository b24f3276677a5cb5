"""What happens in the demo, and when: an application at work, its primary killed, back, the backlog brought home.

Then the books. Every step is a command that anybody could type, or a call that any application could make.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from twinbus.cli import connections
from twinbus.cli.demo.application import (
    BACKLOG_QUEUES,
    PING_SECONDS,
    QUEUES,
    SUBSCRIPTIONS,
    TOPIC,
    Application,
    Records,
    running,
)
from twinbus.cli.demo.display import TextDisplay
from twinbus.cli.demo.processes import LEDGER, TABLES, DemoProcesses, Process
from twinbus.cli.demo.snapshot import Monitor
from twinbus.cli.syphon import LEFT_BEHIND, Engine
from twinbus.errors import OperatorError
from twinbus.pairing import AioAdministration, EntityMode, FailoverEngaged, Restored
from twinbus.syphon import ListedDiscovery

# The calm before and after; shorter where the outage is.
_HEALTHY_SECONDS: Final = 5.0
_AFTER_SECONDS: Final = 2.0
_LOOK_AGAIN_SECONDS: Final = 0.2
_BACK_SECONDS: Final = 60.0
_QUIET_LOOKS: Final = 60
_PAGE: Final = "report.html"


@dataclass(frozen=True, slots=True)
class DemoOptions:
    rate: float
    seconds: float
    seed: int
    engine: Engine


@dataclass(frozen=True, slots=True)
class DemoResult:
    """`incidents`, `cost` and `page` are Spark's: None without it."""

    kept: Records
    sums: dict[str, Any]
    incidents: list[dict[str, Any]] | None
    cost: dict[str, Any] | None
    page: Path | None
    took: dict[str, float]


async def run_demo(asked: DemoOptions, world: DemoProcesses, show: TextDisplay) -> DemoResult:
    """All of it. Raises OperatorError where a step could not be done."""
    clock = _Stopwatch()
    show.chapter("1  Two namespaces, and an application that sends and receives")
    primary, secondary = await asyncio.gather(world.serve("primary"), world.serve("secondary"))
    world.connect()
    if asked.engine is Engine.SPARK:
        world.begin_spark()
    clock.lap("start")
    kept, primary = await _outage(asked, world, show, clock, primary)
    show.chapter("5  The books")
    with show.busy("the namespaces end"):
        await asyncio.gather(primary.stop(), secondary.stop())
    return await _run_reports(asked, world, show, clock, kept)


async def _outage(
    asked: DemoOptions, world: DemoProcesses, show: TextDisplay, clock: _Stopwatch, primary: Process
) -> tuple[Records, Process]:
    strings = world.connection_strings
    watches: list[Monitor] = []

    def heard(notice: Any) -> None:
        if (said := _event_text(notice)) is not None:
            show.say(f"{watches[0].age():5.1f} s  {said}")

    show.say(f"queues {' and '.join(QUEUES)}, topic {TOPIC} with subscriptions {' and '.join(SUBSCRIPTIONS)}")
    show.say(f"{BACKLOG_QUEUES} backlog queues; {asked.rate:g} messages a second through a pair; seed {asked.seed}")
    books = world.folder / LEDGER
    async with running(strings["primary"], strings["secondary"], books, asked.rate, asked.seed, heard) as application:
        watch = Monitor(application.pair, application.kept)
        watches.append(watch)
        with show.live(world.ports):
            async with _monitoring(watch, strings, show) as backlog:
                await asyncio.sleep(min(_HEALTHY_SECONDS, asked.seconds))
                clock.lap("healthy")
                primary = await _kill_primary(asked, world, show, clock, watch, primary)
                await _drain_backlog(asked, world, show, watch)
                clock.lap("drain")
                await asyncio.sleep(min(_AFTER_SECONDS, asked.seconds))
                await application.stop_sending()
                if await backlog.remaining():
                    # A send that had been under way since the outage was diverted only now.
                    await _drain_backlog(asked, world, show, watch)
                await _wait_for_receivers(application, strings["primary"])
                clock.lap("receive")
        application.kept.diverted = watch.look().flow.diverted
    return application.kept, primary


async def _kill_primary(
    asked: DemoOptions, world: DemoProcesses, show: TextDisplay, clock: _Stopwatch, watch: Monitor, primary: Process
) -> Process:
    """Away for as long as was asked; the new process once senders use it again."""
    show.chapter("2  The primary is gone; the application goes on sending")
    show.command(f"kill -9 {primary.pid}")
    await primary.kill()
    watch.primary_up = False
    await asyncio.sleep(asked.seconds)
    clock.lap("outage")
    show.chapter("3  The primary comes back; a ping notices, and senders use it again")
    again = await world.serve("primary")
    watch.primary_up = True
    await _until(
        lambda: all(one.state is EntityMode.HEALTHY for one in watch.pair.entities()), "the primary was not used again"
    )
    clock.lap("restore")
    return again


async def _drain_backlog(asked: DemoOptions, world: DemoProcesses, show: TextDisplay, watch: Monitor) -> None:
    before = watch.returned

    def heard(line: str) -> None:
        watch.returned = before + json.loads(line)["total"]["returned"]

    show.chapter(f"4  The syphon brings the backlog home, on {asked.engine.value}")
    verb = ["syphon", "--engine", asked.engine.value, "--drain", "--ledger", LEDGER]
    code, process = await world.run(*verb, "--json", "--every", "0.5", hidden=3, heard=heard)
    # What it left behind is for the verdict.
    if code not in (0, LEFT_BEHIND):
        raise OperatorError(f"the syphon ended with {code}", process.said())
    show.say(f"{watch.age():5.1f} s  {watch.returned:,} messages are home")


async def _wait_for_receivers(application: Application, primary: str) -> None:
    """Until receivers have it all, or the primary has nothing more for them, or nothing comes any more."""
    kept, quiet = application.kept, 0
    async with AioAdministration.from_connection_string(primary) as administration:
        while not kept.has_all and quiet < _QUIET_LOOKS:
            empty = not await _count_on_primary(administration)
            before = kept.count_received()
            await asyncio.sleep(1.0)
            quiet = 0 if kept.count_received() > before else _QUIET_LOOKS if empty else quiet + 1


async def _count_on_primary(administration: AioAdministration) -> int:
    """Messages in the queues and subscriptions of the primary; those that receivers hold are in them."""

    async def walk(**keywords: Any) -> int:
        queues = administration.client.list_queues_runtime_properties(**keywords)
        subscriptions = administration.client.list_subscriptions_runtime_properties(TOPIC, **keywords)
        held = [one.active_message_count async for one in queues]
        held += [one.active_message_count async for one in subscriptions]
        return sum(count or 0 for count in held)

    return await administration.ask(walk)


async def _run_reports(
    asked: DemoOptions, world: DemoProcesses, show: TextDisplay, clock: _Stopwatch, kept: Records
) -> DemoResult:
    if asked.engine is not Engine.SPARK:
        with show.busy("adding up"):
            sums = await world.ask("ledger", "check", LEDGER, "--json", good=(0, 1), hidden=1)
        clock.lap("books")
        return DemoResult(kept, sums, None, None, None, clock.laps)
    with show.busy("adding up, on Spark"):
        sums = await world.ask("ledger", "reconcile", TABLES, "--ledger", LEDGER, "--json", good=(0, 1), hidden=1)
        incidents = await world.ask("ledger", "incidents", TABLES, "--json", hidden=1)
        intervals = ["--failover-interval", "0s", "--ping-interval", f"{PING_SECONDS:g}s"]
        cost = await world.ask("cost", "actual", TABLES, *intervals, "--json", hidden=1)
        clock.lap("books")
        code, process = await world.run("report", TABLES, "-o", _PAGE, "--title", "Twinbus demo", heard=lambda _: None)
    if code:
        # The proof stands without its picture.
        show.say(f"there is no report: {process.said()}")
    clock.lap("report")
    return DemoResult(kept, sums, incidents, cost, None if code else world.folder / _PAGE, clock.laps)


# --- looking ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _monitoring(watch: Monitor, strings: dict[str, str], show: TextDisplay) -> AsyncIterator[ListedDiscovery]:
    """What is yielded can be asked for the backlog."""
    async with AioAdministration.from_connection_string(strings["secondary"]) as administration:
        backlog = ListedDiscovery(connections.backlog_name(strings["primary"], None), administration)
        looking = [asyncio.create_task(_see(watch, show)), asyncio.create_task(_count(watch, backlog))]
        try:
            yield backlog
        finally:
            show.see(watch.look(), watch.seconds)
            for task in looking:
                task.cancel()
            await asyncio.wait(looking)


async def _see(watch: Monitor, show: TextDisplay) -> None:
    while True:
        show.see(watch.look(), watch.seconds)
        await asyncio.sleep(show.look_seconds)


async def _count(watch: Monitor, backlog: ListedDiscovery) -> None:
    while True:
        found = await backlog.remaining()
        watch.waiting = watch.waiting if found is None else found
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)


async def _until(holds: Callable[[], bool], otherwise: str) -> None:
    try:
        async with asyncio.timeout(_BACK_SECONDS):
            while not holds():  # noqa: ASYNC110 - a state, not an event: it may be so already
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
    except TimeoutError:
        raise OperatorError(f"{otherwise} within {_BACK_SECONDS:.0f} s") from None


def _event_text(notice: Any) -> str | None:
    match notice:
        case FailoverEngaged():
            return f"{notice.entity}: failover engaged ({str(notice.cause).replace('_', ' ')})"
        case Restored():
            return f"{notice.entity}: restored by a ping after {notice.outage:.1f} s, {notice.diverted:,} diverted"
        case _:
            return None


class _Stopwatch:
    """How long each part took."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = asyncio.get_running_loop().time()

    def lap(self, name: str) -> None:
        now = asyncio.get_running_loop().time()
        self.laps[name] = round(now - self._last, 1)
        self._last = now
