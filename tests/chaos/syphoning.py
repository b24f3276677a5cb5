"""A syphon in a process of its own. It logs every step of every message, and dies or freezes at its stop point.

It is the product's syphon, observed through its transport and its `steps`. The `WRONG` variants have bugs that the
accounts must find.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from tests.chaos.entities import PRIMARY, QUEUES, SECONDARY
from tests.chaos.event_log import EventLog
from tests.syphon.fixed_queues import FixedQueues
from twinbus.ledger import Ledger
from twinbus.syphon import (
    BacklogFailedError,
    HeldMessage,
    MoveStep,
    NativeTransport,
    RetryPolicy,
    Syphon,
    SyphonOptions,
    TimeToLive,
    Transport,
)
from twinbus.syphon.mover import Mover
from twinbus.syphon.native_transport import NativeDestination
from twinbus.syphon.transport import Backlog, Destination, OutgoingMessage, PeekedMessage, SendFailedError

TRY_SECONDS: Final = 0.5
WAIT_SECONDS: Final = 30.0
"""How long a drain waits for a destination that does not answer."""
SEND_UNDER_WAY, COMPLETING, COMPLETION_UNDER_WAY = "send under way", "completing", "completion under way"
RECALLED = "recalled"
FATAL: Final = (
    MoveStep.RECEIVED.value,
    MoveStep.INTENDED.value,
    MoveStep.SENDING.value,
    SEND_UNDER_WAY,
    MoveStep.CONFIRMED.value,
    MoveStep.RECORDED.value,
    COMPLETING,
    COMPLETION_UNDER_WAY,
    MoveStep.COMPLETED.value,
    MoveStep.PUT_ASIDE.value,
    RECALLED,
)
"""Every step at which a syphon can be killed or frozen."""
DEAD_LETTERING, DEAD_LETTERING_UNDER_WAY = "dead-lettering", "dead-lettering under way"
FATAL_TO_DEAD_LETTERS: Final = (DEAD_LETTERING, DEAD_LETTERING_UNDER_WAY, MoveStep.DEAD_LETTERED.value)
"""The steps of a message that cannot be delivered. The accounts of chaos know no such messages."""
# Seconds: long enough for the request to be sent. The answer may or may not have arrived by then.
UNDER_WAY_SECONDS: Final = 0.002


@dataclass(frozen=True, slots=True)
class StopPoint:
    """When to send a signal: at the n-th time that the syphon reaches a step. A step of None is never reached."""

    place: str | None = None
    times: int = 1
    signal: signal.Signals = signal.SIGKILL


@dataclass(frozen=True, slots=True)
class Syphoning:
    """The arguments of the process."""

    primary: str
    secondary: str
    ledger: Path
    log: Path
    fate: StopPoint = StopPoint()
    drain: bool = False
    variant: str | None = None


class StepLog:
    """Logs each step of the syphon, and sends the signal at the stop point."""

    def __init__(self, log: EventLog, fate: StopPoint) -> None:
        self._log = log
        self._fate = fate
        self._left = fate.times

    def tell(self, event: str, held: Sequence[HeldMessage] | Sequence[OutgoingMessage]) -> None:
        if held:
            self._log.tell(event, [str(one.message_id) for one in held])

    def step(self, step: MoveStep, held: Sequence[HeldMessage]) -> None:
        self.reach(step.value)

    def reach(self, place: str, after: float = 0.0) -> None:
        if place != self._fate.place:
            return
        self._left -= 1
        if self._left:
            return
        if after:
            asyncio.get_running_loop().call_later(after, self._strike)
        else:
            self._strike()

    def _strike(self) -> None:
        os.kill(os.getpid(), self._fate.signal)


class WatchedTransport:
    def __init__(self, inner: Transport, watch: StepLog) -> None:
        self._inner = inner
        self._watch = watch

    def backlog(self, queue: str) -> Backlog:
        return WatchedBacklog(self._inner.backlog(queue), self._watch)

    def destination(self, path: str) -> Destination:
        return WatchedDestination(self._inner.destination(path), self._watch)

    def restore(self, held: HeldMessage, ttl: TimeToLive, now: datetime) -> OutgoingMessage:
        return self._inner.restore(held, ttl, now)

    async def close(self) -> None:
        await self._inner.close()


class WatchedDestination:
    def __init__(self, inner: Destination, watch: StepLog) -> None:
        self._inner = inner
        self._watch = watch

    async def send(self, messages: Sequence[OutgoingMessage]) -> None:
        watch = self._watch
        watch.tell("sending", messages)
        watch.reach(SEND_UNDER_WAY, UNDER_WAY_SECONDS)
        try:
            await self._inner.send(messages)
        except SendFailedError as error:
            unsafe = set(map(id, error.failed))
            watch.tell("confirmed", [one for one in messages if id(one) not in unsafe])
            watch.tell("refused" if error.refused else "unsure", error.failed)
            raise
        except BaseException:
            watch.tell("unsure", messages)
            raise
        watch.tell("confirmed", messages)

    async def close(self) -> None:
        await self._inner.close()


class WatchedBacklog:
    def __init__(self, inner: Backlog, watch: StepLog) -> None:
        self._inner = inner
        self._watch = watch

    @property
    def has_credit(self) -> bool:
        return self._inner.has_credit

    async def open(self) -> None:
        await self._inner.open()

    async def receive(self, count: int, wait: float) -> Sequence[HeldMessage]:
        held = await self._inner.receive(count, wait)
        self._watch.tell("received", held)
        return held

    async def receive_deferred(self, numbers: Sequence[int]) -> Sequence[HeldMessage]:
        held = await self._inner.receive_deferred(numbers)
        self._watch.tell("recalled", held)
        if held:
            self._watch.reach(RECALLED)
        return held

    async def complete(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        watch = self._watch
        watch.reach(COMPLETING)
        watch.reach(COMPLETION_UNDER_WAY, UNDER_WAY_SECONDS)
        try:
            lost = await self._inner.complete(held)
        except BacklogFailedError:
            watch.tell("uncompleted", held)
            raise
        gone = set(map(id, lost))
        watch.tell("completed", [one for one in held if id(one) not in gone])
        watch.tell("lost", lost)
        return lost

    async def peek(self, start: int, count: int) -> Sequence[PeekedMessage]:
        return await self._inner.peek(start, count)

    async def abandon(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._inner.abandon(held)

    async def defer(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._inner.defer(held)

    async def dead_letter(self, held: Sequence[HeldMessage], reason: str, description: str) -> Sequence[HeldMessage]:
        self._watch.tell("dead-lettered", held)
        self._watch.reach(DEAD_LETTERING)
        self._watch.reach(DEAD_LETTERING_UNDER_WAY, UNDER_WAY_SECONDS)
        return await self._inner.dead_letter(held, reason, description)

    async def renew(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._inner.renew(held)

    async def stop_receiving(self) -> Sequence[HeldMessage]:
        return await self._inner.stop_receiving()

    async def close(self) -> None:
        await self._inner.close()


# --- wrong ones ------------------------------------------------------------------------------------------------------


def completes_first() -> AbstractContextManager[Any]:
    """A bug: completes a message before it is sent, which violates Y3."""
    right = Mover._send

    async def send(self: Mover, load: Any, shipment: Any, retried: bool) -> None:
        await self._complete(load, shipment.path, shipment.messages)
        await right(self, load, shipment, retried)

    return patch.object(Mover, "_send", send)


def sends_twice() -> AbstractContextManager[Any]:
    right = NativeDestination.send

    async def send(self: NativeDestination, messages: Sequence[OutgoingMessage]) -> None:
        await right(self, messages)
        await right(self, messages)

    return patch.object(NativeDestination, "send", send)


WRONG: Final[dict[str, Callable[[], AbstractContextManager[Any]]]] = {
    "completes first": completes_first,
    "sends twice": sends_twice,
}


# --- the process -----------------------------------------------------------------------------------------------------


def run(work: Syphoning) -> None:
    logging.basicConfig(filename=work.log.with_suffix(".log"), level=logging.WARNING)
    with WRONG[work.variant]() if work.variant is not None else nullcontext():
        asyncio.run(_run(work))


async def _run(work: Syphoning) -> None:
    watch = StepLog(EventLog(work.log), work.fate)
    native = NativeTransport(work.primary, work.secondary, try_timeout=TRY_SECONDS)
    options = SyphonOptions(
        drain=work.drain,
        # A try on a loaded machine may take longer than TRY_SECONDS.
        wait_for_destinations=WAIT_SECONDS,
        window=1000,
        retry_policy=RetryPolicy(first_pause=0.2, longest_pause=0.5),
    )
    with Ledger(work.ledger, "syphon") as ledger:
        async with Syphon(
            WatchedTransport(native, watch),
            FixedQueues(QUEUES),
            primary=PRIMARY,
            secondary=SECONDARY,
            options=options,
            ledger=ledger,
            on_step=watch.step,
        ) as syphon:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, syphon.stop)
            await syphon.run()
