"""A whole namespace: starting, stopping, refusing to start, and keeping messages over a restart."""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.namespace.front.amqp_peer import SECONDS, Peer
from twinbus.amqp import Connection
from twinbus.connect import ReceivedMessage, connect
from twinbus.errors import OperatorError
from twinbus.message import Message
from twinbus.namespace.engine.descriptions import (
    AuthorizationRule,
    Claim,
    Description,
    QueueDescription,
    SubscriptionDescription,
)
from twinbus.namespace.front import default_rule
from twinbus.namespace.server import NamespaceOptions, NamespaceServer, _listen

ORDERS = QueueDescription(path="orders")
EVERYWHERE = "0.0.0.0"  # noqa: S104  that this is refused is what is tested


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


async def started(tls: Path, file: Path | None = None, **options: Any) -> NamespaceServer:
    server = NamespaceServer(NamespaceOptions(name="one", file=file, tls=tls, entities=(ORDERS,), **options))
    await server.start()
    return server


def bodies(messages: Sequence[ReceivedMessage]) -> list[bytes]:
    return [bytes(message.body) for message in messages]


async def test_accepted_messages_are_there_after_a_restart(tls: Path, tmp_path: Path) -> None:
    server = await started(tls, tmp_path / "one.sqlite")
    async with connect(server.connection_string, timeout=SECONDS) as bus:
        await (await bus.sender("orders")).send([Message(str(number)) for number in range(100)])
        receiver = await bus.receiver("orders")
        done = await receiver.receive(10, SECONDS)
        await receiver.complete(done)
    await server.stop()
    again = await started(tls, tmp_path / "one.sqlite")
    async with connect(again.connection_string, timeout=SECONDS) as bus:
        left = await bus.management("orders").peek(0, 100)
        assert bodies(left) == [str(number).encode() for number in range(len(done), 100)]
    await again.stop()
    await again.ended


async def test_a_stop_answers_pending_requests_and_then_closes_connections(tls: Path, tmp_path: Path) -> None:
    server = await started(tls, tmp_path / "one.sqlite")
    peer = await Peer.to(server)
    await peer.put_token()
    sender = await peer.sender("orders")
    peer.send(sender, *(f"m{number}" for number in range(200)))
    await peer.answers(1)
    await server.stop()
    closed = await peer.closed()
    assert closed.error is not None
    assert closed.error.condition == "amqp:connection:forced"
    accepted = 200 - len(sender.session.unsettled_out)
    again = await started(tls, tmp_path / "one.sqlite")
    async with connect(again.connection_string, timeout=SECONDS) as bus:
        stored = len(await bus.management("orders").peek(0, 200))
    assert stored == accepted, "nothing was stored that was not acknowledged"
    await again.stop()


async def test_a_stop_does_not_wait_for_peers_that_do_not_answer(tls: Path) -> None:
    server = await started(tls)
    silent = socket.create_connection(("127.0.0.1", server.port))
    mute = await Peer.to(server)
    await mute.put_token()
    mute.transport.pause_reading()
    async with asyncio.timeout(SECONDS):
        await server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    silent.close()
    mute.close()


async def test_a_stop_ends_in_a_black_hole_too(tls: Path) -> None:
    server = await started(tls)
    peer = await Peer.to(server)
    await peer.put_token()
    server.faults.set({"kind": "black-hole"})
    async with asyncio.timeout(SECONDS):
        await server.stop()
        await peer.lost
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


async def test_a_port_in_use_is_an_operators_error(tls: Path) -> None:
    server = await started(tls)
    with pytest.raises(OperatorError, match="cannot listen on"):
        await started(tls, port=server.port)
    await server.stop()


async def test_of_two_that_start_at_once_only_one_has_the_port(tls: Path) -> None:
    listener = _listen(NamespaceOptions(name="first", file=None, tls=tls))
    with listener, pytest.raises(OperatorError, match="cannot listen on"):
        await started(tls, port=listener.getsockname()[1])


async def test_a_client_that_connects_during_the_start_is_served(tls: Path) -> None:
    listener = _listen(NamespaceOptions(name="one", file=None, tls=tls))
    with listener, socket.create_connection(listener.getsockname()) as early:
        accepted, address = listener.accept()
        accepted.close()
        assert address == early.getsockname()


@pytest.mark.parametrize("host", ["192.0.2.1", "::ffff:192.0.2.1", "not an address"])
async def test_a_host_that_cannot_be_listened_on_is_an_operators_error(tls: Path, host: str) -> None:
    own = AuthorizationRule("own", "a key", "", frozenset({Claim.MANAGE}))
    with pytest.raises(OperatorError, match="cannot listen on"):
        await started(tls, host=host, rules=(own,))


async def test_a_store_in_use_is_an_operators_error_and_leaves_the_port_free(tls: Path, tmp_path: Path) -> None:
    server = await started(tls, tmp_path / "one.sqlite")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(OperatorError):
        await started(tls, tmp_path / "one.sqlite", port=port)
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))
    await server.stop()


@pytest.mark.parametrize("wrong", [SubscriptionDescription(topic="missing", name="s"), QueueDescription(path="")])
async def test_an_entity_that_cannot_be_created_is_named_and_the_store_is_closed(
    tls: Path, tmp_path: Path, wrong: Description
) -> None:
    options = NamespaceOptions(name="one", file=tmp_path / "one.sqlite", tls=tls, entities=(ORDERS, wrong))
    with pytest.raises(OperatorError, match="cannot be created"):
        await NamespaceServer(options).start()
    server = await started(tls, tmp_path / "one.sqlite")
    await server.stop()


async def test_the_default_key_is_refused_on_other_than_loopback_addresses(tls: Path) -> None:
    with pytest.raises(OperatorError, match="well-known default key"):
        await started(tls, host=EVERYWHERE)
    own = AuthorizationRule("own", "a key", "", frozenset({Claim.MANAGE}))
    with pytest.raises(OperatorError):
        await started(tls, host=EVERYWHERE, rules=(own, default_rule()))
    server = await started(tls, host=EVERYWHERE, rules=(own,))
    await server.stop()


async def test_a_store_that_fails_ends_the_namespace_and_acknowledges_nothing(tls: Path) -> None:
    server = await started(tls)
    peer = await Peer.to(server)
    await peer.put_token()
    sender = await peer.sender("orders")
    server.runtime.group_commit._fail(OSError("no space left on device"))
    peer.send(sender, "lost")
    await asyncio.wait_for(peer.lost, SECONDS)
    with pytest.raises(OSError, match="no space left"):
        await server.ended
    assert len(sender.session.unsettled_out) == 1
    assert isinstance(peer.core, Connection)


@pytest.mark.parametrize(
    ("host", "names", "endpoint"),
    [
        ("127.0.0.1", (), "localhost:{port}"),
        ("127.0.0.1", ("bus.example",), "localhost:{port}"),
        ("0.0.0.0", (), "localhost:{port}"),  # noqa: S104 - for the length of this test, without the well-known key
        ("0.0.0.0", ("bus.example", "other"), "bus.example:{port}"),  # noqa: S104
        ("0.0.0.0", ("bus.example:15672",), "bus.example:15672"),  # noqa: S104
    ],
)
async def test_x3_the_connection_string_has_a_name_that_is_accepted(
    tls: Path, host: str, names: tuple[str, ...], endpoint: str
) -> None:
    rules = (AuthorizationRule("own", "own-key", "", frozenset({Claim.MANAGE})),)
    server = NamespaceServer(NamespaceOptions(name="one", file=None, tls=tls, host=host, rules=rules, host_names=names))
    await server.start()
    assert server.connection_string.startswith(f"Endpoint=sb://{endpoint.format(port=server.port)};")
    await server.stop()
