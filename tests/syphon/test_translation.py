"""Y3, Y6, Y7, S9 and S10 on the bytes of a message: the translated message equals the message before diverting."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any
from uuid import UUID

import hypothesis.strategies as st
import pytest
from azure.servicebus._pyamqp._encode import encode_payload
from azure.servicebus._transport._pyamqp_transport import PyamqpTransport
from azure.servicebus.amqp import AmqpAnnotatedMessage
from hypothesis import given

from tests.amqp import strategies as amqp
from twinbus.amqp import (
    APPLICATION_PROPERTIES,
    DELIVERY_ANNOTATIONS,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    Header,
    Properties,
    broker_annotations,
    build_message,
    list_field_slices,
    lock_token_annotation,
    read_map_header,
    read_routing_fields,
    skip,
    splice_delivery,
    split_sections,
)
from twinbus.amqp.message_sections import FOOTER
from twinbus.backlog import (
    COMPRESSION_PROPERTY,
    PATH_PROPERTY,
    SCHEDULED_TIME_PROPERTY,
    SESSION_ID_PROPERTY,
    TIME_TO_LIVE_PROPERTY,
)
from twinbus.pairing.message_copies import copy_for_backlog
from twinbus.syphon.translation import DeadLetterReason, destination_of, resubmittable, translate
from twinbus.syphon.transport import NeverDeliverableError
from twinbus.values import Described, Int, Long, Symbol, Timestamp, UInt

NOW = 1_800_000_000_000
TOKEN = UUID(int=7)
DAY = 24 * 3600 * 1000
LONG = 0xFFFF_FFFF


def received(
    raw: bytes, *, enqueued: int = NOW, ttl: int | None = None, overlay: dict[str, Any] | None = None
) -> bytes:
    """The message as the broker of the backlog delivers it."""
    annotations = broker_annotations(11, enqueued, NOW + 60_000, enqueued_seq=11, state=0)
    kept = read_routing_fields(raw).raw
    return b"".join(
        splice_delivery(
            kept,
            delivery_count=3,
            ttl=ttl,
            delivery_annotations=lock_token_annotation(TOKEN),
            message_annotations=annotations,
            overlay=overlay,
        )
    )


def in_backlog(**given: Any) -> bytes:
    properties = {PATH_PROPERTY: "orders", **given.pop("application_properties", {})}
    return build_message(**{"data": b"body", **given}, application_properties=properties)


def shape(raw: bytes) -> dict[str, Any]:
    """Return every field as on the wire. An empty section counts as no section (§3.2)."""
    sections = split_sections(read_routing_fields(raw).raw)

    def fields(code: int) -> list[bytes]:
        found = list_field_slices(sections.raw, sections.spans[code][1]) if code in sections.spans else []
        while found and found[-1] == b"\x40":
            found.pop()
        return found

    def pairs(code: int) -> dict[bytes, bytes]:
        count, pos = read_map_header(sections.raw, sections.spans[code][1]) if code in sections.spans else (0, 0)
        ends = [pos, *(pos := skip(sections.raw, pos) for _ in range(count))]
        parts = [sections.raw[start:end] for start, end in pairwise(ends)]
        return dict(zip(parts[::2], parts[1::2], strict=True))

    return {
        "header": fields(HEADER),
        "delivery annotations": pairs(DELIVERY_ANNOTATIONS),
        "annotations": pairs(MESSAGE_ANNOTATIONS),
        "properties": fields(PROPERTIES),
        "application properties": pairs(APPLICATION_PROPERTIES),
        "body": sections.raw[sections.body_start : sections.body_end],
        "footer": pairs(FOOTER),
    }


# --- round trip: the SDK's sender, a backlog, the syphon -------------------------------------------------------------

numbers = st.integers(-(2**31), 2**31 - 1)
instants = st.integers(1, 7_000_000_000).map(lambda seconds: datetime.fromtimestamp(seconds, UTC))
sdk_values = st.one_of(
    st.booleans(), numbers, st.floats(allow_nan=False), st.text(max_size=20), st.uuids(), instants, st.none()
)
names = st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1, max_size=8)
annotation_values = st.one_of(sdk_values, st.binary(max_size=8))
nested = st.recursive(
    st.one_of(annotation_values, st.none()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
)
bodies = st.one_of(
    st.builds(lambda data: {"data_body": data}, st.binary(max_size=400) | st.lists(st.binary(max_size=20), min_size=1)),
    st.builds(lambda value: {"value_body": value}, nested),
    st.builds(lambda rows: {"sequence_body": rows}, st.lists(st.lists(annotation_values, max_size=3), min_size=1)),
)
ids = st.one_of(st.text(min_size=1, max_size=20), st.uuids(), st.binary(min_size=1, max_size=9), st.integers(1, 2**63))
properties = st.fixed_dictionaries(
    {"message_id": ids},
    optional={
        "correlation_id": ids,
        "user_id": st.binary(min_size=1, max_size=5),
        "to": names,
        "subject": names,
        "reply_to": names,
        "content_type": names,
        "content_encoding": names,
        "group_id": st.text(max_size=9),
        "group_sequence": st.integers(0, LONG),
        "reply_to_group_id": names,
        "creation_time": st.integers(1, NOW),
        "absolute_expiry_time": st.integers(1, NOW * 2),
    },
)
headers = st.fixed_dictionaries(
    {},
    optional={
        "durable": st.booleans(),
        "priority": st.integers(0, 255),
        "time_to_live": st.integers(1, LONG),
        "first_acquirer": st.booleans(),
    },
)
user_annotations = st.dictionaries(names, annotation_values, max_size=3)
scheduled = st.fixed_dictionaries({}, optional={"x-opt-scheduled-enqueue-time": instants, "x-opt-partition-key": names})


@st.composite
def sdk_messages(draw: Callable[..., Any]) -> AmqpAnnotatedMessage:
    return AmqpAnnotatedMessage(
        **draw(bodies),
        header=draw(st.none() | headers),
        properties=draw(properties),
        application_properties=draw(st.none() | st.dictionaries(names, sdk_values, max_size=4)),
        annotations={**draw(user_annotations), **draw(scheduled)},
        delivery_annotations=draw(st.none() | user_annotations),
        footer=draw(st.none() | user_annotations),
    )


def encoded(raw: AmqpAnnotatedMessage) -> bytes:
    return bytes(encode_payload(bytearray(), PyamqpTransport.to_outgoing_amqp_message(raw)))


@given(sdk_messages(), st.booleans(), st.none() | st.integers(1, LONG))
def test_y3_what_the_sdk_diverted_reaches_the_primary_as_the_sdk_would_have_sent_it(
    sent: AmqpAnnotatedMessage, packed: bool, broker_ttl: int | None
) -> None:
    meant = shape(encoded(sent))
    path, raw, _ = translate(received(encoded(copy_for_backlog(sent, "orders", compress=packed)), ttl=broker_ttl), NOW)
    found = shape(raw)
    assert path == "orders"
    if sent.header is not None and sent.header.time_to_live is not None:
        # The SDK computes these two from the time to live when it sends. S7 clears them; the service needs neither.
        for one in (found, meant):
            one["properties"] = [field for index, field in enumerate(one["properties"]) if index not in (8, 9)]
            while one["properties"] and one["properties"][-1] == b"\x40":
                one["properties"].pop()
    assert found == meant


@given(amqp.bodies, amqp.parts)
def test_y3_values_of_every_amqp_type_are_carried_byte_for_byte(body: dict[str, Any], parts: dict[str, Any]) -> None:
    meant = {**parts, "application_properties": {**parts.get("application_properties", {})}}
    header = meant.get("header") or Header()
    meant["header"] = Header(header.durable, header.priority, None, header.first_acquirer)
    stored = {
        **meant,
        "application_properties": {**meant["application_properties"], PATH_PROPERTY: "orders"},
    }
    path, raw, _ = translate(received(build_message(**body, **stored)), NOW)
    assert path == "orders"
    assert shape(raw) == shape(build_message(**body, **meant))


def test_y3_nothing_of_the_brokers_is_carried_over() -> None:
    raw = translate(received(in_backlog(), ttl=5 * DAY), NOW).raw
    assert raw == build_message(data=b"body")


# --- aliases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ticks", [Long(70_000_000), Described(Symbol("com.microsoft:timespan"), Long(70_000_000))])
def test_y3_the_time_to_live_is_read_as_a_long_or_as_the_old_clients_span(ticks: object) -> None:
    raw = translate(received(in_backlog(application_properties={TIME_TO_LIVE_PROPERTY: ticks})), NOW).raw
    assert split_sections(raw).header.ttl == 7_000


def test_y3_a_time_to_live_too_long_for_a_header_is_written_as_creation_and_expiry() -> None:
    ticks = Long(100 * DAY * 10_000)
    raw = translate(received(in_backlog(application_properties={TIME_TO_LIVE_PROPERTY: ticks})), NOW).raw
    found = split_sections(raw)
    assert found.header.ttl == LONG
    assert (found.properties.creation_time, found.properties.absolute_expiry_time) == (NOW, NOW + 100 * DAY)


def test_y3_the_old_clients_endless_span_ends_with_the_last_datetime_of_dotnet() -> None:
    ticks = Described(Symbol("com.microsoft:timespan"), Long(2**63 - 1))
    raw = translate(received(in_backlog(application_properties={TIME_TO_LIVE_PROPERTY: ticks})), NOW).raw
    assert split_sections(raw).properties.absolute_expiry_time == 253_402_300_800_000


def test_s10_a_scheduled_time_comes_back_as_the_annotation_it_was() -> None:
    raw = translate(
        received(in_backlog(application_properties={SCHEDULED_TIME_PROPERTY: Timestamp(NOW + DAY)})), NOW
    ).raw
    assert read_routing_fields(raw).scheduled_enqueue_time == NOW + DAY
    assert split_sections(raw).application_properties == {}


@pytest.mark.parametrize(
    ("properties", "reason", "named"),
    [
        ({PATH_PROPERTY: ""}, DeadLetterReason.NO_DESTINATION, PATH_PROPERTY),
        ({PATH_PROPERTY: 5}, DeadLetterReason.NO_DESTINATION, PATH_PROPERTY),
        ({SESSION_ID_PROPERTY: 5}, DeadLetterReason.WRONG_ALIAS, SESSION_ID_PROPERTY),
        ({TIME_TO_LIVE_PROPERTY: "an hour"}, DeadLetterReason.WRONG_ALIAS, TIME_TO_LIVE_PROPERTY),
        ({TIME_TO_LIVE_PROPERTY: Int(5)}, DeadLetterReason.WRONG_ALIAS, TIME_TO_LIVE_PROPERTY),
        ({SCHEDULED_TIME_PROPERTY: Long(5)}, DeadLetterReason.WRONG_ALIAS, SCHEDULED_TIME_PROPERTY),
        ({COMPRESSION_PROPERTY: "zstd"}, DeadLetterReason.WRONG_ALIAS, COMPRESSION_PROPERTY),
        ({COMPRESSION_PROPERTY: "deflate"}, DeadLetterReason.WRONG_ALIAS, COMPRESSION_PROPERTY),
    ],
)
def test_y6_an_alias_of_a_wrong_kind_can_never_be_delivered(
    properties: dict[str, object], reason: DeadLetterReason, named: str
) -> None:
    with pytest.raises(NeverDeliverableError, match=named) as raised:
        translate(received(in_backlog(application_properties=properties)), NOW)
    assert raised.value.reason == reason


def test_y6_a_message_without_a_path_has_no_destination() -> None:
    with pytest.raises(NeverDeliverableError) as raised:
        translate(received(build_message(data=b"body")), NOW)
    assert (raised.value.reason, raised.value.description) == (DeadLetterReason.NO_DESTINATION, "x-ms-path is missing")
    assert destination_of(received(build_message(data=b"body"))) is None


def test_y6_bytes_that_are_no_message_can_never_be_delivered() -> None:
    with pytest.raises(NeverDeliverableError) as raised:
        translate(b"\x00\x53\x74\xc1\xff", NOW)
    assert raised.value.reason == DeadLetterReason.MALFORMED


def test_the_destination_is_told_without_translating() -> None:
    assert destination_of(received(in_backlog(properties=Properties(message_id="1")))) == "orders"


# --- time to live (Y7) -----------------------------------------------------------------------------------------------


def lived(spent: int, ttl: int, *, scheduled_in: int | None = None) -> bytes:
    properties: dict[str, object] = {TIME_TO_LIVE_PROPERTY: Long(ttl * 10_000)}
    if scheduled_in is not None:
        properties[SCHEDULED_TIME_PROPERTY] = Timestamp(NOW + scheduled_in)
    return received(in_backlog(application_properties=properties), enqueued=NOW - spent)


def test_y7_a_time_to_live_starts_anew_on_the_primary() -> None:
    assert split_sections(translate(lived(spent=DAY, ttl=5_000), NOW).raw).header.ttl == 5_000


def test_y7_absolute_deducts_the_time_spent_in_the_backlog() -> None:
    assert split_sections(translate(lived(spent=2_000, ttl=5_000), NOW, "absolute").raw).header.ttl == 3_000


def test_y7_absolute_never_delivers_what_expired() -> None:
    with pytest.raises(NeverDeliverableError) as raised:
        translate(lived(spent=5_000, ttl=5_000), NOW, "absolute")
    assert raised.value.reason == "TTLExpiredException"


@pytest.mark.parametrize(("scheduled_in", "left"), [(60_000, 5_000), (0, 5_000), (-2_000, 3_000)])
def test_y7_the_time_to_live_of_a_scheduled_message_starts_when_it_is_due(scheduled_in: int, left: int) -> None:
    raw = translate(lived(spent=DAY, ttl=5_000, scheduled_in=scheduled_in), NOW, "absolute").raw
    assert split_sections(raw).header.ttl == left


# --- resubmitting (Y6) -----------------------------------------------------------------------------------------------

DEAD = {"DeadLetterReason": "NoDestination", "DeadLetterErrorDescription": "x-ms-path is missing"}


def test_y6_a_dead_letter_goes_back_with_its_aliases_and_without_its_reason() -> None:
    sent = in_backlog(
        properties=Properties(message_id="1"),
        message_annotations={"mine": UInt(5)},
        application_properties={"colour": "red", SESSION_ID_PROPERTY: "s"},
    )
    back = resubmittable(received(sent, ttl=DAY, overlay=DEAD))
    assert shape(back) == shape(sent)
    assert translate(received(back), NOW) == translate(received(sent), NOW)


@pytest.mark.parametrize("properties", [{}, {PATH_PROPERTY: "gone"}])
def test_y6_a_dead_letter_can_be_given_another_destination(properties: dict[str, object]) -> None:
    dead = received(build_message(data=b"body", application_properties=properties), overlay=DEAD)
    assert translate(received(resubmittable(dead, "orders")), NOW)[:2] == ("orders", build_message(data=b"body"))
