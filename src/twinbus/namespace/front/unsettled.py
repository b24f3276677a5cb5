"""Deliveries that a connection sent and its peer has not settled, by session and delivery id.

A peer settles ranges of delivery ids. One range may contain deliveries of several links. `disposed` splits a range by
link, and each link passes its part to the engine. Deliveries that are settled in a transaction stay here until the
transaction ends.

Some peers never settle. Each time a session has `_CHECK_STEP` more deliveries here, this side settles the deliveries
whose lock has expired. If the peer sends a disposition for them at the same time, the answer is "lock lost".
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Protocol

from twinbus.amqp import (
    KIB,
    RECEIVER,
    Accepted,
    DeliveryState,
    Disposed,
    Modified,
    Rejected,
    Released,
    Session,
    consecutive_runs,
    read_transactional,
)
from twinbus.namespace.engine.effects import MESSAGE_LOCK_LOST
from twinbus.namespace.engine.events import Abandon, Complete, Defer, MessageOutcome, MoveToDeadLetter, Release
from twinbus.namespace.front import refusals
from twinbus.namespace.front.backpressure import ConnectionOutput
from twinbus.namespace.resources import ConnectionAccount

_RELEASED = Released()
_CHECK_STEP = 4096
# The memory that one unsettled delivery takes in this module and in the protocol core together, in bytes.
_ENTRY_BYTES = 512
# Changes of fewer bytes are not reported to the account: a call for each message would take too much time.
_ACCOUNT_STEP = 4 * KIB


class SettleableLink(Protocol):
    """The link on which deliveries were sent."""

    def settled(
        self, disposition: Disposed, outcome: MessageOutcome, ids: list[int], tokens: tuple[bytes, ...]
    ) -> None:
        """Settle deliveries with one outcome."""

    def settled_in_transaction(
        self, transaction: bytes, disposition: Disposed, outcome: MessageOutcome, tokens: dict[int, bytes]
    ) -> None:
        """Make the settlement of deliveries part of a transaction. `tokens` has their lock tokens by delivery id."""

    def is_locked(self, token: bytes) -> bool:
        """Return whether a delivery can still be settled."""


LockedDelivery = tuple[SettleableLink, bytes]
"""The link and the lock token of a delivery. A plain tuple saves time: there is one for each message."""


class LockedDeliveries:
    """The unsettled deliveries of one connection. The messages of all of them are locked."""

    def __init__(self, output: ConnectionOutput, account: ConnectionAccount) -> None:
        self._output = output
        self._account = account
        self._by_session: defaultdict[Session, dict[int, LockedDelivery]] = defaultdict(dict)
        self._next_check_at: dict[Session, int] = {}
        self._checked: set[Session] = set()
        """Sessions in which this side has settled expired deliveries."""
        self._count = 0
        self._accounted = 0  # the count that was last reported to the account

    def __len__(self) -> int:
        return self._count

    def add(self, session: Session, deliveries: dict[int, LockedDelivery]) -> None:
        """Add deliveries that were just sent."""
        unsettled = self._by_session[session]
        unsettled.update(deliveries)
        self._changed(len(deliveries))
        if len(unsettled) >= self._next_check_at.get(session, _CHECK_STEP):
            self._settle_expired(session, unsettled)

    def disposed(self, event: Disposed) -> None:
        """Pass the peer's settlement of a range of deliveries to the links of these deliveries."""
        if event.role != RECEIVER:
            return
        if not event.settled and not event.delivery_ids and event.session in self._checked:
            # This side has settled the deliveries of the range already, and the peer waits for an answer.
            lost = Rejected(refusals.amqp_error(MESSAGE_LOCK_LOST))
            self._output.dispose_sent(event.session, event.first, event.last, lost)
            return
        unsettled = self._by_session.get(event.session)
        if not unsettled:
            return
        transactional = read_transactional(event.state)
        state = event.state if transactional is None else transactional.outcome
        outcome = outcome_of(state, settled=event.settled)
        if outcome is None:
            return
        by_link: dict[SettleableLink, tuple[list[int], list[bytes]]] = {}
        keeps_entries = transactional is not None and not event.settled
        found = 0
        for delivery_id in event.delivery_ids:
            entry = unsettled.get(delivery_id) if keeps_entries else unsettled.pop(delivery_id, None)
            if entry is not None:
                found += 1
                link, token = entry
                ids, tokens = by_link.setdefault(link, ([], []))
                ids.append(delivery_id)
                tokens.append(token)
        if not keeps_entries:
            self._changed(-found)
        for link, (ids, tokens) in by_link.items():
            if transactional is None:
                link.settled(event, outcome, ids, tuple(tokens))
            else:
                by_id = dict(zip(ids, tokens, strict=True))
                link.settled_in_transaction(transactional.transaction, event, outcome, by_id)

    def transaction_committed(self, session: Session, ids: list[int], disposition: Disposed) -> None:
        """Remove deliveries that a transaction has settled. Confirms them if the peer waits for a confirmation."""
        unsettled = self._by_session.get(session, {})
        for delivery_id in ids:
            if unsettled.pop(delivery_id, None) is not None:
                self._changed(-1)
            if not disposition.settled:
                self._output.dispose_sent(session, delivery_id, delivery_id, disposition.state)

    def forget_links(self, session: Session, links: set[Any]) -> None:
        """Remove the deliveries of links that are gone. Their messages can be settled through `$management`."""
        unsettled = self._by_session.get(session)
        if unsettled:
            kept = {key: entry for key, entry in unsettled.items() if entry[0] not in links}
            self._by_session[session] = kept
            self._changed(len(kept) - len(unsettled))

    def forget_session(self, session: Session) -> None:
        """Remove the deliveries of a session that has ended."""
        self._changed(-len(self._by_session.pop(session, ())))
        self._next_check_at.pop(session, None)
        self._checked.discard(session)

    def clear(self) -> None:
        """Remove all deliveries: the connection is gone."""
        self._by_session.clear()
        self._next_check_at.clear()
        self._checked.clear()

    def _settle_expired(self, session: Session, unsettled: dict[int, LockedDelivery]) -> None:
        """Settle deliveries whose lock has expired or that were settled through `$management`."""
        expired = [delivery_id for delivery_id, (link, token) in unsettled.items() if not link.is_locked(token)]
        for delivery_id in expired:
            del unsettled[delivery_id]
        self._changed(-len(expired))
        for first, last in consecutive_runs(expired):
            self._output.dispose_sent(session, first, last, _RELEASED)
        if expired:
            self._checked.add(session)
        self._next_check_at[session] = len(unsettled) + _CHECK_STEP

    def _changed(self, difference: int) -> None:
        self._count += difference
        if abs(self._count - self._accounted) * _ENTRY_BYTES >= _ACCOUNT_STEP:
            self._accounted = self._count
            self._account.hold("unsettled deliveries", self._count * _ENTRY_BYTES)


def outcome_of(state: DeliveryState | None, *, settled: bool) -> MessageOutcome | None:
    """Return the outcome that a delivery state asks for, or None for a state that does not settle a message."""
    match state:
        case Accepted():
            return Complete()
        case Released():
            return Release()
        case Modified():
            properties = _text_keys(state.message_annotations)
            return Defer(properties) if state.undeliverable_here else Abandon(properties)
        case Rejected():
            info = _text_keys(state.error.info if state.error is not None else None) or {}
            reason, description = info.pop("DeadLetterReason", None), info.pop("DeadLetterErrorDescription", None)
            return MoveToDeadLetter(reason, description, info or None)
        case _:
            # amqp-core-messaging §3.4.5: a settlement without an outcome does not change the message.
            return Release() if settled else None


def _text_keys(entries: dict[Any, Any] | None) -> dict[str, Any] | None:
    return {str(key): value for key, value in entries.items()} if entries else None
