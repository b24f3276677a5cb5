"""Transaction types (amqp-core-transactions): requests to a coordinator, its answers, and transactional states.

On the wire, all of these are described lists. This module only reads and writes them. The server runs transactions.
"""

from dataclasses import dataclass
from typing import Any, Final

from twinbus.amqp.decoding import decode
from twinbus.amqp.described_types import encode_described, from_described
from twinbus.amqp.errors import AmqpError, DecodeError
from twinbus.amqp.performatives import Accepted, DeliveryState, Modified, Rejected, Released
from twinbus.values import Described, Symbol, ULong

COORDINATOR: Final = 0x30
DECLARE: Final = 0x31
DISCHARGE: Final = 0x32
DECLARED: Final = 0x33
TRANSACTIONAL_STATE: Final = 0x34

_CODES: Final = {
    "amqp:coordinator:list": COORDINATOR,
    "amqp:declare:list": DECLARE,
    "amqp:discharge:list": DISCHARGE,
    "amqp:declared:list": DECLARED,
    "amqp:transactional-state:list": TRANSACTIONAL_STATE,
}
_OUTCOMES: Final = (Accepted, Rejected, Released, Modified)


@dataclass(frozen=True, slots=True)
class Declare:
    """Request to begin a transaction (§4.5.2)."""


@dataclass(frozen=True, slots=True)
class Discharge:
    """Request to end a transaction (§4.5.3): commit the transaction, or roll it back if `fail` is true."""

    transaction: bytes
    fail: bool


@dataclass(frozen=True, slots=True)
class TransactionalState:
    """State of a transfer or an outcome that takes effect when the transaction commits (§4.5.5)."""

    transaction: bytes
    outcome: DeliveryState | None


def is_coordinator(terminus: Any) -> bool:
    """Return whether the target of an attach is a transaction coordinator."""
    return isinstance(terminus, Described) and _code(terminus) == COORDINATOR


def read_coordinator_request(value: Any) -> Declare | Discharge:
    """Return the request in the body of a message to the coordinator. Raises DecodeError for any other body."""
    code = _code(value) if isinstance(value, Described) else None
    if code == DECLARE:
        return Declare()
    if code == DISCHARGE:
        fields = _fields(value, 2)
        if type(fields[0]) is not bytes or not (fields[1] is None or isinstance(fields[1], bool)):
            raise DecodeError("the txn-id of a discharge is not a binary, or its fail is not a boolean")
        return Discharge(fields[0], bool(fields[1]))
    raise DecodeError("a message to the coordinator is neither a declare nor a discharge")


def declared_state(transaction: bytes) -> Described:
    """Return the outcome that names a new transaction (§4.5.4)."""
    return Described(ULong(DECLARED), [transaction])


def transactional_state(transaction: bytes, outcome: DeliveryState | None = None) -> Described:
    """Return the delivery state that makes a transfer, or an outcome, part of a transaction."""
    # `encode` writes plain values only: decode the outcome's bytes into a described list, which may be nested.
    value = None if outcome is None else decode(encode_described(outcome), 0)[0]
    return Described(ULong(TRANSACTIONAL_STATE), [transaction, value])


def read_transactional(state: DeliveryState | None) -> TransactionalState | None:
    """Return `state` as a TransactionalState, or None if `state` is not part of a transaction.

    For a transactional state whose fields are not valid, the result has the transaction b"" and no outcome. No
    transaction has this id, so the server refuses the state instead of settling the delivery outside a transaction.
    """
    if not isinstance(state, Described) or _code(state) != TRANSACTIONAL_STATE:
        return None
    try:
        transaction, value = _fields(state, 2)
        outcome = None if value is None else from_described(value)
    except (AmqpError, TypeError):
        return TransactionalState(b"", None)
    known = outcome if isinstance(outcome, _OUTCOMES) else None
    return TransactionalState(transaction if type(transaction) is bytes else b"", known)


def _code(value: Described) -> int | None:
    descriptor = value.descriptor
    if isinstance(descriptor, Symbol):
        return _CODES.get(str(descriptor))
    return int(descriptor) if isinstance(descriptor, ULong) else None


def _fields(value: Described, count: int) -> list[Any]:
    """Return `count` fields of a described list, with None for each field that is missing."""
    if not isinstance(value.value, list) or len(value.value) > count:
        raise DecodeError(f"a transaction type is not a list of at most {count} fields")
    return [*value.value, *[None] * (count - len(value.value))]
