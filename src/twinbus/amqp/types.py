"""The AMQP type system in one place: the value types, and `encode`, `decode` and `skip`.

Nothing here knows performatives, sections or connections.
"""

from twinbus.amqp.conditions import AmqpError, DecodeError, EncodeError
from twinbus.amqp.decoding import decode, decode_all, skip
from twinbus.amqp.encoding import MAX_DEPTH, encode
from twinbus.amqp.values import (
    Array,
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    Described,
    Float32,
    Int,
    Long,
    NumberKeyedMap,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
)

__all__ = [
    "MAX_DEPTH",
    "AmqpError",
    "Array",
    "Byte",
    "Char",
    "Decimal32",
    "Decimal64",
    "Decimal128",
    "DecodeError",
    "Described",
    "EncodeError",
    "Float32",
    "Int",
    "Long",
    "NumberKeyedMap",
    "Short",
    "Symbol",
    "Timestamp",
    "UByte",
    "UInt",
    "ULong",
    "UShort",
    "decode",
    "decode_all",
    "encode",
    "skip",
]
