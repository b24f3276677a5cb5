"""The words of amqp-core-transactions: what a coordinator is told and answers, and states that belong to a transaction.

They travel as described lists, so this only reads and makes those. What a transaction does is not decided here.
"""

from dataclasses import dataclass
from typing import Any, Final

from twinbus.amqp.decoding import decode
from twinbus.amqp.described_types import encode_described, from_described
from twinbus.amqp.errors import AmqpError, DecodeError
from twinbus.amqp.performatives import Accepted, DeliveryState, Modified, Rejected, Released
from twinbus.values import Described, Symbol, ULong

_CODES: Final = {
    "amqp:coordinator:list": 0x30,
    "amqp:declare:list": 0x31,
    "amqp:discharge:list": 0x32,
    "amqp:declared:list": 0x33,
    "amqp:transactional-state:list": 0x34,
}
_OUTCOMES: Final = (Accepted, Rejected, Released, Modified)


@dataclass(frozen=True, slots=True)
class Declare:
    """§4.5.2: begin a transaction."""


@dataclass(frozen=True, slots=True)
class Discharge:
    """§4.5.3: end it; with `fail`, as if it had never been."""

    transaction: bytes
    fail: bool


@dataclass(frozen=True, slots=True)
class Transactional:
    """§4.5.5: a transfer or an outcome that counts only if the transaction does."""

    transaction: bytes
    outcome: DeliveryState | None


def is_coordinator(terminus: Any) -> bool:
    return isinstance(terminus, Described) and _code(terminus) == 0x30


def coordinator() -> Described:
    return Described(ULong(0x30), [])


def read_coordinator_request(value: Any) -> Declare | Discharge:
    """The body of a message to the coordinator."""
    code = _code(value) if isinstance(value, Described) else None
    if code == 0x31:
        return Declare()
    if code == 0x32:
        fields = _fields(value, 2)
        if type(fields[0]) is not bytes or not (fields[1] is None or isinstance(fields[1], bool)):
            raise DecodeError("a discharge has a binary for its transaction and a boolean for its failing")
        return Discharge(fields[0], bool(fields[1]))
    raise DecodeError("a coordinator takes declare and discharge, nothing else")


def declare() -> Described:
    return Described(ULong(0x31), [])


def discharge(transaction: bytes, *, fail: bool) -> Described:
    return Described(ULong(0x32), [transaction, fail])


def declared_state(transaction: bytes) -> Described:
    """§4.5.4: the outcome that names a new transaction."""
    return Described(ULong(0x33), [transaction])


def transaction_of(state: DeliveryState | None) -> bytes | None:
    """Which transaction an outcome has declared."""
    if not isinstance(state, Described) or _code(state) != 0x33:
        return None
    found = _fields(state, 1)[0]
    return found if type(found) is bytes else None


def transactional_state(transaction: bytes, outcome: DeliveryState | None = None) -> Described:
    # The outcome as the codec of values understands it: a described list inside another.
    value = None if outcome is None else decode(encode_described(outcome), 0)[0]
    return Described(ULong(0x34), [transaction, value])


def read_transactional(state: DeliveryState | None) -> Transactional | None:
    """None for a state outside of transactions. What cannot be read is a transaction that nobody knows, no outcome."""
    if not isinstance(state, Described) or _code(state) != 0x34:
        return None
    try:
        transaction, value = _fields(state, 2)
        outcome = None if value is None else from_described(value)
    except (AmqpError, TypeError):
        return Transactional(b"", None)
    known = outcome if isinstance(outcome, _OUTCOMES) else None
    return Transactional(transaction if type(transaction) is bytes else b"", known)


def _code(value: Described) -> int | None:
    descriptor = value.descriptor
    if isinstance(descriptor, Symbol):
        return _CODES.get(str(descriptor))
    return int(descriptor) if isinstance(descriptor, ULong) else None


def _fields(value: Described, count: int) -> list[Any]:
    if not isinstance(value.value, list) or len(value.value) > count:
        raise DecodeError("a word about a transaction is no list, or too long")
    return [*value.value, *[None] * (count - len(value.value))]
