"""Peers that are silent, slow or gone: every wait ends with an error that names the operation, and leaves nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from twinbus.amqp import Error
from twinbus.connect import ServiceBusConnection, connect, encode_message
from twinbus.connect.errors import (
    ConnectionClosedError,
    MessagingEntityNotFoundError,
    OperationTimeoutError,
    ServiceBusAuthenticationError,
    ServiceBusCommunicationError,
    ServiceBusConnectionError,
    ServiceBusError,
)
from twinbus.connect.sender import SendConfirmation
from twinbus.message import Message

from .peer import Peer, listening, silent

SHORT = 0.05


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    async with listening() as found:
        yield found


@pytest.fixture
async def bus(peer: Peer) -> AsyncIterator[ServiceBusConnection]:
    async with connect(peer.endpoint, timeout=20) as found:
        yield found


async def test_connecting_to_a_silent_port_ends_at_the_deadline() -> None:
    async with silent() as endpoint, connect(endpoint, timeout=SHORT) as bus:
        with pytest.raises(OperationTimeoutError, match=r"attach: no answer in 0\.05 s"):
            await bus.sender("q")
        with pytest.raises(OperationTimeoutError, match=r"connect to 127\.0\.0\.1"):
            await bus.open()
        with pytest.raises(OperationTimeoutError, match="peek-message"):
            await bus.management("q").peek()


async def test_a_port_nobody_listens_on_is_a_communication_error(unused_tcp_port: int) -> None:
    async with connect(f"Endpoint=sb://127.0.0.1:{unused_tcp_port};SharedAccessKeyName=n;SharedAccessKey=k") as bus:
        with pytest.raises(ServiceBusCommunicationError, match="cannot connect"):
            await bus.sender("q")


async def test_a_peer_without_amqp_is_distinguished_from_a_silent_one() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    text = f"Endpoint=sb://127.0.0.1:{port};SharedAccessKeyName=n;SharedAccessKey=k;UseDevelopmentEmulator=true"
    async with server, connect(text) as bus:
        with pytest.raises(ServiceBusError, match="HTTP"):
            await bus.open()


async def test_a_peer_that_falls_silent_is_detected_by_missing_heartbeats(peer: Peer) -> None:
    async with connect(peer.endpoint, idle_timeout=0.1) as bus:
        receiver = await bus.receiver("q")
        peer.line.is_frozen = True
        with pytest.raises(ServiceBusConnectionError, match="silent"):
            await receiver.receive(1, 20)
        assert not bus.is_connected


async def send(bus: ServiceBusConnection, peer: Peer, seconds: float) -> None:
    sender = await bus.sender("q")
    peer.answers = False
    await sender.send([Message(b"1"), Message(b"2")], timeout=seconds)


async def send_soon(bus: ServiceBusConnection, peer: Peer, seconds: float) -> None:
    sender = await bus.sender("q", timeout=seconds)
    peer.answers = False
    await sender.room()
    await sender.send_soon(Message(b"1"))


async def send_without_credit(bus: ServiceBusConnection, peer: Peer, seconds: float) -> None:
    peer.credit = 0
    sender = await bus.sender("q")
    peer.note("out of credit")
    await sender.send([Message(b"1")], timeout=seconds)


async def complete(bus: ServiceBusConnection, peer: Peer, seconds: float) -> None:
    receiver = await bus.receiver("q")
    await peer.until(lambda: peer.line.link("q").credit)
    peer.line.deliver("q", encode_message(Message(b"x"), 0))
    messages = await receiver.receive(1, 5)
    peer.answers = False
    await receiver.complete(messages, timeout=seconds)


async def peek(bus: ServiceBusConnection, peer: Peer, seconds: float) -> None:
    peer.answers_requests = False
    await bus.management("q").peek(timeout=seconds)


Operation = Callable[[ServiceBusConnection, Peer, float], Awaitable[None]]
UNDER_WAY: dict[Operation, Callable[[Peer], object]] = {
    send: lambda peer: peer.received,
    send_soon: lambda peer: peer.received,
    send_without_credit: lambda peer: peer.notes,
    complete: lambda peer: peer.settled,
    peek: lambda peer: peer.requests,
}


@pytest.mark.parametrize("operation", UNDER_WAY)
async def test_an_operation_that_is_never_answered_ends_at_its_deadline(
    operation: Operation, bus: ServiceBusConnection, peer: Peer
) -> None:
    with pytest.raises(OperationTimeoutError) as caught:
        await operation(bus, peer, SHORT)
    assert caught.value.entity == "q"
    assert bus.is_connected


def abort(peer: Peer) -> None:
    peer.line.abort()


def close(peer: Peer) -> None:
    peer.line.core.close(Error("amqp:connection:forced", "shutting down"))
    peer.line.flush()


def end_sessions(peer: Peer) -> None:
    for session in peer.line.core.sessions:
        session.end(Error("amqp:connection:forced", "the session was ended"))
    peer.line.flush()


def detach_links(peer: Peer) -> None:
    for link in peer.line.core.links:
        link.detach(error=Error("amqp:link:detach-forced", "idle"))
    peer.line.flush()


@pytest.mark.parametrize("blow", [abort, close, end_sessions, detach_links])
@pytest.mark.parametrize("operation", UNDER_WAY)
async def test_any_end_of_the_link_fails_operations_in_flight(
    operation: Operation, blow: Callable[[Peer], None], bus: ServiceBusConnection, peer: Peer
) -> None:
    task = asyncio.ensure_future(operation(bus, peer, 20))
    await peer.until(lambda: UNDER_WAY[operation](peer))
    blow(peer)
    with pytest.raises(ServiceBusConnectionError):
        await task


async def test_a_receive_in_flight_fails_when_the_connection_breaks(bus: ServiceBusConnection, peer: Peer) -> None:
    receiver = await bus.receiver("q")
    task = asyncio.ensure_future(receiver.receive(1, 20))
    await peer.until(lambda: peer.line.link("q").credit)
    peer.line.abort()
    with pytest.raises(ServiceBusConnectionError, match="broke"):
        await task


async def test_a_refused_link_raises_the_reason_and_leaves_the_connection_usable(
    bus: ServiceBusConnection, peer: Peer
) -> None:
    peer.attach_error = Error("amqp:not-found", "no such queue")
    with pytest.raises(MessagingEntityNotFoundError, match="no such queue") as caught:
        await bus.sender("q")
    assert caught.value.entity == "q"
    with pytest.raises(MessagingEntityNotFoundError):
        await bus.receiver("q")
    peer.attach_error = None
    await bus.sender("q")
    assert len(peer.lines) == 1


async def test_a_refused_token_is_an_authentication_error(bus: ServiceBusConnection, peer: Peer) -> None:
    peer.token_status = 401
    with pytest.raises(ServiceBusAuthenticationError, match="as told"):
        await bus.sender("q")
    peer.token_status = 202
    await bus.sender("q")


async def test_closing_ends_a_waiting_call_and_refuses_the_next(bus: ServiceBusConnection, peer: Peer) -> None:
    sender, receiver = await bus.sender("q"), await bus.receiver("q")
    peer.answers = False
    sending = asyncio.ensure_future(sender.send([Message(b"")]))
    receiving = asyncio.ensure_future(receiver.receive(1, 20))
    await peer.until(lambda: peer.received)
    await bus.close()
    for task in (sending, receiving):
        with pytest.raises(ConnectionClosedError):
            await task
    for call in (sender.send([Message(b"")]), receiver.receive(1, 20), bus.sender("q")):
        with pytest.raises(ConnectionClosedError):
            await call


async def test_closing_is_bounded_if_the_peer_does_not_answer(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinbus.connect.reconnection._CLOSE_SECONDS", SHORT)
    monkeypatch.setattr("twinbus.connect.receiver._DRAIN_SECONDS", SHORT)
    bus = connect(peer.endpoint)
    await bus.sender("q")
    await bus.receiver("q")
    peer.line.is_frozen = True
    await bus.close()
    assert not bus.is_connected


async def test_a_cancelled_call_leaves_the_sender_usable(bus: ServiceBusConnection, peer: Peer) -> None:
    sender = await bus.sender("q")
    peer.answers = False
    task = asyncio.ensure_future(sender.send([Message(b"1")]))
    await peer.until(lambda: peer.received)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    peer.answers = True
    await sender.send([Message(b"2")])


async def test_a_peer_that_does_not_read_holds_back_the_sender_until_it_does(
    bus: ServiceBusConnection, peer: Peer
) -> None:
    peer.max_message_size, peer.credit = 1_000_000, 1000
    sender = await bus.sender("q")
    await sender.room()
    transport = peer.line.transport
    assert transport is not None
    transport.pause_reading()
    messages = [Message(bytes(900_000)) for _ in range(30)]
    with pytest.raises(OperationTimeoutError) as caught:
        await sender.send(messages, timeout=SHORT)
    assert caught.value.failed == tuple(messages)
    transport.resume_reading()
    await sender.send([Message(b"last")])
    assert len(peer.received) < 30


async def test_an_answer_that_arrives_together_with_the_timeout_counts(
    peer: Peer, bus: ServiceBusConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in one turn of the loop: the timeout is handled first, when all messages are accepted already."""

    def answered(self: SendConfirmation, key: int, error: ServiceBusError | None) -> None:
        self.unaccepted.discard(key)
        self.outstanding -= 1  # the waiting call is not woken again

    monkeypatch.setattr(SendConfirmation, "answered", answered)
    sender = await bus.sender("q")
    await sender.send([Message(b"1"), Message(b"2")], timeout=SHORT)
    assert len(peer.received) == 1, "both went as one batch"
