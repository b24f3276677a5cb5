import contextlib
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.amqp import strategies
from twinbus.amqp.delivery_splicing import with_message_id
from twinbus.amqp.encoding import encode
from twinbus.amqp.errors import DecodeError, EncodeError
from twinbus.amqp.message_builder import batch_payload, build_message, with_sections
from twinbus.amqp.message_sections import Header, Properties, batch_messages, split_sections
from twinbus.amqp.routing_fields import read_routing_fields
from twinbus.values import Long, Symbol, Timestamp, ULong

HEADER, DELIVERY, MESSAGE, PROPERTIES = (
    b"\x00\x53\x70\x45",
    b"\x00\x53\x71\xc1\x01\x00",
    b"\x00\x53\x72\xc1\x01\x00",
    b"\x00\x53\x73\x45",
)
APPLICATION, DATA, SEQUENCE, VALUE = (
    b"\x00\x53\x74\xc1\x01\x00",
    b"\x00\x53\x75\xa0\x01x",
    b"\x00\x53\x76\x45",
    b"\x00\x53\x77\x40",
)
FOOTER = b"\x00\x53\x78\xc1\x01\x00"
IN_ORDER = [HEADER, DELIVERY, MESSAGE, PROPERTIES, APPLICATION, DATA, FOOTER]


@given(strategies.parts, strategies.bodies)
@settings(max_examples=60, deadline=None)
def test_a_built_message_reads_back(parts: dict[str, Any], body: dict[str, Any]) -> None:
    raw = build_message(**parts, **body)
    found = split_sections(raw)
    assert found.header == parts.get("header", Header())
    assert found.properties == parts.get("properties", Properties())
    for name in ("delivery_annotations", "message_annotations", "application_properties", "footer"):
        assert getattr(found, name) == parts.get(name, {})
    if "data" in body:
        assert found.data == ([body["data"]] if isinstance(body["data"], bytes) else body["data"])
    elif "value" in body:
        assert found.value == body["value"]
    else:
        assert found.sequences == body["sequence"]
    assert raw[found.body_start : found.body_end] == raw[found.body[0][0] : found.body[-1][2]]


def test_sections_are_accepted_in_order_and_each_alone() -> None:
    assert split_sections(b"".join(IN_ORDER)).body_kind == "data"
    for section in IN_ORDER:
        read_routing_fields(section)
        split_sections(section)


def test_a_body_is_several_data_or_several_sequences_or_one_value() -> None:
    assert split_sections(DATA + DATA + DATA).data == [b"x", b"x", b"x"]
    assert split_sections(SEQUENCE + SEQUENCE).sequences == [[], []]
    assert split_sections(VALUE).value is None
    assert split_sections(HEADER).body_kind is None


WRONG = {
    "out of order": MESSAGE + HEADER + DATA,
    "twice the header": HEADER + HEADER + DATA,
    "twice the properties": PROPERTIES + PROPERTIES,
    "twice the value": VALUE + VALUE,
    "data and value": DATA + VALUE,
    "data and sequence": DATA + SEQUENCE,
    "properties behind the body": DATA + PROPERTIES,
    "an unknown section": b"\x00\x53\x79\x45",
    "a section below the header": b"\x00\x53\x6f\x45",
    "no descriptor": b"\x53\x75\xa0\x01x",
    "a header that is a map": b"\x00\x53\x70\xc1\x01\x00",
    "data that is a string": b"\x00\x53\x75\xa1\x01x",
    "annotations that are a list": b"\x00\x53\x72\x45",
    "bytes left over": DATA + b"\x01",
    "cut off in the descriptor": DATA + b"\x00\x53",
    "cut off in the data": b"\x00\x53\x75\xa0\x05x",
    "an unknown symbolic descriptor": b"\x00\xa3\x03abc\x45",
}


@pytest.mark.parametrize("raw", WRONG.values(), ids=WRONG.keys())
def test_a_malformed_message_is_a_decode_error(raw: bytes) -> None:
    with pytest.raises(DecodeError):
        split_sections(raw)
    with pytest.raises(DecodeError):
        read_routing_fields(raw)


def test_descriptors_may_be_written_long_or_as_symbols() -> None:
    long_form = b"\x00\x80" + (0x73).to_bytes(8) + encode(["id"]) + b"\x00\xa3\x10amqp:data:binary" + encode(b"body")
    assert split_sections(long_form).properties.message_id == "id"
    assert split_sections(long_form).data == [b"body"]
    assert read_routing_fields(long_form).message_id == "id"
    assert split_sections(with_message_id(long_form, "new")).properties.message_id == "new"


def test_the_routing_fields_are_read() -> None:
    raw = build_message(
        data=b"body",
        header=Header(ttl=5000),
        message_annotations={
            "x-opt-scheduled-enqueue-time": Timestamp(1_700_000_000_000),
            "x-opt-partition-key": "pk",
            "x-opt-via-partition-key": "via",
            "mine": Long(1),
        },
        properties=Properties(
            message_id=UUID(int=7),
            to="there",
            content_type="text/plain",
            absolute_expiry_time=9,
            creation_time=8,
            group_id="session",
        ),
        application_properties={"small": True, "large": "x" * 100},
    )
    found = read_routing_fields(raw)
    assert found.raw is raw
    assert found.message_id == UUID(int=7)
    assert (found.to, found.content_type, found.group_id) == ("there", "text/plain", "session")
    assert (found.ttl, found.absolute_expiry_time, found.creation_time) == (5000, 9, 8)
    assert found.scheduled_enqueue_time == 1_700_000_000_000
    assert (found.partition_key, found.via_partition_key) == ("pk", "via")
    assert found.largest_property == 102
    sections = split_sections(raw)
    spans = [sections.spans[code] for code in (0x72, 0x74)]
    assert found.properties_size == sum(end - start for _, start, end in spans)


@pytest.mark.parametrize("header", [b"", HEADER], ids=["without a header", "with a header"])
def test_delivery_annotations_that_the_python_sdk_writes_last_are_put_in_their_place(header: bytes) -> None:
    assert read_routing_fields(header + PROPERTIES + DATA + DELIVERY).raw == header + DELIVERY + PROPERTIES + DATA
    with pytest.raises(DecodeError):
        read_routing_fields(header + DELIVERY + DATA + DELIVERY)


def test_a_footer_that_the_javascript_sdk_writes_before_the_body_is_put_in_its_place() -> None:
    footer = b"\x00\x53\x78" + encode({Symbol("crc"): 7})
    with pytest.raises(DecodeError):
        split_sections(footer + DATA)
    assert read_routing_fields(HEADER + footer + PROPERTIES + DATA).raw == HEADER + PROPERTIES + DATA + footer
    with pytest.raises(DecodeError):
        read_routing_fields(footer + DATA + footer)


@given(strategies.parts, strategies.bodies)
@settings(max_examples=60, deadline=None)
def test_the_routing_fields_agree_with_the_sections(parts: dict[str, Any], body: dict[str, Any]) -> None:
    raw = build_message(**parts, **body)
    found, sections = read_routing_fields(raw), split_sections(raw)
    for name in ("message_id", "group_id", "content_type", "to", "absolute_expiry_time", "creation_time"):
        assert getattr(found, name) == getattr(sections.properties, name)
    assert found.ttl == sections.header.ttl
    sizes = [len(encode(value)) for value in sections.application_properties.values()]
    assert found.largest_property == max(sizes, default=0)


BAD_FIELDS = {
    "a ttl that is a string": b"\x00\x53\x70" + encode([None, None, "5"]),
    "a header of six fields": b"\x00\x53\x70" + encode([None] * 6),
    "a message id that is a list": b"\x00\x53\x73" + encode([[]]),
    "a message id that is a boolean": b"\x00\x53\x73" + encode([True]),
    "a session id that is a number": b"\x00\x53\x73" + encode([None] * 10 + [ULong(1)]),
    "a session id that is not UTF-8": b"\x00\x53\x73"
    + encode([None] * 10 + [b"\xff"]).replace(b"\xa0\x01", b"\xa1\x01"),
    "properties of fourteen fields": b"\x00\x53\x73" + encode([None] * 14),
    "properties that claim more than they hold": b"\x00\x53\x73\xc0\x02\x05\x40",
    "a property key that is a symbol": b"\x00\x53\x74" + encode({Symbol("k"): 1}),
    "application properties with an odd count": b"\x00\x53\x74\xc1\x02\x01\x40",
    "application properties that run over": b"\x00\x53\x74\xc1\x05\x02\xa1\x01k\xa1" + DATA,
    "annotations with four thousand million items": b"\x00\x53\x72\xd1\x00\x00\x00\x05\xff\xff\xff\xfe\x40",
    "a list with four thousand million fields": b"\x00\x53\x70\xd0\x00\x00\x00\x05\xff\xff\xff\xff\x40",
}


@pytest.mark.parametrize("raw", BAD_FIELDS.values(), ids=BAD_FIELDS.keys())
def test_a_malformed_routing_field_is_a_decode_error(raw: bytes) -> None:
    with pytest.raises(DecodeError):
        read_routing_fields(raw)


@given(strategies.values, strategies.values, st.booleans())
def test_n1_annotations_of_any_type_are_read_and_get_the_types_of_the_service(
    key: Any, instant: Any, is_symbol: bool
) -> None:
    spelled = Symbol if is_symbol else str
    sent = {Symbol("before"): 1, spelled("x-opt-partition-key"): key, spelled("x-opt-via-partition-key"): key}
    sent |= {spelled("x-opt-scheduled-enqueue-time"): instant, Symbol("x-opt-mine"): key}
    fields = read_routing_fields(b"\x00\x53\x72" + encode(sent) + DATA)
    text = str(key) if isinstance(key, str) else None
    if type(key) is bytes:
        with contextlib.suppress(UnicodeDecodeError):
            text = key.decode()
    is_number = isinstance(instant, int) and not isinstance(instant, bool) and instant < 2**63
    assert (fields.partition_key, fields.via_partition_key) == (text, text)
    assert fields.scheduled_enqueue_time == (int(instant) if is_number else None)
    kept = split_sections(fields.raw).message_annotations or {}
    expected = {Symbol(name): value for name, value in sent.items()}
    if text is not None:
        expected |= dict.fromkeys((Symbol("x-opt-partition-key"), Symbol("x-opt-via-partition-key")), text)
    if is_number:
        expected[Symbol("x-opt-scheduled-enqueue-time")] = Timestamp(instant)
    assert {Symbol(name): repr(value) for name, value in kept.items()} == {
        name: repr(value) for name, value in expected.items()
    }
    assert fields.raw.endswith(DATA)


@given(strategies.parts, strategies.bodies, st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_message_is_read_or_a_decode_error(parts: dict[str, Any], body: dict[str, Any], data: Any) -> None:
    raw = bytearray(build_message(**parts, **body))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    for read in (split_sections, read_routing_fields, batch_messages):
        try:
            read(damaged)
        except DecodeError:
            continue


@given(strategies.parts, strategies.bodies, strategies.ids)
@settings(max_examples=60, deadline=None)
def test_an_id_is_spliced_in_and_nothing_else_changes(parts: dict[str, Any], body: dict[str, Any], new_id: Any) -> None:
    raw = build_message(**parts, **body)
    before, after = split_sections(raw), split_sections(with_message_id(raw, new_id))
    expected = before.properties
    expected.message_id = new_id
    assert after.properties == expected
    assert (
        after.raw[: after.spans[0x73][0]]
        == raw[: before.spans[0x73][0] if 0x73 in before.spans else after.spans[0x73][0]]
    )
    tail = before.spans[0x73][2] if 0x73 in before.spans else after.spans[0x73][0]
    assert after.raw[after.spans[0x73][2] :] == raw[tail:]


def test_a_batch_holds_its_messages() -> None:
    inside = [build_message(data=b"x" * size) for size in (0, 10, 300)]
    payload = batch_payload(inside)
    assert batch_messages(payload) == inside
    envelope = PROPERTIES + payload
    assert batch_messages(envelope) == inside
    with pytest.raises(DecodeError):
        batch_messages(VALUE)


def test_a_field_of_a_wrong_type_is_the_callers_error() -> None:
    with pytest.raises(EncodeError, match="priority"):
        build_message(header=Header(priority=300))
    with pytest.raises(EncodeError, match="content_type"):
        build_message(properties=Properties(content_type="é"))
    with pytest.raises(EncodeError, match="to"):
        build_message(properties=Properties(to=5))  # type: ignore[arg-type]  # the wrong type is the point


def test_reading_a_body_as_another_kind_is_a_decode_error() -> None:
    with pytest.raises(DecodeError, match="value"):
        _ = split_sections(DATA).value
    with pytest.raises(DecodeError, match="data"):
        _ = split_sections(VALUE).data
    with pytest.raises(DecodeError, match="sequence"):
        _ = split_sections(VALUE).sequences


def test_wrong_types_are_found_when_a_section_is_read() -> None:
    with pytest.raises(DecodeError):
        _ = split_sections(b"\x00\x53\x70" + encode(["durable"])).header
    with pytest.raises(DecodeError):
        _ = split_sections(b"\x00\x53\x70" + encode([None] * 6)).header


def test_sections_are_replaced_and_the_others_stay() -> None:
    raw = build_message(
        header=Header(ttl=1), message_annotations={"x": 1}, application_properties={"a": 1}, data=b"body"
    )
    changed = with_sections(split_sections(raw), properties=Properties(subject="s"), application_properties={"b": 2})
    expected = build_message(
        header=Header(ttl=1),
        message_annotations={"x": 1},
        properties=Properties(subject="s"),
        application_properties={"b": 2},
        data=b"body",
    )
    assert changed == expected
    assert with_sections(
        split_sections(raw), header=Header(ttl=2), message_annotations={Symbol("y"): 2}
    ) == build_message(
        header=Header(ttl=2), message_annotations={"y": 2}, application_properties={"a": 1}, data=b"body"
    )
