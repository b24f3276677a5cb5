"""State of the receive side of a queue or subscription: receivers, locks, sessions, and rows ready for delivery.

    ReceiveState
      main, dead_letter, transfer_dead_letter: DeliveryLane    rows in order, and the receivers that wait for them
      receivers: AttachedReceiver by handle                    credit of each link
      locks: MessageLocks                                      which message is locked under which token
      sessions: EntitySessions                                 sessions held, each with a DeliveryLane of its own

This module holds data and the small operations that every decision needs. The decisions are in `receiving` (attach,
detach, timers), `delivery`, `session_assignment`, `settlement` and `queries`. Locks are in memory only: after a
restart every message is free.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from twinbus.namespace.engine.deadline_heap import DeadlineHeap
from twinbus.namespace.engine.descriptions import QueueDescription, SubscriptionDescription
from twinbus.namespace.engine.duplicate_detection import SeenIdBudget
from twinbus.namespace.engine.effects import Refusal, not_allowed
from twinbus.namespace.engine.lifecycle import EntityCounters
from twinbus.namespace.engine.read_ahead import ReadAhead, ReadAheadBudget
from twinbus.namespace.engine.storage_protocol import QueueLane, Row

ReceiveSettings = QueueDescription | SubscriptionDescription


# --- receivers ---------------------------------------------------------------------------------------------------


class AttachedReceiver:
    """A receiver link as the engine sees it.

    `delivered` is the number of messages delivered since the link was attached. `credit_limit` is the number that
    `delivered` may reach.
    """

    __slots__ = (
        "credit_limit",
        "delivered",
        "drain",
        "got_message",
        "handle",
        "is_waiting",
        "lane",
        "peek_lock",
        "room",
    )

    def __init__(self, handle: Any, peek_lock: bool) -> None:
        self.handle = handle
        """The object that events and effects call `receiver`. The engine does not look into this object."""
        self.peek_lock = peek_lock
        self.credit_limit = 0
        self.delivered = 0
        self.room = 0
        """The number of bytes that may still be delivered. The last message may be larger than the rest of the room."""
        self.drain = False
        self.is_waiting = False
        """Whether the receiver is in the `waiting` line of its lane."""
        self.got_message = False
        """Whether a message was delivered since the current credit was granted."""
        self.lane: DeliveryLane | None = None
        """The lane whose rows the receiver gets; None while the receiver waits for a session."""

    @property
    def has_credit(self) -> bool:
        return self.credit_limit > self.delivered


class DeliveryLane:
    """Rows in the order of delivery, and the receivers with credit, which get one row each, round after round."""

    __slots__ = ("forward_to", "read_ahead", "receiver_count", "session", "waiting")

    def __init__(self, read_ahead: ReadAhead, session: HeldSession | None = None) -> None:
        self.read_ahead = read_ahead
        self.session = session
        """The session whose rows these are; None for a lane without sessions."""
        self.receiver_count = 0
        self.forward_to: str | None = None
        """Address of the entity to which all rows of this lane are forwarded; None if rows are not forwarded."""
        self.waiting: deque[AttachedReceiver] = deque()

    def attach(self, receiver: AttachedReceiver) -> None:
        receiver.lane = self
        self.receiver_count += 1
        self.read_ahead.set_has_receivers(True)

    def detach(self) -> None:
        self.receiver_count -= 1
        if not self.receiver_count:
            self.read_ahead.set_has_receivers(False)

    def add_waiting(self, receiver: AttachedReceiver) -> None:
        if not receiver.is_waiting:
            receiver.is_waiting = True
            self.waiting.append(receiver)

    def remove_waiting(self, receiver: AttachedReceiver) -> None:
        if receiver.is_waiting:
            receiver.is_waiting = False
            self.waiting.remove(receiver)


# --- locks -------------------------------------------------------------------------------------------------------


class MessageLock:
    """One message locked under one token. `row` does not contain the encoded message."""

    __slots__ = ("row", "session", "token", "until")

    def __init__(self, token: bytes, row: Row, until: int, session: HeldSession | None) -> None:
        self.token = token
        self.row = row
        self.until = until
        self.session = session


class MessageLocks:
    """The message locks of one entity, its dead-letter sub-queues included.

    The lock of a session's message ends with the lock of the session, and has no deadline of its own.
    """

    __slots__ = ("by_seq", "by_token", "deadlines")

    def __init__(self) -> None:
        self.by_token: dict[bytes, MessageLock] = {}
        self.by_seq: dict[int, MessageLock] = {}
        self.deadlines: DeadlineHeap[bytes] = DeadlineHeap()

    def add(self, token: bytes, row: Row, until: int, session: HeldSession | None) -> None:
        lock = MessageLock(token, row.without_raw(), until, session)
        self.by_token[token] = lock
        self.by_seq[row.seq] = lock
        if session is None:
            self.deadlines.set(token, until)
        else:
            session.locks[token] = lock

    def find(self, token: bytes, now: int) -> MessageLock | None:
        """Return the lock with this token; None if there is none, or if it has expired and is not removed yet."""
        lock = self.by_token.get(token)
        if lock is None or (lock.until if lock.session is None else lock.session.until) <= now:
            return None
        return lock

    def remove(self, lock: MessageLock) -> None:
        token = lock.token
        del self.by_token[token]
        del self.by_seq[lock.row.seq]
        if lock.session is None:
            self.deadlines.cancel(token)
        else:
            del lock.session.locks[token]

    def renew(self, lock: MessageLock, until: int) -> None:
        lock.until = until
        self.deadlines.set(lock.token, until)


# --- sessions ----------------------------------------------------------------------------------------------------


class HeldSession:
    """A session that a receiver has locked, with the messages that the receiver has not settled."""

    __slots__ = ("id", "lane", "locks", "receiver", "until")

    def __init__(self, session: str, receiver: AttachedReceiver, until: int, read_ahead: ReadAhead) -> None:
        self.id = session
        self.receiver = receiver
        self.until = until
        self.locks: dict[bytes, MessageLock] = {}
        self.lane = DeliveryLane(read_ahead, self)


class EntitySessions:
    """The session locks of one entity, and the receivers that wait for any session, in the order they were attached."""

    __slots__ = ("_waiting_number", "deadlines", "held", "last_assigned", "search_needed", "wait_deadlines", "waiting")

    def __init__(self) -> None:
        self.held: dict[str, HeldSession] = {}
        self.deadlines: DeadlineHeap[str] = DeadlineHeap()
        self.waiting: OrderedDict[int, AttachedReceiver] = OrderedDict()
        self.wait_deadlines: DeadlineHeap[int] = DeadlineHeap()
        self._waiting_number = 0
        self.search_needed = False
        """Whether the store may have a free session with messages for a receiver that waits."""
        self.last_assigned = ""
        """The id of the session that was assigned last. The next search starts after this id."""

    def add_waiting(self, receiver: AttachedReceiver, deadline: int) -> None:
        self._waiting_number += 1
        self.waiting[self._waiting_number] = receiver
        self.wait_deadlines.set(self._waiting_number, deadline)

    def take_first_waiting(self) -> AttachedReceiver:
        number, receiver = self.waiting.popitem(last=False)
        self.wait_deadlines.cancel(number)
        return receiver

    def remove_waiting(self, receiver: AttachedReceiver) -> None:
        for number, each in self.waiting.items():
            if each is receiver:
                del self.waiting[number]
                self.wait_deadlines.cancel(number)
                return


# --- the whole receive side --------------------------------------------------------------------------------------


class EngineResources:
    """The objects that all entities of a namespace share.

    These are the function that makes lock tokens, the next id of a shared body, two memory budgets, and the lanes that
    wait to be forwarded.
    """

    __slots__ = ("new_token", "next_body", "pending_forwards", "read_ahead_budget", "seen_id_budget")

    def __init__(
        self,
        new_token: Callable[[], bytes],
        next_body: int,
        read_ahead_budget: ReadAheadBudget,
        seen_id_budget: SeenIdBudget,
    ) -> None:
        self.new_token = new_token
        """A function of the caller that returns 16 random bytes. The engine itself makes no random values."""
        self.next_body = next_body
        self.read_ahead_budget = read_ahead_budget
        self.seen_id_budget = seen_id_budget
        self.pending_forwards: dict[tuple[ReceiveState, DeliveryLane], None] = {}
        """Lanes with rows to be forwarded, in the order in which they were added. The values are not used."""

    def take_body_id(self) -> int:
        body = self.next_body
        self.next_body = body + 1
        return body


class ReceiveState:
    """The receive side of one queue or subscription: its lanes, receivers, locks, sessions and timer."""

    __slots__ = (
        "counters",
        "dead_letter",
        "lanes_to_serve",
        "locks",
        "main",
        "next_expiry",
        "next_timer",
        "path",
        "receivers",
        "resources",
        "sessions",
        "settings",
        "transfer_dead_letter",
    )

    def __init__(
        self, counters: EntityCounters, settings: ReceiveSettings, resources: EngineResources, next_expiry: int | None
    ) -> None:
        self.counters = counters
        self.settings = settings
        self.path = settings.path
        self.resources = resources
        self.locks = MessageLocks()
        self.receivers: dict[Any, AttachedReceiver] = {}
        """The attached receivers by handle."""
        self.sessions = EntitySessions()
        self.main = self._new_lane(QueueLane.ACTIVE)
        self.dead_letter = self._new_lane(QueueLane.DEAD)
        self.transfer_dead_letter = self._new_lane(QueueLane.TRANSFER_DEAD)
        self.next_expiry = next_expiry
        """No message expires before this instant; None: no message expires."""
        self.lanes_to_serve: list[DeliveryLane] = []
        """Lanes that may have both rows and waiting receivers."""
        self.next_timer: int | None = next_expiry
        """The instant of the next EntityTimerFired. If nothing is due then, only this instant is computed anew."""
        self.apply_forwarding()

    def _new_lane(self, lane: QueueLane) -> DeliveryLane:
        queue, empty = self.counters.queue, self.counters.lanes[lane] == 0
        return DeliveryLane(ReadAhead(queue, lane, self.resources.read_ahead_budget, empty=empty))

    def apply_forwarding(self) -> None:
        """Set the forwarding targets of the lanes from the settings."""
        delivered_by_session = self.delivers_by_session
        self.main.forward_to = self.settings.forward_to or None
        if self.delivers_by_session is not delivered_by_session:
            # Rows are in the main lane only while the entity forwards: they are read again from the store.
            self.main.read_ahead.close()
            self.main.read_ahead = self._new_lane(QueueLane.ACTIVE).read_ahead
        self.dead_letter.forward_to = self.settings.forward_dead_letters_to or None
        for lane in (self.main, self.dead_letter):
            self.request_delivery(lane)

    @property
    def delivers_by_session(self) -> bool:
        """Whether each row belongs to the lane of its session. All rows of an entity that forwards are in one lane."""
        return self.settings.requires_session and self.main.forward_to is None

    def forwarding_refusal(self, lane: DeliveryLane) -> Refusal:
        """Return why a receiver cannot receive from a lane that is forwarded."""
        what = "its dead letters" if lane is self.dead_letter else "its messages"
        return not_allowed(f"'{self.path}' forwards {what} to '{lane.forward_to}': they cannot be received here.")

    def arm_timer(self, at: int) -> None:
        """Let the timer fire at the instant `at`, if it does not fire before that anyway."""
        if self.next_timer is None or at < self.next_timer:
            self.next_timer = at

    @property
    def has_work(self) -> bool:
        """Whether a row may be delivered or a session assigned now."""
        return bool(self.lanes_to_serve) or self.sessions.search_needed

    def request_delivery(self, lane: DeliveryLane) -> None:
        """Note that the lane may have rows, if a receiver waits for them or they are to be forwarded."""
        if lane.waiting and lane not in self.lanes_to_serve:
            self.lanes_to_serve.append(lane)
        if lane.forward_to is not None and not lane.read_ahead.is_exhausted:
            self.resources.pending_forwards[self, lane] = None

    def lane_of(self, row: Row) -> DeliveryLane | None:
        """Return the lane that delivers the row; None if the row belongs to a session that no receiver holds."""
        if row.lane >= QueueLane.TRANSFER_DEAD:
            return self.transfer_dead_letter
        if row.lane >= QueueLane.DEAD:
            return self.dead_letter
        if not self.delivers_by_session:
            return self.main
        held = self.sessions.held.get(row.session or "")
        return held.lane if held else None

    def note_expiry(self, at: int | None) -> None:
        """Arm the timer for a message that expires at this instant."""
        if at is not None and (self.next_expiry is None or at < self.next_expiry):
            self.next_expiry = at
            self.arm_timer(at)

    def forget_rows(self, seqs: set[int]) -> None:
        """Drop from memory the rows with these sequence numbers, which were removed without being delivered."""
        self.main.read_ahead.forget(seqs)
        self.dead_letter.read_ahead.forget(seqs)
        self.transfer_dead_letter.read_ahead.forget(seqs)
        for held in self.sessions.held.values():
            held.lane.read_ahead.forget(seqs)
