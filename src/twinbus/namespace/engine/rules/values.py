"""The values of the rule language, and how they compare and calculate: C#'s promotions, as the service documents.

None is null and unknown alike: the callers of these functions have dealt with it before.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, Final
from uuid import UUID

from twinbus.namespace.engine.limits import MAX_PROPERTIES_BYTES
from twinbus.namespace.engine.rules.errors import RuleEvaluationError
from twinbus.values import (
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
)

_TICKS_PER_MS: Final = 10_000
_EPOCH_TICKS: Final = 621_355_968_000_000_000
"""Of .NET's calendar, which begins with the year 1."""
LEAST_LONG: Final = -(2**63)
LARGEST_LONG: Final = 2**63 - 1


class Duration(int):
    """A length of time in milliseconds."""

    __slots__ = ()


class ValueKind(Enum):
    """What a value is to the language. The texts are for its errors."""

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


def plain(value: Any) -> Any:
    """A value as rules see it: .NET's own types, which clients send described, become times and texts."""
    if value.__class__ is not Described:
        return value
    name, inner = str(value.descriptor), value.value
    if name == "com.microsoft:timespan" and isinstance(inner, int):
        return Duration(inner // _TICKS_PER_MS)
    if name == "com.microsoft:datetime-offset" and isinstance(inner, int):
        return Timestamp((inner - _EPOCH_TICKS) // _TICKS_PER_MS)
    if name == "com.microsoft:uri" and isinstance(inner, str):
        return str(inner)
    return value


def wire(value: Any) -> Any:
    """A value as clients expect it in a message."""
    if value.__class__ is Duration:
        return Described(Symbol("com.microsoft:timespan"), Long(value * _TICKS_PER_MS))
    return value


def matched(left: Any, right: Any, verb: str, *, ordered: bool) -> tuple[Any, Any]:
    """Both as one type that compares, or a RuleEvaluationError: nothing is read out of a text."""
    kind, other = kind_of(left), kind_of(right)
    if kind is other:
        if kind is not ValueKind.OPAQUE and (kind in _ORDERED or not ordered):
            return left, right
    elif kind in _NUMBERS and other in _NUMBERS:
        return float(left), float(right)
    raise RuleEvaluationError(f"{kind.value} cannot be compared ({verb}) with {other.value}")


def add(left: Any, right: Any) -> Any:
    if _are_integers(left, right):  # the most frequent first
        return _number(left + right)
    kind, other = kind_of(left), kind_of(right)
    if kind in _NUMBERS and other in _NUMBERS:
        return _number(left + right)
    if ValueKind.TEXT in (kind, other):
        joined = as_text(left) + as_text(right)
        if len(joined) > MAX_PROPERTIES_BYTES:  # an action that doubles its property 32 times would not come back
            raise RuleEvaluationError(f"a string of more than {MAX_PROPERTIES_BYTES} characters fits no message")
        return joined
    if (kind, other) in {(ValueKind.INSTANT, ValueKind.DURATION), (ValueKind.DURATION, ValueKind.DURATION)}:
        return left.__class__(left + right)
    raise _no_such("+", kind, other)


def subtract(left: Any, right: Any) -> Any:
    if _are_integers(left, right):  # the most frequent first
        return _number(left - right)
    kind, other = kind_of(left), kind_of(right)
    if kind in _NUMBERS and other in _NUMBERS:
        return _number(left - right)
    if kind is other is ValueKind.INSTANT:
        return Duration(left - right)
    if (kind, other) in {(ValueKind.INSTANT, ValueKind.DURATION), (ValueKind.DURATION, ValueKind.DURATION)}:
        return left.__class__(left - right)
    raise _no_such("-", kind, other)


def multiply(left: Any, right: Any) -> Any:
    _need_numbers("*", left, right)
    return _number(left * right)


def divide(left: Any, right: Any) -> Any:
    """Of integers it is an integer, cut towards zero."""
    _need_numbers("/", left, right)
    if kind_of(left) is kind_of(right) is ValueKind.INTEGER:
        if right == 0:
            raise RuleEvaluationError("an integer is divided by zero")
        quotient = abs(left) // abs(right)
        return _number(quotient if (left < 0) is (right < 0) else -quotient)
    if right == 0:
        return math.nan if left == 0 or math.isnan(left) else math.copysign(math.inf, left) * math.copysign(1, right)
    return float(left) / float(right)


def remainder(left: Any, right: Any) -> Any:
    """It has the sign of what is divided."""
    _need_numbers("%", left, right)
    if kind_of(left) is kind_of(right) is ValueKind.INTEGER:
        if right == 0:
            raise RuleEvaluationError("an integer is divided by zero")
        rest = abs(left) % abs(right)
        return _number(-rest if left < 0 else rest)
    return math.nan if right == 0 or math.isinf(left) else math.fmod(left, right)


def negate(value: Any) -> Any:
    kind = kind_of(value)
    if kind in _NUMBERS:
        return _number(-value)
    if kind is ValueKind.DURATION:
        return Duration(-value)
    raise RuleEvaluationError(f"{kind.value} has no sign (-)")


def confirm(value: Any) -> Any:
    """Unary plus."""
    kind = kind_of(value)
    if kind in _NUMBERS or kind is ValueKind.DURATION:
        return value
    raise RuleEvaluationError(f"{kind.value} has no sign (+)")


def need_text(value: Any, verb: str) -> str:
    if kind_of(value) is not ValueKind.TEXT:
        raise RuleEvaluationError(f"{verb} needs a string, not {kind_of(value).value}")
    return str(value)


def converted(value: Any, existing: Any) -> Any:
    """A number that replaces a number stays of its type where it fits; everything else keeps its own type."""
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


def _number(value: Any) -> Any:
    if isinstance(value, int) and not LEAST_LONG <= value <= LARGEST_LONG:
        raise RuleEvaluationError("the result of an integer operation does not fit 64 bits")
    return value


def as_text(value: Any) -> str:
    """As C# writes it when it is joined to a string."""
    kind = kind_of(value)
    if kind is ValueKind.REAL:
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(float(value))
    if kind in (ValueKind.TEXT, ValueKind.INTEGER, ValueKind.BOOLEAN, ValueKind.GUID):
        return str(value)
    raise RuleEvaluationError(f"{kind.value} cannot become a string")


def _are_integers(left: Any, right: Any) -> bool:
    return left.__class__ in INTEGERS and right.__class__ in INTEGERS


def _need_numbers(operator: str, left: Any, right: Any) -> None:
    kind, other = kind_of(left), kind_of(right)
    if kind not in _NUMBERS or other not in _NUMBERS:
        raise _no_such(operator, kind, other)


def _no_such(operator: str, kind: ValueKind, other: ValueKind) -> RuleEvaluationError:
    return RuleEvaluationError(f"{kind.value} and {other.value} have no operation {operator}")
