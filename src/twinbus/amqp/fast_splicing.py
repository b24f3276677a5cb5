"""Fast path of `delivery_splicing` for the usual delivery: an active message without a header or annotations.

One `Struct` writes everything that the broker adds (docs/decisions/0016-the-syphons-figures.md for locked messages,
0019-the-pipeline.md for peeks).
tests/amqp/test_delivery_splicing.py checks that the result equals that of `splice_delivery`.
"""

from struct import Struct

from twinbus.amqp.delivery_splicing import (
    ENQUEUED_KEY,
    ENQUEUED_SEQUENCE_KEY,
    LOCK_TOKEN,
    LOCKED_UNTIL_KEY,
    PLAIN_HEADERS,
    SEQUENCE_KEY,
    STATE_KEY,
    EncodedEntries,
    broker_annotations,
)
from twinbus.amqp.encoding import encode_map_of
from twinbus.amqp.message_sections import MESSAGE_ANNOTATIONS

_LOCKED_HEAD = b"\x00\x53\x71" + encode_map_of(2, LOCK_TOKEN + bytes(16))[:-16]
_UNLOCKED_HEAD = b"\x00\x53\x71" + encode_map_of(0, b"")


def _first_annotation(annotations: EncodedEntries) -> bytes:
    """Return the bytes of these message annotations up to the first value, which is the sequence number."""
    return b"\x00\x53\x72" + encode_map_of(annotations.count, annotations.raw)[: -len(annotations.raw)] + SEQUENCE_KEY


_LOCKED_SEQUENCE = _first_annotation(broker_annotations(0, 0, 0, enqueued_seq=0, state=0))
_UNLOCKED_SEQUENCE = _first_annotation(broker_annotations(0, 0, enqueued_seq=0, state=0))
_ACTIVE = STATE_KEY + Struct(">i").pack(0)
_LOCKED_HEADS = tuple(header + _LOCKED_HEAD for header in PLAIN_HEADERS)
_LOCKED_BEFORE = Struct(
    f">16s{len(_LOCKED_SEQUENCE)}sq{len(ENQUEUED_KEY)}sq{len(LOCKED_UNTIL_KEY)}sq"
    f"{len(ENQUEUED_SEQUENCE_KEY)}sq{len(_ACTIVE)}s"
).pack
_UNLOCKED_HEADS = tuple(header + _UNLOCKED_HEAD for header in PLAIN_HEADERS)
_UNLOCKED_BEFORE = Struct(
    f">{len(_UNLOCKED_SEQUENCE)}sq{len(ENQUEUED_KEY)}sq{len(ENQUEUED_SEQUENCE_KEY)}sq{len(_ACTIVE)}s"
).pack


def _is_usual(raw: bytes, delivery_count: int) -> bool:
    """Return whether the sender wrote neither a header nor annotations, and there is a header for `delivery_count`."""
    return raw[:2] == b"\x00\x53" and raw[2] > MESSAGE_ANNOTATIONS and delivery_count <= 255


def splice_locked_delivery(
    raw: bytes, delivery_count: int, tag: bytes, seq: int, enqueued_ms: int, locked_until_ms: int, enqueued_seq: int
) -> list[bytes] | None:
    """Return the parts of an active message for a receiver, as `splice_delivery` does.

    Returns None if the sender wrote a header or annotations, or `delivery_count` is above 255. `tag` is the lock token
    as in delivery tags, little-endian (`UUID(bytes_le=tag)`).
    """
    if not _is_usual(raw, delivery_count):
        return None
    token = tag[3::-1] + tag[5:3:-1] + tag[7:5:-1] + tag[8:]
    annotations = _LOCKED_BEFORE(
        token,
        _LOCKED_SEQUENCE,
        seq,
        ENQUEUED_KEY,
        enqueued_ms,
        LOCKED_UNTIL_KEY,
        locked_until_ms,
        ENQUEUED_SEQUENCE_KEY,
        enqueued_seq,
        _ACTIVE,
    )
    return [_LOCKED_HEADS[delivery_count] + annotations, raw]


def splice_unlocked_delivery(
    raw: bytes, delivery_count: int, seq: int, enqueued_ms: int, enqueued_seq: int
) -> list[bytes] | None:
    """Return the parts of an active message that is not locked: of a peek, or of receive-and-delete.

    Returns None in the same cases as `splice_locked_delivery`.
    """
    if not _is_usual(raw, delivery_count):
        return None
    annotations = _UNLOCKED_BEFORE(
        _UNLOCKED_SEQUENCE, seq, ENQUEUED_KEY, enqueued_ms, ENQUEUED_SEQUENCE_KEY, enqueued_seq, _ACTIVE
    )
    return [_UNLOCKED_HEADS[delivery_count] + annotations, raw]
