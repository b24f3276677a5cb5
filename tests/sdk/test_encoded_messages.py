"""`lossless_message` returns an object that the SDK encodes with every value and type unchanged, or None (Y10)."""

from __future__ import annotations

from typing import Any

import pytest
from azure.servicebus._pyamqp._encode import encode_payload
from hypothesis import given

from tests.amqp import strategies as amqp
from twinbus.amqp import Header, Properties, Sections, build_message, encode, read_routing_fields, split_sections
from twinbus.sdk.encoded_messages import lossless_message
from twinbus.values import Byte, Char, Decimal32, Described, Int, Long, NumberKeyedMap, Symbol, Timestamp, UInt

COMMON: dict[str, Any] = {
    "header": Header(durable=True, priority=4, ttl=5),
    "properties": Properties(message_id="1", correlation_id=b"\x00", content_type="text/plain", creation_time=5),
    "message_annotations": {"x-a": Symbol("s"), "x-b": UInt(5), "x-c": Timestamp(5)},
    "application_properties": {"a": Long(5), "b": "text", "c": Byte(1), "d": Described(Symbol("com:x"), Long(5))},
    "footer": {"f": b"sum"},
}


def parts(sections: Sections) -> list[bytes]:
    maps = (sections.message_annotations, sections.application_properties, sections.footer)
    body = sections.raw[sections.body_start : sections.body_end]
    return [*(encode(one) for one in maps), repr((sections.header, sections.properties)).encode(), body]


def sent(raw: bytes) -> bytes:
    made = lossless_message(raw)
    assert made is not None
    return read_routing_fields(bytes(encode_payload(bytearray(), made))).raw


@pytest.mark.parametrize(
    "body",
    [
        {"data": b"body"},
        {"data": [b"one", b"two"]},
        {"value": [Long(5), Symbol("s"), {"a": Int(5)}]},
        {"value": [NumberKeyedMap((UInt(key), None) for key in range(100))]},
        {"value": "text"},
        {"sequence": [[Long(5)], ["text"]]},
    ],
)
def test_y10_usual_messages_are_unchanged(body: dict[str, Any]) -> None:
    raw = build_message(**body, **COMMON)
    assert parts(split_sections(sent(raw))) == parts(split_sections(raw))


@pytest.mark.parametrize(
    "odd",
    [
        {"application_properties": {"a": Char("x")}},
        {"message_annotations": {"a": Decimal32(bytes(4))}},
        {"value": Long(5)},
        {"value": Symbol("s")},
    ],
)
def test_y10_a_message_with_a_type_that_the_sdk_would_change_is_refused(odd: dict[str, Any]) -> None:
    assert lossless_message(build_message(**{"data": b"body"} | odd if "value" not in odd else odd)) is None


@given(amqp.bodies, amqp.parts)
def test_y10_every_message_that_is_not_refused_is_unchanged(body: dict[str, Any], given_parts: dict[str, Any]) -> None:
    raw = build_message(**body, **{**given_parts, "header": Header(durable=True)})
    if lossless_message(raw) is not None:
        again, first = split_sections(sent(raw)), split_sections(raw)
        assert encode(again.application_properties) == encode(first.application_properties)
        assert encode(again.message_annotations) == encode(first.message_annotations)
        assert again.properties == first.properties
        assert again.body_kind == first.body_kind
