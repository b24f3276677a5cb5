"""Packing messages into transfers: nothing is lost, nothing is reordered, no transfer is larger than the limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.amqp import BATCH_FORMAT, batch_messages, split_sections
from twinbus.connect.errors import MessageSizeExceededError
from twinbus.connect.message_encoding import encode_message, pack_transfers
from twinbus.message import Message


def encoded(size: int, name: str | None = None) -> bytes:
    return encode_message(Message(b"x" * size, message_id=name, session_id=name), 0)


@given(st.lists(st.integers(0, 600), max_size=40), st.integers(700, 4000), st.booleans())
def test_batches_hold_all_messages_in_order_and_keep_to_the_limit(sizes: list[int], limit: int, named: bool) -> None:
    messages = [encoded(size, f"name {index}" if named else None) for index, size in enumerate(sizes)]
    found: list[bytes] = []
    for batch in pack_transfers(messages, limit):
        inside = batch_messages(batch.payload) if batch.message_format == BATCH_FORMAT else [batch.payload]
        assert inside == messages[batch.first : batch.end]
        assert len(batch.payload) <= limit
        found += inside
    assert found == messages


def test_as_many_as_fit_go_into_one_batch() -> None:
    messages = [encoded(100)] * 50
    whole = pack_transfers(messages, 1_000_000)
    assert len(whole) == 1
    assert len(pack_transfers(messages, len(whole[0].payload))) == 1
    assert len(pack_transfers(messages, len(whole[0].payload) - 1)) == 2


def test_a_message_alone_is_sent_as_it_is() -> None:
    raw = encoded(10)
    (batch,) = pack_transfers([raw], 1000)
    assert (batch.payload, batch.message_format) == (raw, 0)


def test_a_batch_has_id_session_and_partition_of_its_first_message() -> None:
    first = encode_message(Message(b"", message_id="m", session_id="s", partition_key="s"), 0)
    (batch,) = pack_transfers([first, encoded(1)], 1000)
    envelope = split_sections(batch.payload)
    assert (envelope.properties.message_id, envelope.properties.group_id) == ("m", "s")
    assert envelope.message_annotations == {"x-opt-partition-key": "s"}


def test_one_message_that_is_too_large_refuses_all() -> None:
    with pytest.raises(MessageSizeExceededError, match="the link accepts at most 500"):
        pack_transfers([encoded(10), encoded(600)], 500)


def test_no_messages_make_no_transfer() -> None:
    assert pack_transfers([], 100) == []
