"""Auto-forward: what stands in an entity, or in its dead-letter queue, moves on to a queue or topic of the namespace.

Source and target change in one step, so a crash neither loses nor doubles a message. What its target does not take
goes to the source's transfer dead-letter queue.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final

from twinbus.amqp import encode_annotations, read_routing_fields, splice_delivery
from twinbus.namespace.engine.effects import EngineDecision, PendingDecision, Refusal, not_found
from twinbus.namespace.engine.limits import MAX_HOPS, MIB
from twinbus.namespace.engine.passing import ForwardedMessage
from twinbus.namespace.engine.queries import is_expired
from twinbus.namespace.engine.queue import Queue
from twinbus.namespace.engine.receive_state import DeliveryLane, ReceiveState
from twinbus.namespace.engine.receiving import follow_up
from twinbus.namespace.engine.settlement import (
    bury,
    dead_letter_properties,
    drop,
    expire,
    hops_of,
    of_hops,
    overlay_properties,
)
from twinbus.namespace.engine.storage_protocol import QueueLane, Row, StoreRead
from twinbus.namespace.engine.topic import Subscription, Topic
from twinbus.values import Condition

_PAGE: Final = 256

_TOO_FAR: Final = dead_letter_properties(
    "MaxTransferHopCountExceeded", f"The message was forwarded {MAX_HOPS} times, which is as often as it may be."
)
# The names under which clients know these refusals.
_REASONS: Final = {
    Condition.NOT_FOUND: "MessagingEntityNotFoundException",
    Condition.ENTITY_DISABLED: "MessagingEntityDisabledException",
    Condition.RESOURCE_LIMIT_EXCEEDED: "QuotaExceededException",
}


def forward(
    source: Queue | Subscription, feed: DeliveryLane, target: Queue | Topic | None, now: int
) -> PendingDecision:
    """Move what stands ready, a page at a time. The families of both are to be idle meanwhile."""
    state, step = source.receive_state, EngineDecision()
    if feed.onward is None or not state.settings.status.gives_receives:
        return step
    rows = yield from _take(state, feed)
    moving = [row for row in rows if not is_expired(row, now) and hops_of(row.overlay) < MAX_HOPS]
    results: list[Refusal | None] = [not_found(feed.onward)] * len(moving)
    if target is not None and moving:
        try:
            passed = [_passed(row, source.path, now) for row in moving]
            results = yield from target.take_over(passed, now, step)
        except Exception:  # the store could not be read
            _give_back(feed, rows)
            raise
    refusals = {row.seq: refusal for row, refusal in zip(moving, results, strict=True)}
    for row in rows:
        if is_expired(row, now):
            expire(state, row, step)
        elif row.seq not in refusals:
            bury(state, row, step, _TOO_FAR, QueueLane.TRANSFER_DEAD)
        elif (refusal := refusals[row.seq]) is not None:
            bury(state, row, step, _why(refusal), QueueLane.TRANSFER_DEAD)
        else:
            drop(state, row, step)
    state.wake(feed)  # where more is left
    if state.pending:
        yield from follow_up(state, now, step)
    source.finish(step)
    return step


def _take(state: ReceiveState, feed: DeliveryLane) -> Generator[StoreRead, Any, list[Row]]:
    rows: list[Row] = []
    size, window = 0, feed.window
    while len(rows) < _PAGE and size < MIB:
        row = window.take()
        if row is not None:
            rows.append(row)
            size += row.size
            continue
        if window.exhausted:
            break
        need = window.need()
        try:
            found = yield need
        except Exception:  # the store could not be read
            window.restore(need)
            _give_back(feed, rows)
            raise
        window.fill(need, found, state.locks.by_seq)
    return rows


def _give_back(feed: DeliveryLane, rows: list[Row]) -> None:
    for row in rows:
        feed.window.arrived(row.seq, row.size)


def _passed(row: Row, source: str, now: int) -> ForwardedMessage:
    raw = row.raw
    told, annotations = overlay_properties(row.overlay), {}
    if row.lane == QueueLane.DEAD:
        annotations["x-opt-deadletter-source"] = source
    if told or annotations:  # what settling it set becomes part of the message
        raw = b"".join(
            splice_delivery(raw, delivery_count=0, message_annotations=encode_annotations(annotations), overlay=told)
        )
    left = None if row.expires is None else row.expires - now
    return ForwardedMessage(read_routing_fields(raw), row.origin_seq, left, of_hops(hops_of(row.overlay) + 1))


def _why(refusal: Refusal) -> dict[str, Any]:
    return dead_letter_properties(_REASONS.get(refusal.condition, refusal.condition.value), refusal.description)
