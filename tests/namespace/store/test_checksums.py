"""X2: checksums of rows, inventories, and what they cover."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from twinbus.namespace.engine.storage_protocol import MoveRow, PutBody, PutCounters, QueueLane, Row
from twinbus.namespace.store.checksums import (
    Inventory,
    body_crc,
    counters_crc,
    keys_of_range,
    moved_crc,
    row_crc,
    row_key,
    values_crc,
)
from twinbus.namespace.store.write_batch import moved

NUMBERS = st.integers(0, (1 << 63) - 1)
LANES = st.sampled_from(QueueLane)
INSTANTS = st.none() | NUMBERS
ROWS = st.builds(
    Row,
    queue=NUMBERS,
    lane=LANES,
    seq=NUMBERS,
    origin_seq=NUMBERS,
    enqueued=NUMBERS,
    expires=INSTANTS,
    due=INSTANTS,
    session=st.none() | st.text(max_size=9),
    delivery_count=NUMBERS,
    size=NUMBERS,
    overlay=st.none() | st.binary(max_size=9),
    body=st.none() | NUMBERS,
    raw=st.binary(max_size=40),
)


def other_value(value: Any, bit: int) -> Any:
    """Return the value with one bit changed, or another type."""
    match value:
        case int():
            return value ^ (1 << bit % 63)
        case bytes() if value:
            at = bit % len(value)
            return value[:at] + bytes([value[at] ^ (1 << bit % 8)]) + value[at + 1 :]
        case str() if value:
            return value[:-1] + chr(ord(value[-1]) ^ 1)
        case bytes() | str():
            return None
        case _:
            return 0


@given(ROWS, st.sampled_from(Row._fields), st.integers(0, 1_000))
def test_x2_every_column_of_a_message_is_covered(row: Row, name: str, bit: int) -> None:
    old: Any = getattr(row, name)
    value: Any = {"session": "", "overlay": b""}[name] if old is None and name in ("session", "overlay") else None
    value = value if value is not None else other_value(old, bit)
    if name == "raw" and (value is None or row.body is not None):
        return  # a shared body has its own checksum
    assert row_crc(row._replace(**{name: value})) != row_crc(row)


@given(ROWS, ROWS, st.integers(0, 2**32 - 1))
def test_x2_a_move_keeps_the_checksum_right_and_damage_wrong(row: Row, to: Row, wrong: int) -> None:
    new = moved(row, MoveRow(*row[:3], to.lane, to.seq, to.enqueued, to.expires, to.delivery_count, to.overlay))
    bare_old, bare_new = row._replace(raw=b"", session=None), new._replace(raw=b"", session=None)
    assert moved_crc(row_crc(row), bare_old, bare_new) == row_crc(new)
    assert moved_crc(row_crc(row) ^ wrong, bare_old, bare_new) == row_crc(new) ^ wrong


@given(LANES, st.integers(0, 1 << 62), st.integers(0, 50))
def test_the_keys_of_a_range_are_the_sum_of_its_keys(lane: QueueLane, first: int, count: int) -> None:
    last = first + count
    assert keys_of_range(lane, first, last) == sum(row_key(lane, seq) for seq in range(first, last + 1))


def test_the_keys_of_a_range_over_the_limit_of_32_bits() -> None:
    first = (1 << 32) - 3
    assert keys_of_range(1, first, first + 5) == sum(row_key(1, seq) for seq in range(first, first + 6))


@given(st.lists(NUMBERS | st.text(max_size=5) | st.binary(max_size=5), min_size=1, max_size=5), st.data())
def test_x2_every_value_of_another_row_is_covered(values: list[Any], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(values) - 1))
    changed = other_value(values[at], data.draw(st.integers(0, 99)))
    assert values_crc([*values[:at], changed, *values[at + 1 :]]) != values_crc(values)


def test_x2_neighbouring_values_do_not_run_together() -> None:
    assert values_crc(["ab", "c"]) != values_crc(["a", "bc"])


def test_x2_bodies_and_counters_are_covered() -> None:
    body, counters = PutBody(1, b"raw", 2), PutCounters(*range(11))
    bodies = (body, body._replace(body=3), body._replace(topic=3), body._replace(raw=b"rav"))
    assert len({body_crc(each) for each in bodies}) == 4
    changed = {counters_crc(counters._replace(**{name: 99}), Inventory(1, 2), 3) for name in PutCounters._fields}
    changed |= {counters_crc(counters, Inventory(9, 2), 3), counters_crc(counters, Inventory(1, 9), 3)}
    changed |= {counters_crc(counters, Inventory(1, 2), 9), counters_crc(counters, Inventory(1, 2), 3)}
    assert len(changed) == len(PutCounters._fields) + 4
