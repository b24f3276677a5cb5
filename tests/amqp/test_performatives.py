from dataclasses import fields
from typing import Any

import pytest
from azure.servicebus._pyamqp._decode import decode_frame, decode_payload

from twinbus.amqp.described_types import decode_described, encode_described
from twinbus.amqp.encoding import encode
from twinbus.amqp.errors import AmqpError, DecodeError, EncodeError
from twinbus.amqp.fast_frames import (
    disposition_frame,
    transfer_head,
)
from twinbus.amqp.frames import performative_frame
from twinbus.amqp.message_builder import build_message
from twinbus.amqp.message_sections import Header, Properties
from twinbus.amqp.performatives import (
    ACCEPTED,
    RECEIVER,
    SENDER,
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    End,
    Error,
    Flow,
    Modified,
    Open,
    Received,
    Rejected,
    Released,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    Source,
    Target,
    Transfer,
)
from twinbus.values import Described, Symbol, UInt, ULong

ERROR = Error("amqp:not-found", "no such queue", {Symbol("k"): "v"})
SOURCE = Source(
    "queue", 1, "never", 5, True, {Symbol("a"): 1}, "move", {Symbol("f"): None}, Released(), ["x", "y"], ["z"]
)
ALL: list[Any] = [
    Open("c"),
    Open("c", "h", 1024, 7, 1000, ["en"], ["de"], ["o"], ["d"], {Symbol("p"): "v"}),
    Begin(next_outgoing_id=1, incoming_window=2, outgoing_window=3),
    Begin(
        remote_channel=0, next_outgoing_id=2**32 - 1, incoming_window=2, outgoing_window=3, handle_max=9,
        offered_capabilities=["a"], desired_capabilities=["b"], properties={Symbol("p"): 1},
    ),
    Attach("link", 0, SENDER, initial_delivery_count=0),
    Attach("x", 300, RECEIVER, 1, 1, SOURCE, Target("t"), {b"t": None}, True, 4, 2**40, ["o"], ["d"], {Symbol("p"): 1}),
    Attach("link", 1, SENDER, target=Described(ULong(0x30), [])),  # a coordinator
    Flow(incoming_window=1, next_outgoing_id=2, outgoing_window=3),
    Flow(
        next_incoming_id=9, incoming_window=1, next_outgoing_id=2, outgoing_window=3, handle=4, delivery_count=5,
        link_credit=6, available=7, drain=True, echo=True, properties={Symbol("p"): 1},
    ),
    Transfer(1),
    Transfer(1, 2, b"tag", 0x80013700, True, True, 1, ACCEPTED, True, True, True),
    Disposition(RECEIVER, 1),
    Disposition(SENDER, 1, 2, True, Rejected(ERROR), True),
    Disposition(RECEIVER, 0, 0, True, Modified(True, False, {Symbol("x"): 1})),
    Disposition(RECEIVER, 0, 0, False, Received(1, 2)),
    Disposition(RECEIVER, 0, 0, False, Described(ULong(0x34), [b"txn", None])),
    Detach(1),
    Detach(1, True, ERROR),
    End(),
    End(ERROR),
    Close(),
    Close(ERROR),
    SaslMechanisms(["ANONYMOUS"]),
    SaslInit("PLAIN", b"\0u\0p", "host"),
    SaslOutcome(1, b"more"),
]  # fmt: skip


@pytest.mark.parametrize("performative", ALL, ids=lambda value: type(value).__name__)
def test_every_composite_round_trips(performative: Any) -> None:
    raw = encode_described(performative)
    assert decode_described(raw, 0) == (performative, len(raw))


@pytest.mark.parametrize("performative", ALL, ids=lambda value: type(value).__name__)
def test_every_field_is_written_and_missing_ones_are_null(performative: Any) -> None:
    raw = encode_described(performative)
    wide = raw[3] == 0xD0
    assert int.from_bytes(raw[8:12] if wide else raw[5:6]) == len(fields(performative))


def test_trailing_fields_may_be_left_out_by_the_peer() -> None:
    raw = b"\x00\x53\x10" + encode(["peer"])
    assert decode_described(raw, 0)[0] == Open("peer")
    assert decode_described(b"\x00\x53\x18\x45", 0)[0] == Close()


def test_descriptors_may_be_symbols() -> None:
    raw = encode(Described(Symbol("amqp:open:list"), ["peer"]))
    assert decode_described(raw, 0)[0] == Open("peer")


def test_a_missing_mandatory_field_is_an_invalid_field() -> None:
    with pytest.raises(AmqpError) as caught:
        decode_described(b"\x00\x53\x10\x45", 0)
    assert caught.value.condition == "amqp:invalid-field"


MISSHAPEN: dict[str, Any] = {
    "a number for a name": Described(ULong(0x10), [UInt(1)]),
    "a long for a uint": Described(ULong(0x16), [5]),
    "a string for an error": Described(ULong(0x18), ["error"]),
    "another composite for an error": Described(ULong(0x18), [Described(ULong(0x24), [])]),
    "an unknown composite for an error": Described(ULong(0x18), [Described(ULong(0x99), [])]),
    "strings for symbols": Described(ULong(0x10), ["c", None, None, None, None, ["en"]]),
    "too many fields": Described(ULong(0x18), [None, None]),
    "a map for a list": Described(ULong(0x18), {}),
    "no described value": ["open"],
}


@pytest.mark.parametrize("value", MISSHAPEN.values(), ids=MISSHAPEN.keys())
def test_a_field_of_a_wrong_type_is_a_decode_error(value: Any) -> None:
    with pytest.raises(DecodeError):
        decode_described(encode(value), 0)


def test_encoding_a_wrong_field_is_the_callers_error() -> None:
    with pytest.raises(EncodeError, match="max_frame_size"):
        encode_described(Open("c", max_frame_size=2**32))
    with pytest.raises(EncodeError, match="handle"):
        encode_described(Detach(None))  # type: ignore[arg-type]  # the missing handle is the point


def test_the_sdk_reads_our_performatives() -> None:
    frame = performative_frame(1, Attach("link", 2, SENDER, 0, 1, Source("s"), Target("t"), initial_delivery_count=0))
    code, values = decode_frame(memoryview(frame[8:]))
    assert code == 0x12
    assert values[0] == b"link"
    assert values[1:5] == [2, False, 0, 1]
    assert values[5][0] == b"s"
    assert len(values) == 14
    head = transfer_head(1, 0, 9, b"tag", 0, False, False, 4)
    code, values = decode_frame(memoryview(head[8:] + b"abcd"))
    assert (code, values[0], values[1], values[2], values[-1]) == (0x14, 0, 9, b"tag", b"abcd")
    code, values = decode_frame(memoryview(disposition_frame(0, SENDER, 5, 5, True, Rejected(ERROR))[8:]))
    assert (code, values[1], values[2], values[3]) == (0x15, 5, 5, True)


def test_the_sdk_reads_our_messages() -> None:
    raw = build_message(
        data=b"body",
        header=Header(priority=3),
        properties=Properties(message_id="m", group_id="g"),
        application_properties={"k": 5},
        message_annotations={"a": True},
    )
    found = decode_payload(memoryview(raw))
    assert found.properties is not None
    assert found.header is not None
    assert found.properties.message_id == b"m"
    assert found.header.priority == 3
    assert found.application_properties == {b"k": 5}
    assert found.data == [b"body"]
