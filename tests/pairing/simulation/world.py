"""A world of two namespaces and the processes that send to them, made from a seed, on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random

from twinbus.pairing import aliases
from twinbus.pairing.failover import Mode
from twinbus.pairing.failures import FailureKind

from .judge import FIRST_LIST, Rules, ViolationError, check_messages
from .places import FAULTS, TRY_TIMEOUT, Fault, Message, Place
from .process import CALL_TIMEOUT, Process

HORIZON = 60.0
SENDERS = 2


class World:
    """`World(seed).settle()` lives through its faults, ends them, and checks what must hold: ViolationError."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(seed)
        self.time = 0.0
        self._numbers = count()
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self.messages: list[Message] = []
        self.closed: list[Process] = []
        self.rules = self._rules()
        entities = [f"q{index}" for index in range(chance.randint(1, 2))]
        queues = [f"b{index}" for index in range(chance.randint(1, 3))]
        self.primary = {name: Place(name, chance, self.after) for name in entities}
        self.backlog = {name: Place(name, chance, self.after) for name in queues}
        self.processes = [self._process() for _ in range(chance.randint(1, 2))]
        self._plan()

    def _rules(self) -> Rules:
        chance = self.chance
        counting = set(FIRST_LIST)
        if chance.random() < 0.1:
            counting ^= {chance.choice((FailureKind.SERVER_BUSY, FailureKind.QUOTA_EXCEEDED))}
        return Rules(
            failover_interval=chance.choice((0.0, 0.0, 2.0, 5.0, 20.0)),
            ping_interval=chance.choice((1.0, 3.0, 10.0)),
            ping_jitter=chance.choice((0.0, 0.1, 1.0)),
            probation=chance.choice((1.0, 5.0, 15.0)),
            raise_while_unusable=chance.random() < 0.3,
            counting=frozenset(counting),
            lateness=chance.choice((0.0, 0.0, 0.2)),
        )

    def _process(self) -> Process:
        return Process(self.rules, self.chance, lambda: self.time, self.after, self.primary, self.backlog)

    # --- what is going to happen -------------------------------------------------------------------------------------

    def _plan(self) -> None:
        chance = self.chance
        for _ in range(chance.randint(5, 15)):
            begin = chance.uniform(0, HORIZON)
            for _ in range(chance.choice((1, 1, 2, 4))):
                self.after(begin + chance.random(), self._send)
        for _ in range(chance.randint(1, 5)):
            fault = chance.choice(FAULTS)
            struck = self._struck()
            begin = chance.uniform(0, HORIZON)
            self.after(begin, partial(self._strike, struck, fault))
            self.after(chance.uniform(begin, HORIZON), partial(self._strike, struck, None))
        if chance.random() < 0.3:
            self.after(chance.uniform(0, HORIZON), self._restart)
        for _ in range(chance.choice((0, 0, 1, 2))):
            self.after(chance.uniform(0, HORIZON), self._force)

    def _struck(self) -> list[Place]:
        """A whole namespace, or one entity or queue of it."""
        side = list(self.chance.choice((self.primary, self.primary, self.backlog)).values())
        return side if self.chance.random() < 0.5 else [self.chance.choice(side)]

    @staticmethod
    def _strike(places: list[Place], fault: Fault | None) -> None:
        for place in places:
            place.fault = fault

    def _send(self) -> None:
        self._send_from(self.chance.choice(self.processes), self.chance.choice(list(self.primary)))

    def _send_from(self, process: Process, path: str, *, faulty: bool | None = None) -> Message:
        chance = self.chance
        original = aliases.Sendable(
            session_id=chance.choice((None, "red")),
            time_to_live=chance.choice((None, 1, 60_000)),
            scheduled_enqueue_time=chance.choice((None, 1_700_000_000_000)),
            application_properties={"number": len(self.messages)},
        )
        spoilt = chance.random() < 0.03 if faulty is None else faulty
        message = Message(len(self.messages), path, original, spoilt)
        self.messages.append(message)
        process.send(chance.randrange(SENDERS), message)
        return message

    def _restart(self) -> None:
        place = self.chance.randrange(len(self.processes))
        if self.chance.random() < 0.5:
            self.processes[place].kill()
        else:
            self.processes[place].close()
            self.closed.append(self.processes[place])
        self.processes[place] = self._process()

    def _force(self) -> None:
        process = self.chance.choice(self.processes)
        process.force(self.chance.choice(list(self.primary)), over=self.chance.random() < 0.6)

    # --- time --------------------------------------------------------------------------------------------------------

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heappush(self._coming, (self.time + seconds, next(self._numbers), do))

    def _live(self, until: float) -> None:
        coming = self._coming
        while coming and coming[0][0] <= until:
            self.time, _, do = heappop(coming)
            do()
            for process in (*self.processes, *self.closed):
                process.check()

    def settle(self) -> None:
        self._live(HORIZON)
        self._strike([*self.primary.values(), *self.backlog.values()], None)
        # Calls under way may still fail, and their failures still count.
        rules = self.rules
        self._live(HORIZON + CALL_TIMEOUT + TRY_TIMEOUT + rules.failover_interval + 3 * rules.ping_interval + 20)
        if self._coming:
            raise ViolationError(f"something still goes on: {self._coming[0]}")
        for process in self.processes:
            self._check_settled(process)
        for process in self.processes:
            process.close()
        if any(process.calls for process in (*self.processes, *self.closed)):
            raise ViolationError("calls have no result")
        self._check_stored()

    def _check_settled(self, process: Process) -> None:
        if process.rotation.usable != tuple(self.backlog):
            raise ViolationError("a backlog queue never came back")
        for path in self.primary:
            if process.entities[path].mode is not Mode.HEALTHY:
                raise ViolationError(f"{path} never came back")
            last = self._send_from(process, path, faulty=False)
            self._live(self.time + TRY_TIMEOUT)
            if not last.accepted or self.primary[path].stored[-1].message is not last:
                raise ViolationError(f"{path} is healthy, but does not get its messages")

    def _check_stored(self) -> None:
        found: dict[Message, int] = {}
        for place in (*self.primary.values(), *self.backlog.values()):
            for message, _ in place.stored:
                found[message] = found.get(message, 0) + 1
        check_messages(self.messages, found)
        for place in self.primary.values():
            if any(content != message.original for message, content in place.stored):
                raise ViolationError("the primary got a changed message")
        for place in self.backlog.values():
            for message, content in place.stored:
                if aliases.restore(content) != (message.entity, message.original, None):
                    raise ViolationError("a message comes back changed")
