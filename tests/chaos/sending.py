"""Paired senders at full rate, in their own process. Each message is logged before its send and after a safe send.

A message whose send failed is sent again with the same id. This module checks nothing.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Final

from azure.servicebus import ServiceBusMessage

import twinbus
import twinbus.aio
from tests.chaos.entities import DESTINATIONS, NEWS, PRIMARY, QUEUES, SESSIONS, body_of, session_of
from tests.chaos.event_log import EventLog
from twinbus import PartialSendError, SendAvailabilityOptions

THREADS, TASKS = "threads", "tasks"
_PAUSE_SECONDS: Final = 0.05
"""Seconds before a failed message is sent again."""


@dataclass(frozen=True, slots=True)
class Sending:
    """The arguments of the process."""

    primary: str
    secondary: str
    ledger: Path
    log: Path
    name: str
    seed: int

    @property
    def options(self) -> SendAvailabilityOptions:
        return SendAvailabilityOptions(
            backlog_queue_count=len(QUEUES),
            failover_interval=timedelta(0),
            ping_interval=timedelta(seconds=1),
            try_timeout=timedelta(seconds=1),
            probation=timedelta(seconds=1),
            provision="assume",
            primary_name=PRIMARY,
            ledger=self.ledger,
        )


class MessageSource:
    """The messages for one destination: `take` one, send it, then call `sent` or `failed`."""

    def __init__(self, work: Sending, destination: str, log: EventLog) -> None:
        self.destination = destination
        self.is_topic = destination == NEWS
        self._rng = Random(f"{work.seed}-{work.name}-{destination}")
        self._prefix = f"{work.seed}-{work.name}-{destination}"
        self._log = log
        self._made = 0
        self._again: list[str] = []
        self._ids: list[str] = []

    def take(self) -> list[ServiceBusMessage]:
        if self._again:
            self._ids, self._again = self._again, []
        else:
            count = self._rng.choice((1, 1, 1, 5, 20))
            self._ids = [f"{self._prefix}-{self._made + number}" for number in range(count)]
            self._made += count
        self._log.tell("asked", self._ids, self.destination)
        return [self._message(name) for name in self._ids]

    def sent(self) -> None:
        self._log.tell("safe", self._ids, self.destination)

    def failed(self, error: Exception) -> None:
        self._again = self._ids
        if isinstance(error, PartialSendError):
            self._log.tell("safe", [str(name) for name in error.safe], self.destination)
            self._again = [str(name) for name in error.unsafe]
        self._log.tell("unsafe", self._again, self.destination, repr(error))

    def _message(self, name: str) -> ServiceBusMessage:
        session = session_of(name) if self.destination == SESSIONS else None
        return ServiceBusMessage(body_of(name), message_id=name, session_id=session)


def message_sources(work: Sending) -> Sequence[MessageSource]:
    logging.basicConfig(filename=work.log.with_suffix(".log"), level=logging.ERROR)
    log = EventLog(work.log)
    return [MessageSource(work, destination, log) for destination in DESTINATIONS]


# --- threads ---------------------------------------------------------------------------------------------------------


def run_threads(work: Sending) -> None:
    """Send until SIGTERM."""
    # A thread that starts another thread may take the signal, and then a main thread that waits for a lock does not
    # wake up. A signal that every thread blocks stays pending until `sigwait` takes it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ended = threading.Event()
    with twinbus.pair_connection_strings(work.primary, work.secondary, options=work.options) as pair:
        threads = [threading.Thread(target=_send, args=(pair, desk, ended)) for desk in message_sources(work)]
        for thread in threads:
            thread.start()
        signal.sigwait({signal.SIGTERM})
        ended.set()
        for thread in threads:
            thread.join()


def _send(pair: twinbus.Pair, desk: MessageSource, ended: threading.Event) -> None:
    make = pair.get_topic_sender if desk.is_topic else pair.get_queue_sender
    with make(desk.destination) as sender:
        while not ended.is_set():
            messages = desk.take()
            try:
                sender.send_messages(messages)
            except Exception as error:
                desk.failed(error)
                time.sleep(_PAUSE_SECONDS)
            else:
                desk.sent()


# --- asyncio ---------------------------------------------------------------------------------------------------------


def run_tasks(work: Sending) -> None:
    asyncio.run(_run_tasks(work))


async def _run_tasks(work: Sending) -> None:
    """Send until SIGTERM."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with (
        twinbus.aio.pair_connection_strings(work.primary, work.secondary, options=work.options) as pair,
        asyncio.TaskGroup() as group,
    ):
        for desk in message_sources(work):
            group.create_task(_send_aio(pair, desk, ended))


async def _send_aio(pair: twinbus.aio.Pair, desk: MessageSource, ended: asyncio.Event) -> None:
    make = pair.get_topic_sender if desk.is_topic else pair.get_queue_sender
    async with make(desk.destination) as sender:
        while not ended.is_set():
            messages = desk.take()
            try:
                await sender.send_messages(messages)
            except Exception as error:
                desk.failed(error)
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                desk.sent()


KINDS: Final = {THREADS: run_threads, TASKS: run_tasks}
