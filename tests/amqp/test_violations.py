"""Each breach of the protocol, and the error the standard names for it."""

from typing import Any

import pytest

from tests.amqp.joined import bare_server, closing_error, only
from twinbus.amqp.connection import Connection
from twinbus.amqp.described_types import decode_described
from twinbus.amqp.encoding import encode
from twinbus.amqp.events import ConnectionEvent, LinkAttached, LinkDetached, SessionEnded
from twinbus.amqp.frames import AMQP_HEADER, SASL_FRAME, encode_frame, performative_frame
from twinbus.amqp.limits import Limits
from twinbus.amqp.performatives import (
    RECEIVER,
    SENDER,
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    End,
    Flow,
    Open,
    SaslInit,
    Source,
    Target,
    Transfer,
)
from twinbus.values import Condition, Described, Symbol, UInt, ULong

BEGIN = Begin(next_outgoing_id=0, incoming_window=100, outgoing_window=100)
TO_SERVER = Attach("in", 0, SENDER, source=Source("a"), target=Target("b"), initial_delivery_count=0)
FROM_SERVER = Attach("out", 1, RECEIVER, source=Source("a"), target=Target("b"))
FLOW = Flow(next_incoming_id=0, incoming_window=9, next_outgoing_id=0, outgoing_window=9)


def on(channel: int, *performatives: Any) -> bytes:
    return b"".join(performative_frame(channel, performative) for performative in performatives)


def last_performative(connection: Connection) -> Any:
    raw = connection.data_to_send()[-1]
    return decode_described(raw, 8)[0]


def two_links() -> Connection:
    """A server with a session on channel 0, a link in on handle 0 and a link out on handle 1."""
    server = bare_server()
    for event in only(LinkAttached, server.receive(on(0, BEGIN, TO_SERVER, FROM_SERVER), 0.0)):
        event.link.accept(max_message_size=1000)
        if not event.link.is_sender:
            event.link.flow(5)
    server.data_to_send()
    return server


def flow_of(**changes: Any) -> Flow:
    return Flow(next_incoming_id=0, incoming_window=9, next_outgoing_id=0, outgoing_window=9, **changes)


CLOSES: dict[str, tuple[str, bytes]] = {
    "a frame above the size we take": (Condition.FRAMING_ERROR, (2**20 + 1).to_bytes(4) + b"\x02\x00\x00\x00"),
    "a frame of four thousand million bytes": (Condition.FRAMING_ERROR, b"\xff\xff\xff\xff\x02\x00\x00\x00"),
    "a frame below eight bytes": (Condition.FRAMING_ERROR, b"\x00\x00\x00\x07\x02\x00\x00\x00"),
    "a data offset below two": (Condition.FRAMING_ERROR, b"\x00\x00\x00\x08\x01\x00\x00\x00"),
    "a data offset behind the frame": (Condition.FRAMING_ERROR, b"\x00\x00\x00\x08\x03\x00\x00\x00"),
    "a frame of an unknown type": (Condition.FRAMING_ERROR, b"\x00\x00\x00\x08\x02\x02\x00\x00"),
    "a SASL frame": (Condition.FRAMING_ERROR, performative_frame(0, SaslInit("PLAIN"), SASL_FRAME)),
    "a body that is no described list": (Condition.DECODE_ERROR, encode_frame(0, encode("text"))),
    "an unknown performative": (Condition.DECODE_ERROR, encode_frame(0, encode(Described(ULong(0x99), [])))),
    "a delivery state as performative": (Condition.DECODE_ERROR, encode_frame(0, b"\x00\x53\x24\x45")),
    "bytes behind a performative": (Condition.DECODE_ERROR, encode_frame(0, b"\x00\x53\x17\x45\x40")),
    "bytes behind a flow": (Condition.DECODE_ERROR, encode_frame(0, on(0, FLOW)[8:] + b"\x40")),
    "bytes behind a disposition": (
        Condition.DECODE_ERROR,
        encode_frame(0, on(0, Disposition(RECEIVER, 0))[8:] + b"\x40"),
    ),
    "a performative cut short": (Condition.DECODE_ERROR, encode_frame(0, on(0, BEGIN)[8:-1])),
    "a transfer cut short": (Condition.DECODE_ERROR, encode_frame(0, b"\x00\x53\x14\xc0\x05\x02\x43")),
    "a transfer that is no list": (Condition.DECODE_ERROR, encode_frame(0, b"\x00\x53\x14\x40")),
    "a transfer of twelve fields": (Condition.DECODE_ERROR, encode_frame(0, b"\x00\x53\x14" + encode([None] * 12))),
    "a transfer without a handle": (Condition.INVALID_FIELD, encode_frame(0, b"\x00\x53\x14\x45")),
    "a transfer with a null handle": (Condition.INVALID_FIELD, encode_frame(0, b"\x00\x53\x14" + encode([None]))),
    "a transfer whose handle is a string": (Condition.DECODE_ERROR, encode_frame(0, b"\x00\x53\x14" + encode(["0"]))),
    "a transfer whose tag is a string": (
        Condition.DECODE_ERROR,
        encode_frame(0, b"\x00\x53\x14" + encode([UInt(0), UInt(0), "tag"])),
    ),
    "a transfer whose state is a string": (
        Condition.DECODE_ERROR,
        encode_frame(0, b"\x00\x53\x14" + encode([UInt(0), UInt(0), b"t", None, None, None, None, "accepted"])),
    ),
    "a disposition whose state is a source": (
        Condition.DECODE_ERROR,
        encode_frame(0, b"\x00\x53\x15" + encode([True, UInt(0), None, True, Described(ULong(0x28), [])])),
    ),
    "a disposition without a role": (
        Condition.INVALID_FIELD,
        encode_frame(0, b"\x00\x53\x15" + encode([None, UInt(0)])),
    ),
    "a flow without windows": (Condition.INVALID_FIELD, encode_frame(0, b"\x00\x53\x13\x45")),
    "a flow whose properties are a list": (
        Condition.DECODE_ERROR,
        encode_frame(0, b"\x00\x53\x13" + encode([UInt(0)] * 4 + [None] * 6 + [[]])),
    ),
    "an attach whose name is missing": (
        Condition.INVALID_FIELD,
        encode_frame(0, b"\x00\x53\x12" + encode([None, UInt(5)])),
    ),
    "a second open": (Condition.ILLEGAL_STATE, on(0, Open("again"))),
    "a channel above the channel-max": (Condition.FRAMING_ERROR, on(5000, BEGIN)),
    "a channel begun twice": (Condition.NOT_ALLOWED, on(0, BEGIN)),
    "a begin that answers nobody": (
        Condition.INVALID_FIELD,
        on(7, Begin(remote_channel=3, next_outgoing_id=0, incoming_window=1, outgoing_window=1)),
    ),
    "a transfer on a channel without a session": (Condition.NOT_ALLOWED, on(9, Transfer(0, 0, b"t"))),
    "an end on a channel without a session": (Condition.NOT_ALLOWED, on(9, End())),
    "a transfer on an ended session": (Condition.NOT_ALLOWED, on(0, End(), Transfer(0, 0, b"t"))),
    "a handle above the handle-max": (
        Condition.FRAMING_ERROR,
        on(0, Attach("far", 8192, SENDER, initial_delivery_count=0)),
    ),
}


@pytest.mark.parametrize(("condition", "raw"), CLOSES.values(), ids=CLOSES.keys())
def test_a_violation_of_the_connection_closes_it(condition: str, raw: bytes) -> None:
    server = two_links()
    error = closing_error(server.receive(raw, 0.0))
    assert error is not None
    assert error.condition == condition
    assert server.is_closed
    assert last_performative(server) == Close(error)
    assert server.receive(raw, 0.0) == []
    assert server.links == []


ENDS: dict[str, tuple[str, bytes]] = {
    "a transfer on a handle that is not attached": (Condition.UNATTACHED_HANDLE, on(0, Transfer(5, 0, b"t"))),
    "a flow on a handle that is not attached": (Condition.UNATTACHED_HANDLE, on(0, flow_of(handle=5))),
    "a detach of a handle that was never attached": (Condition.UNATTACHED_HANDLE, on(0, Detach(5))),
    "an attach on a handle in use": (Condition.HANDLE_IN_USE, on(0, Attach("b", 0, SENDER, initial_delivery_count=0))),
    "a transfer from the receiver of a link": (Condition.NOT_ALLOWED, on(0, Transfer(1, 0, b"t"))),
    "a sender without an initial delivery count": (Condition.INVALID_FIELD, on(0, Attach("b", 5, SENDER))),
    "an unknown settle mode": (Condition.INVALID_FIELD, on(0, Attach("b", 5, RECEIVER, snd_settle_mode=3))),
}


@pytest.mark.parametrize(("condition", "raw"), ENDS.values(), ids=ENDS.keys())
def test_a_violation_of_the_session_ends_it_and_the_connection_continues(condition: str, raw: bytes) -> None:
    server = two_links()
    events = server.receive(raw, 0.0)
    [ended] = only(SessionEnded, events)
    assert ended.error is not None
    assert ended.error.condition == condition
    assert len(ended.links) == 2
    assert last_performative(server) == End(ended.error)
    assert server.receive(raw + on(0, TO_SERVER, End()), 0.0) == []
    assert not server.is_closed
    assert server.sessions == []
    assert len(server.receive(on(0, BEGIN), 0.0)) == 1


DETACHES: dict[str, tuple[str, bytes]] = {
    "a first transfer without a delivery id": (Condition.INVALID_FIELD, on(0, Transfer(0, None, b"t"))),
    "a first transfer without a tag": (Condition.INVALID_FIELD, on(0, Transfer(0, 0))),
    "a first part without a tag": (Condition.INVALID_FIELD, on(0, Transfer(0, 0, more=True))),
    "a delivery inside another": (
        Condition.ILLEGAL_STATE,
        on(0, Transfer(0, 0, b"t", more=True), Transfer(0, 1, b"u")),
    ),
    "a message above the limit": (
        Condition.MESSAGE_SIZE_EXCEEDED,
        encode_frame(0, on(0, Transfer(0, 0, b"t"))[8:] + bytes(1001)),
    ),
}


@pytest.mark.parametrize(("condition", "raw"), DETACHES.values(), ids=DETACHES.keys())
def test_a_violation_of_the_link_detaches_it_and_the_session_continues(condition: str, raw: bytes) -> None:
    server = two_links()
    events = server.receive(raw, 0.0)
    [gone] = only(LinkDetached, events)
    assert gone.error is not None
    assert gone.error.condition == condition
    assert last_performative(server) == Detach(0, True, gone.error)
    assert server.receive(on(0, Transfer(0, 9, b"late"), Detach(0, True)), 0.0) == []
    assert len(server.links) == 1


def test_a_transfer_before_the_answer_is_refused() -> None:
    server = bare_server()
    events = server.receive(on(0, BEGIN, TO_SERVER, Transfer(0, 0, b"t")), 0.0)
    assert [type(event) for event in events][-2:] == [LinkAttached, LinkDetached]
    [gone] = only(LinkDetached, events)
    assert gone.error is not None
    assert gone.error.condition == Condition.TRANSFER_LIMIT_EXCEEDED


@pytest.mark.parametrize("performative", [BEGIN, End(), FLOW, TO_SERVER], ids=lambda value: type(value).__name__)
def test_anything_before_open_closes_with_open_and_close(performative: Any) -> None:
    server = Connection.server("s", bare_allowed=True)
    error = closing_error(server.receive(AMQP_HEADER + on(0, performative), 0.0))
    assert error is not None
    assert error.condition == Condition.ILLEGAL_STATE
    said = server.data_to_send()
    assert said[0] == AMQP_HEADER
    assert [type(decode_described(raw, 8)[0]) for raw in said[1:]] == [Open, Close]


@pytest.mark.parametrize(
    ("remote", "condition"),
    [
        (Open("c", max_frame_size=511), Condition.INVALID_FIELD),
        (Open("c", idle_time_out=5), Condition.NOT_ALLOWED),
    ],
    ids=["frames below 512", "heartbeats every few milliseconds"],
)
def test_an_open_with_unusable_values_is_closed(remote: Open, condition: str) -> None:
    server = Connection.server("s", bare_allowed=True)
    error = closing_error(server.receive(AMQP_HEADER + on(0, remote), 0.0))
    assert error is not None
    assert error.condition == condition


def test_an_oversized_frame_is_refused_before_it_is_kept() -> None:
    server = bare_server(max_frame_size=1000)
    closing_error(server.receive((1001).to_bytes(4) + b"\x02\x00\x00\x00" + bytes(500), 0.0))
    assert server.buffered_bytes == 0


def test_the_memory_of_attach_frames_is_bounded() -> None:
    # Each attach takes the memory of the link, of its own objects, and of 1,000 characters.
    server = bare_server(limits=Limits(attach_bytes=8 * 1024))
    server.receive(on(0, BEGIN), 0.0)
    events: list[ConnectionEvent] = []
    for handle in range(5):
        attach = Attach(
            f"l{handle}",
            handle,
            SENDER,
            target=Target("t"),
            initial_delivery_count=0,
            properties={Symbol("p"): "x" * 1000},
        )
        events += server.receive(on(0, attach), 0.0)
    assert len(only(LinkAttached, events)) == 2
    server.receive(b"".join(on(0, Detach(handle, True)) for handle in range(5)), 0.0)
    assert server.buffered_bytes == 0


def test_a_client_closes_on_a_violation_as_well() -> None:
    client = Connection.client("c", "h", sasl=None)
    client.receive(AMQP_HEADER + on(0, Open("s")), 0.0)
    client.begin()
    error = closing_error(client.receive(on(0, Attach("x", 0, SENDER)), 0.0))
    assert error is not None
    assert error.condition == Condition.NOT_ALLOWED


def test_an_answer_to_a_session_that_we_ended_is_no_violation() -> None:
    client = Connection.client("c", "h", sasl=None)
    client.receive(AMQP_HEADER + on(0, Open("s")), 0.0)
    session = client.begin()
    session.end()
    answer = Begin(remote_channel=0, next_outgoing_id=0, incoming_window=1, outgoing_window=1)
    events = client.receive(on(4, answer, End()), 0.0)
    assert [type(event) for event in events] == [SessionEnded]
    assert client.sessions == []
