"""`twinbus syphon`: options, signals and exit codes. The work itself is in `twinbus.syphon`."""

from __future__ import annotations

import asyncio
import gc
import json as json_text
import os
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from twinbus.cli import connections
from twinbus.cli.connections import Primary, PrimaryName, Secondary, Seconds, State
from twinbus.cli.engine import Engine, spark_session
from twinbus.cli.errors import ATTENTION, Debug, WrongUsageError, errors_reported
from twinbus.cli.interrupts import SIGNALLED
from twinbus.cli.ledger import refuse_unwritable
from twinbus.cli.ledger_audit import announce, audited, drain_audit, no_drain_audit, show_lost
from twinbus.cli.network import credential_name, network_of, network_options
from twinbus.cli.option_values import span_option
from twinbus.cli.progress import LINE_SECONDS, Display, display
from twinbus.errors import TwinbusError
from twinbus.printable import printable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from twinbus.ledger import Ledger
    from twinbus.pipeline.syphon_job import SparkSyphon
    from twinbus.syphon import Discovery, DryRunResult, Progress, SharedHolds, Syphon, SyphonOptions, Transport

T = TypeVar("T")
# An audit needs about 1 KB of memory for each message, and a drain must not end for lack of memory. The help of the
# verb and the guides name this limit.
_MOST_AUDITED_BYTES = 256 * 2**20
# The garbage collector runs after this many new objects, as in the server. Messages in flight are in no reference
# cycle, so more frequent runs would free no memory.
_COLLECT_AFTER = 50_000


class Carrier(StrEnum):
    NATIVE = "native"
    SDK = "sdk"


class Lifetime(StrEnum):
    RESTART = "restart"
    ABSOLUTE = "absolute"


_Rate = Annotated[float | None, typer.Option(help="Maximum messages per second.", show_default="no limit")]
_Transport = Annotated[Carrier, typer.Option(help="native: our own client. sdk: azure-servicebus.")]
_Folder = Annotated[
    Path | None, typer.Option(help="Directory of the ledger that records every move.", show_default="none")
]
_Ttl = Annotated[
    Lifetime,
    typer.Option(help="Times to live start again on the primary, or the time in the backlog counts."),
]
_Engine = Annotated[
    Engine, typer.Option(help="native: in this process. spark: as a Structured Streaming job, in lanes.")
]
_Master = Annotated[
    str | None,
    typer.Option(help="Spark master URL: spark://host:7077, yarn, …", show_default="as submitted, or this machine"),
]
_Lanes = Annotated[
    int | None, typer.Option(min=1, help="With spark: lanes per backlog queue.", show_default="all cores")
]
_Wait = Annotated[
    timedelta,
    span_option(
        "With --drain: wait this long for destinations that are away, once nothing else can move (10m, 1h).",
        show_default="try each once more",
    ),
]
_Every = Annotated[float, typer.Option(min=0.1, help="Seconds between two lines, without a terminal.")]


@network_options
def syphon(
    primary: Primary,
    secondary: Secondary,
    drain: Annotated[bool, typer.Option("--drain", help="End when nothing more can move.")] = False,
    wait_for_destinations: _Wait = timedelta(0),
    rate: _Rate = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be moved, and move nothing.")] = False,
    transport: _Transport = Carrier.NATIVE,
    ledger: _Folder = None,
    state: State = None,
    ttl: _Ttl = Lifetime.RESTART,
    engine: _Engine = Engine.NATIVE,
    master: _Master = None,
    lanes: _Lanes = None,
    primary_name: PrimaryName = None,
    seconds: Seconds = 10.0,
    every: _Every = LINE_SECONDS,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: one object per line.")] = False,
    debug: Debug = False,
) -> None:
    """Move the backlog to the entities it was meant for.

    Runs until it is stopped. Several syphons may run at the same time, on one machine or many.

    SIGUSR1 pauses, SIGUSR2 resumes.

    SIGTERM and Ctrl-C finish what is in flight; a second signal ends the process immediately.

    With --state, nothing is delivered to an entity that an operator holds there.

    With --drain, it ends when no message that is left can move, and each destination that is away was tried once
    more. It lists why messages are not home, and what to do.

    With --drain and --ledger, an audit follows the drain: it compares the ledger with the backlog queues. The last
    line then has its verdict: proven, proven with possible duplicates, not proven, or lost.

    There is no such audit if the ledger is larger than 256 MiB. The last line then has the command that makes one.

    Exit code: 0 if stopped, 1 if it could not work, 128 + signal after a second signal.

    With --drain: 0 if all was moved, 3 if messages are left, or it was stopped before, or the verdict is not proven, or
    there is a ledger and no verdict; 1 if the verdict is lost.

    Examples:
      twinbus syphon                                    # while the pair is used
      twinbus syphon --drain --ledger ./ledger          # until nothing can move
      twinbus syphon --drain --wait-for-destinations 10m
      twinbus syphon --dry-run                          # what would be moved
      twinbus syphon --drain --engine spark --lanes 4   # at scale, on Spark
      twinbus syphon --proxy http://proxy.example:3128  # where only 443 goes out
    """
    with errors_reported(debug=debug):
        from twinbus.namespace import configure_logging  # noqa: PLC0415 - slow
        from twinbus.syphon import SyphonOptions  # noqa: PLC0415

        _refuse(engine, ledger, master, lanes, dry_run=dry_run)
        if wait_for_destinations and (dry_run or not drain):
            raise WrongUsageError("--wait-for-destinations needs --drain", "Add it, or leave it out.")
        connections.require_two_namespaces(primary, secondary)
        name = connections.backlog_name(primary, primary_name)
        wait = wait_for_destinations.total_seconds()
        options = SyphonOptions(rate=rate, drain=drain, wait_for_destinations=wait, ttl=ttl.value)
        sides = (("primary", primary), ("secondary", secondary))
        configure_logging("warning", keys=[connections.address(side, text).key for side, text in sides])
        work = _Work(primary, secondary, name, transport, seconds, state)
        if dry_run:
            _print_dry_run(_on_loop(work.dry_run()), json=json)
            return
        shown = display(json=json, seconds=every)
        if engine is Engine.SPARK:
            ended, has_drained = _on_spark(work, options, ledger, shown, master, lanes)
        else:
            ended, has_drained = _on_loop(work.run(options, ledger, shown))
        if code := _exit_code(ended, drain=drain, has_drained=has_drained, json=json):
            raise typer.Exit(code)


def _refuse(engine: Engine, ledger: Path | None, master: str | None, lanes: int | None, *, dry_run: bool) -> None:
    """Raise an error for options that have no effect, and for a ledger that cannot be written."""
    if dry_run and (ledger is not None or master is not None or lanes is not None):
        raise WrongUsageError("--dry-run cannot be combined with --ledger, --master or --lanes", "Leave them out.")
    if engine is Engine.NATIVE and (master is not None or lanes is not None):
        raise WrongUsageError("--master and --lanes need --engine spark", "Add it, or leave them out.")
    if ledger is not None:
        refuse_unwritable(ledger)


def _exit_code(ended: Progress, *, drain: bool, has_drained: bool, json: bool) -> int:
    """Return the exit code of a run. Without `json`, prints the lost messages, or why there was no audit."""
    from twinbus.ledger import EXIT_CODES  # noqa: PLC0415 - slow

    if (audit := ended.audit) is not None:
        verdict = audit["verdict"]
        if not json:
            if audit["lost"]:
                show_lost(audit)
            elif verdict is None:
                typer.echo(printable(f"no verdict: the audit was {audit['text']}"))
        # Without a verdict nothing is proven (L6): 0 would say that it is.
        if code := ATTENTION if verdict is None else EXIT_CODES[verdict]:
            return code
    is_moved = has_drained and not (ended.left or ended.total.dead_lettered or ended.total.kept or ended.aside)
    return ATTENTION if drain and not is_moved else 0


def _on_loop(work: Coroutine[Any, Any, T]) -> T:
    import uvloop  # noqa: PLC0415 - slow it

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _on_spark(
    work: _Work, options: SyphonOptions, ledger: Path | None, shown: Display, master: str | None, lanes: int | None
) -> tuple[Progress, bool]:
    if work.carrier is not Carrier.NATIVE:
        raise WrongUsageError("--engine spark works with the native transport only", "Leave out --transport.")
    # The Spark session is not stopped here, because another part of this process may have made the session.
    spark = spark_session("twinbus syphon", master)
    return _on_loop(work.run_on_spark(spark, options, None if ledger is None else ledger.absolute(), shown, lanes))


@dataclass(frozen=True, slots=True)
class _Work:
    """One run of the verb: its namespaces, and the methods that run a syphon or a dry run."""

    primary: str
    secondary: str
    name: str
    carrier: Carrier
    seconds: float
    state: str | None = None

    async def run(self, options: SyphonOptions, ledger: Path | None, shown: Display) -> tuple[Progress, bool]:
        """Run a syphon. Returns its progress at the end, and whether a drain came to its end."""
        from twinbus.backlog import primary_name  # noqa: PLC0415
        from twinbus.ledger import Ledger, Role  # noqa: PLC0415 - slow
        from twinbus.syphon import Syphon  # noqa: PLC0415

        async with AsyncExitStack() as stack:
            transport = await self._transport(stack)
            gc.freeze()
            gc.set_threshold(_COLLECT_AFTER)
            book = stack.enter_context(Ledger(ledger, role=Role.SYPHON)) if ledger is not None else None
            discovery = connections.discovery(self.name, self.secondary, transport, self.seconds, book)
            made = Syphon(
                transport,
                discovery,
                primary=self.name,
                secondary=primary_name(connections.endpoint("secondary", self.secondary)),
                options=options,
                ledger=book,
                shared_holds=await self._shared_holds(stack, book),
            )
            await stack.enter_async_context(made)
            await self._look(discovery, must_answer=options.drain)

            async def audit() -> Mapping[str, Any] | None:
                if ledger is None or not options.drain:
                    return None
                return await self._audit(ledger, book, has_drained=made.has_drained)

            return await _shown(made, shown, audit), made.has_drained

    async def _shared_holds(self, stack: AsyncExitStack, book: Ledger | None) -> SharedHolds | None:
        from twinbus.syphon import SharedHolds  # noqa: PLC0415 - slow

        if self.state is None:
            return None
        opened = connections.shared_state(self.state, self.name, self.secondary, self.seconds, book)
        shared = await stack.enter_async_context(opened)
        if shared.location.is_missing():
            typer.echo(f"note: the folder {printable(self.state)} does not exist yet: nothing is held there", err=True)
        return SharedHolds.of_state(shared.read, in_secondary=shared.location.folder is None)

    async def run_on_spark(
        self, spark: SparkSession, options: SyphonOptions, ledger: Path | None, shown: Display, lanes: int | None
    ) -> tuple[Progress, bool]:
        """Run a syphon on Spark. Returns the same as `run`."""
        from twinbus.backlog import primary_name  # noqa: PLC0415 - slow
        from twinbus.ledger import Ledger, Role  # noqa: PLC0415
        from twinbus.pipeline.syphon_job import SparkSyphon, SparkSyphonOptions, SyphonJob  # noqa: PLC0415

        job = SyphonJob(
            primary=self.primary,
            secondary=self.secondary,
            primary_name=self.name,
            secondary_name=primary_name(connections.endpoint("secondary", self.secondary)),
            primary_network=network_of("primary"),
            secondary_network=network_of("secondary"),
            credential=credential_name(),
            ledger=None if ledger is None else str(ledger),
            ttl=options.ttl,
            timeout=self.seconds,
        )
        async with AsyncExitStack() as stack:
            transport = await self._transport(stack)
            stack.push_async_callback(transport.close)
            discovery = connections.discovery(self.name, self.secondary, transport, self.seconds)
            settings = SparkSyphonOptions(
                lanes=lanes,
                drain=options.drain,
                rate=options.rate,
                wait_for_destinations=options.wait_for_destinations,
            )
            # What the driver reads of the state is in a segment of its own (M1).
            book = None if ledger is None or self.state is None else Ledger(ledger, Role.SYPHON)
            holds = await self._shared_holds(stack, None if book is None else stack.enter_context(book))
            made = await stack.enter_async_context(SparkSyphon(spark, discovery, job, settings, holds))
            await self._look(discovery, must_answer=options.drain)

            async def audit() -> Mapping[str, Any] | None:
                if ledger is None or not options.drain:
                    return None
                return await self._audit(ledger, None, has_drained=made.has_drained)

            return await _shown(made, shown, audit), made.has_drained

    async def _audit(self, directory: Path, book: Ledger | None, *, has_drained: bool) -> Mapping[str, Any]:
        """Audit the ledger after a drain, with its open writer `book` or a new one.

        If there is no audit, the result says why and what to run, and has no verdict.
        """
        from twinbus.ledger import Ledger, Role, list_segments, segment_size  # noqa: PLC0415 - slow

        command = f"twinbus ledger audit {shlex.quote(str(directory))}"
        if not has_drained:
            return no_drain_audit("the drain was stopped before its end", f"Drain again, or run `{command}`.")
        try:
            if sum(map(segment_size, list_segments(directory))) > _MOST_AUDITED_BYTES:
                why = f"the ledger is larger than {_MOST_AUDITED_BYTES // 2**20} MiB"
                return no_drain_audit(why, f"Run `{command} --engine spark`.")
            with Ledger(directory, Role.AUDIT) if book is None else nullcontext(book) as writer:
                return drain_audit(await audited(writer, self.secondary, self.name, 0.0, self.seconds, announce))
        except (TwinbusError, OSError) as error:
            return no_drain_audit(str(error), f"When this is mended, run `{command}`.")

    async def dry_run(self) -> DryRunResult:
        from twinbus.syphon import count_backlog  # noqa: PLC0415 - slow

        async with AsyncExitStack() as stack:
            transport = await self._transport(stack)
            stack.push_async_callback(transport.close)
            discovery = connections.discovery(self.name, self.secondary, transport, self.seconds)
            stack.push_async_callback(discovery.close)
            await self._look(discovery, must_answer=True)
            return await count_backlog(transport, discovery)

    async def _transport(self, stack: AsyncExitStack) -> Transport:
        if self.carrier is Carrier.NATIVE:
            return connections.native_transport(self.primary, self.secondary, self.seconds)
        from twinbus.syphon import SdkTransport  # noqa: PLC0415 - one or the other

        sides = (("primary", self.primary), ("secondary", self.secondary))
        clients = [await stack.enter_async_context(connections.aio_client(text, side=side)) for side, text in sides]
        return SdkTransport(clients[0], clients[1], try_timeout=self.seconds)

    async def _look(self, discovery: Discovery, *, must_answer: bool) -> None:
        """Look for backlog queues before the syphon runs, and raise an error if the secondary refuses the key.

        With `must_answer`, also raise an error if the secondary does not answer or has no backlog queue. Without
        `must_answer`, the syphon starts in both cases and tries again regularly.
        """
        try:
            found = await discovery.queues()
        except Exception as error:
            if must_answer or connections.is_refused(error):
                raise connections.connection_error("secondary", error) from error
            return
        if not found:
            missing = connections.no_backlog_error(self.secondary, self.name)
            if must_answer:
                raise missing
            typer.echo(f"{missing.text}. {missing.hint} It is looked for again regularly.", err=True)


async def _shown(
    syphon: Syphon | SparkSyphon,
    shown: Display,
    audit: Callable[[], Awaitable[Mapping[str, Any] | None]] | None = None,
) -> Progress:
    running = asyncio.create_task(syphon.run())
    with _signal_handlers(syphon), shown:
        while not running.done():
            await syphon.count_remaining()
            shown.show(syphon.progress())
            await asyncio.wait({running}, timeout=shown.seconds)
        # The messages were last counted before the end of the run, so the numbers of remaining messages are too old.
        ended = replace(running.result(), remaining=None, seconds_left=None)
        if audit is not None:
            ended = replace(ended, audit=await audit())
        shown.end(ended)
    return ended


@contextmanager
def _signal_handlers(syphon: Syphon | SparkSyphon) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    stopping = False

    def stop(number: int) -> None:
        nonlocal stopping
        if stopping:
            # This exit is as safe as a crash: messages that were not completed are received again (Y3).
            sys.stdout.flush()
            os._exit(SIGNALLED + number)
        stopping = True
        syphon.stop()

    calls: dict[signal.Signals, Callable[[], None]] = {
        signal.SIGTERM: partial(stop, signal.SIGTERM),
        signal.SIGINT: partial(stop, signal.SIGINT),
        signal.SIGUSR1: syphon.pause,
        signal.SIGUSR2: syphon.resume,
    }
    for number, call in calls.items():
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        for number in calls:
            loop.remove_signal_handler(number)


def _print_dry_run(found: DryRunResult, *, json: bool) -> None:
    rows = [*found.by_destination.items(), *([(None, found.unaddressed)] if found.unaddressed.messages else [])]
    if json:
        destinations = [
            {
                "destination": path,
                "messages": one.messages,
                "bytes": one.bytes,
                "deferred": one.deferred,
                "oldest": None if one.oldest is None else one.oldest.isoformat(),
            }
            for path, one in rows
        ]
        typer.echo(
            json_text.dumps({"queues": list(found.queues), "messages": found.messages, "destinations": destinations})
        )
        return
    for path, one in rows:
        # By the broker's clock: an age would compare it with the clock of this machine (L5).
        age = "" if one.oldest is None else f", the oldest since {one.oldest:%Y-%m-%d %H:%M:%S} UTC"
        aside = f", {one.deferred} of them put aside" if one.deferred else ""
        where = "no destination, would be dead-lettered" if path is None else printable(path)
        typer.echo(f"{one.messages:>9}  {where} ({one.bytes} bytes{age}{aside})")
    typer.echo(f"{found.messages} messages in {len(found.queues)} backlog queues; nothing was moved")
