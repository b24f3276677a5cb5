"""Transactions: sends and settlements over several entities, committed all in one decision or not at all.

All operations are checked, and all rows are read, before any entity changes. Until the transaction is complete, the
runtime must give no other event to the root entities of the operations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from twinbus.amqp import RoutingFields
from twinbus.namespace.engine.effects import (
    MESSAGE_LOCK_LOST,
    AnswerRequest,
    EngineDecision,
    PendingDecision,
    ReadingPart,
    Refusal,
    not_allowed,
    not_found,
    session_lock_lost,
)
from twinbus.namespace.engine.events import MessagesSent, MessagesSettled
from twinbus.namespace.engine.queue import Queue
from twinbus.namespace.engine.send_checks import transfer_refusal
from twinbus.namespace.engine.settlement import outcome_refusal
from twinbus.namespace.engine.storage_protocol import PutCounters, StoreWrite
from twinbus.namespace.engine.topic import Subscription, Topic
from twinbus.values import Condition

TransactionOperation = tuple[Queue | Topic | Subscription, MessagesSent | MessagesSettled]


def commit_transaction(operations: Sequence[TransactionOperation], reply: Any, now: int) -> PendingDecision:
    """Carry out all operations in their order. Answer: None, or a Refusal that says why nothing was carried out."""
    refusal = _refusal(operations, now)
    if refusal is not None:
        text = f"Nothing of the transaction was done. {refusal.description} ({refusal.condition.value})"
        return EngineDecision(effects=[AnswerRequest(reply, Refusal(Condition.TRANSACTION_ROLLBACK, text))])
    yield from _load_seen_ids(operations, now)
    decision = EngineDecision()
    for entity, event in operations:
        # An entity does not read rows for a decision that has a write. A delivery that needs rows waits for the timer.
        decision.writes.append(entity.counters.put())
        yield from entity.advance(event, now, decision)
    for entity, _ in operations:
        if not isinstance(entity, Subscription) and entity.seen_ids is not None:
            entity.seen_ids.loaded = None
    decision.writes = _last_counters_only(decision.writes)
    decision.effects.append(AnswerRequest(reply, None))
    return decision


def _refusal(operations: Sequence[TransactionOperation], now: int) -> Refusal | None:
    added: defaultdict[Queue | Topic | Subscription, int] = defaultdict(int)
    settled: set[bytes] = set()
    for entity, event in operations:
        if entity.lifecycle.ended:
            refusal: Refusal | None = not_found(entity.path)
        elif isinstance(event, MessagesSent):
            refusal = _send_refusal(entity, event, added[entity])
            added[entity] += sum(len(message.raw) for message in event.messages)
        else:
            refusal = _settlement_refusal(entity, event, settled, now)
            settled.update(event.tokens)
        if refusal is not None:
            return refusal
    return None


def _send_refusal(entity: Queue | Topic | Subscription, event: MessagesSent, added: int) -> Refusal | None:
    """Return why the messages cannot be sent; None if they can.

    `added` is the number of bytes that earlier operations of the transaction send to the entity.
    """
    if isinstance(entity, Subscription):
        return not_allowed(f"'{entity.path}' is a subscription: messages are sent to its topic.")
    return transfer_refusal(event.messages, entity.description, entity.size + added)


def _settlement_refusal(
    entity: Queue | Topic | Subscription, event: MessagesSettled, settled: set[bytes], now: int
) -> Refusal | None:
    """Return why the messages cannot be settled; None if they can.

    `settled` contains the tokens that earlier operations of the transaction settle.
    """
    if isinstance(entity, Topic):
        return not_allowed(f"'{entity.path}' is a topic: its subscriptions have receivers.")
    state = entity.receive_state
    if event.session is not None:
        held = state.sessions.held.get(event.session)
        if held is None or held.until <= now:
            return session_lock_lost(event.session)
    for token in event.tokens:
        lock = state.locks.find(token, now)
        if lock is None or token in settled:
            return MESSAGE_LOCK_LOST
        if (refusal := outcome_refusal(lock.row, event.outcome)) is not None:
            return refusal
    return None


def _load_seen_ids(operations: Sequence[TransactionOperation], now: int) -> ReadingPart:
    """Read the known message ids before any entity changes: a failed read must not leave a transaction half done."""
    sent: defaultdict[Queue | Topic, list[RoutingFields]] = defaultdict(list)
    for entity, event in operations:
        if isinstance(event, MessagesSent) and not isinstance(entity, Subscription):
            sent[entity] += event.messages
    loaded = []
    for entity, messages in sent.items():
        if entity.seen_ids is not None:
            loaded.append((entity.seen_ids, (yield from entity.seen_ids.duplicates(messages, now))))
    for seen_ids, known in loaded:
        seen_ids.loaded = known


def _last_counters_only(writes: list[StoreWrite]) -> list[StoreWrite]:
    """Return the writes with only one PutCounters for each queue, the last one."""
    counters = {write.queue: write for write in writes if isinstance(write, PutCounters)}
    return [*(write for write in writes if not isinstance(write, PutCounters)), *counters.values()]
