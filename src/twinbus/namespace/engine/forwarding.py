"""Auto-forward: moves the rows of a queue or subscription, or of its dead-letter queue, to another queue or topic.

Source and target change in one decision, so a crash neither loses nor duplicates a message. A message that the target
refuses, or that was forwarded 4 times already (`MAX_HOPS`), goes to the transfer dead-letter queue of the source. An
entity that forwards to itself, or a subscription to its topic, ends so, too.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from twinbus.amqp import encode_annotations, read_routing_fields, splice_delivery
from twinbus.namespace.engine.effects import EngineDecision, PendingDecision, Refusal, not_found
from twinbus.namespace.engine.limits import MAX_HOPS, MIB
from twinbus.namespace.engine.queue import Queue
from twinbus.namespace.engine.receive_state import DeliveryLane, ReceiveState
from twinbus.namespace.engine.send_target import ForwardedMessage
from twinbus.namespace.engine.settlement import dead_letter_properties, dead_letter_row, drop_row, expire_row
from twinbus.namespace.engine.storage_protocol import (
    PutCounters,
    QueueLane,
    Row,
    StoreRead,
    forward_count,
    forward_count_overlay,
    overlay_properties,
)
from twinbus.namespace.engine.topic import Subscription, Topic
from twinbus.values import Condition

_PAGE: Final = 256

_TOO_MANY_HOPS: Final = dead_letter_properties(
    "MaxTransferHopCountExceeded", f"The message was forwarded {MAX_HOPS} times, which is as often as it may be."
)
# The service's dead-letter reasons for these refusals.
_REASONS: Final = {
    Condition.NOT_FOUND: "MessagingEntityNotFoundException",
    Condition.ENTITY_DISABLED: "MessagingEntityDisabledException",
    Condition.RESOURCE_LIMIT_EXCEEDED: "QuotaExceededException",
}


def forward(
    source: Queue | Subscription, lane: DeliveryLane, target: Queue | Topic | None, now: int
) -> PendingDecision:
    """Move available rows from a lane of the source to the target, at most 256 rows and about 1 MiB.

    `target` is None if the entity does not exist. Until the decision is complete, the caller must give no other event
    to the root entities of source and target.
    """
    state, decision = source.receive_state, EngineDecision()
    if lane.forward_to is None or not state.settings.status.gives_receives:
        return decision
    rows = yield from _take_rows(state, lane)
    moving = [row for row in rows if not row.is_expired(now) and forward_count(row.overlay) < MAX_HOPS]
    results: list[Refusal | None] = [not_found(lane.forward_to)] * len(moving)
    if target is not None and moving:
        try:
            forwarded = [_forwarded(row, source.path, now) for row in moving]
            results = yield from target.accept_forwarded(forwarded, now, decision, is_return=source.root is target)
        except Exception:
            _return_rows(lane, rows)
            raise
    refusals = {row.seq: refusal for row, refusal in zip(moving, results, strict=True)}
    for row in rows:
        if row.is_expired(now):
            expire_row(state, row, decision)
        elif row.seq not in refusals:
            dead_letter_row(state, row, decision, _TOO_MANY_HOPS, QueueLane.TRANSFER_DEAD)
        elif (refusal := refusals[row.seq]) is not None:
            dead_letter_row(state, row, decision, _refusal_properties(refusal), QueueLane.TRANSFER_DEAD)
        else:
            drop_row(state, row, decision)
    state.request_delivery(lane)  # notes the next forward, if more rows are left
    yield from source.conclude(now, decision)
    if source.root is target:
        _keep_last_counters(decision, state.counters.queue)
    return decision


def _keep_last_counters(decision: EngineDecision, queue: int) -> None:
    """Keep only the last write of the counters: the entity was the target, and then the source."""
    writes = decision.writes
    places = [index for index, each in enumerate(writes) if isinstance(each, PutCounters) and each.queue == queue]
    for place in reversed(places[:-1]):
        del writes[place]


def _take_rows(state: ReceiveState, lane: DeliveryLane) -> Generator[StoreRead, Any, list[Row]]:
    rows: list[Row] = []
    size, read_ahead = 0, lane.read_ahead
    while len(rows) < _PAGE and size < MIB:
        row = read_ahead.take()
        if row is not None:
            rows.append(row)
            size += row.size
            continue
        if read_ahead.is_exhausted:
            break
        read = read_ahead.next_read()
        try:
            found = yield read
        except Exception:
            read_ahead.restore(read)
            _return_rows(lane, rows)
            raise
        read_ahead.fill(read, found, state.locks.by_seq)
    return rows


def _return_rows(lane: DeliveryLane, rows: list[Row]) -> None:
    for row in rows:
        lane.read_ahead.make_available(row.seq, row.size)


def _forwarded(row: Row, source: str, now: int) -> ForwardedMessage:
    raw = row.raw
    properties, annotations = overlay_properties(row.overlay), {}
    if row.lane == QueueLane.DEAD:
        annotations["x-opt-deadletter-source"] = source
    if properties or annotations:  # properties that settlement set become part of the message
        raw = b"".join(
            splice_delivery(
                raw, delivery_count=0, message_annotations=encode_annotations(annotations), overlay=properties
            )
        )
    ttl = None if row.expires is None else row.expires - now
    overlay = forward_count_overlay(forward_count(row.overlay) + 1)
    return ForwardedMessage(read_routing_fields(raw), row.origin_seq, ttl, overlay)


def _refusal_properties(refusal: Refusal) -> dict[str, Any]:
    return dead_letter_properties(_REASONS.get(refusal.condition, refusal.condition.value), refusal.description)
