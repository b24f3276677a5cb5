"""A ledger and a backlog queue in which everything happens at once, and an audit beside it. Each step is one instant.

Senders, syphons, a resubmitter, the broker and a thief are generators; each `yield` lets any other of them go on. So is
the audit: the world changes between any two pages that the audit peeks, and between any two segments that it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

from twinbus.ledger import (
    AuditFindings,
    BacklogLook,
    Balance,
    Entry,
    Intent,
    LedgerReading,
    MessageKey,
    Move,
    Movement,
    Operation,
    Outcome,
    Stage,
    compare_with_backlog,
    grouped_moves,
    read_for_audit,
)

SECONDARY, QUEUE, DESTINATION = "paris", "contoso/x-servicebus-transfer/0", "contoso/orders"
PAGE = 2
Actor = Generator[None, None, None]


@dataclass
class Stored:
    """A message of the queue or of its dead-letter queue."""

    number: int
    id: str
    send: int
    """Which send stored it: an id may be used by several sends."""
    locked: bool = False


@dataclass
class Writer:
    """A writer of the ledger: its lines, and entries that it has not written yet."""

    digits: str
    clock: Iterator[int] = field(default_factory=lambda: count(1))
    lines: list[Entry] = field(default_factory=list)
    queued: list[Entry] = field(default_factory=list)
    begun: int = 0

    def new_id(self) -> str:
        self.begun += 1
        return f"{self.digits}-{self.begun}"


class AuditedWorld:
    def __init__(self, seed: int, *, thieves: bool, ids: int = 60) -> None:
        self.chance = Random(seed)
        self.clock = count(1)
        self.thieves = thieves
        self.ids = ids
        self.queue: list[Stored] = []
        self.dead: list[Stored] = []
        self.accepted: dict[int, str] = {}
        self.delivered: Counter[int] = Counter()
        self.writers: list[Writer] = []
        self.dead_writers: set[str] = set()
        self.actors: list[tuple[Actor, Writer]] = []
        self.next_number = 1
        self.names: dict[int, str] = {}
        self.audits = 0

    # --- the truth ---------------------------------------------------------------------------------------------------

    def truly_lost(self) -> Counter[str]:
        """The ids of accepted sends whose message was not delivered and is not in the backlog."""
        there = {one.send for one in (*self.queue, *self.dead)}
        gone = self.accepted.keys() - self.delivered.keys() - there
        return Counter(self.accepted[send] for send in gone)

    def lost_by_number(self) -> Counter[str]:
        """The same by number: a message that was delivered twice hides another one of the same id that is lost."""
        there = Counter(one.id for one in (*self.queue, *self.dead))
        for send, times in self.delivered.items():
            there[self.names[send]] += times
        return Counter(self.accepted.values()) - there

    def only_dead(self) -> set[str]:
        """The ids that one send used, which was accepted, and whose only copy is a dead letter."""
        sends = Counter(self.names.values())
        copies = Counter(one.id for one in (*self.queue, *self.dead))
        return {
            one.id
            for one in self.dead
            if sends[one.id] == copies[one.id] == 1 and one.send in self.accepted and not self.delivered[one.send]
        }

    # --- running -----------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> Iterator[tuple[AuditFindings, Balance]]:
        """Runs audits beside everything else, and yields what each of them found at the instant of its end."""
        audit, pace = self._audit(), self.chance.choice([0.1, 0.3, 0.9])
        for _ in range(steps):
            self._begin_something()
            self._one_step()
            if self.chance.random() < pace:
                try:
                    next(audit)
                except StopIteration as ended:
                    self.audits += 1
                    yield ended.value
                    audit = self._audit()

    def rest(self) -> tuple[AuditFindings, Balance]:
        """Lets everything end that has begun, and returns what an audit finds then."""
        while self.actors:
            self._one_step()
        for writer in self.writers:
            writer.lines += writer.queued
            writer.queued.clear()
        audit = self._audit()
        while True:
            try:
                next(audit)
            except StopIteration as ended:
                found: tuple[AuditFindings, Balance] = ended.value
                return found

    def _begin_something(self) -> None:
        dice = self.chance.random()
        if dice < 0.12:
            self._start(self._send)
        elif dice < 0.3 and self.queue:
            self._start(self._syphon)
        elif dice < 0.4 and self.dead:
            self._start(self._resubmit)
        elif dice < 0.42 and self.queue:
            self._broker_dead_letters()
        elif dice < 0.44 and self.thieves:
            self._steal()

    def _start(self, actor: object) -> None:
        writer = Writer(f"{len(self.writers):016x}", self.clock)
        self.writers.append(writer)
        self.actors.append((actor(writer), writer))  # type: ignore[operator] # one of the methods below

    def _one_step(self) -> None:
        if not self.actors:
            return
        place = self.chance.randrange(len(self.actors))
        actor, writer = self.actors[place]
        if self.chance.random() < 0.02:  # kill -9: what was not written is lost
            actor.close()
            writer.queued.clear()
            self.dead_writers.add(f"syphon-host-1-{writer.digits}")
            del self.actors[place]
            return
        if writer.queued and self.chance.random() < 0.3:
            writer.lines += writer.queued
            writer.queued.clear()
        try:
            next(actor)
        except StopIteration:
            writer.lines += writer.queued
            writer.queued.clear()
            del self.actors[place]

    # --- actors ------------------------------------------------------------------------------------------------------

    def _send(self, writer: Writer) -> Actor:
        send = len(self.names)
        name = f"m{self.chance.randrange(self.ids)}" if self.chance.random() < 0.1 else f"n{send}"
        self.names[send] = name
        if self.chance.random() < 0.1:  # the primary does not answer
            if self.chance.random() < 0.3:
                self.delivered[send] += 1
            writer.lines.append(operation(writer, Stage.SEND_PRIMARY, name, "unknown"))
        yield
        if self.chance.random() < 0.1:  # the backlog does not answer, and the message is sent again
            if self.chance.random() < 0.5:
                self._store(self.queue, name, send)
            writer.lines.append(operation(writer, Stage.SEND_BACKLOG, name, "unknown"))
        yield
        self._store(self.queue, name, send)
        yield
        writer.lines.append(operation(writer, Stage.SEND_BACKLOG, name))
        self.accepted[send] = name

    def _syphon(self, writer: Writer) -> Actor:
        free = [one for one in self.queue if not one.locked]
        if not free:
            return
        one = self.chance.choice(free)
        one.locked = True
        try:
            yield
            if self.chance.random() < 0.3:
                yield from self._dead_letter(writer, one)
                return
            begun = operation(writer, Stage.RETURN_PRIMARY, one.id)
            writer.lines.append(intent(begun))
            yield
            dice = self.chance.random()
            if dice < 0.85 or dice > 0.95:
                self.delivered[one.send] += 1
            yield
            result = "ok" if dice < 0.85 else "unknown" if dice < 0.9 or dice > 0.95 else "server_busy"
            writer.lines.append(outcome(begun, result))
            yield
            if result != "ok":
                return
            if one in self.queue and self.chance.random() < 0.95:
                self.queue.remove(one)
                yield
                writer.queued.append(operation(writer, Stage.COMPLETE_BACKLOG, one.id))
            else:
                writer.queued.append(operation(writer, Stage.COMPLETE_BACKLOG, one.id, "unknown"))
                writer.queued.append(movement(writer, Move.POSSIBLE_DUPLICATE, one.id))
        finally:
            one.locked = False

    def _dead_letter(self, writer: Writer, one: Stored) -> Actor:
        if one in self.queue:
            self.queue.remove(one)
            self._store(self.dead, one.id, one.send)
            yield
            writer.queued.append(movement(writer, Move.DEAD_LETTERED, one.id))

    def _resubmit(self, writer: Writer) -> Actor:
        free = [one for one in self.dead if not one.locked]
        if not free:
            return
        one = self.chance.choice(free)
        one.locked = True
        try:
            begun = operation(writer, Stage.RESUBMIT_BACKLOG, one.id)
            writer.lines.append(intent(begun))
            yield
            self._store(self.queue, one.id, one.send)
            yield
            writer.lines += [outcome(begun, "ok"), movement(writer, Move.RESUBMITTED, one.id)]
            completion = operation(writer, Stage.COMPLETE_BACKLOG, one.id)
            writer.lines.append(intent(completion))
            yield
            if one in self.dead:
                self.dead.remove(one)
            yield
            writer.queued.append(outcome(completion, "ok"))
        finally:
            one.locked = False

    def _broker_dead_letters(self) -> None:
        one = self.chance.choice(self.queue)
        if not one.locked:
            self.queue.remove(one)
            self._store(self.dead, one.id, one.send)

    def _steal(self) -> None:
        place = self.chance.choice([self.queue, self.dead])
        if place:
            place.remove(self.chance.choice(place))

    def _store(self, place: list[Stored], name: str, send: int) -> None:
        place.append(Stored(self.next_number, name, send))
        self.next_number += 1

    # --- the audit ---------------------------------------------------------------------------------------------------

    def _audit(self) -> Generator[None, None, tuple[AuditFindings, Balance]]:
        writer = Writer(f"a{len(self.writers):015x}", self.clock)
        self.writers.append(writer)
        before = yield from self._read()
        first = yield from self._look()
        after = yield from self._read()
        found = compare_with_backlog(before, first, after, None, namespace=SECONDARY)
        if found.needs_second_look:
            for _ in range(self.chance.randrange(20)):
                yield
            second = yield from self._look()
            after = yield from self._read()
            found = compare_with_backlog(before, first, after, second, namespace=SECONDARY)
        for one, ids in grouped_moves(found.moves):
            # The clock of the machine that audits may be wrong (L5).
            at = next(writer.clock) + self.chance.choice([-(10**6), 0, 10**6])
            writer.lines.append(
                Movement(
                    at=at, id=writer.new_id(), move=one.move, ids=tuple(ids), source=one.source,
                    destination=one.message.destination, reason=one.reason, broker_at=one.broker_at,
                )
            )  # fmt: skip
        # This reading is one instant, so that the truth of this instant can be compared with it.
        return found, read_for_audit((line for one in self.writers for line in one.lines), self.dead_writers).balance

    def _read(self) -> Generator[None, None, LedgerReading]:
        dead, lines = set(self.dead_writers), []
        listed = list(self.writers)
        for place, writer in enumerate(listed):
            lines += writer.lines
            if not place % 8:
                yield
        return read_for_audit(lines, dead)

    def _look(self) -> Generator[None, None, BacklogLook]:
        look = BacklogLook()
        for messages in (self.queue, self.dead):
            start = 0
            while page := sorted((one for one in messages if one.number >= start), key=lambda one: one.number)[:PAGE]:
                keys = [MessageKey(DESTINATION, one.id) for one in page]
                look.seen.update(keys)
                look.dead.update(keys if messages is self.dead else ())
                start = page[-1].number + 1
                yield
        return look


def operation(writer: Writer, stage: Stage, name: str, result: str = "ok") -> Operation:
    home = stage in (Stage.SEND_PRIMARY, Stage.RETURN_PRIMARY)
    return Operation(
        at=next(writer.clock), id=writer.new_id(), stage=stage, namespace="contoso" if home else SECONDARY,
        entity="orders" if home else QUEUE, destination=None if home else DESTINATION, ids=(name,), bytes=1, units=1,
        seconds=0.0, result=result,
    )  # fmt: skip


def intent(whole: Operation) -> Intent:
    names = ("stage", "namespace", "entity", "ids", "bytes", "units", "destination")
    return Intent(at=whole.at, id=whole.id, **{name: getattr(whole, name) for name in names})


def outcome(whole: Operation, result: str) -> Outcome:
    return Outcome(at=whole.at, id=whole.id, seconds=0.0, result=result)


def movement(writer: Writer, move: Move, name: str) -> Movement:
    source = f"{SECONDARY}/{QUEUE}"
    return Movement(
        at=next(writer.clock), id=writer.new_id(), move=move, ids=(name,), source=source, destination=DESTINATION
    )
