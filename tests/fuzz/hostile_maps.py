"""Map keys that a peer would choose to make a Python dict slow, by kind, and the places where a map can stand.

A dict of n such keys takes time in proportion to n². Nothing here builds such a dict: keys are encoded one by one.
"""

import sys
from collections.abc import Callable, Iterable
from functools import cache
from itertools import count
from random import Random
from typing import Any, Final
from uuid import UUID

from twinbus.amqp import encode, encode_list_of, encode_map_of
from twinbus.amqp.encoding import encode_fields
from twinbus.values import Described, Float32, Int, Long, Symbol, Timestamp, UInt, ULong

MODULUS: Final = sys.hash_info.modulus  # 2**61 - 1: numbers and UUIDs that differ by a multiple of it have one hash
_HASH_BITS: Final = 61
_SMALLEST_TABLE: Final = 3  # as a power of two


def uuids(number: int) -> list[Any]:
    return [UUID(int=k * MODULUS) for k in range(number)]


@cache
def chained(number: int) -> tuple[int, ...]:
    """Numbers with different hashes that all follow one chain of slots in CPython's dict.

    A dict of 2**bits slots looks at slot i = hash, then at i = 5 * i + (hash >> 5) + 1, and so on; once the hash is
    shifted out, every key walks the same cycle i = 5 * i + 1. The first keys occupy a long run of that cycle. The
    others are chosen so that all their slots lie in the run: each of them walks to its end.
    """
    bits = max(_SMALLEST_TABLE, (number * 3 // 2).bit_length())
    while (1 << bits) * 2 // 3 > number and bits > _SMALLEST_TABLE:
        bits -= 1
    size, chance = 1 << bits, Random(number)
    cycle = [1]
    while len(cycle) < size:
        cycle.append((5 * cycle[-1] + 1) % size)
    place = [0] * size
    for index, slot in enumerate(cycle):
        place[slot] = index
    keys = dict.fromkeys(cycle[: min(number, size // 3)])
    while len(keys) < min(number, size * 2 // 3):
        found = _in_run(chance, cycle, place, len(keys), bits)
        if found is not None:
            keys[found] = None
    return (*keys, *range(1 << 62, (1 << 62) + number - len(keys)))


def _in_run(chance: Random, cycle: list[int], place: list[int], run: int, bits: int) -> int | None:
    """Chooses five bits at a time: the next slot depends on no bits that come later."""
    slot = key = cycle[int(chance.random() * run)]
    mask, width = len(cycle) - 1, bits
    for step in count(1):
        low, tries = key, 32 if width + 5 < _HASH_BITS else 1
        for _ in range(tries):
            if tries > 1:
                key = low | int(chance.random() * 32) << width
            following = (5 * slot + (key >> 5 * step) + 1) & mask
            if place[following] < run:
                break
        else:
            return None
        slot, width = following, width + 5
        if key >> 5 * step == 0:
            return key
    return None


def floats(number: int) -> list[Any]:
    """2**61 is 1 modulo the modulus: 33 doubles have one hash, whatever their digits are."""
    return [float(2 * k // 33 + 1) * 2.0 ** (61 * (k % 33 - 17)) for k in range(number)]


def nested(number: int) -> list[Any]:
    def deep(key: Any) -> Any:
        for _ in range(30):
            key = Described(ULong(1), key)
        return key

    return [deep(key) for key in uuids(number)]


def _of(kind: Callable[[Any], Any], keys: Callable[[int], Iterable[Any]]) -> Callable[[int], list[Any]]:
    return lambda number: [kind(key) for key in keys(number)]


def _small(number: int) -> Iterable[int]:
    return range(number)


# By the kind of key. Each function returns that many different keys.
KEYS: Final[dict[str, Callable[[int], list[Any]]]] = {
    "uuid": uuids,
    "ulong": _of(ULong, chained),
    "long": _of(Long, chained),
    "timestamp": _of(Timestamp, chained),
    "negative long": _of(lambda key: Long(-key), chained),
    "uint": _of(UInt, _small),
    "int": _of(lambda key: Int(-1 - key), _small),
    "double": floats,
    "float": _of(lambda key: Float32(key / 2), _small),
    "nan": _of(lambda _: float("nan"), _small),
    "described uuid": _of(lambda key: Described(Symbol("d"), key), uuids),
    "uuid as descriptor": _of(lambda key: Described(key, None), uuids),
    "described ulong": _of(lambda key: Described(ULong(1), ULong(key)), chained),
    "described 30 deep": nested,
    "uuids and text": lambda number: [
        key for pair in zip(uuids(number), map(str, range(number)), strict=True) for key in pair
    ][:number],
}


# Numbers that fill a chain in a dict; those kinds become slow at larger sizes than others.
CHAINED: Final = frozenset(("ulong", "long", "timestamp", "negative long", "described ulong"))


def text_keys(number: int) -> list[Any]:
    """Keys of an ordinary map, as long as UUIDs are."""
    return [f"{key:016}" for key in range(number)]


def encoded_map(keys: Iterable[Any]) -> bytes:
    parts = [encode(key) + b"\x40" for key in keys]
    return encode_map_of(2 * len(parts), b"".join(parts))


def map_of_size(kind: str, size: int) -> bytes:
    """An encoded map of about that many bytes; kind "text" is an ordinary one."""
    make = text_keys if kind == "text" else KEYS[kind]
    width = len(encode(make(1)[0])) + 1 + (8 if kind in CHAINED else 0)
    return encoded_map(make(max(1, size // width)))


def maps_of_64(kind: str, size: int) -> bytes:
    """A list of maps that are just small enough to be dicts."""
    make = text_keys if kind == "text" else KEYS[kind]
    one = encoded_map(make(64))
    return encode_list_of([one] * max(1, size // len(one)))


# --- where a map can stand: functions from an encoded map to an encoded performative, delivery state or section ----


def _list(code: int, *fields: bytes) -> bytes:
    return b"\x00\x53" + bytes((code,)) + encode_fields(len(fields), b"".join(fields))


def _nulls(number: int) -> tuple[bytes, ...]:
    return (b"\x40",) * number


def _attach(
    source: bytes = b"\x40", target: bytes = b"\x40", unsettled: bytes = b"\x40", properties: bytes = b"\x40"
) -> bytes:
    head = encode("link"), encode(UInt(0)), b"\x41", b"\x40", b"\x40"
    return _list(0x12, *head, source, target, unsettled, *_nulls(5), properties)


def _error(info: bytes) -> bytes:
    return _list(0x1D, encode(Symbol("amqp:not-found")), b"\x40", info)


_WINDOWS: Final = encode(UInt(0)), encode(UInt(5)), encode(UInt(5))

PERFORMATIVES: Final[dict[str, Callable[[bytes], bytes]]] = {
    "open properties": lambda found: _list(0x10, encode("peer"), *_nulls(8), found),
    "open properties, nested": lambda found: _list(
        0x10, encode("peer"), *_nulls(8), encode_map_of(2, encode(Symbol("k")) + encode_list_of([found]))
    ),
    "begin properties": lambda found: _list(0x11, b"\x40", *_WINDOWS, *_nulls(3), found),
    "attach properties": lambda found: _attach(properties=found),
    "attach unsettled": lambda found: _attach(unsettled=found),
    "source filter": lambda found: _attach(source=_list(0x28, encode("queue"), *_nulls(6), found)),
    "source node properties": lambda found: _attach(source=_list(0x28, encode("queue"), *_nulls(4), found)),
    "source default outcome": lambda found: _attach(
        source=_list(0x28, encode("queue"), *_nulls(7), _list(0x27, b"\x40", b"\x40", found))
    ),
    "target node properties": lambda found: _attach(target=_list(0x29, encode("queue"), *_nulls(4), found)),
    "unknown terminus": lambda found: _attach(target=_list(0x30, found)),
    "flow properties": lambda found: _list(0x13, b"\x40", *_WINDOWS, *_nulls(6), found),
    "transfer state": lambda found: _list(
        0x14, encode(UInt(0)), encode(UInt(0)), encode(b"t"), *_nulls(4), _list(0x27, b"\x40", b"\x40", found)
    ),
    "disposition, modified": lambda found: _list(
        0x15, b"\x41", encode(UInt(0)), b"\x40", b"\x41", _list(0x27, b"\x40", b"\x40", found)
    ),
    "disposition, rejected": lambda found: _list(
        0x15, b"\x41", encode(UInt(0)), b"\x40", b"\x41", _list(0x25, _error(found))
    ),
    "disposition, transactional": lambda found: _list(
        0x15, b"\x41", encode(UInt(0)), b"\x40", b"\x41",
        _list(0x34, encode(b"t"), _list(0x27, b"\x40", b"\x40", found)),
    ),
    "detach error": lambda found: _list(0x16, encode(UInt(0)), b"\x41", _error(found)),
    "end error": lambda found: _list(0x17, _error(found)),
    "close error": lambda found: _list(0x18, _error(found)),
}  # fmt: skip

# Sections of a message. An ordinary body follows where the section is none.
SECTIONS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "delivery annotations": lambda found: b"\x00\x53\x71" + found + b"\x00\x53\x75\xa0\x01x",
    "message annotations": lambda found: b"\x00\x53\x72" + found + b"\x00\x53\x75\xa0\x01x",
    "application properties": lambda found: b"\x00\x53\x74" + found + b"\x00\x53\x75\xa0\x01x",
    "sequence body": lambda found: b"\x00\x53\x76" + encode_list_of([found]),
    "value body": lambda found: b"\x00\x53\x77" + found,
    "described value body": lambda found: b"\x00\x53\x77\x00\x53\x07" + found,
    "array body": lambda found: b"\x00\x53\x77" + _array_of_maps(found),
    "footer": lambda found: b"\x00\x53\x75\xa0\x01x\x00\x53\x78" + found,
}


def _array_of_maps(found: bytes) -> bytes:
    if found.startswith(b"\xc1") and len(found) >= 3:  # a mutated map may be shorter
        content = b"\xd1" + (found[1] + 3).to_bytes(4) + found[2].to_bytes(4) + found[3:]
    else:
        content = found
    return b"\xf0" + (len(content) + 4).to_bytes(4) + (1).to_bytes(4) + content
