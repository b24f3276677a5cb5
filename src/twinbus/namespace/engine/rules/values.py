"""Values of the rule language: their types, comparison, arithmetic and conversion.

The service documents the rules of C#: an integer is converted if the other operand is a floating-point number; values
of other types cannot be combined, except that + joins a string and another value. None stands for null and for unknown.
Callers handle None before they call these functions.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, Final
from uuid import UUID

from twinbus.namespace.engine.limits import MAX_PROPERTIES_BYTES
from twinbus.namespace.engine.rules.errors import RuleEvaluationError
from twinbus.values import (
    TICKS_PER_MILLISECOND,
    Byte,
    Char,
    Described,
    Float32,
    Int,
    Long,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
    milliseconds_from_ticks,
)

LEAST_LONG: Final = -(2**63)
LARGEST_LONG: Final = 2**63 - 1


class Duration(int):
    """A length of time in milliseconds."""

    __slots__ = ()


class ZonelessTime(Timestamp):
    """A point in time that was written without a time zone. Rules take it as UTC; the management API shows no zone."""

    __slots__ = ()


class ValueKind(Enum):
    """The types of the language. The texts are used in error messages."""

    BOOLEAN = "a boolean"
    INTEGER = "an integer"
    REAL = "a floating-point number"
    TEXT = "a string"
    INSTANT = "a point in time"
    DURATION = "a duration"
    GUID = "a GUID"
    BINARY = "binary"
    OPAQUE = "a value that rules do not know"


INTEGERS: Final[frozenset[type]] = frozenset((int, Byte, Short, Int, Long, UByte, UShort, UInt, ULong))
TEXTS: Final[frozenset[type]] = frozenset((str, Symbol, Char))
_KINDS: Final[dict[type, ValueKind]] = {
    bool: ValueKind.BOOLEAN,
    **dict.fromkeys(INTEGERS, ValueKind.INTEGER),
    **dict.fromkeys((float, Float32), ValueKind.REAL),
    **dict.fromkeys(TEXTS, ValueKind.TEXT),
    Timestamp: ValueKind.INSTANT,
    Duration: ValueKind.DURATION,
    UUID: ValueKind.GUID,
    bytes: ValueKind.BINARY,
}
_NUMBERS: Final = frozenset((ValueKind.INTEGER, ValueKind.REAL))
_ORDERED: Final = frozenset((ValueKind.INTEGER, ValueKind.REAL, ValueKind.TEXT, ValueKind.INSTANT, ValueKind.DURATION))


def kind_of(value: Any) -> ValueKind:
    return _KINDS.get(value.__class__, ValueKind.OPAQUE)


def from_amqp(value: Any) -> Any:
    """Return an AMQP value as a value of the rule language. Described values of .NET types become times and texts."""
    if value.__class__ is ZonelessTime:
        return Timestamp(value)
    if value.__class__ is not Described:
        return value
    name, inner = str(value.descriptor), value.value
    if name == "com.microsoft:timespan" and isinstance(inner, int):
        return Duration(inner // TICKS_PER_MILLISECOND)
    if name == "com.microsoft:datetime-offset" and isinstance(inner, int):
        return Timestamp(milliseconds_from_ticks(inner))
    if name == "com.microsoft:uri" and isinstance(inner, str):
        return str(inner)
    return value


def to_amqp(value: Any) -> Any:
    """Return a value of the rule language as the AMQP value that clients expect in a message."""
    if value.__class__ is Duration:
        return Described(Symbol("com.microsoft:timespan"), Long(value * TICKS_PER_MILLISECOND))
    return value


def comparable(left: Any, right: Any, operator: str, *, ordered: bool) -> tuple[Any, Any]:
    """Return both values converted to one type. Raises RuleEvaluationError if they cannot be compared.

    A text is never converted. With `ordered`, the type must also have an order.
    """
    kind, other = kind_of(left), kind_of(right)
    if kind is other:
        if kind is not ValueKind.OPAQUE and (kind in _ORDERED or not ordered):
            return left, right
    elif kind in _NUMBERS and other in _NUMBERS:
        return float(left), float(right)
    raise RuleEvaluationError(f"{kind.value} cannot be compared ({operator}) with {other.value}")


def add(left: Any, right: Any) -> Any:
    if _are_integers(left, right):  # the most frequent case first
        return _check_range(left + right)
    kind, other = kind_of(left), kind_of(right)
    if kind in _NUMBERS and other in _NUMBERS:
        return _check_range(left + right)
    if ValueKind.TEXT in (kind, other):
        joined = as_text(left) + as_text(right)
        if len(joined) > MAX_PROPERTIES_BYTES:  # the 32 statements of an action could each double a text
            raise RuleEvaluationError(f"a string of more than {MAX_PROPERTIES_BYTES} characters fits no message")
        return joined
    if (kind, other) in {(ValueKind.INSTANT, ValueKind.DURATION), (ValueKind.DURATION, ValueKind.DURATION)}:
        return left.__class__(left + right)
    raise _no_operation("+", kind, other)


def subtract(left: Any, right: Any) -> Any:
    if _are_integers(left, right):  # the most frequent case first
        return _check_range(left - right)
    kind, other = kind_of(left), kind_of(right)
    if kind in _NUMBERS and other in _NUMBERS:
        return _check_range(left - right)
    if kind is other is ValueKind.INSTANT:
        return Duration(left - right)
    if (kind, other) in {(ValueKind.INSTANT, ValueKind.DURATION), (ValueKind.DURATION, ValueKind.DURATION)}:
        return left.__class__(left - right)
    raise _no_operation("-", kind, other)


def multiply(left: Any, right: Any) -> Any:
    _require_numbers("*", left, right)
    return _check_range(left * right)


def divide(left: Any, right: Any) -> Any:
    """Return the quotient. The quotient of two integers is an integer, rounded towards zero."""
    _require_numbers("/", left, right)
    if kind_of(left) is kind_of(right) is ValueKind.INTEGER:
        if right == 0:
            raise RuleEvaluationError("an integer is divided by zero")
        quotient = abs(left) // abs(right)
        return _check_range(quotient if (left < 0) is (right < 0) else -quotient)
    if right == 0:
        return math.nan if left == 0 or math.isnan(left) else math.copysign(math.inf, left) * math.copysign(1, right)
    return float(left) / float(right)


def remainder(left: Any, right: Any) -> Any:
    """Return the remainder, which has the sign of the dividend."""
    _require_numbers("%", left, right)
    if kind_of(left) is kind_of(right) is ValueKind.INTEGER:
        if right == 0:
            raise RuleEvaluationError("an integer is divided by zero")
        rest = abs(left) % abs(right)
        return _check_range(-rest if left < 0 else rest)
    return math.nan if right == 0 or math.isinf(left) else math.fmod(left, right)


def negate(value: Any) -> Any:
    kind = kind_of(value)
    if kind in _NUMBERS:
        return _check_range(-value)
    if kind is ValueKind.DURATION:
        return Duration(-value)
    raise RuleEvaluationError(f"{kind.value} has no sign (-)")


def unary_plus(value: Any) -> Any:
    kind = kind_of(value)
    if kind in _NUMBERS or kind is ValueKind.DURATION:
        return value
    raise RuleEvaluationError(f"{kind.value} has no sign (+)")


def require_text(value: Any, operator: str) -> str:
    """Return a text value as str. Raises RuleEvaluationError for any other type."""
    if kind_of(value) is not ValueKind.TEXT:
        raise RuleEvaluationError(f"{operator} needs a string, not {kind_of(value).value}")
    return str(value)


def with_type_of(existing: Any, value: Any) -> Any:
    """Return the value that replaces `existing`. A number is converted to the type of `existing` if possible."""
    kind, wanted = kind_of(value), kind_of(existing)
    if kind not in _NUMBERS or wanted not in _NUMBERS:
        return value
    if wanted is ValueKind.REAL:
        return existing.__class__(value)
    if kind is ValueKind.INTEGER or value.is_integer():
        least, largest = _RANGES.get(existing.__class__, (LEAST_LONG, LARGEST_LONG))
        if least <= value <= largest:
            return existing.__class__(value)
    return value


_RANGES: Final[dict[type, tuple[int, int]]] = {
    Byte: (-(2**7), 2**7 - 1),
    Short: (-(2**15), 2**15 - 1),
    Int: (-(2**31), 2**31 - 1),
    UByte: (0, 2**8 - 1),
    UShort: (0, 2**16 - 1),
    UInt: (0, 2**32 - 1),
    ULong: (0, 2**64 - 1),
}


def _check_range(value: Any) -> Any:
    """Return the result of an operation. Raises RuleEvaluationError for an integer of more than 64 bits."""
    if isinstance(value, int) and not LEAST_LONG <= value <= LARGEST_LONG:
        raise RuleEvaluationError("the result of an integer operation does not fit 64 bits")
    return value


def as_text(value: Any) -> str:
    """Return the text of a value, as C# writes the value when it joins the value to a string."""
    kind = kind_of(value)
    if kind is ValueKind.REAL:
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(float(value))
    if kind in (ValueKind.TEXT, ValueKind.INTEGER, ValueKind.BOOLEAN, ValueKind.GUID):
        return str(value)
    raise RuleEvaluationError(f"{kind.value} cannot become a string")


def _are_integers(left: Any, right: Any) -> bool:
    return left.__class__ in INTEGERS and right.__class__ in INTEGERS


def _require_numbers(operator: str, left: Any, right: Any) -> None:
    kind, other = kind_of(left), kind_of(right)
    if kind not in _NUMBERS or other not in _NUMBERS:
        raise _no_operation(operator, kind, other)


def _no_operation(operator: str, kind: ValueKind, other: ValueKind) -> RuleEvaluationError:
    return RuleEvaluationError(f"{kind.value} and {other.value} have no operation {operator}")
