"""Transfers that are too large, and empty batches: each is answered by itself, and the link stays."""

import pytest

from tests.namespace.front.amqp_peer import Peer
from twinbus.amqp import BATCH_FORMAT, Accepted, LinkState, Properties, Rejected, batch_payload, build_message

LARGEST = 262_144
PROPERTIES_ALONE = build_message(properties=Properties(message_id="m")).removesuffix(b"\x00\x53\x77\x40")


def sized(size: int, *, batched: bool) -> bytes:
    """Return one message, or a batch of two, of exactly this size on the wire."""

    def made(length: int) -> bytes:
        raw = build_message(properties=Properties(message_id="m"), data=b"x" * length)
        return batch_payload([raw, build_message(data=b"x" * 1000)]) if batched else raw

    return made(100_000 + size - len(made(100_000)))


@pytest.mark.parametrize("batched", [False, True])
async def test_a_transfer_larger_than_the_link_takes_is_rejected_by_itself(peer: Peer, batched: bool) -> None:
    sender = await peer.sender("orders")
    assert sender.remote is not None
    assert sender.remote.max_message_size == LARGEST
    form = BATCH_FORMAT if batched else 0
    for tag, size in ((b"1", LARGEST + 1), (b"2", LARGEST), (b"3", 1_000_000)):
        payload = sized(size, batched=batched)
        assert len(payload) == size
        sender.send(tag, payload, message_format=form)
    peer.flush()
    states = {answer.first: answer.state for answer in await peer.answers(3)}
    assert isinstance(states[1], Accepted)
    for number in (0, 2):
        state = states[number]
        assert isinstance(state, Rejected)
        assert state.error is not None
        assert state.error.condition == "amqp:link:message-size-exceeded"
        assert "262144 bytes" in str(state.error.description)
    await peer.echo()
    assert sender.state is LinkState.ATTACHED


async def test_n1_the_sections_before_a_batch_do_not_count(peer: Peer) -> None:
    # The Python client fills a batch up to the limit, and then writes properties of the first message before it.
    sender = await peer.sender("orders")
    sender.send(b"1", PROPERTIES_ALONE + sized(LARGEST, batched=True), message_format=BATCH_FORMAT)
    peer.flush()
    (answer,) = await peer.answers(1)
    assert isinstance(answer.state, Accepted)


@pytest.mark.parametrize("payload", [b"", PROPERTIES_ALONE])
async def test_a_batch_without_messages_stores_nothing_and_is_accepted(peer: Peer, payload: bytes) -> None:
    sender = await peer.sender("orders")
    sender.send(b"empty", payload, message_format=BATCH_FORMAT)
    peer.send(sender, "after")
    answers = await peer.answers(1)
    assert all(isinstance(answer.state, Accepted) for answer in answers)
