"""The two namespaces of a simulated world: backlog queues with locks, destinations that die and return.

They answer as brokers do, late, not at all, or after they have done what was asked; and they notice what must never be.
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
    """Something that must never be was seen."""


class Where(Enum):
    ACTIVE = "active"
    DEFERRED = "deferred"
    GONE = "completed"
    DEAD = "dead-lettered"


@dataclass(eq=False)
class Letter:
    """A message, and what befell it. `excuses`: why it may arrive more than once. `wronged`: completed too soon."""

    number: int
    path: str
    flaw: str | None = None
    comes: float = 0.0
    where: Where = Where.ACTIVE
    holder: object = None
    locked_until: float = 0.0
    arrivals: int = 0
    arrived: float = 0.0
    excuses: int = 0
    operations: int = 0
    wronged: bool = False

    def held_by(self, holder: object) -> bool:
        return self.holder is holder and self.locked_until > now()


class Grip:
    """A lock on a letter: `HeldMessage`."""

    size = 1000
    unanswered = False

    def __init__(self, letter: Letter, lock: float) -> None:
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
class Outage:
    begin: float
    end: float
    kind: FailureKind

    def strikes(self, at: float) -> bool:
        return self.begin <= at < self.end


@dataclass
class Entity:
    """A destination on the primary."""

    path: str
    chance: Random
    outages: list[Outage] = field(default_factory=list)

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
            # Some are confirmed, some arrived though nobody said so, the others did not arrive.
            safe = self.chance.randint(0, len(messages) - 1) if self.chance.random() < 0.3 else 0
            self._arrive(messages[:safe])
            for message in messages[safe:]:
                if self.chance.random() < 0.3:
                    self._arrive([message])
                    letter_of(message.held).excuses += 1
        raise SendFailedError(self.path, struck.kind, messages[safe:], refused=struck.kind in CERTAIN)

    @staticmethod
    def _arrive(messages: Sequence[OutgoingMessage]) -> None:
        for message in messages:
            letter = letter_of(message.held)
            letter.arrivals += 1
            letter.arrived = letter.arrived or now()


def letter_of(held: HeldMessage) -> Letter:
    assert isinstance(held, Grip)
    return held.letter


class Queue:
    """A backlog queue. `trouble` is how often a call fails, half of those after it was done."""

    def __init__(self, path: str, chance: Random, letters: list[Letter], lock: float) -> None:
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

    def free(self, where: Where) -> list[Letter]:
        return [one for one in self.there(where) if one.locked_until <= now()]

    def there(self, *where: Where) -> list[Letter]:
        return [one for one in self.letters if one.where in where and one.comes <= now()]


class SimulatedBacklog:
    """One syphon's view of a queue. Once the syphon is dead nothing it asks for is heard."""

    def __init__(self, queue: Queue, life: Life) -> None:
        self._queue = queue
        self._life = life

    @property
    def has_credit(self) -> bool:
        return False

    async def open(self) -> None:
        await self._life.alive()

    async def receive(self, count: int, wait: float) -> Sequence[Grip]:
        end = now() + wait
        await self._begin("receive", 0)
        while not (found := self._queue.free(Where.ACTIVE)[:count]):
            if now() >= end:
                self._queue.operations["empty"] += 1
                return []
            await asyncio.sleep(min(10.0, max(end - now(), 0.001)))
            await self._life.alive()
        self._queue.operations["receive"] += len(found)
        grips = [Grip(letter, self._queue.lock) for letter in found]
        for letter in found:
            letter.operations += 1
        await self._queue.answer()
        return grips

    async def receive_deferred(self, numbers: Sequence[int]) -> Sequence[Grip]:
        await self._begin("receive_deferred", len(numbers))
        wanted = set(numbers)
        found = [letter for letter in self._queue.free(Where.DEFERRED) if letter.number in wanted]
        for letter in found:
            letter.operations += 1
        grips = [Grip(letter, self._queue.lock) for letter in found]
        await self._queue.answer()
        return grips

    async def peek(self, start: int, count: int) -> Sequence[PeekedMessage]:
        await self._begin("peek", 1)
        there = self._queue.there(Where.ACTIVE, Where.DEFERRED)
        page = [one for one in there if one.number >= start][: min(count, 7)]
        found = [
            PeekedMessage(one.number, one.where is Where.DEFERRED, one.path or None, str(one.number), 1000, EPOCH)
            for one in page
        ]
        await self._queue.answer()
        return found

    async def complete(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settle("complete", held, Where.GONE)

    async def abandon(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settle("abandon", held, None)

    async def defer(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        return await self._settle("defer", held, Where.DEFERRED)

    async def dead_letter(self, held: Sequence[HeldMessage], reason: str, description: str) -> Sequence[HeldMessage]:
        return await self._settle("dead_letter", held, Where.DEAD)

    async def renew(self, held: Sequence[HeldMessage]) -> Sequence[HeldMessage]:
        await self._begin("renew", len(held))
        lost: list[HeldMessage] = []
        for one in held:
            letter = letter_of(one)
            if letter.held_by(one):
                letter.locked_until = now() + self._queue.lock
            else:
                lost.append(one)
        await self._queue.answer()
        return lost

    async def stop_receiving(self) -> Sequence[Grip]:
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

    async def _settle(self, name: str, held: Sequence[HeldMessage], to: Where | None) -> Sequence[HeldMessage]:
        lost: list[HeldMessage] = []
        try:
            await self._begin(name, len(held))
            self._settle_each(held, to, lost)
            await self._queue.answer()
        except BacklogFailedError:
            for one in held:
                letter_of(one).excuses += 1
            raise
        return lost

    @staticmethod
    def _settle_each(held: Sequence[HeldMessage], to: Where | None, lost: list[HeldMessage]) -> None:
        for one in held:
            letter = letter_of(one)
            letter.operations += 1
            if not letter.held_by(one):
                letter.excuses += letter.arrivals > 0
                lost.append(one)
                continue
            letter.locked_until = 0.0
            letter.wronged |= to is Where.GONE and not letter.arrivals
            letter.where = to or letter.where


class Life:
    """Of one syphon's process."""

    def __init__(self) -> None:
        self.dead = False
        self._unheard: list[asyncio.Future[None]] = []

    async def alive(self) -> None:
        if self.dead:
            self._unheard.append(asyncio.get_running_loop().create_future())
            await self._unheard[-1]


class SimulatedDestination:
    def __init__(self, entity: Entity, life: Life) -> None:
        self._entity = entity
        self._life = life

    async def send(self, messages: Sequence[OutgoingMessage]) -> None:
        await self._life.alive()
        bad = [message for message in messages if letter_of(message.held).flaw == "large"]
        if bad:
            raise SendFailedError(self._entity.path, FailureKind.MESSAGE_TOO_LARGE, messages, refused=True)
        for message in messages:
            letter_of(message.held).operations += 1
        await self._entity.take(messages)
        await self._life.alive()

    async def close(self) -> None:
        pass


class SimulatedTransport:
    def __init__(self, queues: dict[str, Queue], entities: dict[str, Entity], life: Life) -> None:
        self._queues = queues
        self._entities = entities
        self._life = life

    def backlog(self, queue: str) -> SimulatedBacklog:
        return SimulatedBacklog(self._queues[queue], self._life)

    def destination(self, path: str) -> SimulatedDestination:
        return SimulatedDestination(self._entities[path], self._life)

    def restore(self, held: HeldMessage, ttl: TimeToLive, now: datetime) -> OutgoingMessage:
        letter = letter_of(held)
        if letter.flaw == "no path":
            raise NeverDeliverableError("NoDestination", "x-ms-path is missing")
        if letter.flaw == "odd":
            raise CannotCarryError("a body of an odd kind")
        return OutgoingMessage(letter.path, str(letter.number), 1000, None, held)

    async def close(self) -> None:
        pass
