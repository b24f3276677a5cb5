from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.amqp.joined import only, opened, payloads
from twinbus.amqp.connection import Connection
from twinbus.amqp.errors import AmqpError
from twinbus.amqp.events import Delivered, Disposed, LinkDetached, LinkFlowed, SessionEnded
from twinbus.amqp.fast_frames import transfer_head
from twinbus.amqp.frames import performative_frame
from twinbus.amqp.limits import Limits
from twinbus.amqp.performatives import (
    ACCEPTED,
    RECEIVER,
    SENDER,
    Error,
    Flow,
    Modified,
    Rejected,
    Released,
    Transfer,
)
from twinbus.amqp.serial_numbers import MASK
from twinbus.values import Condition


def test_a_sender_sends_no_more_than_its_credit() -> None:
    joined = opened()
    session, _ = joined.begin()
    sender, receiver = joined.sender(session, credit=2)
    assert (sender.credit, receiver.credit) == (2, 2)
    sender.send(b"1", b"a")
    sender.send(b"2", b"b")
    assert sender.credit == 0
    with pytest.raises(AmqpError) as caught:
        sender.send(b"3", b"c")
    assert caught.value.condition == Condition.TRANSFER_LIMIT_EXCEEDED
    _, at_server = joined.exchange()
    assert len(only(Delivered, at_server)) == 2
    assert receiver.credit == 0
    receiver.flow(3, properties={"k": 1})
    at_client, _ = joined.exchange()
    [flowed] = only(LinkFlowed, at_client)
    assert flowed.properties == {"k": 1}
    assert sender.credit == 3


def test_credit_in_flight_is_not_counted_twice() -> None:
    joined = opened()
    session, _ = joined.begin()
    sender, receiver = joined.sender(session, credit=5)
    sender.send(b"1", b"a")
    receiver.flow(5)
    joined.exchange()
    assert sender.credit == 4
    assert receiver.credit == 4


def test_a_drained_sender_gives_its_credit_back() -> None:
    joined = opened()
    session, _ = joined.begin()
    receiver, sender = joined.receiver(session, credit=0)
    receiver.flow(10, drain=True)
    _, at_server = joined.exchange()
    assert [event.link for event in only(LinkFlowed, at_server)] == [sender]
    assert sender.drain
    sender.send(b"1", b"a")
    sender.drained()
    at_client, _ = joined.exchange()
    assert payloads(at_client) == [b"a"]
    assert [event.link.credit for event in only(LinkFlowed, at_client)] == [0]
    assert receiver.delivery_count == sender.delivery_count == 10
    receiver.flow(1)
    joined.exchange()
    assert (sender.credit, sender.drain) == (1, False)


def test_drained_sends_nothing_without_a_drain_request() -> None:
    joined = opened()
    session, _ = joined.begin()
    _, sender = joined.receiver(session, credit=5)
    sender.drained()
    assert joined.server.data_to_send() == []
    assert sender.credit == 5


def test_an_echo_is_answered() -> None:
    joined = opened()
    session, _ = joined.begin()
    receiver, sender = joined.receiver(session, credit=0)
    receiver.flow(4, echo=True)
    at_client, at_server = joined.exchange()
    assert [event.echo for event in only(LinkFlowed, at_server)] == [True]
    assert [event.link for event in only(LinkFlowed, at_client)] == [receiver]
    joined.client.out.append(
        performative_frame(
            session.channel,
            Flow(next_incoming_id=0, incoming_window=9, next_outgoing_id=0, outgoing_window=9, echo=True),
        )
    )
    joined.server.receive(b"".join(joined.client.data_to_send()), 0.0)
    assert len(joined.server.data_to_send()) == 1
    assert sender.credit == 4


def test_only_the_receiver_grants_credit() -> None:
    joined = opened()
    session, _ = joined.begin()
    sender, _ = joined.sender(session)
    with pytest.raises(ValueError, match="receiver"):
        sender.flow(5)


def test_a_closed_window_holds_frames_back_in_order() -> None:
    server = Connection.server("s", limits=Limits(incoming_window=4))
    joined = opened(server=server)
    session, _ = joined.begin()
    one, _ = joined.sender(session)
    two, _ = joined.sender(session)
    for number in range(6):
        (one if number % 2 else two).send(b"%d" % number, b"%d" % number * 10)
    assert session.remote_incoming_window == 0
    assert one.pending_bytes + two.pending_bytes == 20
    _, at_server = joined.exchange()
    assert [payload[:1] for payload in payloads(at_server)] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert one.pending_bytes == two.pending_bytes == 0


def test_a_detach_is_sent_after_the_links_waiting_frames() -> None:
    server = Connection.server("s", limits=Limits(incoming_window=2))
    joined = opened(server=server)
    session, remote_session = joined.begin()
    sender, _ = joined.sender(session)
    for number in range(5):
        sender.send(b"%d" % number, b"x", settled=True)
    sender.detach()
    at_client, at_server = joined.exchange()
    assert [type(event) for event in at_server] == [Delivered] * 5 + [LinkDetached]
    assert len(only(LinkDetached, at_client)) == 1
    assert session.links == remote_session.links == []


def test_the_answer_to_a_detach_is_sent_after_the_links_waiting_frames() -> None:
    client = Connection.client("c", "h", limits=Limits(incoming_window=2))
    joined = opened(client=client)
    session, remote_session = joined.begin()
    receiver, sender = joined.receiver(session)
    for number in range(5):
        sender.send(b"%d" % number, b"x", settled=True)
    receiver.detach()
    at_client, at_server = joined.exchange()
    assert only(Delivered, at_client) == []
    assert len(only(LinkDetached, at_client)) == len(only(LinkDetached, at_server)) == 1
    assert session.links == remote_session.links == []


def test_a_transfer_into_a_closed_window_ends_the_session() -> None:
    server = Connection.server("s", limits=Limits(incoming_window=4))
    joined = opened(server=server)
    session, remote_session = joined.begin()
    sender, _ = joined.sender(session)
    flood = b"".join(transfer_head(session.channel, sender.handle, n, b"t", 0, True, False, 0) for n in range(5))
    events = server.receive(flood, 0.0)
    assert len(only(Delivered, events)) == 4
    [ended] = only(SessionEnded, events)
    assert ended.error is not None
    assert ended.error.condition == Condition.WINDOW_VIOLATION
    assert ended.session is remote_session
    assert server.receive(flood, 0.0) == []
    assert not server.is_closed


def test_a_delivery_without_credit_detaches_the_link_where_credit_is_enforced() -> None:
    joined = opened(server=Connection.server("s", limits=Limits(enforce_credit=True)))
    session, _ = joined.begin()
    sender, receiver = joined.sender(session, credit=1)
    frame = transfer_head(session.channel, sender.handle, 0, b"t", 0, True, False, 0)
    events = joined.server.receive(frame * 2, 0.0)
    assert len(only(Delivered, events)) == 1
    [gone] = only(LinkDetached, events)
    assert gone.link is receiver
    assert gone.error is not None
    assert gone.error.condition == Condition.TRANSFER_LIMIT_EXCEEDED
    at_client, at_server = joined.exchange()
    assert [event.error for event in only(LinkDetached, at_client)] == [gone.error]
    assert at_server == []


def test_a_server_accepts_deliveries_beyond_the_credit_by_default() -> None:
    joined = opened()
    session, _ = joined.begin()
    sender, receiver = joined.sender(session, credit=1)
    frame = transfer_head(session.channel, sender.handle, 0, b"t", 0, True, False, 0)
    assert len(only(Delivered, joined.server.receive(frame * 3, 0.0))) == 3
    assert receiver.credit == 0


@pytest.mark.parametrize("as_list", [False, True])
def test_a_large_message_is_cut_to_the_peers_frames(as_list: bool) -> None:
    joined = opened(server=Connection.server("s", max_frame_size=512))
    session, _ = joined.begin()
    sender, _ = joined.sender(session)
    payload = bytes(range(256)) * 20
    sender.send(b"t" * 32, [payload[:100], payload[100:]] if as_list else payload, message_format=7)
    frames = joined.client.data_to_send()
    sizes = [len(head) + len(piece) for head, piece in zip(frames[::2], frames[1::2], strict=True)]
    assert len(sizes) > 10
    assert max(sizes) <= 512
    [arrived] = only(Delivered, joined.server.receive(b"".join(frames), 0.0))
    assert (arrived.payload, arrived.message_format, arrived.tag) == (payload, 7, b"t" * 32)
    assert joined.server.partial_bytes == 0


def test_frames_of_two_links_may_be_interleaved() -> None:
    joined = opened()
    session, _ = joined.begin()
    (one, _), (two, _) = joined.sender(session), joined.sender(session)
    pieces = [
        (one, 0, b"a", True), (two, 1, b"b", True), (one, 0, b"a", True), (two, 1, b"b", False), (one, 0, b"a", False),
    ]  # fmt: skip
    raw = b"".join(
        transfer_head(session.channel, link.handle, number, b"t", 0, False, more, 1) + payload
        for link, number, payload, more in pieces
    )
    assert payloads(joined.server.receive(raw, 0.0)) == [b"bb", b"aaa"]


def whole(session_channel: int, transfer: Transfer, payload: bytes = b"") -> bytes:
    frame = performative_frame(session_channel, transfer)
    return (len(frame) + len(payload)).to_bytes(4) + frame[4:] + payload


def test_an_aborted_delivery_is_forgotten() -> None:
    joined = opened()
    session, _ = joined.begin()
    sender, receiver = joined.sender(session, credit=5)
    raw = whole(0, Transfer(sender.handle, 0, b"t", more=True), b"abc")
    raw += whole(0, Transfer(sender.handle, aborted=True), b"d")
    raw += whole(0, Transfer(sender.handle, 1, b"u"), b"next")
    assert payloads(joined.server.receive(raw, 0.0)) == [b"next"]
    assert receiver.credit == 3
    assert joined.server.partial_bytes == 0


def test_a_resumed_delivery_is_ignored() -> None:
    joined = opened()
    session, _ = joined.begin()
    sender, receiver = joined.sender(session, credit=5)
    raw = whole(0, Transfer(sender.handle, 0, b"t", resume=True, more=True), b"abc")
    raw += whole(0, Transfer(sender.handle), b"def")
    raw += whole(0, Transfer(sender.handle, 1, b"u"), b"next")
    assert payloads(joined.server.receive(raw, 0.0)) == [b"next"]
    assert receiver.credit == 4


def test_a_settled_flag_on_any_frame_settles_the_delivery() -> None:
    joined = opened()
    session, remote_session = joined.begin()
    sender, _ = joined.sender(session)
    raw = whole(0, Transfer(sender.handle, 0, b"t", more=True), b"a")
    raw += whole(0, Transfer(sender.handle, settled=True, more=True), b"b") + whole(0, Transfer(sender.handle), b"c")
    [arrived] = only(Delivered, joined.server.receive(raw, 0.0))
    assert (arrived.settled, arrived.payload) == (True, b"abc")
    assert remote_session.unsettled_in == {}


def test_a_message_above_the_links_limit_detaches_the_link() -> None:
    for pieces in (1, 4):
        joined = opened(client=Connection.client("c", "h"))
        session, _ = joined.begin()
        sender, receiver = joined.sender(session, max_message_size=1000)
        assert sender.max_message_size == 1000
        raw = b""
        for number in range(pieces):
            more = number < pieces - 1
            raw += whole(0, Transfer(sender.handle, 0, b"t", more=more), b"x" * (1200 // pieces))
        events = joined.server.receive(raw, 0.0)
        [gone] = only(LinkDetached, events)
        assert gone.link is receiver
        assert gone.error is not None
        assert gone.error.condition == Condition.MESSAGE_SIZE_EXCEEDED
        assert joined.server.partial_bytes == 0
        assert not joined.server.is_closed


def test_unfinished_deliveries_of_all_links_together_are_bounded() -> None:
    joined = opened(server=Connection.server("s", limits=Limits(partial_bytes=2500)))
    session, _ = joined.begin()
    links = [joined.sender(session) for _ in range(3)]
    raw = b"".join(
        whole(0, Transfer(link.handle, n, b"t", more=True), b"x" * 1000) for n, (link, _) in enumerate(links)
    )
    events = joined.server.receive(raw, 0.0)
    [gone] = only(LinkDetached, events)
    assert gone.link is links[2][1]
    assert gone.error is not None
    assert gone.error.condition == Condition.RESOURCE_LIMIT_EXCEEDED
    assert joined.server.partial_bytes == 2000


def test_the_number_of_unsettled_deliveries_is_bounded() -> None:
    joined = opened(server=Connection.server("s", limits=Limits(max_unsettled=3)))
    session, remote_session = joined.begin()
    sender, _ = joined.sender(session)
    for number in range(4):
        sender.send(b"%d" % number, b"")
    at_client, at_server = joined.exchange()
    assert len(only(Delivered, at_server)) == 3
    for events in (at_client, at_server):
        [ended] = only(SessionEnded, events)
        assert ended.error is not None
        assert ended.error.condition == Condition.RESOURCE_LIMIT_EXCEEDED
    assert remote_session.unsettled_in == {}


def test_what_we_send_unsettled_is_bounded_by_the_credit_we_show() -> None:
    joined = opened(server=Connection.server("s", limits=Limits(max_unsettled=2)))
    session, _ = joined.begin()
    _, sender = joined.receiver(session, credit=10)
    assert sender.credit == 2
    sender.send(b"1", b"")
    sender.send(b"2", b"")
    assert sender.credit == 0
    joined.exchange()
    session.dispose(RECEIVER, 0, settled=True, state=ACCEPTED)
    joined.exchange()
    assert sender.credit == 1


@pytest.mark.parametrize(
    "state",
    [
        ACCEPTED,
        Released(),
        Modified(True, True, {"a": 1}),
        Rejected(Error("com.microsoft:dead-letter", "why", {"DeadLetterReason": "r"})),
        None,
    ],
    ids=["accepted", "released", "modified", "rejected", "none"],
)
def test_each_outcome_arrives_in_both_directions(state: Any) -> None:
    joined = opened()
    session, remote_session = joined.begin()
    _, sender = joined.receiver(session)
    ids = [sender.send(b"%d" % number, b"") for number in range(3)]
    joined.exchange()
    session.dispose(RECEIVER, ids[0], ids[2], settled=False, state=state)
    _, at_server = joined.exchange()
    [told] = only(Disposed, at_server)
    assert (told.role, told.delivery_ids, told.settled, told.state) == (RECEIVER, ids, False, state)
    remote_session.dispose(SENDER, ids[0], ids[1], settled=True, state=state)
    at_client, _ = joined.exchange()
    [answer] = only(Disposed, at_client)
    assert (answer.role, answer.delivery_ids, answer.settled, answer.state) == (SENDER, ids[:2], True, state)
    assert list(remote_session.unsettled_out) == list(session.unsettled_in) == ids[2:]


def test_the_cost_of_a_wide_disposition_is_bounded_by_the_unsettled_deliveries() -> None:
    joined = opened()
    session, _ = joined.begin()
    _, sender = joined.receiver(session)
    ids = [sender.send(b"%d" % number, b"") for number in range(3)]
    joined.exchange()
    session.dispose(RECEIVER, 0, 0x7FFFFFFF, settled=True, state=ACCEPTED)
    _, at_server = joined.exchange()
    assert [event.delivery_ids for event in only(Disposed, at_server)] == [ids]
    session.dispose(RECEIVER, 0, 2, settled=True, state=ACCEPTED)
    _, at_server = joined.exchange()
    assert [event.delivery_ids for event in only(Disposed, at_server)] == [[]]


@pytest.mark.parametrize("start", [2**32 - 3, 2**31 - 3, 2**32 - 1])
def test_delivery_numbers_wrap_around(start: int) -> None:
    client = Connection.client("c", "h", first_outgoing_id=start, limits=Limits(incoming_window=8))
    server = Connection.server("s", first_outgoing_id=start, limits=Limits(incoming_window=8))
    joined = opened(client=client, server=server)
    session, remote_session = joined.begin()
    sender = session.attach("wrapping", SENDER, initial_delivery_count=start)
    joined.exchange()
    [receiver] = remote_session.links
    receiver.accept()
    receiver.flow(20)
    joined.exchange()
    ids = [sender.send(b"%d" % number, b"%d" % number) for number in range(20)]
    assert ids == [(start + number) & MASK for number in range(20)]
    _, at_server = joined.exchange()
    assert [event.delivery_id for event in only(Delivered, at_server)] == ids
    assert sender.delivery_count == receiver.delivery_count == (start + 20) & MASK
    remote_session.dispose(RECEIVER, ids[0], ids[9], settled=True, state=ACCEPTED)
    at_client, _ = joined.exchange()
    assert [event.delivery_ids for event in only(Disposed, at_client)] == [ids[:10]]
    assert list(session.unsettled_out) == ids[10:]
    receiver.flow(7)
    joined.exchange()
    assert sender.credit == 7


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3000)), max_size=25), st.integers(512, 2000), st.integers(1, 9)
)
@settings(max_examples=40, deadline=None)
def test_every_message_arrives_complete_for_any_frame_size_and_window(
    sizes: list[tuple[int, int]], frame_size: int, window: int
) -> None:
    server = Connection.server("s", max_frame_size=frame_size, limits=Limits(incoming_window=window))
    joined = opened(server=server)
    session, remote_session = joined.begin()
    links = [joined.sender(session, credit=30)[0] for _ in range(4)]
    sent = []
    for number, (index, size) in enumerate(sizes):
        payload = bytes((number & 0xFF,)) * size
        links[index].send(b"%d" % number, payload)
        sent.append((links[index].name, payload))
    _, at_server = joined.exchange()
    assert [(event.link.name, event.payload) for event in only(Delivered, at_server)] == sent
    assert len(remote_session.unsettled_in) == len(session.unsettled_out) == len(sent)
