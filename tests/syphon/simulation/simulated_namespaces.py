"""The two namespaces of a simulation: backlog queues with locks, destinations that fail and return.

They answer late, not at all, or after they have carried out a request, as brokers do. They raise ViolationError for
what must never happen.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from random import Random

from twinbus.backlog import FailureKind
from twinbus.syphon.transport import (
    BacklogFailedError,
    CannotCarryError,
    HeldMessage,
    NeverDeliverableError,
    OutgoingMessage,
    PeekedMessage,
    SendFailedError,
    TimeToLive,
)

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
UNCERTAIN = (FailureKind.TIMEOUT, FailureKind.CONNECTION_LOST, FailureKind.DETACHED, FailureKind.INTERNAL)
CERTAIN = (
    FailureKind.SERVER_BUSY,
    FailureKind.UNAUTHORIZED,
    FailureKind.ENTITY_DISABLED,
    FailureKind.QUOTA_EXCEEDED,
    FailureKind.ENTITY_NOT_FOUND,
)


def wall() -> datetime:
    return EPOCH + timedelta(seconds=asyncio.get_running_loop().time())


def now() -> float:
    return asyncio.get_running_loop().time()


class ViolationError(AssertionError):
    """Something happened that must never happen."""


class MessagePlace(Enum):
    ACTIVE = "active"
    DEFERRED = "deferred"
    GONE = "completed"
    DEAD = "dead-lettered"


@dataclass(eq=False)
class SimulatedMessage:
    """A message and its history. `excuses`: reasons why it may arrive twice. `wronged`: completed before it arrived."""

    number: int
    path: str
    flaw: str | None = None
    comes: float = 0.0
    where: MessagePlace = MessagePlace.ACTIVE
    holder: object = None
    locked_until: float = 0.0
    arrivals: int = 0
    arrived: float = 0.0
    excuses: int = 0
    operations: int = 0
    wronged: bool = False

    def held_by(self, holder: object) -> bool:
        return self.holder is holder and self.locked_until > now()


class SimulatedHeld:
    """A `HeldMessage`: the lock on a simulated message."""

    size = 1000
    unanswered = False

    def __init__(self, letter: SimulatedMessage, lock: float) -> None:
        self.letter = letter
        letter.holder = self
        letter.locked_until = now() + lock

    @property
    def sequence_number(self) -> int:
        return self.letter.number

    @property
    def message_id(self) -> str:
        return str(self.letter.number)

    @property
    def locked_until(self) -> datetime:
        return EPOCH + timedelta(seconds=self.letter.locked_until)

    @property
    def enqueued_time(self) -> datetime:
        return EPOCH


@dataclass
class SimulatedOutage:
    begin: float
    end: float
    kind: FailureKind

    def strikes(self, at: float) -> bool:
        return self.begin <= at < self.end


@dataclass
class SimulatedEntity:
    """A destination on the primary."""

    path: str
    chance: Random
    outages: list[SimulatedOutage] = field(default_factory=list)

    async def take(self, messages: Sequence[OutgoingMessage]) -> None:
        await asyncio.sleep(self.chance.uniform(0.0, 0.05))
        struck = next((one for one in self.outages if one.strikes(now())), None)
        if struck is None:
            self._arrive(messages)
            await asyncio.sleep(self.chance.uniform(0.0, 0.05))
            return
        if struck.kind is FailureKind.TIMEOUT:
            await asyncio.sleep(10.0)
        safe = 0
        if struck.kind in UNCERTAIN:
            # Some messages are confirmed, some arrived without a confirmation, the others did not arrive.
            safe = self.chance.randint(0, len(messages) - 1) if self.chance.random() < 0.3 else 0
            self._arrive(messages[:safe])
            for message in messages[safe:]:
                if self.chance.random() < 0.3:
                    self._arrive([message])
                    message_of(message.held).excuses += 1
        raise SendFailedError(self.path, struck.kind, messages[safe:], refused=struck.kind in CERTAIN)

    @staticmethod
    def _arrive(messages: Sequence[OutgoingMessage]) -> None:
        for message in messages:
            letter = message_of(message.held)
            letter.arrivals += 1
            letter.arrived = letter.arrived or now()


def message_of(held: HeldMessage) -> SimulatedMessage:
    assert isinstance(held, SimulatedHeld)
    return held.letter


class SimulatedQueue:
    """A backlog queue. `trouble` is the share of calls that fail. Half of these fail after they were carried out."""

    def __init__(self, path: str, chance: Random, letters: list[SimulatedMessage], lock: float) -> None:
        self.path = path
        self.letters = letters
        self.lock = lock
        self.trouble = 0.0
        self.operations: Counter[str] = Counter()
        self.chance = chance

    async def call(self, name: str, count: int = 1) -> None:
        self.operations[name] += count
        await asyncio.sleep(self.chance.uniform(0.0, 0.05))

    async def answer(self) -> None:
        if self.chance.random() < self.trouble:
            raise BacklogFailedError(self.path, FailureKind.CONNECTION_LOST)
        await asyncio.sleep(self.chance.uniform(0.0, 0.02))

    def free(self, where: MessagePlace) -> list[SimulatedMessage]:
        return [one for one in self.there(where) if one.locked_until <= now()]

    def there(self, *where: MessagePlace) -> list[SimulatedMessage]:
        return [one for one in self.letters if one.where in where and one.comes <= now()]


class SimulatedBacklog:
    """A `Backlog` of one syphon. Requests of a process that was killed are never answered."""

    def __init__(self, queue: SimulatedQueue, life: SimulatedProcess) -> None:
        self._queue = queue
        self._life = life

    @property
    def has_credit(self) -> bool:
        return False

    async def open(self) -> None:
        await self._life.alive()

    async def receive(self, count: int, wait: float) -> Sequence[SimulatedHeld]:
        end = now() + wait
        await self._begin("receive", 0)
        while not (found := self._queue.free(MessagePlace.ACTIVE)[:count]):
            if now() >= end:
                self._queue.operations["empty"] += 1
                return []
            await asyncio.sleep(min(10.0, max(end - now(), 0.001)))
            await self._life.alive()
        self._queue.operations["receive"] += len(found)
        grips = [SimulatedHeld(letter, self._queue.lock) for letter in found]
        for letter in found:
            letter.operations += 1
        await self._queue.answer()
        return grips

    async def receive_deferred(self, numbers: Sequence[int]) -> Sequence[SimulatedHeld]:
        await self._begin("receive_deferred", len(numbers))
        wanted = set(numbers)
        found = [letter for letter in self._queue.free(MessagePlace.DEFERRED) if letter.number in wanted]
        for letter in found:
            letter.operations += 1
        grips = [SimulatedHeld(letter, self._queue.lock) for letter in found]
        await self._queue.answer()
        return grips

    async def peek(self, start: int, count: int) -> Sequence[PeekedMessage]:
        await self._begin("peek", 1)
        there = self._queue.there(MessagePlace.ACTIVE, MessagePlace.DEFERRED)
        page = [one for one in there if one.number >= start][: min(count, 7)]
        found = [
            PeekedMessage(
                one.number, one.where is MessagePlace.DEFERRED, one.path or None, str(one.number), 1000, EPOCH
            )
            for one in page
        ]
        await self._queue.answer()
        return found

    async def complete(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settle("complete", held, MessagePlace.GONE)

    async def abandon(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settle("abandon", held, None)

    async def defer(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settle("defer", held, MessagePlace.DEFERRED)

    async def dead_letter(self, held: Sequence[HeldMessage], reason: str, description: str) -> Sequence[HeldMessage]:
        return await self._settle("dead_letter", held, MessagePlace.DEAD)

    async def renew(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        await self._begin("renew", len(held))
        lost: list[HeldMessage] = []
        for one in held:
            letter = message_of(one)
            if letter.held_by(one):
                letter.locked_until = now() + self._queue.lock
            else:
                lost.append(one)
        await self._queue.answer()
        return lost

    async def stop_receiving(self) -> Sequence[SimulatedHeld]:
        await self._life.alive()
        return ()

    async def close(self) -> None:
        await self._life.alive()

    async def _begin(self, name: str, count: int) -> None:
        await self._life.alive()
        await self._queue.call(name, count)
        await self._life.alive()
        if self._queue.chance.random() < self._queue.trouble:
            raise BacklogFailedError(self._queue.path, FailureKind.CONNECTION_LOST)

    async def _settle(self, name: str, held: Sequence[HeldMessage], to: MessagePlace | None) -> Sequence[HeldMessage]:
        lost: list[HeldMessage] = []
        try:
            await self._begin(name, len(held))
            self._settle_each(held, to, lost)
            await self._queue.answer()
        except BacklogFailedError:
            for one in held:
                message_of(one).excuses += 1
            raise
        return lost

    @staticmethod
    def _settle_each(held: Sequence[HeldMessage], to: MessagePlace | None, lost: list[HeldMessage]) -> None:
        for one in held:
            letter = message_of(one)
            letter.operations += 1
            if not letter.held_by(one):
                letter.excuses += letter.arrivals > 0
                lost.append(one)
                continue
            letter.locked_until = 0.0
            letter.wronged |= to is MessagePlace.GONE and not letter.arrivals
            letter.where = to or letter.where


class SimulatedProcess:
    """The process of one syphon; it can be killed."""

    def __init__(self) -> None:
        self.dead = False
        self._unheard: list[asyncio.Future[None]] = []

    async def alive(self) -> None:
        if self.dead:
            self._unheard.append(asyncio.get_running_loop().create_future())
            await self._unheard[-1]


class SimulatedDestination:
    def __init__(self, entity: SimulatedEntity, life: SimulatedProcess) -> None:
        self._entity = entity
        self._life = life

    async def send(self, messages: Sequence[OutgoingMessage]) -> None:
        await self._life.alive()
        bad = [message for message in messages if message_of(message.held).flaw == "large"]
        if bad:
            raise SendFailedError(self._entity.path, FailureKind.MESSAGE_TOO_LARGE, messages, refused=True)
        for message in messages:
            message_of(message.held).operations += 1
        await self._entity.take(messages)
        await self._life.alive()

    async def close(self) -> None:
        pass


class SimulatedTransport:
    def __init__(
        self, queues: dict[str, SimulatedQueue], entities: dict[str, SimulatedEntity], life: SimulatedProcess
    ) -> None:
        self._queues = queues
        self._entities = entities
        self._life = life

    def backlog(self, queue: str) -> SimulatedBacklog:
        return SimulatedBacklog(self._queues[queue], self._life)

    def destination(self, path: str) -> SimulatedDestination:
        return SimulatedDestination(self._entities[path], self._life)

    def restore(self, held: HeldMessage, ttl: TimeToLive, now: datetime) -> OutgoingMessage:
        letter = message_of(held)
        if letter.flaw == "no path":
            raise NeverDeliverableError("NoDestination", "x-ms-path is missing")
        if letter.flaw == "odd":
            raise CannotCarryError("a body of an odd kind")
        return OutgoingMessage(letter.path, str(letter.number), 1000, None, held)

    async def close(self) -> None:
        pass
