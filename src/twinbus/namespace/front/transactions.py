"""Transactions of one connection: what peers send and settle in one is kept until the coordinator is told its end.

Whether it can be carried out, and how, is the engine's; a transaction that nobody ends in time ends by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING
from uuid import uuid4

from twinbus.amqp import (
    MIB,
    Accepted,
    Declare,
    DecodeError,
    Delivered,
    DeliveryState,
    LimitExceededError,
    Link,
    Rejected,
    declared_state,
    read_coordinator_request,
    split_sections,
)
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.limits import MAX_TRANSACTION_MESSAGES, TRANSACTION_TIMEOUT
from twinbus.namespace.engine.transactions import TransactionOperation, commit_transaction
from twinbus.namespace.front import refusals
from twinbus.namespace.resources import ConnectionAccount
from twinbus.namespace.runtime import NamespaceRuntime
from twinbus.values import Condition

if TYPE_CHECKING:
    from twinbus.namespace.front.amqp_connection import AmqpConnection

_CREDIT = 100
# As many as the service lets a connection have at a time.
_MOST = 100
# Of messages in all open transactions of a connection: room for one of 100 messages of 256 KB, and for smaller ones.
_MOST_BYTES = 48 * MIB
_TIMED_OUT = Refusal(
    Condition.TRANSACTION_TIMEOUT,
    f"The transaction was not ended within {TRANSACTION_TIMEOUT // 1000} s; nothing of it was done.",
)

Ended = Callable[[bool], None]
"""Told whether the transaction was carried out."""


class Transaction:
    """One that is not ended yet. With `refusal` it can only come to nothing."""

    __slots__ = ("ended", "messages", "operations", "refusal", "size", "timer")

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self.timer = timer
        self.operations: list[TransactionOperation] = []
        self.ended: list[Ended] = []
        self.messages = 0
        self.size = 0
        self.refusal: Refusal | None = None

    def doom(self, refusal: Refusal) -> None:
        self.refusal = self.refusal or refusal
        self.operations.clear()


class Transactions:
    """The transactions of one connection."""

    def __init__(
        self,
        runtime: NamespaceRuntime,
        account: ConnectionAccount,
        exceeded: Callable[[LimitExceededError], None],
        timeout: float = TRANSACTION_TIMEOUT / 1000,
    ) -> None:
        self._runtime = runtime
        self._account = account
        self._exceeded = exceeded
        self._size = 0
        self.timeout = timeout
        self._open: dict[bytes, Transaction] = {}

    def declare(self) -> bytes | Refusal:
        """Begin one; its id."""
        if len(self._open) >= _MOST and not self._forget_one_timed_out():
            return Refusal(
                Condition.RESOURCE_LIMIT_EXCEEDED, f"A connection has at most {_MOST} transactions at a time."
            )
        found = uuid4().bytes
        timer = asyncio.get_running_loop().call_later(self.timeout, self._time_out, found)
        self._open[found] = Transaction(timer)
        return found

    def add(
        self, name: bytes, operation: TransactionOperation, messages: int, ended: Ended | None = None, *, size: int = 0
    ) -> Refusal | None:
        """Let an operation with `size` bytes of messages be part of it. What is refused here dooms the whole."""
        transaction = self._open.get(name)
        if transaction is None:
            return _unknown()
        transaction.messages += messages
        if transaction.messages > MAX_TRANSACTION_MESSAGES:
            text = f"A transaction has at most {MAX_TRANSACTION_MESSAGES} messages."
            self._doom(transaction, Refusal(Condition.RESOURCE_LIMIT_EXCEEDED, text))
        elif self._size + size > _MOST_BYTES:
            text = (
                f"The open transactions of a connection hold at most {_MOST_BYTES} bytes of messages. End some before "
                "others begin."
            )
            self._exceeded(LimitExceededError("transaction-bytes", text))
            self._doom(transaction, Refusal(Condition.RESOURCE_LIMIT_EXCEEDED, text))
        if transaction.refusal is None:
            self._grow(transaction, size)
            transaction.operations.append(operation)
            if ended is not None:
                transaction.ended.append(ended)
        return transaction.refusal

    def doom(self, name: bytes, refusal: Refusal) -> None:
        """Part of it was refused elsewhere: it cannot be carried out as a whole any more."""
        if (transaction := self._open.get(name)) is not None:
            self._doom(transaction, refusal)

    def discharge(self, name: bytes, fail: bool, reply: Callable[[Refusal | None], None]) -> None:
        """End one. `reply` is told when it is on disk, or why nothing of it was done."""
        transaction = self._open.pop(name, None)
        if transaction is None:
            reply(_unknown())
            return
        transaction.timer.cancel()
        self._grow(transaction, -transaction.size)

        def done(refusal: Refusal | None) -> None:
            for ended in transaction.ended:
                ended(refusal is None and not fail)
            reply(refusal)

        if fail:
            done(None)
        elif transaction.refusal is not None:
            done(_rolled_back(transaction.refusal))
        elif not transaction.operations:
            done(None)
        else:
            operations = transaction.operations
            entities = [entity for entity, _ in operations]
            self._runtime.submit_together(entities, lambda now: commit_transaction(operations, done, now), done)

    def forget(self) -> None:
        """The connection is gone: what was not ended comes to nothing."""
        for transaction in self._open.values():
            transaction.timer.cancel()
        self._open.clear()
        self._size = 0

    def knows(self, name: bytes) -> bool:
        return name in self._open

    def _doom(self, transaction: Transaction, refusal: Refusal) -> None:
        transaction.doom(refusal)
        self._grow(transaction, -transaction.size)

    def _grow(self, transaction: Transaction, size: int) -> None:
        transaction.size += size
        self._size += size
        self._account.hold("messages of open transactions", self._size)

    def _time_out(self, name: bytes) -> None:
        self._doom(self._open[name], _TIMED_OUT)

    def _forget_one_timed_out(self) -> bool:
        """Kept only to tell its end: those that nobody asks for must not be in the way of others."""
        name = next((name for name, kept in self._open.items() if kept.refusal is _TIMED_OUT), None)
        return name is not None and self._open.pop(name) is not None


class CoordinatorLink:
    """The link on which a peer begins and ends transactions."""

    def __init__(self, connection: AmqpConnection, link: Link) -> None:
        self._connection = connection
        self._link = link
        self._names: set[bytes] = set()

    def grant(self) -> None:
        self._link.flow(_CREDIT)

    def flowed(self) -> None:
        """The peer told its state; nothing depends on it."""

    def detached(self) -> None:
        """§4.3: what was begun on a link that is gone comes to nothing."""
        for name in self._names:
            self._connection.transactions.discharge(name, True, lambda _: None)

    def delivered(self, delivery: Delivered) -> None:
        if self._link.credit <= _CREDIT // 2:
            self.grant()
        try:
            request = read_coordinator_request(split_sections(delivery.payload).value)
        except DecodeError as error:
            self._answer(delivery, Refusal(Condition.DECODE_ERROR, error.description))
            return
        transactions = self._connection.transactions
        if isinstance(request, Declare):
            name = transactions.declare()
            if isinstance(name, bytes):
                if len(self._names) > 2 * _MOST:  # some timed out and were forgotten
                    self._names = set(filter(transactions.knows, self._names))
                self._names.add(name)
                self._dispose(delivery, declared_state(name))
            else:
                self._answer(delivery, name)
        else:
            self._names.discard(request.transaction)
            transactions.discharge(request.transaction, request.fail, lambda refusal: self._answer(delivery, refusal))

    def _answer(self, delivery: Delivered, refusal: Refusal | None) -> None:
        self._dispose(delivery, Accepted() if refusal is None else Rejected(refusals.amqp_error(refusal)))

    def _dispose(self, delivery: Delivered, state: DeliveryState) -> None:
        if not delivery.settled:
            self._connection.dispose_received(self._link.session, delivery.delivery_id, state)


def _unknown() -> Refusal:
    return Refusal(
        Condition.TRANSACTION_UNKNOWN_ID, "There is no such transaction on this connection, or it has ended."
    )


def _rolled_back(why: Refusal) -> Refusal:
    if why.condition is Condition.TRANSACTION_TIMEOUT:
        return why
    text = f"Nothing of the transaction was done. {why.description} ({why.condition.value})"
    return Refusal(Condition.TRANSACTION_ROLLBACK, text)
