"""A world of two namespaces and the processes that send to them, made from a seed, on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random

from tests.pairing.simulation.call_messages import LAST, LETTERS, CallMessages
from tests.pairing.simulation.call_oracle import CallKind
from tests.pairing.simulation.clause_model import FIRST_LIST, LONGEST_IN_BACKLOG, TRY_TIMEOUT, Rules, ViolationError
from tests.pairing.simulation.fake_entities import FAULTS, DeliveryCounts, FakeEntity, Fault
from twinbus.backlog import FailureKind
from twinbus.pairing.decide.failover import EntityMode
from twinbus.pairing.decide.failover_events import FailoverEngaged

from .process import SimulatedProcess

HORIZON = 40.0
LONGEST_CALL = LONGEST_IN_BACKLOG + 10 * TRY_TIMEOUT
WHATS = (*(CallKind.SEND,) * 16, CallKind.SCHEDULE, CallKind.SCHEDULE, CallKind.OPEN, CallKind.BATCH, CallKind.CANCEL)
TIMEOUTS = (None, None, None, 0.03, 1.0, 6.0, 15.0)
NOTHING = CallMessages((), ())


class World:
    """`World(seed).settle()` runs with faults, ends them, and checks the result. Raises ViolationError."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(seed)
        self.time = 0.0
        self._numbers = count()
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self.stock = DeliveryCounts()
        self.last = list(LAST)
        first = chance.randrange(len(LETTERS))
        self.letters = [*LETTERS[first:], *LETTERS[:first]]
        self.closed: list[SimulatedProcess] = []
        self.rules = self._rules()
        entities = [f"q{index}" for index in range(chance.randint(1, 2))]
        queues = [f"b{index}" for index in range(chance.randint(1, 3))]
        self.primary = {name: FakeEntity(name, chance, self.after, self.stock) for name in entities}
        self.backlog = {name: FakeEntity(name, chance, self.after, self.stock) for name in queues}
        self.processes = [self._process() for _ in range(chance.choice((1, 1, 1, 2)))]
        self._plan()

    def _rules(self) -> Rules:
        chance = self.chance
        counting = set(FIRST_LIST)
        if chance.random() < 0.1:
            counting ^= {chance.choice((FailureKind.SERVER_BUSY, FailureKind.QUOTA_EXCEEDED))}
        return Rules(
            failover_interval=chance.choice((0.0, 0.0, 0.0, 2.0, 10.0)),
            ping_interval=chance.choice((1.0, 3.0, 10.0, 10.0)),
            ping_jitter=chance.choice((0.0, 0.1, 1.0)),
            probation=chance.choice((1.0, 5.0, 15.0)),
            raise_while_unusable=chance.random() < 0.3,
            counting=frozenset(counting),
            lateness=chance.choice((0.0, 0.0, 0.2)),
        )

    def _process(self) -> SimulatedProcess:
        sides = (self.primary, self.backlog)
        return SimulatedProcess(self.rules, self.chance, lambda: self.time, self.after, self.stock, sides)

    # --- what is going to happen -------------------------------------------------------------------------------------

    def _plan(self) -> None:
        chance = self.chance
        begins = []
        for _ in range(chance.randint(1, 5)):
            struck, fault = self._struck(), chance.choice(FAULTS)
            begin = chance.uniform(0, HORIZON / 2)
            begins.append(begin)
            self.after(begin, partial(self._strike, struck, fault))
            self.after(chance.uniform(begin, HORIZON), partial(self._strike, struck, None))
        for _ in range(chance.randint(2, 5)):
            # Most calls come when something has just happened.
            begin = chance.choice(begins) if chance.random() < 0.8 else chance.uniform(0, HORIZON)
            for _ in range(chance.choice((1, 1, 2, 4))):
                self.after(begin + chance.choice((1, 8)) * chance.random(), self._send)
        if chance.random() < 0.3:
            self.after(chance.uniform(0, HORIZON), chance.choice((self._restart, self._lose)))
        for _ in range(chance.choice((0, 1, 2))):
            self.after(chance.choice((0.0, chance.uniform(0, HORIZON))), self._force)

    def _struck(self) -> list[FakeEntity]:
        """Return what a fault hits: a whole namespace, or one entity or queue."""
        side = list(self.chance.choice((self.primary, self.backlog)).values())
        return side if self.chance.random() < 0.5 else [self.chance.choice(side)]

    @staticmethod
    def _strike(places: list[FakeEntity], fault: Fault | None) -> None:
        for place in places:
            place.fault = fault

    def _send(self) -> None:
        chance = self.chance
        what = chance.choice(WHATS)
        letter = self.letters.pop() if what in (CallKind.SEND, CallKind.SCHEDULE) else NOTHING
        cancelled_at = chance.choice((1, 2, 3, 4)) if chance.random() < 0.15 else None
        process = chance.choice((*self.processes, *self.closed))
        process.send(what, chance.choice(list(self.primary)), letter, chance.choice(TIMEOUTS), cancelled_at)

    def _restart(self) -> None:
        place = self.chance.randrange(len(self.processes))
        if self.chance.random() < 0.5:
            self.processes[place].kill()
        else:
            self.processes[place].close()
            self.closed.append(self.processes[place])
        self.processes[place] = self._process()

    def _lose(self) -> None:
        """End one side of one pair. The whole pair is closed later, and another process replaces it."""
        chance = self.chance
        place = chance.randrange(len(self.processes))
        process = self.processes[place]
        process.lose(chance.choice(("primary", "secondary")), chance.randrange(3))
        self.after(chance.uniform(1.0, 20.0), process.close)
        self.closed.append(process)
        self.processes[place] = self._process()

    def _force(self) -> None:
        process = self.chance.choice(self.processes)
        path, hold = self.chance.choice(list(self.primary)), self.chance.random() < 0.3
        process.force(path, over=self.chance.random() < 0.7, hold=hold)
        if hold:
            # An operator releases what an operator holds.
            self.after(self.chance.uniform(0, HORIZON), lambda: process.force(path, over=False))

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
        longest_ping = max(belief.ping_interval for process in self.processes for belief in process.beliefs.values())
        # A call under way may fail one more trial, which doubles the interval.
        pings = 3 * 2 * longest_ping
        self._live(HORIZON + LONGEST_CALL + TRY_TIMEOUT + self.rules.failover_interval + pings + 20)
        if self._coming:
            raise ViolationError(f"something still goes on: {self._coming[0]}")
        for process in self.processes:
            self._check_settled(process)
        for process in (*self.processes, *self.closed):
            process.close()
            if process.calls:
                raise ViolationError("calls have no result")
            self._check_told(process)
        self._check_stored()

    def _check_settled(self, process: SimulatedProcess) -> None:
        if process.rotation.rotation.usable != tuple(self.backlog):
            raise ViolationError("a backlog queue never came back")
        for path, place in self.primary.items():
            if process.cells[path].entity.mode not in (EntityMode.HEALTHY, EntityMode.ON_TRIAL):
                raise ViolationError(f"{path} never came back")
            process.send(CallKind.SEND, path, last := self.last.pop(), None, None)
            self._live(self.time + TRY_TIMEOUT)
            if place.last is None or place.last.ids != last.ids or not self.stock.promised.issuperset(last.ids):
                raise ViolationError(f"{path} is healthy, but does not get its messages")
            if process.cells[path].entity.mode is not EntityMode.HEALTHY:
                raise ViolationError(f"{path} accepted a message, and is still on trial")

    @staticmethod
    def _check_told(process: SimulatedProcess) -> None:
        engaged = sum(isinstance(notice, FailoverEngaged) for notice in process.notices)
        if engaged != sum(belief.failovers for belief in process.beliefs.values()):
            raise ViolationError("a failover was told twice, or not at all")

    def _check_stored(self) -> None:
        """Check that every message that was reported safe is stored. Nothing removes messages in this world."""
        for identity, copies in self.stock.stored.items():
            if copies > (identity in self.stock.promised) and identity not in self.stock.doubtful:
                raise ViolationError(f"{identity} is stored {copies} times without a lost acknowledgement")
