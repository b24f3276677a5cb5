"""A transaction is carried out: sends and settlements over several entities, all in one step or none of them.

Everything is looked at, and everything read, before anything changes. The families concerned are idle meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from typing import Any

from twinbus.amqp import RoutingFields
from twinbus.namespace.engine.effects import (
    MESSAGE_LOCK_LOST,
    AnswerRequest,
    EngineDecision,
    PendingDecision,
    Refusal,
    not_allowed,
    not_found,
    session_lock_lost,
)
from twinbus.namespace.engine.events import MessagesSent, MessagesSettled
from twinbus.namespace.engine.queue import Queue
from twinbus.namespace.engine.send_checks import transfer_refusal
from twinbus.namespace.engine.settlement import refusal_of_outcome
from twinbus.namespace.engine.storage_protocol import PutCounters, StoreRead, StoreWrite
from twinbus.namespace.engine.topic import Subscription, Topic
from twinbus.values import Condition

Entity = Queue | Topic | Subscription
TransactionOperation = tuple[Entity, MessagesSent | MessagesSettled]


def commit_transaction(operations: Sequence[TransactionOperation], reply: Any, now: int) -> PendingDecision:
    """Carry out all operations in their order. Answer: None, or why none of them was carried out."""
    refusal = _refusal(operations, now)
    if refusal is not None:
        text = f"Nothing of the transaction was done. {refusal.description} ({refusal.condition.value})"
        return EngineDecision(effects=[AnswerRequest(reply, Refusal(Condition.TRANSACTION_ROLLBACK, text))])
    yield from _recall(operations, now)
    step = EngineDecision()
    for entity, event in operations:
        # With something written already, no entity reads in this step: what it gives out waits for its timer.
        step.writes.append(entity.counters.put())
        yield from entity.advance(event, now, step)
    for entity, _ in operations:
        if not isinstance(entity, Subscription) and entity.seen is not None:
            entity.seen.recalled = None
    step.writes = _counted_once(step.writes)
    step.effects.append(AnswerRequest(reply, None))
    return step


def _refusal(operations: Sequence[TransactionOperation], now: int) -> Refusal | None:
    added: defaultdict[Entity, int] = defaultdict(int)
    settled: set[bytes] = set()
    for entity, event in operations:
        if entity.lifecycle.ended:
            refusal: Refusal | None = not_found(entity.path)
        elif isinstance(event, MessagesSent):
            refusal = _refusal_of_sent(entity, event, added[entity])
            added[entity] += sum(len(message.raw) for message in event.messages)
        else:
            refusal = _refusal_of_settled(entity, event, settled, now)
            settled.update(event.tokens)
        if refusal is not None:
            return refusal
    return None


def _refusal_of_sent(entity: Entity, event: MessagesSent, added: int) -> Refusal | None:
    if isinstance(entity, Subscription):
        return not_allowed(f"'{entity.path}' is a subscription: messages are sent to its topic.")
    size = entity.size if isinstance(entity, Topic) else entity.counters.size
    return transfer_refusal(event.messages, entity.description, size + added)


def _refusal_of_settled(entity: Entity, event: MessagesSettled, settled: set[bytes], now: int) -> Refusal | None:
    if isinstance(entity, Topic):
        return not_allowed(f"'{entity.path}' is a topic: its subscriptions have receivers.")
    if event.session is not None:
        held = entity.receive_state.sessions.held.get(event.session)
        if held is None or held.until <= now:
            return session_lock_lost(event.session)
    for token in event.tokens:
        lock = entity.receive_state.locks.held(token, now)
        if lock is None or token in settled:
            return MESSAGE_LOCK_LOST
        if (refusal := refusal_of_outcome(lock.row, event.outcome)) is not None:
            return refusal
    return None


def _recall(operations: Sequence[TransactionOperation], now: int) -> Generator[StoreRead, Any, None]:
    """Ask the stores of duplicate detection now: a read that fails must not come after a change."""
    sent: defaultdict[Queue | Topic, list[RoutingFields]] = defaultdict(list)
    for entity, event in operations:
        if isinstance(event, MessagesSent) and not isinstance(entity, Subscription):
            sent[entity] += event.messages
    known = []
    for entity, messages in sent.items():
        if entity.seen is not None:
            known.append((entity.seen, (yield from entity.seen.duplicates(messages, now))))
    for seen, ids in known:
        seen.recalled = ids


def _counted_once(writes: list[StoreWrite]) -> list[StoreWrite]:
    """The last word about each queue's counters, and all else."""
    counted = {write.queue: write for write in writes if isinstance(write, PutCounters)}
    return [*(write for write in writes if not isinstance(write, PutCounters)), *counted.values()]
