from random import Random

import pytest

from tests.amqp.joined import Joined, bare_server, closing_error, only, opened, payloads
from twinbus.amqp.connection import Connection
from twinbus.amqp.errors import AmqpError
from twinbus.amqp.events import (
    ConnectionClosed,
    Delivered,
    Disposed,
    LinkAccepted,
    LinkAttached,
    LinkDetached,
    Opened,
    SessionBegun,
    SessionEnded,
)
from twinbus.amqp.frames import HEARTBEAT, performative_frame
from twinbus.amqp.limits import Limits
from twinbus.amqp.performatives import (
    ACCEPTED,
    RECEIVER,
    SENDER,
    Attach,
    Begin,
    Detach,
    End,
    Error,
    Flow,
    Source,
    Target,
    Transfer,
)
from twinbus.values import Condition


def test_a_message_goes_to_the_server_and_its_outcome_back() -> None:
    joined = opened()
    session, _ = joined.begin()
    sender, _ = joined.sender(session)
    delivery_id = sender.send(b"tag", b"payload", message_format=0x80013700)
    _, at_server = joined.exchange()
    [arrived] = only(Delivered, at_server)
    assert (arrived.tag, arrived.payload, arrived.message_format) == (b"tag", b"payload", 0x80013700)
    assert not arrived.settled
    arrived.link.session.dispose(RECEIVER, arrived.delivery_id, settled=True, state=ACCEPTED)
    at_client, _ = joined.exchange()
    [told] = only(Disposed, at_client)
    assert (told.role, told.first, told.settled, told.state) == (RECEIVER, delivery_id, True, ACCEPTED)
    assert told.delivery_ids == [delivery_id]


@pytest.mark.parametrize("seed", range(8))
def test_a_stream_may_be_cut_anywhere(seed: int) -> None:
    chunks = Random(seed)
    joined = Joined(Connection.client("c", "h", max_frame_size=600), Connection.server("s", max_frame_size=700))
    session = joined.client.begin()
    link = session.attach("in", SENDER, source=Source("a"), target=Target("b"))
    _, at_server = joined.exchange(chunks)
    theirs = only(LinkAttached, at_server)[0].link
    theirs.accept()
    theirs.flow(50)
    joined.exchange(chunks)
    sent = [bytes((number,)) * (number * 97) for number in range(30)]
    for number, payload in enumerate(sent):
        link.send(b"%d" % number, payload)
    _, at_server = joined.exchange(chunks)
    assert payloads(at_server) == sent


def test_everything_may_be_pipelined_before_the_first_answer() -> None:
    joined = Joined()
    session = joined.client.begin()
    session.attach("one", SENDER, source=Source("a"), target=Target("b"))
    session.attach("two", RECEIVER, source=Source("a"), target=Target("b"))
    _, at_server = joined.exchange()
    assert [type(event) for event in at_server[1:]] == [Opened, SessionBegun, LinkAttached, LinkAttached]


def test_the_server_sees_the_attach_and_answers_later() -> None:
    joined = opened()
    session, _ = joined.begin()
    ours = session.attach(
        "link", RECEIVER, source=Source("queue"), target=Target("me"), snd_settle_mode=0, rcv_settle_mode=1,
        properties={"com.microsoft:timeout": 5}, max_message_size=1000,
    )  # fmt: skip
    at_client, at_server = joined.exchange()
    assert at_client == []
    [asked] = only(LinkAttached, at_server)
    theirs = asked.link
    assert theirs.is_sender
    assert theirs.source == Source("queue")
    assert (theirs.snd_settle_mode, theirs.rcv_settle_mode, theirs.max_message_size) == (0, 1, 1000)
    assert theirs.properties == {"com.microsoft:timeout": 5}
    assert theirs.credit == 0
    theirs.accept(source=Source("answered"), properties={"locked": 1}, max_message_size=2000)
    at_client, _ = joined.exchange()
    assert [event.link for event in only(LinkAccepted, at_client)] == [ours]
    assert ours.source == Source("answered")
    assert ours.target == Target("me")
    assert ours.properties == {"locked": 1}
    assert ours.max_message_size == 2000
    assert (ours.snd_settle_mode, ours.rcv_settle_mode) == (0, 1)


@pytest.mark.parametrize("role", [SENDER, RECEIVER])
def test_a_refused_link_is_attached_with_a_null_terminus_and_detached(role: bool) -> None:
    joined = opened()
    session, _ = joined.begin()
    ours = session.attach("link", role, source=Source("queue"), target=Target("me"))
    _, at_server = joined.exchange()
    theirs = only(LinkAttached, at_server)[0].link
    theirs.refuse(Error("amqp:not-found", "no queue", {"x": 1}))
    at_client, at_server = joined.exchange()
    assert only(LinkAccepted, at_client) == []
    assert (ours.target if role is SENDER else ours.source) is None
    [gone] = only(LinkDetached, at_client)
    assert gone.closed
    assert gone.error == Error("amqp:not-found", "no queue", {"x": 1})
    assert only(LinkDetached, at_server) == []
    theirs.accept()
    theirs.refuse(Error("amqp:internal-error"))
    assert joined.exchange() == ([], [])
    assert session.links == []


def test_either_side_detaches_and_both_forget_the_link() -> None:
    joined = opened()
    session, remote_session = joined.begin()
    for side in ("client", "server"):
        ours, theirs = joined.sender(session)
        gone = ours if side == "client" else theirs
        gone.detach(error=Error("amqp:link:detach-forced", side))
        at_client, at_server = joined.exchange()
        [first] = only(LinkDetached, at_client)
        [second] = only(LinkDetached, at_server)
        told = second if side == "client" else first
        assert told.error == Error("amqp:link:detach-forced", side)
        assert session.links == remote_session.links == []
        assert joined.client.link_count == joined.server.link_count == 0


def test_a_peer_that_detaches_before_the_answer_gets_an_attach_and_a_detach() -> None:
    joined = opened()
    session, _ = joined.begin()
    ours = session.attach("link", RECEIVER, source=Source("queue"), target=Target("me"))
    _, at_server = joined.exchange()
    theirs = only(LinkAttached, at_server)[0].link
    ours.detach()
    at_client, at_server = joined.exchange()
    assert len(only(LinkDetached, at_server)) == len(only(LinkDetached, at_client)) == 1
    theirs.accept()
    assert joined.server.data_to_send() == []
    assert session.links == []


def test_both_detach_at_once() -> None:
    joined = opened()
    session, remote_session = joined.begin()
    ours, theirs = joined.sender(session)
    ours.detach()
    theirs.detach()
    at_client, at_server = joined.exchange()
    assert len(only(LinkDetached, at_client)) == len(only(LinkDetached, at_server)) == 1
    assert session.links == remote_session.links == []


def test_a_session_ends_with_its_links() -> None:
    joined = opened()
    session, remote_session = joined.begin()
    _, theirs = joined.sender(session)
    session.end(Error("amqp:internal-error", "done"))
    at_client, at_server = joined.exchange()
    [ended] = only(SessionEnded, at_server)
    assert ended.session is remote_session
    assert ended.error == Error("amqp:internal-error", "done")
    assert ended.links == [theirs]
    assert len(only(SessionEnded, at_client)) == 1
    assert joined.client.sessions == joined.server.sessions == []
    remote_session.dispose(RECEIVER, 0, settled=True)
    theirs.flow(5)
    assert joined.server.data_to_send() == []
    assert joined.begin()[0].is_live


@pytest.mark.parametrize("side", ["client", "server"])
def test_either_side_closes_with_an_error(side: str) -> None:
    joined = opened()
    session, _ = joined.begin()
    joined.sender(session)
    getattr(joined, side).close(Error("amqp:connection:forced", "bye"))
    at_client, at_server = joined.exchange()
    told, own = (at_server, at_client) if side == "client" else (at_client, at_server)
    assert closing_error(told) == Error("amqp:connection:forced", "bye")
    assert closing_error(own) is None
    assert joined.client.is_closed
    assert joined.server.is_closed
    with pytest.raises(AmqpError):
        joined.client.begin()


def test_frames_on_their_way_are_dropped_while_closing() -> None:
    joined = opened()
    session, _ = joined.begin()
    sender, _ = joined.sender(session)
    joined.server.close()
    sender.send(b"t", b"late")
    at_client, at_server = joined.exchange()
    assert only(Delivered, at_server) == []
    assert only(ConnectionClosed, at_server) == [ConnectionClosed(None)]
    assert only(ConnectionClosed, at_client) == [ConnectionClosed(None)]


def test_the_server_may_begin_sessions_and_links_too() -> None:
    joined = opened()
    ours = joined.server.begin()
    link = ours.attach("back", SENDER, source=Source("a"), target=Target("b"))
    at_client, _ = joined.exchange()
    theirs = only(LinkAttached, at_client)[0].link
    theirs.accept()
    theirs.flow(1)
    joined.exchange()
    link.send(b"1", b"hello")
    at_client, _ = joined.exchange()
    assert payloads(at_client) == [b"hello"]


def test_channels_and_handles_are_told_apart_by_peer() -> None:
    joined = opened()
    mine = joined.server.begin()
    theirs, _ = joined.begin()
    assert mine.is_live
    assert theirs.is_live
    a, b = joined.sender(theirs), joined.sender(theirs)
    a[0].send(b"1", b"a")
    b[0].send(b"2", b"b")
    _, at_server = joined.exchange()
    assert [(event.link, event.payload) for event in only(Delivered, at_server)] == [(a[1], b"a"), (b[1], b"b")]


def test_a_link_name_attached_again_steals_the_link() -> None:
    server = bare_server()
    begin = Begin(next_outgoing_id=0, incoming_window=10, outgoing_window=10)
    attach = Attach("link", 0, SENDER, source=Source("a"), target=Target("b"), initial_delivery_count=0)
    events = server.receive(performative_frame(0, begin) + performative_frame(0, attach), 0.0)
    first = only(LinkAttached, events)[0].link
    first.accept()
    attach.handle = 1
    events = server.receive(performative_frame(0, attach), 0.0)
    [gone] = only(LinkDetached, events)
    assert gone.link is first
    assert gone.error is not None
    assert gone.error.condition == Condition.LINK_STOLEN
    [asked] = only(LinkAttached, events)
    assert asked.link.name == "link"


def test_links_beyond_the_limit_are_refused() -> None:
    joined = opened(server=Connection.server("s", limits=Limits(max_links=2)))
    session, _ = joined.begin()
    joined.sender(session)
    joined.sender(session)
    session.attach("third", SENDER, source=Source("a"), target=Target("b"))
    at_client, at_server = joined.exchange()
    assert only(LinkAttached, at_server) == []
    [gone] = only(LinkDetached, at_client)
    assert gone.error is not None
    assert gone.error.condition == Condition.RESOURCE_LIMIT_EXCEEDED


def test_the_peers_handle_max_and_channel_max_are_kept() -> None:
    limits = Limits(handle_max=1)
    joined = opened(server=Connection.server("s", channel_max=1, limits=limits))
    session, _ = joined.begin()
    joined.sender(session)
    joined.sender(session)
    with pytest.raises(AmqpError) as caught:
        session.attach("third", SENDER)
    assert caught.value.condition == Condition.RESOURCE_LIMIT_EXCEEDED
    joined.begin()
    with pytest.raises(AmqpError):
        joined.client.begin()
    assert len(session.links) == 2


def test_the_python_sdk_ends_its_session_before_it_detaches() -> None:
    joined = opened()
    session, _ = joined.begin()
    ours, _ = joined.sender(session)
    channel, handle = session.channel, ours.handle
    leaving = (
        performative_frame(channel, End()),
        performative_frame(channel, Detach(handle, True)),
        performative_frame(channel, Flow(incoming_window=1, next_outgoing_id=0, outgoing_window=1)),
    )
    events = joined.server.receive(b"".join(leaving), 0.0)
    assert [type(event) for event in events] == [SessionEnded]
    assert not joined.server.is_closed


def test_a_second_detach_is_passed_over() -> None:
    joined = opened()
    session, _ = joined.begin()
    ours, _ = joined.sender(session)
    twice = performative_frame(session.channel, Detach(ours.handle, True)) * 2
    events = joined.server.receive(twice, 0.0)
    assert [type(event) for event in events] == [LinkDetached]
    assert not joined.server.is_closed


def test_the_handle_of_a_refused_link_may_be_taken_again() -> None:
    server = bare_server()
    begin = Begin(next_outgoing_id=0, incoming_window=10, outgoing_window=10)
    attach = Attach("one", 0, SENDER, source=Source("a"), target=Target("b"), initial_delivery_count=0)
    events = server.receive(performative_frame(0, begin) + performative_frame(0, attach), 0.0)
    only(LinkAttached, events)[0].link.refuse(Error("amqp:not-found"))
    attach.name = "two"
    events = server.receive(performative_frame(0, attach), 0.0)
    assert [event.link.name for event in only(LinkAttached, events)] == ["two"]
    assert server.link_count == 1


def test_long_descriptors_are_read_the_slow_way() -> None:
    server = bare_server()
    begin = Begin(next_outgoing_id=0, incoming_window=10, outgoing_window=10)
    attach = Attach("one", 0, SENDER, source=Source("a"), target=Target("b"), initial_delivery_count=0)
    events = server.receive(performative_frame(0, begin) + performative_frame(0, attach), 0.0)
    link = only(LinkAttached, events)[0].link
    link.accept()
    link.flow(5)
    for performative, payload in (
        (Transfer(0, 0, b"t"), b"payload"),
        (Flow(incoming_window=9, next_outgoing_id=1, outgoing_window=9, handle=0, available=7), b""),
    ):
        usual = performative_frame(0, performative)
        body = b"\x00\x80" + usual[10:11].rjust(8, b"\0") + usual[11:] + payload
        events = server.receive((len(body) + 8).to_bytes(4) + usual[4:8] + body, 0.0)
        assert len(events) == 1, events
    assert link.available == 7


def test_an_extended_frame_header_is_passed_over() -> None:
    server = bare_server()
    usual = performative_frame(3, Begin(next_outgoing_id=0, incoming_window=10, outgoing_window=10))
    longer = (len(usual) + 4).to_bytes(4) + b"\x03" + usual[5:8] + b"xxxx" + usual[8:]
    assert len(only(SessionBegun, server.receive(longer, 0.0))) == 1


def test_a_heartbeat_reports_no_event() -> None:
    assert bare_server().receive(HEARTBEAT * 3, 0.0) == []
