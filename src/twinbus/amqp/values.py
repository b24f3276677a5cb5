"""The Python faces of the AMQP types that Python itself has no type for.

Each keeps enough to be encoded as the very type it was decoded from. Ranges are checked when a value is encoded.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


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
    """Also what a plain `int` is encoded as."""

    __slots__ = ()


class Timestamp(int):
    """Milliseconds since the Unix epoch, UTC."""

    __slots__ = ()


class Float32(float):
    __slots__ = ()


class Char(str):
    """One Unicode character."""

    __slots__ = ()


class Symbol(str):
    """ASCII text from a limited domain."""

    __slots__ = ()


class Decimal32(bytes):
    """The IEEE 754-2008 encoding as it stands on the wire: Python has no type that keeps it exactly."""

    __slots__ = ()


class Decimal64(bytes):
    __slots__ = ()


class Decimal128(bytes):
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Described:
    descriptor: Any
    value: Any


class Array(list[Any]):
    """Values of one type. `element` is its Python type; `descriptors` stand before every element, outermost first."""

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
