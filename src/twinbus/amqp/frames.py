"""Frame headers and protocol headers (amqp-core-transport §2.2, §2.3). Both have eight bytes."""

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


def encode_frame(channel: int, body: bytes, frame_type: int = AMQP_FRAME) -> bytes:
    return FRAME_HEADER.pack(len(body) + 8, 2, frame_type, channel) + body


def performative_frame(channel: int, performative: Any, frame_type: int = AMQP_FRAME) -> bytes:
    return encode_frame(channel, encode_described(performative), frame_type)


def frame_size(buf: bytes | bytearray, pos: int, max_frame_size: int) -> int:
    """Return the size of the frame at `pos`. At least 4 bytes of the frame must be in `buf`.

    Raises AmqpError if the size is not allowed. Call this function before you buffer bytes of the frame.
    """
    size = int.from_bytes(buf[pos : pos + 4])
    if not 8 <= size <= max_frame_size:
        raise AmqpError(Condition.FRAMING_ERROR, f"a frame of {size} bytes; 8 to {max_frame_size} are allowed")
    return size


def frame_body(buf: bytes, pos: int, size: int, frame_type: int) -> tuple[int, int]:
    """Return the channel of the frame at `pos`, and the start of its body. Raises AmqpError for an invalid header."""
    _, doff, found, channel = FRAME_HEADER.unpack_from(buf, pos)
    if doff < 2 or doff * 4 > size:
        raise AmqpError(Condition.FRAMING_ERROR, f"a frame with a data offset of {doff}")
    if found != frame_type:
        raise AmqpError(Condition.FRAMING_ERROR, f"a frame of type {found}; type {frame_type} is expected")
    return channel, pos + doff * 4
