"""The demo's application: senders with a constant rate, and receivers. It uses a pair as any application does.

The application records the ids of accepted messages and of received messages. `verdict` compares these ids.
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
# Each subscription has a rule that selects the events of its region.
SUBSCRIPTIONS: Final = ("europe", "overseas")
REGION: Final = "region"
ENTITIES: Final = (*QUEUES, TOPIC)
# The queues and subscriptions from which messages of an entity are received. Each message arrives at exactly one.
PLACES: Final[Mapping[str, tuple[str, ...]]] = {
    **{queue: (queue,) for queue in QUEUES},
    TOPIC: tuple(f"{TOPIC}/{one}" for one in SUBSCRIPTIONS),
}
_ALL: Final = tuple(place for places in PLACES.values() for place in places)
BODY_BYTES: Final = (200, 2000)
BACKLOG_QUEUES: Final = 4
PING_SECONDS: Final = 1.0
# The timeout of one try of the SDK: long enough for a busy machine. The timeout does not delay the failover, because
# connections to a killed server are refused without a delay.
_TRY_SECONDS: Final = 20.0
_PROBATION_SECONDS: Final = 2.0
# The pauses between tries of the SDK. They are shorter than the SDK's defaults, because the demo lasts about a minute.
_RETRIES: Final[dict[str, Any]] = {"retry_backoff_factor": 0.1, "retry_backoff_max": 1.0}
# The longest duration of one receive call, including the opening of the link. The call returns earlier with messages.
_WAIT_SECONDS: Final = 5.0
# A sender that is late sends faster until it is on time again, but only for this much of its delay.
_LATE_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.2
_AT_ONCE: Final = 50


def options(ledger: Path) -> SendAvailabilityOptions:
    """Return options with failover_interval 0: a failed send is diverted in the same call and raises no error (S4)."""
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
    """The ids of accepted messages, and the ids and sequence numbers of received messages, by queue or subscription.

    The same id with the same sequence number is a redelivery, not a duplicate.
    """

    accepted: dict[str, set[str]] = field(default_factory=lambda: {place: set() for place in _ALL})
    received: dict[str, dict[str, set[int]]] = field(
        default_factory=lambda: {place: defaultdict(set) for place in _ALL}
    )
    errors: list[str] = field(default_factory=list)
    redelivered: int = 0
    diverted: int = 0
    """Number of diverted messages, from the pair's metrics."""

    @property
    def has_all(self) -> bool:
        return all(self.accepted[place] <= self.received[place].keys() for place in _ALL)

    def count_accepted(self) -> int:
        return sum(map(len, self.accepted.values()))

    def count_received(self) -> int:
        return sum(map(len, self.received.values()))


class Application:
    """Sends and receives on an open pair. `stop_sending` stops the senders; receivers run until the end."""

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
        # Each entity has its own random generator, so that its messages do not depend on the speed of other senders.
        random_source = random.Random(f"{self._seed} {entity}")
        made = self.pair.get_topic_sender(entity) if entity == TOPIC else self.pair.get_queue_sender(entity)
        pause = len(ENTITIES) / self._rate
        loop = asyncio.get_running_loop()
        due, number = loop.time() + random_source.random() * pause, 0
        async with made as sender, asyncio.TaskGroup() as sends:
            while not self._stopped.is_set():
                number += 1
                place = random_source.choice(PLACES[entity])
                message = ServiceBusMessage(
                    random_source.randbytes(random_source.randint(*BODY_BYTES)),
                    message_id=f"{entity}-{number:05}",
                    application_properties={REGION: place.rpartition("/")[2]},
                )
                # A slow send does not delay other sends, as long as the limit of concurrent sends is not reached.
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
        # Cancelling the task is not enough: the SDK may swallow the cancellation.
        while not self._over:
            if subscription:
                receiver = self.pair.get_subscription_receiver(queue, subscription, **given)
            else:
                receiver = self.pair.get_queue_receiver(queue, **given)
            # After an error, a new receiver is used. Messages that were not completed are received again.
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
    """Run the application inside the block. Closing the pair seals its segments of the ledger."""
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
            # Report the first error only.
            raise group_of.exceptions[0] from None
