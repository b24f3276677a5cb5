"""Processes that are killed with -9: syphons over both transports, and applications that send through a pair.

They are forked from a server that has imported everything, so that a process starts within milliseconds. A process
tells its parent through a pipe when it has begun to move or to send; then the parent kills it at a random instant,
unless the process kills itself at the place that its `KillPlan` names.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final, Literal

from azure.servicebus import ServiceBusMessage
from azure.servicebus.aio import ServiceBusClient

import twinbus
import twinbus.aio
from tests.chaos.syphoning import FATAL, FATAL_TO_DEAD_LETTERS, UNDER_WAY_SECONDS, WatchedTransport
from tests.crash.stored_ids import marked_body
from tests.syphon.fixed_queues import FixedQueues
from twinbus import SendAvailabilityOptions
from twinbus.connect import Receiver, Sender, ServiceBusConnection, connect
from twinbus.ledger import OK, Ledger, LedgerOptions, Role, RunningOperation, Stage
from twinbus.syphon import HeldMessage, MoveStep, NativeTransport, RetryPolicy, Syphon, SyphonOptions
from twinbus.syphon.dead_letters import DeadLetters
from twinbus.syphon.sdk_transport import SdkTransport
from twinbus.syphon.transport import OutgoingMessage

Durability = Literal["process", "lazy"]
NATIVE, SDK = "native", "sdk"
TRANSPORTS: Final = (NATIVE, SDK)
PLACES: Final = FATAL
"""Every place where a syphon kills itself."""
DEAD_LETTER_PLACES: Final = FATAL_TO_DEAD_LETTERS
"""Every place where a syphon kills itself that dead-letters messages."""
WINDOW: Final = 20
"""The most messages that a syphon holds which is to be killed."""
SYNC, AIO = "sync", "asyncio"
PRIMARY_NAME, SECONDARY_NAME = "contoso", "contoso-away"
_BEGIN_SECONDS: Final = 60.0
_PLACE_SECONDS: Final = 30.0
# A small segment is full after some dozen entries: many kills hit a writer that seals a segment and opens the next.
_SEGMENT_BYTES: Final = 8192
_QUICK: Final = RetryPolicy(first_pause=0.05, longest_pause=0.2)


@dataclass(frozen=True, slots=True)
class KillPlan:
    """How a process ends: by itself, at a place that it reaches for the `times`-th time; or by its parent, `seconds`
    after the process has begun."""

    place: str | None = None
    times: int = 1
    seconds: float = 0.0


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- from the parent --------------------------------------------------------------------------------------------------


class KilledProcess:
    """A process that runs `program(work, begun)`."""

    def __init__(self, program: Callable[[Any, Connection], None], work: Any, plan: KillPlan) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.crash.killed_clients"])
        self._begun, given = context.Pipe(duplex=False)
        self._plan = plan
        self._process: ForkServerProcess = context.Process(target=program, args=(work, given), daemon=True)
        self._process.start()
        given.close()

    def until_killed(self) -> str | None:
        """Kills the process, unless it ends itself at its place. Returns that place, or None after a random kill."""
        if self._begun.poll(_BEGIN_SECONDS):
            if self._plan.place is None:
                time.sleep(self._plan.seconds)  # chooses the instant of the kill; nothing is waited for
            else:
                # The process kills itself, unless it does not come to the place.
                self._process.join(_PLACE_SECONDS)
        has_ended = self._process.exitcode is not None
        code = self.join(0.0)
        assert code in (-signal.SIGKILL, 0), f"a process ended with {code} before it was killed"
        return self._plan.place if has_ended else None

    def join(self, seconds: float) -> int | None:
        """Returns the exit code of the process. Kills the process if it does not end within so many seconds."""
        self._process.join(seconds)
        self._process.kill()
        self._process.join()
        return self._process.exitcode


# --- syphons ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SyphonWork:
    primary: str
    secondary: str
    queues: tuple[str, ...]
    ledger: Path
    transport: str = NATIVE
    durability: Durability = "process"
    plan: KillPlan = KillPlan()
    drain: bool = False
    window: int = WINDOW


class PlannedKill:
    """Kills its process at a place. `WatchedTransport` and the syphon report the places."""

    def __init__(self, plan: KillPlan, begun: Connection) -> None:
        self._place = plan.place
        self._left = plan.times
        self._begun: Connection | None = begun

    def tell(self, event: str, held: Sequence[HeldMessage] | Sequence[OutgoingMessage]) -> None:
        if held and self._begun is not None:
            begun, self._begun = self._begun, None
            begun.send_bytes(b"x")

    def step(self, step: MoveStep, held: Sequence[HeldMessage]) -> None:
        self.reach(step.value)

    def reach(self, place: str, after: float = 0.0) -> None:
        if place != self._place:
            return
        self._left -= 1
        if self._left:
            return
        if after:
            asyncio.get_running_loop().call_later(after, kill_self)
        else:
            kill_self()


def run_syphon(work: SyphonWork, begun: Connection) -> None:
    logging.disable(logging.CRITICAL)
    asyncio.run(_syphon(work, begun))


async def _syphon(work: SyphonWork, begun: Connection) -> None:
    watch = PlannedKill(work.plan, begun)
    options = SyphonOptions(drain=work.drain, window=work.window, retry_policy=_QUICK)
    ledger_options = LedgerOptions(segment_bytes=_SEGMENT_BYTES, durability=work.durability)
    async with AsyncExitStack() as stack:
        transport: NativeTransport | SdkTransport
        if work.transport == SDK:
            texts = (work.primary, work.secondary)
            clients = [ServiceBusClient.from_connection_string(text, retry_total=0) for text in texts]
            for client in clients:
                await stack.enter_async_context(client)
            transport = SdkTransport(*clients, try_timeout=5.0)
        else:
            transport = NativeTransport(work.primary, work.secondary, try_timeout=5.0)
        ledger = stack.enter_context(Ledger(work.ledger, "syphon", ledger_options))
        syphon = await stack.enter_async_context(
            Syphon(
                WatchedTransport(transport, watch),  # type: ignore[arg-type]  # it has all that is used of a StepLog
                FixedQueues(work.queues),
                primary=PRIMARY_NAME,
                secondary=SECONDARY_NAME,
                options=options,
                ledger=ledger,
                on_step=watch.step,
            )
        )
        await syphon.run()


# --- the dead-letter tool ---------------------------------------------------------------------------------------------

RESUBMITTING, RESUBMIT_UNDER_WAY, STORED = "resubmitting", "resubmit under way", "the copy is stored"
MOVING, MOVED = "before the move is recorded", "the move is recorded"
REMOVING, REMOVAL_UNDER_WAY, REMOVED = "removing", "removal under way", "the dead letter is removed"
RESUBMIT_PLACES: Final = (
    RESUBMITTING,
    RESUBMIT_UNDER_WAY,
    STORED,
    MOVING,
    MOVED,
    REMOVING,
    REMOVAL_UNDER_WAY,
    REMOVED,
)
"""Every place where a program kills itself that resubmits dead letters."""


@dataclass(frozen=True, slots=True)
class Resubmission:
    """Resubmits the dead letters whose ids begin with `prefix`. `to`: for another destination."""

    secondary: str
    queue: str
    ledger: Path
    prefix: str
    to: str | None
    plan: KillPlan = KillPlan()


def run_resubmission(work: Resubmission, begun: Connection) -> None:
    logging.disable(logging.CRITICAL)
    asyncio.run(_resubmit(work, begun))


async def _resubmit(work: Resubmission, begun: Connection) -> None:
    watch = PlannedKill(work.plan, begun)
    options = LedgerOptions(segment_bytes=_SEGMENT_BYTES)
    with WatchedLedger(work.ledger, Role.DEADLETTER, options) as ledger:
        ledger.watch = watch
        async with connect(work.secondary) as bus:
            dead = DeadLetters(
                WatchedConnection(bus, watch),  # type: ignore[arg-type]  # it has all that is used of a connection
                [work.queue],
                primary=PRIMARY_NAME,
                secondary=SECONDARY_NAME,
                ledger=ledger,
            )
            census = await dead.census(lambda letter: str(letter.message_id).startswith(work.prefix))
            begun.send_bytes(b"x")
            await dead.resubmit(census, to=work.to)


class WatchedLedger(Ledger):
    """Reports the places before and after a move is recorded."""

    watch: PlannedKill

    def moved(self, *arguments: Any, **options: Any) -> None:
        self.watch.reach(MOVING)
        super().moved(*arguments, **options)
        self.watch.reach(MOVED)


class WatchedConnection:
    """A connection whose senders and receivers report their places."""

    def __init__(self, inner: ServiceBusConnection, watch: PlannedKill) -> None:
        self._inner = inner
        self._watch = watch
        self.management = inner.management

    async def sender(self, queue: str) -> Sender:
        made = await self._inner.sender(queue)
        steps = (RESUBMITTING, RESUBMIT_UNDER_WAY, STORED)
        made.send = self._watched(made.send, *steps)  # type: ignore[method-assign]
        return made

    async def receiver(self, queue: str, **options: Any) -> Receiver:
        made = await self._inner.receiver(queue, **options)
        steps = (REMOVING, REMOVAL_UNDER_WAY, REMOVED)
        made.complete = self._watched(made.complete, *steps)  # type: ignore[method-assign]
        return made

    def _watched(
        self, call: Callable[..., Awaitable[None]], before: str, under_way: str, after: str
    ) -> Callable[..., Coroutine[Any, Any, None]]:
        async def watched(*arguments: Any, **options: Any) -> None:
            self._watch.reach(before)
            self._watch.reach(under_way, UNDER_WAY_SECONDS)
            await call(*arguments, **options)
            self._watch.reach(after)

        return watched


# --- applications -----------------------------------------------------------------------------------------------------

ACCEPTED, RETURNED = "the service accepted a send", "the primary accepted what the embedded syphon returned"
"""Places where an application is killed between the acceptance and the entry."""
ACCEPTED_PLACES: Final = {
    ACCEPTED: (Stage.SEND_PRIMARY, Stage.SEND_BACKLOG, Stage.SCHEDULE_PRIMARY),
    RETURNED: (Stage.RETURN_PRIMARY,),
}
AFTER_RETURN, AT_EXIT = "a send has returned", "the process ends by os._exit"
"""Places where an application ends after a send: by kill -9, and without a kill."""
SENDERS: Final = 2
"""Threads or tasks of one application that send at the same time."""


@dataclass(frozen=True, slots=True)
class Application:
    """`told` is the file to which the application writes the ids of each send that returned, before the next send."""

    primary: str
    secondary: str
    entity: str
    ledger: Path
    told: Path
    name: str
    driver: str
    is_diverted: bool
    has_syphon: bool
    plan: KillPlan

    def options(self) -> SendAvailabilityOptions:
        ledger = Ledger(self.ledger, options=LedgerOptions(segment_bytes=_SEGMENT_BYTES))
        return SendAvailabilityOptions(
            backlog_queue_count=1,
            provision="assume",
            primary_name=PRIMARY_NAME,
            ping_interval=timedelta(minutes=30),
            enable_syphon=self.has_syphon,
            ledger=ledger,
        )


class WatchedOperation(RunningOperation):
    """Calls `accepted` when the service has accepted the messages, and the ledger has no outcome yet."""

    __slots__ = ("accepted",)

    accepted: Callable[[], None]

    def end(self, result: str = OK, *, cause: str | None = None, failed: Sequence[object] = ()) -> None:
        if result == OK:
            self.accepted()
        super().end(result, cause=cause, failed=failed)


def watch_acceptances(watch: PlannedKill) -> None:
    """Watches every ledger of this process: a pair's, and the one that the pair's embedded syphon makes for itself."""
    begin_as = Ledger.begin_as

    def watched(self: Ledger, prefix: str, ids: str | Sequence[object], size: int | Sequence[int]) -> RunningOperation:
        for place, stages in ACCEPTED_PLACES.items():
            if any(f'"{stage}"' in prefix for stage in stages):
                operation = WatchedOperation(self._writer, prefix, ids, size)
                operation.accepted = partial(watch.reach, place)
                return operation
        return begin_as(self, prefix, ids, size)

    Ledger.begin_as = watched  # type: ignore[method-assign]  # nobody else can reach the syphon's ledger


class Call(Enum):
    """The ways to send that an application uses in turn."""

    ONE = "a message"
    LIST = "a list"
    BATCH = "a batch"
    SCHEDULE = "a schedule"

    @classmethod
    def of(cls, number: int) -> Call:
        return (cls.ONE, cls.ONE, cls.LIST, cls.ONE, cls.BATCH, cls.SCHEDULE)[number % 6]


def later() -> datetime:
    return datetime.now(UTC) + timedelta(days=1)


class Reports:
    """Makes messages, and writes down the ids of those that are reported safe."""

    def __init__(self, work: Application, begun: Connection) -> None:
        self._work = work
        self._begun: Connection | None = begun
        self._left = work.plan.times
        self._file = os.open(work.told, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def messages(self, sender: int, number: int) -> list[ServiceBusMessage]:
        count = 1 if Call.of(number) is Call.ONE else 3
        names = [f"{self._work.name}-{sender}-{number}-{part}" for part in range(count)]
        return [ServiceBusMessage(marked_body(name), message_id=name) for name in names]

    def returned(self, messages: Sequence[ServiceBusMessage]) -> None:
        os.write(self._file, "".join(f"{one.message_id}\n" for one in messages).encode())
        self._left -= 1
        if not self._left and self._work.plan.place == AFTER_RETURN:
            kill_self()
        if not self._left and self._work.plan.place == AT_EXIT:
            os._exit(0)
        if self._begun is not None:
            begun, self._begun = self._begun, None
            begun.send_bytes(b"x")


def reported_safe(told: Path) -> set[str]:
    return set(told.read_text().split()) if told.exists() else set()


def run_application(work: Application, begun: Connection) -> None:
    logging.disable(logging.CRITICAL)
    reports = Reports(work, begun)
    watch_acceptances(PlannedKill(work.plan, begun))
    options = work.options()
    if work.driver == AIO:
        asyncio.run(_send_aio(work, options, reports))
    else:
        _send_sync(work, options, reports)


def _send_sync(work: Application, options: SendAvailabilityOptions, reports: Reports) -> None:
    pair = twinbus.pair_connection_strings(work.primary, work.secondary, options=options)
    if work.is_diverted:
        pair.force_failover(work.entity)
    sender = pair.get_queue_sender(work.entity)

    def send(number: int) -> None:
        for position in range(1_000_000):
            messages = reports.messages(number, position)
            match Call.of(position):
                case Call.SCHEDULE:
                    sender.schedule_messages(messages, later())
                case Call.BATCH:
                    batch = sender.create_message_batch()
                    for message in messages:
                        batch.add_message(message)
                    sender.send_messages(batch)
                case _:
                    sender.send_messages(messages)
            reports.returned(messages)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(SENDERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def _send_aio(work: Application, options: SendAvailabilityOptions, reports: Reports) -> None:
    async with twinbus.aio.pair_connection_strings(work.primary, work.secondary, options=options) as pair:
        if work.is_diverted:
            pair.force_failover(work.entity)
        sender = pair.get_queue_sender(work.entity)

        async def send(number: int) -> None:
            for position in range(1_000_000):
                messages = reports.messages(number, position)
                match Call.of(position):
                    case Call.SCHEDULE:
                        await sender.schedule_messages(messages, later())
                    case Call.BATCH:
                        batch = await sender.create_message_batch()
                        for message in messages:
                            batch.add_message(message)
                        await sender.send_messages(batch)
                    case _:
                        await sender.send_messages(messages)
                reports.returned(messages)

        await asyncio.gather(*map(send, range(SENDERS)))
