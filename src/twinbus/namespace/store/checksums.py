"""Checksums of what a store holds, and the inventory of each queue. Why these: docs/decisions/0034.

Every stored row has a CRC-32 over all its columns. The store compares it when it reads the row. A CRC finds every
damage of up to 32 consecutive bits, and all but one of 4 billion larger ones. It is no protection against an attacker.

    message   `row_crc`: the encoded message, the session and the overlay, and all numbers: entity, lane, sequence
              number, times, delivery count. A row that shares its body is covered without the encoded message.
    body      `body_crc`
    others    `values_crc` over all values of the row; `counters_crc` where speed matters

A move changes some columns of a row, and the store does not read the encoded message for that. `moved_crc` computes the
new checksum from the old one: two texts of the same length that end two inputs change the CRC of both in the same way
(CRC is linear over XOR). If the row was damaged before the move, the new checksum is wrong in the same bits as the old
one. So a move never hides damage.

The checksum of a row that is gone cannot be compared. So each queue has an inventory: the number of its rows, and the
sum of their `row_key`. The sum is one of keys because a commit knows the key of a row that it removes.

This module is pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from twinbus.namespace.engine.storage_protocol import PutBody, PutCounters, Row

_pack_numbers = Struct("<10q").pack
_pack_two = Struct("<2q").pack
_NO_INSTANT = -(1 << 63)
# The start values make an empty text different from none: crc32(b"") is 0.
_SESSION_START = 1
_OVERLAY_START = 2


class Inventory(NamedTuple):
    """The number of rows of a queue, and the sum of their keys."""

    rows: int = 0
    keys: int = 0


_LOW = 0xFFFFFFFF
KEY_SQL = f"((seq & {_LOW}) * 8 + lane)"
"""`row_key` in SQL. Only the low bits of the sequence number count, so that a sum of many keys fits into 64 bits."""


def row_key(lane: int, seq: int) -> int:
    """Return the number that a row adds to the inventory of its queue."""
    return (seq & _LOW) * 8 + lane


def keys_of_range(lane: int, first: int, last: int) -> int:
    """Return the sum of `row_key` over consecutive sequence numbers."""
    count = last - first + 1
    if (first & _LOW) + count > _LOW:
        return sum(row_key(lane, seq) for seq in range(first, last + 1))
    return ((first & _LOW) * 2 + count - 1) * count // 2 * 8 + lane * count


def row_crc(row: Row) -> int:
    """Return the checksum of a row. `raw` of a row that shares its body is left out: the body has its own checksum."""
    queue, lane, seq, origin_seq, enqueued, expires, due, session, delivery_count, size, overlay, body, raw = row
    crc = 0 if session is None else crc32(session.encode(), _SESSION_START)
    if body is None:
        crc = crc32(raw, crc)
    crc = crc32(
        _pack_numbers(
            queue,
            lane,
            seq,
            origin_seq,
            enqueued,
            _NO_INSTANT if expires is None else expires,
            _NO_INSTANT if due is None else due,
            delivery_count,
            size,
            -1 if body is None else body,
        ),
        crc,
    )
    return crc if overlay is None else crc ^ crc32(overlay, _OVERLAY_START)


def moved_crc(stored: int, old: Row, new: Row) -> int:
    """Return the checksum of a row after a move. `stored` is its checksum before. `raw` and `session` are not used."""
    return stored ^ _head_crc(old) ^ _head_crc(new)


def _head_crc(row: Row) -> int:
    return row_crc(row._replace(raw=b"", session=None))


def body_crc(body: PutBody) -> int:
    """Return the checksum of a body that several rows share."""
    return crc32(body.raw, crc32(_pack_two(body.body, body.topic)))


_pack_counters = Struct(f"<{len(PutCounters._fields) + 3}q").pack


def counters_crc(counters: PutCounters, inventory: Inventory, commits: int) -> int:
    """Return the checksum of the counters of a queue, with its inventory and the number of the commit that writes."""
    return crc32(_pack_counters(*counters, *inventory, commits))


def values_crc(values: Iterable[object]) -> int:
    """Return the checksum of the numbers, texts and bytes in a row of one of the other tables."""
    crc = 0
    for value in values:
        text = value if isinstance(value, bytes) else str(value).encode()
        crc = crc32(text, crc32(b"%d:" % len(text), crc))
    return crc
