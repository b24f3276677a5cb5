"""Transactions of one connection: operations wait until the client discharges the transaction.

The client declares and discharges transactions on a coordinator link. Sends and settlements that name a transaction are
added to that transaction. At the commit, the engine makes one decision that carries out all operations or none. A
transaction that is not discharged before its timeout is rolled back. So is a transaction with an operation for which
the connection has no claim any more when it commits, because a key was rotated or a token expired (X4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
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
from twinbus.namespace.engine.descriptions import Claim
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.limits import MAX_TRANSACTION_MESSAGES, TRANSACTION_TIMEOUT
from twinbus.namespace.engine.transactions import TransactionOperation, commit_transaction
from twinbus.namespace.front import refusals
from twinbus.namespace.front.backpressure import ConnectionOutput
from twinbus.namespace.resources import ConnectionAccount
from twinbus.namespace.runtime import NamespaceRuntime
from twinbus.values import Condition

_CREDIT = 100
# The most open transactions of a connection, as in the service.
_MAX_OPEN = 100
# The most bytes of messages in all open transactions of a connection. A transaction with 100 messages of 256 KB fits.
_MAX_BYTES = 48 * MIB
_TIMED_OUT = Refusal(
    Condition.TRANSACTION_TIMEOUT,
    f"The transaction was not ended within {TRANSACTION_TIMEOUT // 1000} s; nothing of it was done.",
)

TransactionEnded = Callable[[bool], None]
"""A function that is called when a transaction ends. The argument is True if the transaction was committed."""


class Transaction:
    """An open transaction. A transaction with a `refusal` can only be rolled back."""

    __slots__ = ("claims", "messages", "on_end", "operations", "refusal", "size", "timer")

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self.timer = timer
        self.operations: list[TransactionOperation] = []
        self.claims: set[tuple[Claim, str]] = set()
        """The claims that the operations need, with the paths for which."""
        self.on_end: list[TransactionEnded] = []
        self.messages = 0
        self.size = 0
        self.refusal: Refusal | None = None

    def mark_rollback_only(self, refusal: Refusal) -> None:
        """Drop the operations and prevent a commit. The client gets the first refusal as the reason."""
        self.refusal = self.refusal or refusal
        self.operations.clear()


class Transactions:
    """The transactions of one connection."""

    def __init__(
        self,
        runtime: NamespaceRuntime,
        account: ConnectionAccount,
        allow: Callable[[Claim, str], bool],
        limit_exceeded: Callable[[LimitExceededError], None],
        timeout: float = TRANSACTION_TIMEOUT / 1000,
    ) -> None:
        """`allow` returns whether the connection has a claim for a path now."""
        self._runtime = runtime
        self._allow = allow
        self._account = account
        self._limit_exceeded = limit_exceeded
        self._size = 0
        self.timeout = timeout
        self._open: dict[bytes, Transaction] = {}

    def declare(self) -> bytes | Refusal:
        """Begin a transaction. Returns the id of the transaction, or a refusal if too many are open."""
        if len(self._open) >= _MAX_OPEN and not self._forget_one_timed_out():
            return Refusal(
                Condition.RESOURCE_LIMIT_EXCEEDED, f"A connection has at most {_MAX_OPEN} transactions at a time."
            )
        transaction_id = uuid4().bytes
        timer = asyncio.get_running_loop().call_later(self.timeout, self._time_out, transaction_id)
        self._open[transaction_id] = Transaction(timer)
        return transaction_id

    def add(
        self,
        transaction_id: bytes,
        operation: TransactionOperation,
        messages: int,
        on_end: TransactionEnded | None = None,
        *,
        claim: tuple[Claim, str],
        size: int = 0,
    ) -> Refusal | None:
        """Add an operation to a transaction. Returns a refusal if the operation exceeds a limit, or None.

        `claim` is the claim that the operation needs, and the path for which. `messages` is the number of messages of
        the operation, `size` the sum of their bytes. After a refusal, the transaction can only be rolled back.
        """
        transaction = self._open.get(transaction_id)
        if transaction is None:
            return _unknown()
        transaction.messages += messages
        if transaction.messages > MAX_TRANSACTION_MESSAGES:
            text = f"A transaction has at most {MAX_TRANSACTION_MESSAGES} messages."
            self._mark_rollback_only(transaction, Refusal(Condition.RESOURCE_LIMIT_EXCEEDED, text))
        elif self._size + size > _MAX_BYTES:
            text = (
                f"The open transactions of a connection hold at most {_MAX_BYTES} bytes of messages. End some before "
                "others begin."
            )
            self._limit_exceeded(LimitExceededError("transaction-bytes", text))
            self._mark_rollback_only(transaction, Refusal(Condition.RESOURCE_LIMIT_EXCEEDED, text))
        if transaction.refusal is None:
            self._grow(transaction, size)
            transaction.operations.append(operation)
            transaction.claims.add(claim)
            if on_end is not None:
                transaction.on_end.append(on_end)
        return transaction.refusal

    def mark_rollback_only(self, transaction_id: bytes, refusal: Refusal) -> None:
        """Prevent the commit of a transaction, because one of its operations was refused."""
        if (transaction := self._open.get(transaction_id)) is not None:
            self._mark_rollback_only(transaction, refusal)

    def discharge(self, transaction_id: bytes, fail: bool, reply: Callable[[Refusal | None], None]) -> None:
        """Commit a transaction, or roll it back if `fail` is True.

        `reply` is called with None when the commit is on disk or the transaction is rolled back as requested, and with
        a refusal if the commit failed.
        """
        transaction = self._open.pop(transaction_id, None)
        if transaction is None:
            reply(_unknown())
            return
        transaction.timer.cancel()
        self._grow(transaction, -transaction.size)

        def done(refusal: Refusal | None) -> None:
            for on_end in transaction.on_end:
                on_end(refusal is None and not fail)
            reply(refusal)

        lacking = next((claim for claim in transaction.claims if not self._allow(*claim)), None)
        if fail:
            done(None)
        elif lacking is not None:
            done(_rolled_back(refusals.unauthorized(*lacking)))
        elif transaction.refusal is not None:
            done(_rolled_back(transaction.refusal))
        elif not transaction.operations:
            done(None)
        else:
            operations = transaction.operations
            entities = [entity for entity, _ in operations]
            self._runtime.submit_together(entities, lambda now: commit_transaction(operations, done, now), done)

    def clear(self) -> None:
        """Roll back all open transactions: the connection is gone."""
        for transaction in self._open.values():
            transaction.timer.cancel()
        self._open.clear()
        self._size = 0
        self._allow = _never  # breaks the reference cycle of the transactions and their connection

    def is_open(self, transaction_id: bytes) -> bool:
        """Return whether the transaction can still be discharged."""
        return transaction_id in self._open

    def _mark_rollback_only(self, transaction: Transaction, refusal: Refusal) -> None:
        transaction.mark_rollback_only(refusal)
        self._grow(transaction, -transaction.size)

    def _grow(self, transaction: Transaction, size: int) -> None:
        transaction.size += size
        self._size += size
        self._account.hold("messages of open transactions", self._size)

    def _time_out(self, transaction_id: bytes) -> None:
        self._mark_rollback_only(self._open[transaction_id], _TIMED_OUT)

    def _forget_one_timed_out(self) -> bool:
        """Remove one transaction that timed out, to make room for another. Returns whether there was one.

        A transaction that timed out stays only so that the client gets the reason when it discharges the transaction.
        """
        found = next((key for key, transaction in self._open.items() if transaction.refusal is _TIMED_OUT), None)
        return found is not None and self._open.pop(found) is not None


class CoordinatorLink:
    """A link on which the peer declares and discharges transactions."""

    required_claim = None

    def __init__(self, link: Link, transactions: Transactions, output: ConnectionOutput) -> None:
        self._link = link
        self._transactions = transactions
        self._output = output
        self._declared: set[bytes] = set()

    def grant(self) -> None:
        """Let the peer send more requests."""
        self._link.flow(_CREDIT)

    def flowed(self) -> None:
        """Do nothing: flows of the peer need no reaction."""

    def detached(self) -> None:
        """Roll back the transactions that were declared on this link (AMQP 1.0 part 4, §4.3)."""
        for transaction_id in self._declared:
            self._transactions.discharge(transaction_id, True, lambda _: None)

    def delivered(self, delivery: Delivered) -> None:
        """Declare or discharge a transaction."""
        if self._link.credit <= _CREDIT // 2:
            self.grant()
        try:
            request = read_coordinator_request(split_sections(delivery.payload).value)
        except DecodeError as error:
            self._answer(delivery, Refusal(Condition.DECODE_ERROR, error.description))
            return
        if isinstance(request, Declare):
            self._declare(delivery)
        else:
            self._declared.discard(request.transaction)
            self._transactions.discharge(request.transaction, request.fail, partial(self._answer, delivery))

    def _declare(self, delivery: Delivered) -> None:
        declared = self._transactions.declare()
        if isinstance(declared, Refusal):
            self._answer(delivery, declared)
            return
        if len(self._declared) > 2 * _MAX_OPEN:  # some of these timed out and were removed
            self._declared = set(filter(self._transactions.is_open, self._declared))
        self._declared.add(declared)
        self._dispose(delivery, declared_state(declared))

    def _answer(self, delivery: Delivered, refusal: Refusal | None) -> None:
        self._dispose(delivery, Accepted() if refusal is None else Rejected(refusals.amqp_error(refusal)))

    def _dispose(self, delivery: Delivered, state: DeliveryState) -> None:
        if not delivery.settled:
            self._output.dispose_received(self._link.session, delivery.delivery_id, state)


def _unknown() -> Refusal:
    return Refusal(
        Condition.TRANSACTION_UNKNOWN_ID, "There is no such transaction on this connection, or it has ended."
    )


def _rolled_back(why: Refusal) -> Refusal:
    if why.condition is Condition.TRANSACTION_TIMEOUT:
        return why
    text = f"Nothing of the transaction was done. {why.description} ({why.condition.value})"
    return Refusal(Condition.TRANSACTION_ROLLBACK, text)


def _never(claim: Claim, path: str) -> bool:
    """Allow nothing: the connection is gone."""
    return False
