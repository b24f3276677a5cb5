from typing import Any
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.amqp import strategies
from twinbus.amqp.delivery_splicing import (
    NO_ENTRIES,
    NO_LOCK_TOKEN,
    EncodedEntries,
    broker_annotations,
    encode_annotations,
    lock_token_annotation,
    splice_delivery,
)
from twinbus.amqp.encoding import encode
from twinbus.amqp.fast_splicing import splice_locked_delivery, splice_unlocked_delivery
from twinbus.amqp.message_builder import build_message
from twinbus.amqp.message_sections import Header, Properties, split_sections
from twinbus.values import Int, Long, Symbol, Timestamp

TOKEN = UUID(int=99)
OURS = broker_annotations(5, 1_700_000_000_000, 1_700_000_060_000)


def deliver(raw: bytes, **changes: Any) -> bytes:
    arguments: dict[str, Any] = {
        "delivery_count": 0,
        "delivery_annotations": lock_token_annotation(TOKEN),
        "message_annotations": OURS,
        **changes,
    }
    return b"".join(splice_delivery(raw, **arguments))


@given(strategies.parts, strategies.bodies)
@settings(max_examples=60, deadline=None)
def test_a_delivery_adds_the_brokers_annotations_and_keeps_the_senders_sections(
    parts: dict[str, Any], body: dict[str, Any]
) -> None:
    raw = build_message(**parts, **body)
    before, after = split_sections(raw), split_sections(deliver(raw, delivery_count=3))
    header = before.header
    header.delivery_count = 3
    assert after.header == header
    assert after.delivery_annotations == {**before.delivery_annotations, "x-opt-lock-token": TOKEN}
    assert after.message_annotations == {
        **before.message_annotations,
        "x-opt-sequence-number": 5,
        "x-opt-enqueued-time": 1_700_000_000_000,
        "x-opt-locked-until": 1_700_000_060_000,
    }
    start = next((before.spans[code][0] for code in (0x73, 0x74) if code in before.spans), before.body_start)
    assert after.raw.endswith(raw[start:])


@given(strategies.parts, strategies.bodies, st.uuids(), st.integers(0, 300))
@settings(max_examples=100, deadline=None)
def test_the_fast_path_of_a_delivery_gives_the_same_bytes(
    parts: dict[str, Any], body: dict[str, Any], token: UUID, count: int
) -> None:
    enqueued, until = 1_700_000_000_000, 1_700_000_060_000
    locked, unlocked = (broker_annotations(5, enqueued, lock, 4, state=0) for lock in (until, None))
    for some in (parts, {name: part for name, part in parts.items() if name.endswith("properties")}):
        raw = build_message(**some, **body)
        is_usual = count <= 255 and not any(code in split_sections(raw).spans for code in (0x70, 0x71, 0x72))
        for found, tokens, annotations in (
            (splice_locked_delivery(raw, count, token.bytes_le, 5, enqueued, until, 4), token, locked),
            (splice_unlocked_delivery(raw, count, 5, enqueued, 4), None, unlocked),
        ):
            assert (found is not None) == is_usual
            if found is not None:
                ours = NO_LOCK_TOKEN if tokens is None else lock_token_annotation(tokens)
                thorough = deliver(
                    raw, delivery_count=count, delivery_annotations=ours, message_annotations=annotations
                )
                assert b"".join(found) == thorough


@given(strategies.parts, strategies.bodies, strategies.application_properties)
@settings(max_examples=60, deadline=None)
def test_an_overlay_is_merged_into_the_application_properties(
    parts: dict[str, Any], body: dict[str, Any], overlay: dict[str, Any]
) -> None:
    raw = build_message(**parts, **body)
    before, after = split_sections(raw), split_sections(deliver(raw, overlay=overlay))
    assert after.application_properties == {**before.application_properties, **overlay}
    assert after.properties == before.properties
    assert after.raw[after.body_start :] == raw[before.body_start :]


def test_the_brokers_annotation_replaces_the_senders() -> None:
    raw = build_message(
        data=b"",
        message_annotations={"x-opt-sequence-number": Long(77), "x-opt-partition-key": "theirs", "mine": True},
    )
    found = split_sections(deliver(raw)).message_annotations
    assert found["x-opt-sequence-number"] == 5
    assert found["x-opt-partition-key"] == "theirs"
    assert found["mine"] is True


def test_the_brokers_annotation_replaces_the_senders_in_any_encoding_of_the_key() -> None:
    key = b"\xb3" + len("x-opt-sequence-number").to_bytes(4) + b"x-opt-sequence-number"
    content = key + encode(Long(77))
    raw = b"\x00\x53\x72\xc1" + bytes((len(content) + 1, 2)) + content + b"\x00\x53\x75\xa0\x00"
    assert split_sections(deliver(raw)).message_annotations["x-opt-sequence-number"] == 5


def test_the_header_keeps_priority_and_durable_and_gets_a_ttl() -> None:
    raw = build_message(
        data=b"", header=Header(durable=True, priority=7, ttl=10, first_acquirer=True, delivery_count=4)
    )
    assert split_sections(deliver(raw, delivery_count=1000, ttl=99)).header == Header(True, 7, 99, True, 1000)
    assert split_sections(deliver(raw, delivery_count=2)).header == Header(True, 7, 10, True, 2)
    assert split_sections(deliver(build_message(data=b""), ttl=99)).header == Header(ttl=99, delivery_count=0)


def test_every_header_field_is_written_at_its_position() -> None:
    start = split_sections(deliver(build_message(data=b""))).spans[0x70][1]
    assert deliver(build_message(data=b""))[start + 2] == 5


def test_an_empty_map_of_delivery_annotations_is_not_none() -> None:
    raw = build_message(data=b"")
    assert 0x71 in split_sections(deliver(raw, delivery_annotations=NO_ENTRIES)).spans
    assert 0x71 not in split_sections(deliver(raw, delivery_annotations=None)).spans


def test_a_plain_delivery_does_not_copy_the_message() -> None:
    raw = build_message(data=b"x" * 1000, properties=Properties(message_id="1"))
    parts = splice_delivery(raw, delivery_count=0, message_annotations=OURS)
    assert parts[1] is raw


def test_all_broker_annotations_have_their_types() -> None:
    full = broker_annotations(
        1, 2, 3, enqueued_seq=4, partition_key="pk", scheduled_ms=5, state=2, deadletter_source="queue"
    )
    found = split_sections(deliver(build_message(data=b""), message_annotations=full)).message_annotations
    assert {key: (type(value), value) for key, value in found.items()} == {
        "x-opt-sequence-number": (Long, 1),
        "x-opt-enqueued-time": (Timestamp, 2),
        "x-opt-locked-until": (Timestamp, 3),
        "x-opt-enqueue-sequence-number": (Long, 4),
        "x-opt-partition-key": (str, "pk"),
        "x-opt-scheduled-enqueue-time": (Timestamp, 5),
        "x-opt-message-state": (Int, 2),
        "x-opt-deadletter-source": (str, "queue"),
    }
    assert all(type(key) is Symbol for key in found)


def test_encoded_entries_count_keys_and_values() -> None:
    assert encode_annotations({"a": True, "b": None}) == EncodedEntries(4, b"\xa3\x01a\x41\xa3\x01b\x40")
