"""Types that client and server share: AMQP value types without a Python equivalent, .NET ticks, and error conditions.

A decoded value has a class for its AMQP type, so that the value is encoded again as the same type. Ranges are checked
when a value is encoded. The codec is in `twinbus.amqp`; this module does not import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import isnan
from typing import Any, Final
from uuid import UUID


class UByte(int):
    __slots__ = ()


class UShort(int):
    __slots__ = ()


class UInt(int):
    __slots__ = ()


class ULong(int):
    __slots__ = ()


class Byte(int):
    __slots__ = ()


class Short(int):
    __slots__ = ()


class Int(int):
    __slots__ = ()


class Long(int):
    """An AMQP long: a signed integer of 64 bits. A plain `int` is also encoded as a long."""

    __slots__ = ()


class Timestamp(int):
    """An AMQP timestamp: milliseconds since the Unix epoch, UTC."""

    __slots__ = ()


TICKS_PER_MILLISECOND: Final = 10_000
_EPOCH_TICKS: Final = 621_355_968_000_000_000
"""The Unix epoch in ticks. Service Bus counts some instants as .NET does: in units of 100 ns since the year 1."""


def ticks_from_milliseconds(milliseconds: int) -> int:
    """Return a Unix time in milliseconds as .NET ticks."""
    return _EPOCH_TICKS + milliseconds * TICKS_PER_MILLISECOND


def milliseconds_from_ticks(ticks: int) -> int:
    """Return .NET ticks as a Unix time in milliseconds."""
    return (ticks - _EPOCH_TICKS) // TICKS_PER_MILLISECOND


class Float32(float):
    __slots__ = ()


class Char(str):
    """An AMQP char: one Unicode character."""

    __slots__ = ()


class Symbol(str):
    """An AMQP symbol: ASCII text, such as the name of a capability or of an error condition."""

    __slots__ = ()


class Decimal32(bytes):
    """An AMQP decimal32 as the bytes of its IEEE 754-2008 encoding: no Python type represents all values exactly."""

    __slots__ = ()


class Decimal64(bytes):
    __slots__ = ()


class Decimal128(bytes):
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Described:
    """A value with a descriptor. The hash depends on Python's hash seed, so that a peer cannot predict the hash."""

    descriptor: Any
    value: Any

    def __hash__(self) -> int:
        return hash((unpredictable_key(self.descriptor), unpredictable_key(self.value)))


def unpredictable_key(key: Any) -> Any:
    """Return an object that represents a map key in a dict, with a hash that a peer cannot predict.

    Equal keys give equal objects. Python computes the hash of a number or UUID from its value alone, so a peer could
    choose many such keys whose hashes collide in a dict. The hash of text and bytes depends on a random seed.
    """
    if isinstance(key, int):
        return "number", str(int(key))
    if isinstance(key, float):
        if key.is_integer():
            return "number", str(int(key))
        # As in a dict, a NaN equals only the same object.
        return ("nan", str(id(key))) if isnan(key) else ("number", float.__repr__(key))
    if isinstance(key, UUID):
        return "uuid", key.bytes
    return key


class NumberKeyedMap(Mapping[Any, Any]):
    """A decoded map with many keys that are numbers or UUIDs (docs/decisions/0020-linear-decoding.md).

    The map is read like a dict, in the order of its entries, and cannot be changed. Do not copy the map into a dict:
    with keys whose hashes collide, which a peer can choose, the copy takes time quadratic in the number of keys.
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: Iterable[tuple[Any, Any]] = ()) -> None:
        self._entries = {unpredictable_key(key): (key, value) for key, value in entries}

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._entries[unpredictable_key(key)][1]
        except KeyError:
            raise KeyError(key) from None

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return len(self) == len(other) and all(key in other and other[key] == value for key, value in self.items())

    __hash__ = None  # type: ignore[assignment]  # unhashable, like dict

    def __repr__(self) -> str:
        return f"NumberKeyedMap({list(self._entries.values())!r})"


class Array(list[Any]):
    """An AMQP array: values of one type. `element` is the Python type of the values.

    `descriptors` are the descriptors that every value has, the outermost first.
    """

    __slots__ = ("descriptors", "element")

    def __init__(self, element: type, items: Iterable[Any] = (), descriptors: tuple[Any, ...] = ()) -> None:
        super().__init__(items)
        self.element = element
        self.descriptors = descriptors

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Array)
            and self.element is other.element
            and self.descriptors == other.descriptors
            and list.__eq__(self, other)
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __repr__(self) -> str:
        return f"Array({self.element.__name__}, {list(self)!r}, {self.descriptors!r})"


class Condition(StrEnum):
    """Error conditions of AMQP 1.0 and of Service Bus, as they are written on the wire."""

    # amqp-core-transport §2.8.15
    INTERNAL_ERROR = "amqp:internal-error"
    NOT_FOUND = "amqp:not-found"
    UNAUTHORIZED_ACCESS = "amqp:unauthorized-access"
    DECODE_ERROR = "amqp:decode-error"
    RESOURCE_LIMIT_EXCEEDED = "amqp:resource-limit-exceeded"
    NOT_ALLOWED = "amqp:not-allowed"
    INVALID_FIELD = "amqp:invalid-field"
    NOT_IMPLEMENTED = "amqp:not-implemented"
    RESOURCE_LOCKED = "amqp:resource-locked"
    PRECONDITION_FAILED = "amqp:precondition-failed"
    RESOURCE_DELETED = "amqp:resource-deleted"
    ILLEGAL_STATE = "amqp:illegal-state"
    FRAME_SIZE_TOO_SMALL = "amqp:frame-size-too-small"
    # §2.8.16
    CONNECTION_FORCED = "amqp:connection:forced"
    FRAMING_ERROR = "amqp:connection:framing-error"
    CONNECTION_REDIRECT = "amqp:connection:redirect"
    # §2.8.17
    WINDOW_VIOLATION = "amqp:session:window-violation"
    ERRANT_LINK = "amqp:session:errant-link"
    HANDLE_IN_USE = "amqp:session:handle-in-use"
    UNATTACHED_HANDLE = "amqp:session:unattached-handle"
    # §2.8.18
    DETACH_FORCED = "amqp:link:detach-forced"
    TRANSFER_LIMIT_EXCEEDED = "amqp:link:transfer-limit-exceeded"
    MESSAGE_SIZE_EXCEEDED = "amqp:link:message-size-exceeded"
    LINK_REDIRECT = "amqp:link:redirect"
    LINK_STOLEN = "amqp:link:stolen"
    # amqp-core-transactions §4.5.8
    TRANSACTION_UNKNOWN_ID = "amqp:transaction:unknown-id"
    TRANSACTION_ROLLBACK = "amqp:transaction:rollback"
    TRANSACTION_TIMEOUT = "amqp:transaction:timeout"
    # Service Bus
    DEAD_LETTER = "com.microsoft:dead-letter"
    SERVER_BUSY = "com.microsoft:server-busy"
    TIMEOUT = "com.microsoft:timeout"
    OPERATION_CANCELLED = "com.microsoft:operation-cancelled"
    CONTAINER_CLOSE = "com.microsoft:container-close"
    ENTITY_DISABLED = "com.microsoft:entity-disabled"
    ENTITY_ALREADY_EXISTS = "com.microsoft:entity-already-exists"
    MESSAGE_NOT_FOUND = "com.microsoft:message-not-found"
    MESSAGE_LOCK_LOST = "com.microsoft:message-lock-lost"
    SESSION_LOCK_LOST = "com.microsoft:session-lock-lost"
    SESSION_CANNOT_BE_LOCKED = "com.microsoft:session-cannot-be-locked"
    SESSION_NOT_FOUND = "com.microsoft:session-not-found"
    ARGUMENT_ERROR = "com.microsoft:argument-error"
    ARGUMENT_OUT_OF_RANGE = "com.microsoft:argument-out-of-range"
    AUTH_FAILED = "com.microsoft:auth-failed"
    PUBLISHER_REVOKED = "com.microsoft:publisher-revoked"
    PARTITION_NOT_OWNED = "com.microsoft:partition-not-owned"
