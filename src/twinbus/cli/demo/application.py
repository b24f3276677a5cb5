"""The application of the demo: senders at a steady rate and receivers, on a pair, as anybody would write them.

It keeps what it was told is safe and what it received. What that proves is decided in `verdict`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusError

from twinbus.aio import Pair, PairedSender, SendAvailabilityOptions, pair_connection_strings
from twinbus.errors import TwinbusError

QUEUES: Final = ("orders", "payments")
TOPIC: Final = "events"
# Each takes the events of its region, by a rule.
SUBSCRIPTIONS: Final = ("europe", "overseas")
REGION: Final = "region"
ENTITIES: Final = (*QUEUES, TOPIC)
# Where messages for an entity are received, each of them at one.
PLACES: Final[Mapping[str, tuple[str, ...]]] = {
    **{queue: (queue,) for queue in QUEUES},
    TOPIC: tuple(f"{TOPIC}/{one}" for one in SUBSCRIPTIONS),
}
_ALL: Final = tuple(place for places in PLACES.values() for place in places)
BODY_BYTES: Final = (200, 2000)
BACKLOG_QUEUES: Final = 4
PING_SECONDS: Final = 1.0
# Patient with a busy machine: what is dead says so at once.
_TRY_SECONDS: Final = 20.0
_PROBATION_SECONDS: Final = 2.0
# The SDK's own pauses between tries, shorter than its defaults: a minute is all there is.
_RETRIES: Final = {"retry_backoff_factor": 0.1, "retry_backoff_max": 1.0}
# One receive, the opening of its link included. It returns with what is there.
_WAIT_SECONDS: Final = 5.0
# Who was held up catches up with at most so much.
_LATE_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.2
_AT_ONCE: Final = 50


def options(ledger: Path) -> SendAvailabilityOptions:
    """Not one error reaches the application: the failing call itself diverts (S4)."""
    return SendAvailabilityOptions(
        backlog_queue_count=BACKLOG_QUEUES,
        failover_interval=timedelta(0),
        ping_interval=timedelta(seconds=PING_SECONDS),
        try_timeout=timedelta(seconds=_TRY_SECONDS),
        probation=timedelta(seconds=_PROBATION_SECONDS),
        ledger=ledger,
    )


@dataclass(slots=True)
class Records:
    """What the application knows, by place: the ids it was told are safe, and those that came, by sequence number.

    A message that comes again under the same number was only redelivered.
    """

    accepted: dict[str, set[str]] = field(default_factory=lambda: {place: set() for place in _ALL})
    received: dict[str, dict[str, set[int]]] = field(
        default_factory=lambda: {place: defaultdict(set) for place in _ALL}
    )
    errors: list[str] = field(default_factory=list)
    redelivered: int = 0
    diverted: int = 0
    """As the pair has counted them, at the end."""

    @property
    def has_all(self) -> bool:
        return all(self.accepted[place] <= self.received[place].keys() for place in _ALL)

    def count_accepted(self) -> int:
        return sum(map(len, self.accepted.values()))

    def count_received(self) -> int:
        return sum(map(len, self.received.values()))


class Application:
    """`pair` is open while it runs. Senders stop when told; receivers go on until the end."""

    def __init__(self, pair: Pair, rate: float, seed: int) -> None:
        self.pair = pair
        self.kept = Records()
        self._rate = rate
        self._seed = seed
        self._stopped = asyncio.Event()
        self._over = False
        self._turns = asyncio.Semaphore(_AT_ONCE * len(ENTITIES))
        self._sending: list[asyncio.Task[None]] = []

    async def stop_sending(self) -> None:
        self._stopped.set()
        await asyncio.gather(*self._sending)

    async def _send(self, entity: str) -> None:
        # One chance for each entity: what it sends does not hang on how the others were served.
        chance = random.Random(f"{self._seed} {entity}")
        made = self.pair.get_topic_sender(entity) if entity == TOPIC else self.pair.get_queue_sender(entity)
        pause = len(ENTITIES) / self._rate
        loop = asyncio.get_running_loop()
        due, number = loop.time() + chance.random() * pause, 0
        async with made as sender, asyncio.TaskGroup() as sends:
            while not self._stopped.is_set():
                number += 1
                place = chance.choice(PLACES[entity])
                message = ServiceBusMessage(
                    chance.randbytes(chance.randint(*BODY_BYTES)),
                    message_id=f"{entity}-{number:05}",
                    application_properties={REGION: place.rpartition("/")[2]},
                )
                # A send that takes its time holds up no other, unless there are many of them.
                await self._turns.acquire()
                sends.create_task(self._put(place, sender, message))
                due = max(due + pause, loop.time() - _LATE_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(due):
                        await self._stopped.wait()

    async def _put(self, place: str, sender: PairedSender, message: ServiceBusMessage) -> None:
        try:
            await sender.send_messages(message)
        except (ServiceBusError, TwinbusError) as error:
            self.kept.errors.append(f"{message.message_id}: {type(error).__name__}: {error}")
        else:
            self.kept.accepted[place].add(str(message.message_id))
        finally:
            self._turns.release()

    async def _receive(self, place: str) -> None:
        queue, _, subscription = place.partition("/")
        given: dict[str, Any] = {"quiet_while_down": True, "max_wait_time": _WAIT_SECONDS}
        # A cancellation alone would not do: the SDK may take it for its own.
        while not self._over:
            if subscription:
                receiver = self.pair.get_subscription_receiver(queue, subscription, **given)
            else:
                receiver = self.pair.get_queue_receiver(queue, **given)
            # A message that could not be completed comes again, to a new receiver: this one may be of no more use.
            with contextlib.suppress(ServiceBusError, ValueError):
                async with receiver:
                    await self._work(receiver, self.kept.received[place])
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _work(self, receiver: Any, found: dict[str, set[int]]) -> None:
        while not self._over:
            messages = await receiver.receive_messages(_AT_ONCE, _WAIT_SECONDS)
            for message in messages:
                numbers = found[str(message.message_id)]
                self.kept.redelivered += message.sequence_number in numbers
                numbers.add(message.sequence_number)
            await asyncio.gather(*map(receiver.complete_message, messages))


@contextlib.asynccontextmanager
async def running(
    primary: str, secondary: str, ledger: Path, rate: float, seed: int, heard: Callable[[Any], object]
) -> AsyncIterator[Application]:
    """Sends and receives while the caller is inside. Closing the pair seals its part of the ledger."""
    async with pair_connection_strings(primary, secondary, options=options(ledger), **_RETRIES) as pair:
        pair.on("*", heard)
        made = Application(pair, rate, seed)
        try:
            async with asyncio.TaskGroup() as group:
                made._sending = [group.create_task(made._send(entity)) for entity in ENTITIES]
                receiving = [group.create_task(made._receive(place)) for place in _ALL]
                try:
                    yield made
                finally:
                    made._stopped.set()
                    made._over = True
                    for task in receiving:
                        task.cancel()
        except BaseExceptionGroup as group_of:
            # What went wrong first is what is told.
            raise group_of.exceptions[0] from None
