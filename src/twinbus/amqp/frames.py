"""Frames and protocol headers (amqp-core-transport §2.2, §2.3): eight bytes before everything else.

Decides whether a frame header is well formed. What a frame means is not known here.
"""

from struct import Struct
from typing import Any

from twinbus.amqp.described_types import encode_described
from twinbus.amqp.errors import AmqpError
from twinbus.values import Condition

AMQP_HEADER = b"AMQP\x00\x01\x00\x00"
SASL_HEADER = b"AMQP\x03\x01\x00\x00"
TLS_HEADER = b"AMQP\x02\x01\x00\x00"

AMQP_FRAME = 0
SASL_FRAME = 1

MIN_MAX_FRAME_SIZE = 512  # §2.8.19
HEARTBEAT = b"\x00\x00\x00\x08\x02\x00\x00\x00"

FRAME_HEADER = Struct(">IBBH")


def encode_frame(channel: int, body: bytes, kind: int = AMQP_FRAME) -> bytes:
    return FRAME_HEADER.pack(len(body) + 8, 2, kind, channel) + body


def performative_frame(channel: int, performative: Any, kind: int = AMQP_FRAME) -> bytes:
    return encode_frame(channel, encode_described(performative), kind)


def frame_size(buf: bytes | bytearray, pos: int, max_frame_size: int) -> int:
    """Size of the frame whose four size bytes are at `pos`. Checked before any of the frame is kept."""
    size = int.from_bytes(buf[pos : pos + 4])
    if not 8 <= size <= max_frame_size:
        raise AmqpError(Condition.FRAMING_ERROR, f"a frame of {size} bytes; 8 to {max_frame_size} are taken")
    return size


def frame_body(buf: bytes, pos: int, size: int, kind: int) -> tuple[int, int]:
    """Channel and start of the body of the frame at `pos`."""
    _, doff, found, channel = FRAME_HEADER.unpack_from(buf, pos)
    if doff < 2 or doff * 4 > size:
        raise AmqpError(Condition.FRAMING_ERROR, f"a frame with a data offset of {doff}")
    if found != kind:
        raise AmqpError(Condition.FRAMING_ERROR, f"a frame of type {found} where type {kind} belongs")
    return channel, pos + doff * 4
