"""Fast codecs for transfer, disposition and flow, the three performatives that every message needs.

The wire format is the same as that of the dataclasses in `performatives`, but reading and writing is several times
faster than with `described_types` (docs/decisions/0006-server-figures.md). The readers return tuples:
`transfer_fields`, `disposition_fields` and `flow_fields` return the same tuples for dataclasses that `described_types`
has read. tests/amqp/test_fast_frames.py checks that both codecs give equal results.

The readers raise AmqpError or, if the bytes end inside the frame, one of TRUNCATION_ERRORS.
"""

from itertools import product
from struct import Struct
from struct import error as struct_error
from typing import Any, NamedTuple

from twinbus.amqp.decoding import decode
from twinbus.amqp.described_types import MAP, encode_described, from_described
from twinbus.amqp.errors import AmqpError, DecodeError
from twinbus.amqp.frames import performative_frame
from twinbus.amqp.performatives import (
    ACCEPTED,
    RELEASED,
    Accepted,
    DeliveryState,
    Disposition,
    Flow,
    Modified,
    Received,
    Rejected,
    Released,
    Transfer,
)
from twinbus.values import Condition, Described, UByte

_U32 = Struct(">I")
_u32_at = _U32.unpack_from
_u32 = _U32.pack

# Frame header; descriptor and list8; size and count of the list; handle; delivery-id; constructor and length of tag.
_TRANSFER_HEAD = Struct(">IBBH4sBBBIBIBB")
_TRANSFER_LIST = b"\x00\x53\x14\xc0"
# message-format 0, settled, more, and null for rcv-settle-mode, state, resume, aborted and batchable.
_TAILS = {
    (s, m): bytes((0x43, 0x41 if s else 0x42, 0x41 if m else 0x42)) + b"\x40" * 5 for s, m in product((0, 1), repeat=2)
}

MAX_TAG = 32  # §2.8.7
TRANSFER_OVERHEAD = _TRANSFER_HEAD.size + 12  # most bytes that a transfer without state adds to tag and payload


def transfer_head(
    channel: int,
    handle: int,
    delivery_id: int,
    tag: bytes,
    message_format: int,
    settled: bool,
    more: bool,
    payload_size: int,
) -> bytes:
    """Return a transfer frame up to its payload."""
    tail = _TAILS[settled, more]
    if message_format:
        tail = b"\x70" + _u32(message_format) + tail[1:]
    tag_size = len(tag)
    rest = tag_size + len(tail)
    return (
        _TRANSFER_HEAD.pack(
            26 + rest + payload_size, 2, 0, channel,
            _TRANSFER_LIST, 13 + rest, 11,
            0x70, handle,
            0x70, delivery_id,
            0xA0, tag_size,
        )
        + tag
        + tail
    )  # fmt: skip


def transfer_head_with_state(channel: int, transfer: Transfer, payload_size: int) -> bytes:
    """Return a transfer frame up to its payload, with any fields. Slower than `transfer_head`."""
    head = performative_frame(channel, transfer)
    return _u32(len(head) + payload_size) + head[4:]


class TransferExtras(NamedTuple):
    """The fields of a transfer that are seldom used."""

    state: DeliveryState | None = None
    resume: bool = False
    aborted: bool = False


NO_TRANSFER_EXTRAS = TransferExtras()

# handle, delivery-id, delivery-tag, message-format, settled, more, extras, start of the payload
TransferFields = tuple[int, int | None, bytes | None, int | None, bool | None, bool, TransferExtras, int]
# role, first, last, settled, state
DispositionFields = tuple[bool, int, int, bool, DeliveryState | None]


# The bytes after the field `more` in nearly every transfer: null or false for each field; batchable may also be true.
_USUAL_TAILS = frozenset(
    bytes(tail[:length])
    for tail in product((0x40,), (0x40,), (0x40, 0x42), (0x40, 0x42), (0x40, 0x41, 0x42))
    for length in range(6)
)


def read_transfer(buf: bytes, pos: int, end: int) -> TransferFields:
    """Read the transfer whose list starts at `pos`, in a frame that ends at `end`. The payload follows the list."""
    count, pos, stop = _list_at(buf, pos, end)
    if count < 6:
        return _short_transfer(buf, pos, stop, count)
    if count > 11:
        raise DecodeError(f"a transfer with {count} fields")
    handle, pos = _uint(buf, pos)
    if handle is None:
        raise AmqpError(Condition.INVALID_FIELD, "Transfer.handle is missing")
    delivery_id: int | None
    if buf[pos] == 0x70:
        delivery_id = _u32_at(buf, pos + 1)[0]
        pos += 5
    else:
        delivery_id, pos = _uint(buf, pos)
    tag: bytes | None
    if buf[pos] == 0xA0:
        start = pos + 2
        pos = start + buf[pos + 1]
        tag = buf[start:pos]
    else:
        tag, pos = _tag(buf, pos)
    message_format, pos = _uint(buf, pos)
    flags = _FLAGS.get(buf[pos : pos + 2])
    if flags is not None:
        settled, more = flags
        pos += 2
    else:
        settled, pos = _bool(buf, pos)
        found, pos = _bool(buf, pos)
        more = found is True
    extras = NO_TRANSFER_EXTRAS
    if stop - pos == count - 6 and buf[pos:stop] in _USUAL_TAILS:
        pos = stop
    elif count > 6:
        extras, pos = _extras(buf, pos, count - 6)
    if pos != stop:
        raise DecodeError("the size of a transfer does not match its fields")
    return handle, delivery_id, tag, message_format, settled, more, extras, stop


def _short_transfer(buf: bytes, pos: int, stop: int, count: int) -> TransferFields:
    """Read a transfer that has no field `more`. Clients often write the last frame of a delivery without this field."""
    handle = delivery_id = tag = message_format = settled = None
    if count > 0:
        handle, pos = _uint(buf, pos)
    if count > 1:
        delivery_id, pos = _uint(buf, pos)
    if count > 2:
        tag, pos = _tag(buf, pos)
    if count > 3:
        message_format, pos = _uint(buf, pos)
    if count > 4:
        settled, pos = _bool(buf, pos)
    if pos != stop:
        raise DecodeError("the size of a transfer does not match its fields")
    if handle is None:
        raise AmqpError(Condition.INVALID_FIELD, "Transfer.handle is missing")
    return handle, delivery_id, tag, message_format, settled, False, NO_TRANSFER_EXTRAS, stop


def transfer_fields(transfer: Transfer, payload: int) -> TransferFields:
    t = transfer
    extras = TransferExtras(t.state, t.resume, t.aborted)
    return t.handle, t.delivery_id, t.delivery_tag, t.message_format, t.settled, t.more, extras, payload


_FLAGS: dict[bytes, tuple[bool | None, bool]] = {
    bytes((settled, more)): ({0x40: None, 0x41: True, 0x42: False}[settled], more == 0x41)
    for settled in (0x40, 0x41, 0x42)
    for more in (0x40, 0x41, 0x42)
}


def _list_at(buf: bytes, pos: int, end: int) -> tuple[int, int, int]:
    """Return count, start of the first field, and end of a performative's list."""
    form = buf[pos]
    if form == 0xC0:
        stop = pos + 2 + buf[pos + 1]
        if pos + 3 <= stop <= end:
            return buf[pos + 2], pos + 3, stop
    elif form == 0xD0:
        stop = pos + 5 + _u32_at(buf, pos + 1)[0]
        if pos + 9 <= stop <= end:
            return _u32_at(buf, pos + 5)[0], pos + 9, stop
    elif form == 0x45:
        return 0, pos + 1, pos + 1
    raise DecodeError("a performative is not a list, or exceeds its frame")


def _uint(buf: bytes, pos: int) -> tuple[int | None, int]:
    form = buf[pos]
    if form == 0x52:
        return buf[pos + 1], pos + 2
    if form == 0x43:
        return 0, pos + 1
    if form == 0x70:
        return _u32_at(buf, pos + 1)[0], pos + 5
    if form == 0x40:
        return None, pos + 1
    raise DecodeError("a field that should be a uint has a wrong type")


def _bool(buf: bytes, pos: int) -> tuple[bool | None, int]:
    form = buf[pos]
    if form == 0x42:
        return False, pos + 1
    if form == 0x41:
        return True, pos + 1
    if form == 0x40:
        return None, pos + 1
    if form == 0x56 and buf[pos + 1] < 2:
        return buf[pos + 1] == 1, pos + 2
    raise DecodeError("a field that should be a boolean has a wrong type")


def _tag(buf: bytes, pos: int) -> tuple[bytes | None, int]:
    value, pos = decode(buf, pos)
    if value is not None and type(value) is not bytes:
        raise DecodeError("a delivery tag is not a binary")
    return value, pos


def _extras(buf: bytes, pos: int, count: int) -> tuple[TransferExtras, int]:
    state, resume, aborted = None, None, None
    mode, pos = decode(buf, pos)
    if mode is not None and type(mode) is not UByte:
        raise DecodeError("Transfer.rcv_settle_mode has a wrong type")
    if count > 1:
        state, pos = read_state(buf, pos)
    if count > 2:
        resume, pos = _bool(buf, pos)
    if count > 3:
        aborted, pos = _bool(buf, pos)
    if count > 4:
        _, pos = _bool(buf, pos)
    return TransferExtras(state, resume is True, aborted is True), pos


_STATES: dict[bytes, DeliveryState] = {
    b"\x00\x53\x24\x45": ACCEPTED,
    b"\x00\x53\x26\x45": RELEASED,
}
_KNOWN_STATES = (Received, Accepted, Rejected, Released, Modified, Described)


def read_state(buf: bytes, pos: int) -> tuple[DeliveryState | None, int]:
    if buf[pos] == 0x40:
        return None, pos + 1
    usual = _STATES.get(buf[pos : pos + 4])
    if usual is not None:
        return usual, pos + 4
    value, pos = decode(buf, pos)
    try:
        state = from_described(value)
    except TypeError:
        raise DecodeError("a delivery state is not a described type") from None
    if not isinstance(state, _KNOWN_STATES):
        raise DecodeError(f"{type(state).__name__} is not a delivery state")
    return state, pos


def encode_state(state: DeliveryState | None) -> bytes:
    if state is None:
        return b"\x40"
    if state is ACCEPTED or type(state) is Accepted:
        return b"\x00\x53\x24\x45"
    return encode_described(state)


_DISPOSITION = Struct(">IBBH3sBBBBBIBIB")
_WIDE_DISPOSITION = Struct(">IBBH3sBIIBBIBIB")
_DISPOSITION_CODE = b"\x00\x53\x15"


def disposition_frame(
    channel: int, role: bool, first: int, last: int, settled: bool, state: DeliveryState | None
) -> bytes:
    encoded = encode_state(state)
    size = len(encoded)
    role_code = 0x41 if role else 0x42
    settled_code = 0x41 if settled else 0x42
    if size < 220:
        head = _DISPOSITION.pack(
            27 + size, 2, 0, channel, _DISPOSITION_CODE, 0xC0, 14 + size, 6,
            role_code, 0x70, first, 0x70, last, settled_code,
        )  # fmt: skip
    else:
        head = _WIDE_DISPOSITION.pack(
            33 + size, 2, 0, channel, _DISPOSITION_CODE, 0xD0, 17 + size, 6,
            role_code, 0x70, first, 0x70, last, settled_code,
        )  # fmt: skip
    return head + encoded + b"\x42"


def read_disposition(buf: bytes, pos: int, end: int) -> DispositionFields:
    """Read the disposition whose list starts at `pos` and ends at `end`."""
    count, pos, stop = _list_at(buf, pos, end)
    if count > 6:
        raise DecodeError(f"a disposition with {count} fields")
    role = first = last = settled = state = None
    if count > 0:
        role, pos = _bool(buf, pos)
    if count > 1:
        first, pos = _uint(buf, pos)
    if count > 2:
        last, pos = _uint(buf, pos)
    if count > 3:
        settled, pos = _bool(buf, pos)
    if count > 4:
        state, pos = read_state(buf, pos)
    if count > 5:
        _, pos = _bool(buf, pos)
    if pos != stop or pos != end:
        raise DecodeError("the size of a disposition does not match its fields")
    if role is None or first is None:
        raise AmqpError(Condition.INVALID_FIELD, "Disposition.role or first is missing")
    return role, first, first if last is None else last, settled is True, state


def disposition_fields(disposition: Disposition) -> DispositionFields:
    d = disposition
    return d.role, d.first, d.first if d.last is None else d.last, d.settled, d.state


class FlowFields(NamedTuple):
    next_incoming_id: int | None
    incoming_window: int
    next_outgoing_id: int
    outgoing_window: int
    handle: int | None
    delivery_count: int | None
    link_credit: int | None
    available: int | None
    drain: bool
    echo: bool
    properties: dict[Any, Any] | None


def read_flow(buf: bytes, pos: int, end: int) -> FlowFields:
    """Read the flow whose list starts at `pos` and ends at `end`."""
    count, pos, stop = _list_at(buf, pos, end)
    if count > 11:
        raise DecodeError(f"a flow with {count} fields")
    numbers: list[int | None] = [None] * 8
    drain = echo = properties = None
    for index in range(min(count, 8)):
        numbers[index], pos = _uint(buf, pos)
    if count > 8:
        drain, pos = _bool(buf, pos)
    if count > 9:
        echo, pos = _bool(buf, pos)
    if count > 10:
        properties, pos = decode(buf, pos)
        if properties is not None and not isinstance(properties, dict):
            raise DecodeError("Flow.properties is not a map")
    if pos != stop or pos != end:
        raise DecodeError("the size of a flow does not match its fields")
    next_incoming_id, incoming_window, next_outgoing_id, outgoing_window, *link = numbers
    if incoming_window is None or next_outgoing_id is None or outgoing_window is None:
        raise AmqpError(Condition.INVALID_FIELD, "a window of the flow is missing")
    handle, delivery_count, link_credit, available = link
    return FlowFields(
        next_incoming_id, incoming_window, next_outgoing_id, outgoing_window,
        handle, delivery_count, link_credit, available, drain is True, echo is True, properties,
    )  # fmt: skip


_FLOW_CODE = b"\x00\x53\x13\xd0"
_FLOW = Struct(">IBBH4sII")


def flow_frame(channel: int, flow: FlowFields) -> bytes:
    rest = b"".join([b"\x40" if number is None else b"\x70" + _u32(number) for number in flow[:8]])
    rest += (b"\x41" if flow.drain else b"\x42") + (b"\x41" if flow.echo else b"\x42")
    rest += b"\x40" if flow.properties is None else MAP.write(flow.properties)
    size = len(rest)
    return _FLOW.pack(20 + size, 2, 0, channel, _FLOW_CODE, 4 + size, 11) + rest


def flow_fields(flow: Flow) -> FlowFields:
    return FlowFields(
        flow.next_incoming_id, flow.incoming_window, flow.next_outgoing_id, flow.outgoing_window, flow.handle,
        flow.delivery_count, flow.link_credit, flow.available, flow.drain, flow.echo, flow.properties,
    )  # fmt: skip


TRUNCATION_ERRORS = (IndexError, struct_error)
