"""The fast translation returns what the plain one returns."""

from datetime import timedelta
from typing import Any
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from twinbus.amqp import (
    EncodedEntries,
    Properties,
    broker_annotations,
    build_message,
    lock_token_annotation,
    splice_delivery,
)
from twinbus.connect import ReceivedMessage, encode_message
from twinbus.message import BodyType, Message
from twinbus.syphon.fast_translation import fast_translate
from twinbus.syphon.translation import translate
from twinbus.syphon.transport import NeverDeliverableError
from twinbus.values import Long, Symbol

TOKEN = UUID(int=7)
VALUES = st.one_of(
    st.none(), st.booleans(), st.text(max_size=300), st.binary(max_size=10), st.integers(0, 9), st.floats(), st.uuids()
)
NAMES = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["x-ms-path", "x-ms-sessionid", "x-ms-timetolive", "x-mine", "x-ms-pathological", "x"]),
)


def as_delivered(raw: bytes, **arguments: Any) -> bytes:
    annotations: EncodedEntries = broker_annotations(5, 1_700_000_000_000, 1_700_000_060_000, 5, state=0)
    return b"".join(
        splice_delivery(
            raw,
            delivery_count=arguments.pop("delivery_count", 0),
            delivery_annotations=lock_token_annotation(TOKEN),
            message_annotations=annotations,
            **arguments,
        )
    )


def both(raw: bytes) -> bool:
    """Whether the fast path took the message. If it did, the plain path must return the same."""
    found = fast_translate(raw)
    if found is None:
        return False
    plain = translate(raw, 1_700_000_000_500)
    assert (found.path, found.raw, found.enqueued) == plain
    received = ReceivedMessage(raw, None)
    assert (found.message_id, found.sequence_number) == (received.message_id, received.sequence_number)
    return True


@given(
    st.one_of(
        st.dictionaries(NAMES, VALUES, max_size=6),
        # With a destination, so that the fast path takes most of them.
        st.builds(
            lambda before, path, after: {**before, "x-ms-path": path, **after},
            st.dictionaries(st.text(max_size=8), VALUES, max_size=3),
            st.text(min_size=1, max_size=40),
            st.dictionaries(st.text(max_size=8), VALUES, max_size=3),
        ),
    ),
    st.one_of(st.none(), st.text(min_size=1, max_size=40), st.uuids(), st.binary(max_size=8)),
    st.one_of(st.none(), st.integers(1, 10**9)),
    st.integers(0, 300),
    st.binary(max_size=400),
)
def test_a_fast_translation_equals_the_plain_one(
    properties: dict[str, Any], message_id: Any, ttl: int | None, count: int, body: bytes
) -> None:
    made = Message(body, message_id=message_id, application_properties=properties)
    raw = encode_message(made, 0)
    both(as_delivered(raw, delivery_count=count, ttl=ttl))


def test_the_usual_message_is_translated_by_the_fast_path() -> None:
    made = Message(
        b"x", message_id="id", subject="s", application_properties={"a": 1, "x-ms-path": "orders", "b": None}
    )
    assert both(as_delivered(encode_message(made, 0)))


def test_other_aliases_annotations_and_bodies_are_left_to_the_plain_path() -> None:
    for made in (
        Message(b"x", application_properties={"x-ms-path": "orders", "x-ms-timetolive": Long(5)}),
        Message(b"x", application_properties={"x-ms-path": "orders"}, annotations={Symbol("mine"): 1}),
        Message(b"x", application_properties={"x-ms-path": Symbol("orders")}),
        Message(b"x", application_properties={}),
        Message([[1]], body_type=BodyType.SEQUENCE, time_to_live=timedelta(seconds=5)),
    ):
        assert fast_translate(as_delivered(encode_message(made, 0))) is None


@given(st.binary(max_size=200), st.integers(0, 300))
def test_bytes_that_are_no_message_are_left_to_the_plain_path(noise: bytes, cut: int) -> None:
    whole = as_delivered(
        build_message(properties=Properties(message_id="i"), application_properties={"x-ms-path": "q"})
    )
    for raw in (noise, whole[:cut], whole[:cut] + noise):
        try:
            both(raw)
        except NeverDeliverableError:
            continue
