"""A namespace without I/O for tests: the engine over a memory store. The test sets the time; receivers keep effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

from twinbus.amqp import Header, RoutingFields, build_message, decode_all, read_routing_fields
from twinbus.amqp import Properties as MessageProperties
from twinbus.namespace.engine import events
from twinbus.namespace.engine.descriptions import Description, QueueDescription
from twinbus.namespace.engine.effects import (
    AcceptSession,
    AnswerRequest,
    Deliver,
    DetachReceiver,
    Drain,
    EngineDecision,
    Meter,
    MeteredOperation,
    PendingDecision,
    Refusal,
)
from twinbus.namespace.engine.forwarding import forward
from twinbus.namespace.engine.registry import Entity, EntityRegistry
from twinbus.namespace.engine.storage_protocol import PutCounters, Row
from twinbus.namespace.store import MemoryStore
from twinbus.values import Symbol, Timestamp

START = 1_700_000_000_000
PING = "application/vnd.ms-servicebus-ping"


class Delivery(NamedTuple):
    """One message of a Deliver."""

    row: Row
    token: bytes | None
    locked_until: int | None


@dataclass(eq=False, repr=False)
class Receiver:
    """Replaces a receiver link of the front. Stores the effects that it gets."""

    deliveries: list[Delivery] = field(default_factory=list)
    drained: int = 0
    session: str | None = None
    locked_until: int | None = None
    refusal: Refusal | None = None

    def __repr__(self) -> str:
        return f"<receiver of {self.bodies}>"

    def holds(self, session: str) -> bool:
        return self.session == session

    @property
    def rows(self) -> list[Row]:
        return [delivery.row for delivery in self.deliveries]

    @property
    def bodies(self) -> list[str]:
        return [text_of(row) for row in self.rows]

    @property
    def seqs(self) -> list[int]:
        return [row.seq for row in self.rows]

    @property
    def tokens(self) -> list[bytes]:
        return [delivery.token for delivery in self.deliveries if delivery.token is not None]


def envelope(
    body: str = "x",
    *,
    message_id: str | None = None,
    session: str | None = None,
    ttl: int | None = None,
    due: int | None = None,
    content_type: str | None = None,
    properties: dict[str, Any] | None = None,
    partition_key: str | None = None,
) -> RoutingFields:
    annotations: dict[str, Any] = {}
    if due is not None:
        annotations["x-opt-scheduled-enqueue-time"] = Timestamp(due)
    if partition_key is not None:
        annotations["x-opt-partition-key"] = partition_key
    raw = build_message(
        data=body.encode(),
        header=Header(ttl=ttl) if ttl is not None else None,
        message_annotations=annotations or None,
        properties=MessageProperties(
            message_id=message_id,
            group_id=session,
            content_type=Symbol(content_type) if content_type is not None else None,
        ),
        application_properties=properties,
    )
    return read_routing_fields(raw)


def ping(session: str | None = "a session") -> RoutingFields:
    return envelope("", content_type=PING, ttl=1000, session=session)


def text_of(row: Row) -> str:
    """The body of a message with one data section. All bodies of the tests are short."""
    at = row.raw.rindex(b"\x00\x53\x75\xa0")
    return row.raw[at + 5 :].decode()


def overlay_of(row: Row) -> dict[str, Any]:
    overlay: dict[str, Any] = decode_all(row.overlay) if row.overlay else {}
    return overlay


class Bus:
    """Does the work of the runtime: completes decisions, commits writes, then carries out effects."""

    def __init__(self, *descriptions: Description, read_ahead_bytes: int | None = None) -> None:
        self.store = MemoryStore()
        self.now = START
        self.meters: list[Meter] = []
        self.answers: list[Any] = []
        self.reads: list[Any] = []
        self._tokens = count(1)
        self._read_ahead_bytes = read_ahead_bytes
        self.restart()
        for description in descriptions:
            assert not isinstance(self.create(description), Refusal)

    def restart(self) -> None:
        """Open the namespace again from the store, as after a crash: everything in memory is lost."""
        limits = {} if self._read_ahead_bytes is None else {"read_ahead_bytes": self._read_ahead_bytes}
        self.namespace = EntityRegistry(self.store.open(), new_token=self.token, **limits)

    def token(self) -> bytes:
        return next(self._tokens).to_bytes(16, "big")

    def entity(self, path: str) -> Entity:
        found = self.namespace.find(path)
        assert found is not None, path
        return found

    # --- decisions -----------------------------------------------------------------------------------------------

    def submit(self, path: str | Entity, event: events.Event) -> Any:
        """Give an entity an event, and fire every timer that is due. Returns the answer to the event."""
        entity = self.entity(path) if isinstance(path, str) else path
        self.answers.clear()
        self.carry_out(entity.advance(event, self.now))
        answer = self.answers[-1] if self.answers else None
        self.settle()
        return answer

    def carry_out(self, pending: PendingDecision) -> EngineDecision:
        """Complete a decision with the reads it needs, and apply it."""
        answer = None
        while True:
            try:
                read = pending.send(answer)
            except StopIteration as decided:
                decision: EngineDecision = decided.value
                self.apply(decision)
                return decision
            self.reads.append(read)
            answer = self.store.load(read)

    def fail(self, pending: PendingDecision) -> None:
        """Let every read of a decision fail. Applies what it decides all the same."""
        next(pending)
        while True:
            try:
                pending.throw(OSError("disk"))
            except StopIteration as decided:
                self.apply(decided.value)
                return

    def apply(self, decision: EngineDecision) -> None:
        touched = [write.queue for write in decision.writes if isinstance(write, PutCounters)]
        assert len(touched) == len(set(touched)), "counters are written once per queue and decision"
        self.store.commit(decision.writes)
        self.namespace.free(self.store.take_freed())
        for effect in decision.effects:
            match effect:
                case AnswerRequest(reply, result):
                    self.answers.append(result)
                    if callable(reply):
                        reply(result)
                case Deliver(receiver, rows, tokens, until):
                    receiver.deliveries += [Delivery(*each, until) for each in zip(rows, tokens, strict=True)]
                case Drain(receiver):
                    receiver.drained += 1
                case AcceptSession(receiver, session, until):
                    receiver.session, receiver.locked_until = session, until
                case DetachReceiver(receiver, refusal):
                    receiver.refusal = refusal
                case Meter():
                    self.meters.append(effect)

    def settle(self) -> None:
        """Carry out pending forwards and fire every timer that is due, until nothing is left."""
        for _ in range(1000):
            for source, lane, target in self.namespace.pending_forwards():
                self.carry_out(forward(source, lane, target, self.now))
            due = [each for each in self.namespace.root_entities() if each.next_timer is not None]
            due = [root for root in due if (root.next_timer or 0) <= self.now]
            if not due:
                if self.namespace.has_pending_forwards:
                    continue
                return
            for root in due:
                self.carry_out(root.advance(events.EntityTimerFired(), self.now))
        raise AssertionError("timers fire without end")

    def wait(self, milliseconds: int, look: Callable[[], None] = lambda: None) -> None:
        """Let time pass and fire timers when they are due. Calls `look` after each."""
        end = self.now + milliseconds
        while (at := self.next_timer()) is not None and at <= end:
            self.now = max(self.now, at)
            self.settle()
            look()
        self.now = end

    def next_timer(self) -> int | None:
        instants = [root.next_timer for root in self.namespace.root_entities()]
        return min((instant for instant in instants if instant is not None), default=None)

    # --- administration ------------------------------------------------------------------------------------------

    def create(self, description: Description) -> Refusal | None:
        outcome = self.namespace.create(description, self.now)
        if isinstance(outcome, Refusal):
            return outcome
        self.apply(outcome)
        return None

    def update(self, path: str, /, **changes: Any) -> Refusal | None:
        description = replace(self.entity(path).description, **changes)
        outcome = self.namespace.update(description, self.now)
        if isinstance(outcome, Refusal):
            return outcome
        self.carry_out(outcome)
        self.settle()
        return None

    def delete(self, path: str) -> Refusal | None:
        outcome = self.namespace.delete(path, self.now)
        if isinstance(outcome, Refusal):
            return outcome
        self.carry_out(outcome)
        return None

    # --- what a client does --------------------------------------------------------------------------------------

    def send(self, path: str, *messages: RoutingFields | str) -> Refusal | None:
        sent = tuple(envelope(each) if isinstance(each, str) else each for each in messages)
        answer: Refusal | None = self.submit(path, events.MessagesSent("reply", sent))
        return answer

    def schedule(self, path: str, *messages: RoutingFields) -> Any:
        return self.submit(path, events.MessagesScheduled("reply", messages))

    def cancel(self, path: str, *seqs: int) -> Any:
        return self.submit(path, events.ScheduleCancelled("reply", seqs))

    def receiver(
        self, path: str, credit: int = 0, *, dead: bool = False, peek_lock: bool = True, transfer: bool = False
    ) -> Receiver:
        receiver = Receiver()
        receiver.refusal = self.submit(path, events.ReceiverAttached("reply", receiver, dead, peek_lock, transfer))
        if credit and receiver.refusal is None:
            self.credit(path, receiver, credit)
        return receiver

    def session(
        self, path: str, session: str | None = None, credit: int = 0, *, wait: int = 0, peek_lock: bool = True
    ) -> Receiver:
        receiver = Receiver()
        attached = events.SessionReceiverAttached(receiver, session, self.now + wait, peek_lock)
        self.submit(path, attached)
        if credit and receiver.refusal is None:
            self.credit(path, receiver, credit)
        return receiver

    def credit(self, path: str, receiver: Receiver, more: int, *, drain: bool = False) -> None:
        """Grant credit for `more` messages beyond those delivered."""
        self.submit(path, events.CreditGranted(receiver, len(receiver.deliveries) + more, drain))

    def receive(
        self, path: str, most: int = 1000, *, dead: bool = False, peek_lock: bool = True, transfer: bool = False
    ) -> Receiver:
        """Receive everything available through a new receiver, which is then detached."""
        receiver = self.receiver(path, dead=dead, peek_lock=peek_lock, transfer=transfer)
        self.credit(path, receiver, most, drain=True)
        self.submit(path, events.ReceiverDetached(receiver))
        return receiver

    def detach(self, path: str, receiver: Receiver) -> None:
        self.submit(path, events.ReceiverDetached(receiver))

    def settle_tokens(
        self, path: str, tokens: Sequence[bytes], outcome: events.MessageOutcome, session: str | None = None
    ) -> list[Refusal | None]:
        answer: list[Refusal | None] = self.submit(
            path, events.MessagesSettled("reply", tuple(tokens), outcome, session)
        )
        return answer

    def peek(
        self, path: str, start: int = 0, count: int = 100, *, dead: bool = False, session: str | None = None
    ) -> Any:
        return self.submit(path, events.MessagesPeeked("reply", start, count, dead, session))

    def deferred(
        self, path: str, *seqs: int, peek_lock: bool = True, dead: bool = False, session: str | None = None
    ) -> Any:
        return self.submit(path, events.DeferredRequested("reply", seqs, peek_lock, dead, session))

    # --- inspection ----------------------------------------------------------------------------------------------

    def counts(self, path: str) -> tuple[int, int, int, int]:
        """Numbers of active, deferred, scheduled and dead-lettered messages."""
        info = self.namespace.info(path)
        assert info is not None
        return info.counts.active, info.counts.deferred, info.counts.scheduled, info.counts.dead_letter

    def metered(self, operation: MeteredOperation) -> int:
        return sum(meter.count for meter in self.meters if meter.operation is operation)


def queue(path: str = "q", **settings: Any) -> QueueDescription:
    return QueueDescription(path=path, **settings)
