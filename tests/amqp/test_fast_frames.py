"""The fast codecs of transfer, disposition and flow do what the plain codec does."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinbus.amqp import ACCEPTED, RECEIVER, RELEASED, AmqpError, Error, Modified, Received, Rejected, Released, encode
from twinbus.amqp.described_types import decode_described, encode_described
from twinbus.amqp.fast_frames import (
    TRUNCATION_ERRORS,
    FlowFields,
    disposition_fields,
    disposition_frame,
    flow_fields,
    flow_frame,
    read_disposition,
    read_flow,
    read_transfer,
    transfer_fields,
    transfer_head,
)
from twinbus.amqp.performatives import Disposition, Flow, Transfer
from twinbus.values import Described, Symbol, UInt, ULong

ERROR = Error("amqp:not-found", "no such queue", {"key": 1})

numbers = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from((0, 1, 255, 256, 2**32 - 1)))
optional_numbers = st.none() | numbers
flags = st.none() | st.booleans()
states = st.sampled_from(
    (
        None,
        ACCEPTED,
        RELEASED,
        Received(1, 2),
        Rejected(None),
        Rejected(ERROR),
        Modified(True, False, {Symbol("a"): 1}),
        Described(ULong(0x34), [b"transaction", None]),
    )
)
tags = st.none() | st.binary(max_size=40) | st.binary(min_size=256, max_size=300)
transfers = st.builds(
    Transfer,
    numbers,
    optional_numbers,
    tags,
    optional_numbers,
    flags,
    st.booleans(),
    st.sampled_from((None, 0, 1)),
    states,
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
dispositions = st.builds(Disposition, st.booleans(), numbers, optional_numbers, st.booleans(), states, st.booleans())
flows = st.builds(
    Flow,
    next_incoming_id=optional_numbers,
    incoming_window=numbers,
    next_outgoing_id=numbers,
    outgoing_window=numbers,
    handle=optional_numbers,
    delivery_count=optional_numbers,
    link_credit=optional_numbers,
    available=optional_numbers,
    drain=st.booleans(),
    echo=st.booleans(),
    properties=st.none() | st.just({Symbol("p"): 1}),
)


def _plain(raw: bytes) -> Any:
    """Return the fields of a frame body, read by the plain decoder."""
    performative, end = decode_described(raw, 0)
    if isinstance(performative, Transfer):
        return transfer_fields(performative, end)
    assert end == len(raw)
    return disposition_fields(performative) if isinstance(performative, Disposition) else flow_fields(performative)


READERS: dict[type, Callable[[bytes, int, int], Any]] = {
    Transfer: read_transfer,
    Disposition: read_disposition,
    Flow: read_flow,
}


@given(st.one_of(transfers, dispositions, flows))
@settings(max_examples=400, deadline=None)
def test_the_fast_readers_and_the_plain_reader_read_the_same(performative: Transfer | Disposition | Flow) -> None:
    payload = b"payload" if isinstance(performative, Transfer) else b""
    raw = encode_described(performative) + payload
    assert READERS[type(performative)](raw, 3, len(raw)) == _plain(raw)


@given(st.one_of(transfers, dispositions, flows), st.data())
@settings(max_examples=600, deadline=None)
def test_the_fast_readers_accept_no_bytes_that_the_plain_reader_refuses(
    performative: Transfer | Disposition | Flow, data: st.DataObject
) -> None:
    raw = bytearray(encode_described(performative))
    for _ in range(data.draw(st.integers(1, 2))):
        raw[data.draw(st.integers(3, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        fast = READERS[type(performative)](bytes(raw), 3, len(raw))
    except (AmqpError, *TRUNCATION_ERRORS):
        return
    assert fast == _plain(bytes(raw))


@given(numbers, numbers, st.binary(max_size=32), numbers, st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_the_fast_writer_of_transfers_writes_what_the_plain_reader_reads(
    handle: int, delivery_id: int, tag: bytes, message_format: int, settled: bool, more: bool, size: int
) -> None:
    head = transfer_head(3, handle, delivery_id, tag, message_format, settled, more, size)
    assert int.from_bytes(head[:4]) == len(head) + size
    expected = Transfer(handle, delivery_id, tag, message_format, settled, more)
    assert decode_described(head, 8) == (expected, len(head))


@given(dispositions)
def test_the_fast_writer_of_dispositions_writes_what_the_plain_reader_reads(disposition: Disposition) -> None:
    fields = disposition_fields(disposition)
    frame = disposition_frame(3, *fields)
    assert int.from_bytes(frame[:4]) == len(frame)
    assert decode_described(frame, 8) == (Disposition(*fields), len(frame))


@given(flows)
def test_the_fast_writer_of_flows_writes_what_the_plain_reader_reads(flow: Flow) -> None:
    frame = flow_frame(3, flow_fields(flow))
    assert int.from_bytes(frame[:4]) == len(frame)
    assert decode_described(frame, 8) == (flow, len(frame))


@pytest.mark.parametrize(
    "transfer",
    [
        Transfer(0, 0, b"", 0, False, False),
        Transfer(2**32 - 1, 2**32 - 1, b"t" * 32, 2**32 - 1, True, True),
        Transfer(7, 8, b"tag", 0x80013700, None, False, 1, Rejected(ERROR), True, True, True),
        Transfer(7, 8, b"tag", None, None, True, None, None, False, True),
        Transfer(7),
        Transfer(7, 5),
        Transfer(7, 5, b"x" * 300),
    ],
)
def test_the_fast_reader_reads_what_the_plain_writer_writes(transfer: Transfer) -> None:
    raw = encode_described(transfer) + b"payload"
    handle, delivery_id, tag, message_format, settled, more, extras, start = read_transfer(raw, 3, len(raw))
    t = transfer
    assert (handle, delivery_id, tag, message_format, settled) == (
        t.handle, t.delivery_id, t.delivery_tag, t.message_format, t.settled,
    )  # fmt: skip
    assert (more, extras) == (t.more, (t.state, t.resume, t.aborted))
    assert raw[start:] == b"payload"


@pytest.mark.parametrize("count", range(1, 12))
def test_the_fast_reader_accepts_any_number_of_trailing_fields(count: int) -> None:
    full = [UInt(1), UInt(300), b"tag", UInt(5), True, True, None, None, False, False, True]
    raw = b"\x00\x53\x14" + encode(full[:count]) + b"payload"
    found = read_transfer(raw, 3, len(raw))
    wanted = [1, 300, b"tag", 5, True][:count] + [None] * (5 - count) + [count > 5]
    assert list(found[:6]) == wanted
    assert raw[found[7] :] == b"payload"


def test_the_plain_reader_reads_what_the_fast_writers_write() -> None:
    head = transfer_head(3, 4, 5, b"tag", 0x80013700, True, False, 7)
    assert int.from_bytes(head[:4]) == len(head) + 7
    found, end = decode_described(head, 8)
    assert end == len(head)
    assert found == Transfer(4, 5, b"tag", 0x80013700, True, False)
    for state in (None, ACCEPTED, Released(), Rejected(ERROR), Rejected(Error("x", "y" * 5000))):
        frame = disposition_frame(3, RECEIVER, 1, 2**32 - 1, True, state)
        assert int.from_bytes(frame[:4]) == len(frame)
        assert decode_described(frame, 8) == (Disposition(RECEIVER, 1, 2**32 - 1, True, state), len(frame))
        assert read_disposition(frame, 11, len(frame)) == (RECEIVER, 1, 2**32 - 1, True, state)
    for values in (
        FlowFields(1, 2, 3, 4, 5, 6, 7, 8, True, True, {"p": 1}),
        FlowFields(None, 2, 3, 4, None, None, None, None, False, False, None),
    ):
        frame = flow_frame(3, values)
        assert int.from_bytes(frame[:4]) == len(frame)
        assert decode_described(frame, 8) == (Flow(**values._asdict()), len(frame))
        assert read_flow(frame, 11, len(frame)) == values


def test_the_fast_readers_know_both_encodings_of_a_boolean() -> None:
    raw = b"\x00\x53\x15" + b"\xc0\x08\x04\x56\x01\x52\x01\x40\x56\x00"
    assert read_disposition(raw, 3, len(raw)) == (RECEIVER, 1, 1, False, None)
