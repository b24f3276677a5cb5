"""What a queue and a subscription have in common: the state of the side that receivers see.

Data with the few moves every part needs; the decisions about it are in the modules named after them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final

from twinbus.namespace.engine.deadline_heap import DeadlineHeap
from twinbus.namespace.engine.descriptions import QueueDescription, SubscriptionDescription
from twinbus.namespace.engine.duplicate_detection import IdBudget
from twinbus.namespace.engine.lifecycle import EntityCounters
from twinbus.namespace.engine.read_ahead import ReadAhead, ReadAheadBudget
from twinbus.namespace.engine.storage_protocol import QueueLane, Row

ReceiveSettings = QueueDescription | SubscriptionDescription


PAGE: Final = 64


_NO_RAW: Final = (b"",)


class MessageLock:
    """One message held under one token."""

    __slots__ = ("row", "session", "token", "until")

    def __init__(self, token: bytes, row: Row, until: int, session: HeldSession | None) -> None:
        self.token = token
        self.row = row
        self.until = until
        self.session = session


class MessageLocks:
    """The locks of one queue, its dead-letter sub-queue included."""

    __slots__ = ("by_seq", "by_token", "deadlines")

    def __init__(self) -> None:
        self.by_token: dict[bytes, MessageLock] = {}
        self.by_seq: dict[int, MessageLock] = {}
        self.deadlines: DeadlineHeap[bytes] = DeadlineHeap()

    def take(self, token: bytes, row: Row, until: int, session: HeldSession | None) -> None:
        lock = MessageLock(token, tuple.__new__(Row, row[:12] + _NO_RAW), until, session)
        self.by_token[token] = lock
        self.by_seq[row.seq] = lock
        if session is None:
            self.deadlines.set(token, until)
        else:
            session.locks[token] = lock

    def held(self, token: bytes, now: int) -> MessageLock | None:
        """The lock of this token, unless its time is up, even if nobody has noticed yet."""
        lock = self.by_token.get(token)
        if lock is None or (lock.until if lock.session is None else lock.session.until) <= now:
            return None
        return lock

    def drop(self, lock: MessageLock) -> None:
        token = lock.token
        del self.by_token[token]
        del self.by_seq[lock.row.seq]
        if lock.session is None:
            self.deadlines.clear(token)
        else:
            del lock.session.locks[token]

    def renew(self, lock: MessageLock, until: int) -> None:
        lock.until = until
        self.deadlines.set(lock.token, until)


class HeldSession:
    """A session under lock, with the messages its holder has not settled."""

    __slots__ = ("consumer", "feed", "id", "locks", "until")

    feed: DeliveryLane

    def __init__(self, session: str, consumer: AttachedReceiver, until: int) -> None:
        self.id = session
        self.consumer = consumer
        self.until = until
        self.locks: dict[bytes, MessageLock] = {}


class WaitingReceiver:
    """A receiver that takes whichever session comes."""

    __slots__ = ("consumer", "deadline")

    def __init__(self, consumer: AttachedReceiver, deadline: int) -> None:
        self.consumer = consumer
        self.deadline = deadline


class EntitySessions:
    """The session locks of one entity and the receivers that wait for one, first come first served."""

    __slots__ = ("_arrivals", "deadlines", "held", "rotation", "search", "wait_deadlines", "waiting")

    def __init__(self) -> None:
        self.held: dict[str, HeldSession] = {}
        self.deadlines: DeadlineHeap[str] = DeadlineHeap()
        self.waiting: OrderedDict[int, WaitingReceiver] = OrderedDict()
        self.wait_deadlines: DeadlineHeap[int] = DeadlineHeap()
        self._arrivals = 0
        self.search = False
        """There may be a free session with messages for those who wait."""
        self.rotation = ""
        """The session given out last: the next search begins after it."""

    def wait(self, consumer: AttachedReceiver, deadline: int) -> None:
        self._arrivals += 1
        self.waiting[self._arrivals] = WaitingReceiver(consumer, deadline)
        self.wait_deadlines.set(self._arrivals, deadline)

    def first_waiting(self) -> AttachedReceiver:
        number = next(iter(self.waiting))
        self.wait_deadlines.clear(number)
        return self.waiting.pop(number).consumer

    def stop_waiting(self, consumer: AttachedReceiver) -> None:
        for number, waiter in self.waiting.items():
            if waiter.consumer is consumer:
                del self.waiting[number]
                self.wait_deadlines.clear(number)
                return


class AttachedReceiver:
    """A receiver as the engine sees it. `limit` and `taken` count from its attach, like link credit does."""

    __slots__ = ("drain", "fed", "feed", "hungry", "limit", "peek_lock", "receiver", "room", "taken")

    def __init__(self, receiver: Any, peek_lock: bool) -> None:
        self.receiver = receiver
        self.peek_lock = peek_lock
        self.limit = 0
        self.taken = 0
        self.room = 0
        """Bytes it may still be given; at most one message more."""
        self.drain = False
        self.hungry = False
        self.fed = False
        """Something was delivered under the present grant of credit."""
        self.feed: DeliveryLane | None = None
        """None while it waits for a session."""


class DeliveryLane:
    """Rows in order, and the receivers with credit for them, in turn."""

    __slots__ = ("attending", "hungry", "onward", "session", "window")

    def __init__(self, window: ReadAhead, session: HeldSession | None = None) -> None:
        self.window = window
        self.session = session
        self.attending = 0
        self.onward: str | None = None
        """The entity that all rows of this feed are forwarded to."""
        self.hungry: deque[AttachedReceiver] = deque()

    def enter(self, consumer: AttachedReceiver) -> None:
        consumer.feed = self
        self.attending += 1
        self.window.attend(True)

    def exit(self) -> None:
        self.attending -= 1
        if not self.attending:
            self.window.attend(False)

    def queue_up(self, consumer: AttachedReceiver) -> None:
        if not consumer.hungry:
            consumer.hungry = True
            self.hungry.append(consumer)

    def leave(self, consumer: AttachedReceiver) -> None:
        if consumer.hungry:
            consumer.hungry = False
            self.hungry.remove(consumer)


class EngineResources:
    """What the engine is given from outside: tokens nobody can guess, ids for shared bodies, memory."""

    __slots__ = ("budget", "ids", "new_token", "next_body", "onward")

    def __init__(self, new_token: Callable[[], bytes], next_body: int, budget: ReadAheadBudget, ids: IdBudget) -> None:
        self.new_token = new_token
        self.next_body = next_body
        self.budget = budget
        self.ids = ids
        self.onward: dict[tuple[ReceiveState, DeliveryLane], None] = {}
        """Feeds with rows to be forwarded, in the order they were noticed."""

    def take_body(self) -> int:
        body = self.next_body
        self.next_body = body + 1
        return body


class ReceiveState:
    """One queue's messages as receivers see them."""

    __slots__ = (
        "consumers",
        "counters",
        "dead",
        "locks",
        "main",
        "next_expiry",
        "next_timer",
        "path",
        "pending",
        "sessions",
        "settings",
        "supplies",
        "transfer",
    )

    def __init__(
        self, counters: EntityCounters, settings: ReceiveSettings, supplies: EngineResources, next_expiry: int | None
    ) -> None:
        self.counters = counters
        self.settings = settings
        self.path = settings.path
        self.supplies = supplies
        self.locks = MessageLocks()
        self.consumers: dict[Any, AttachedReceiver] = {}
        self.sessions = EntitySessions()
        self.main = self._feed(QueueLane.ACTIVE)
        self.dead = self._feed(QueueLane.DEAD)
        self.transfer = self._feed(QueueLane.TRANSFER_DEAD)
        self.next_expiry = next_expiry
        """Nothing expires before; None: nothing ever will."""
        self.pending: list[DeliveryLane] = []
        """Feeds that may have both rows and receivers."""
        self.next_timer: int | None = next_expiry
        """Nothing is to be done by itself before. It may come for nothing: then it is worked out anew."""
        self.direct()

    def _feed(self, lane: QueueLane) -> DeliveryLane:
        queue, empty = self.counters.queue, self.counters.lanes[lane] == 0
        return DeliveryLane(ReadAhead(queue, lane, self.supplies.budget, empty=empty))

    def direct(self) -> None:
        """Where the settings send rows on to."""
        self.main.onward = self.settings.forward_to or None
        self.dead.onward = self.settings.forward_dead_letters_to or None
        for feed in (self.main, self.dead):
            self.wake(feed)

    def arm(self, at: int) -> None:
        if self.next_timer is None or at < self.next_timer:
            self.next_timer = at

    def wake(self, feed: DeliveryLane) -> None:
        if feed.hungry and feed not in self.pending:
            self.pending.append(feed)
        if feed.onward is not None and not feed.window.exhausted:
            self.supplies.onward[self, feed] = None

    def feed_of(self, row: Row) -> DeliveryLane | None:
        """Where the row is delivered from; None if that is a session nobody holds."""
        if row.lane >= QueueLane.TRANSFER_DEAD:
            return self.transfer
        if row.lane >= QueueLane.DEAD:
            return self.dead
        if not self.settings.requires_session:
            return self.main
        held = self.sessions.held.get(row.session or "")
        return held.feed if held else None

    def expires_at(self, at: int | None) -> None:
        if at is not None and (self.next_expiry is None or at < self.next_expiry):
            self.next_expiry = at
            self.arm(at)

    def forget(self, seqs: set[int]) -> None:
        """Rows that went without being delivered leave every window."""
        self.main.window.forget(seqs)
        self.dead.window.forget(seqs)
        self.transfer.window.forget(seqs)
        for held in self.sessions.held.values():
            held.feed.window.forget(seqs)
