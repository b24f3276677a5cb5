"""How our client reaches a namespace: options, addresses, and what a proxy that refuses or is none leads to."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests import tinyproxy
from twinbus.backlog import FailureKind, failure_kind
from twinbus.connect import (
    ConnectionString,
    HttpProxy,
    NetworkOptionError,
    NetworkOptions,
    ServiceBusCommunicationError,
    ServiceBusError,
    ServiceBusHandshakeError,
    TransportType,
    connect,
)
from twinbus.message import Message
from twinbus.testing import LocalNamespace

SECONDS = 20.0
AZURE = ConnectionString.parse("Endpoint=sb://contoso.servicebus.windows.net/;SharedAccessKeyName=a;SharedAccessKey=b")
LOCAL = ConnectionString.parse(
    "Endpoint=sb://localhost:5673;SharedAccessKeyName=a;SharedAccessKey=b;UseDevelopmentEmulator=true"
)
HOST = "contoso.servicebus.windows.net"
PROXY = HttpProxy("proxy.example", 3128)
WEBSOCKET = TransportType.AmqpOverWebsocket


@pytest.mark.parametrize(
    ("options", "endpoint", "uses_websocket", "address"),
    [
        ({}, AZURE, False, (HOST, 5671)),
        ({}, LOCAL, False, ("localhost", 5673)),
        ({"transport_type": WEBSOCKET}, AZURE, True, (HOST, 443)),
        ({"transport_type": WEBSOCKET}, LOCAL, True, ("localhost", 5673)),
        ({"http_proxy": PROXY}, AZURE, True, (HOST, 443)),
        ({"http_proxy": PROXY, "transport_type": TransportType.Amqp}, AZURE, True, (HOST, 443)),
        ({"custom_endpoint_address": "sb://gateway.example"}, AZURE, True, ("gateway.example", 443)),
        ({"custom_endpoint_address": "gateway.example:8443"}, AZURE, True, ("gateway.example", 8443)),
        (
            {"custom_endpoint_address": "sb://gateway.example", "transport_type": TransportType.Amqp},
            AZURE,
            False,
            ("gateway.example", 5671),
        ),
        ({"custom_endpoint_address": "sb://[::1]:99/x"}, LOCAL, True, ("::1", 99)),
    ],
)
def test_the_options_mean_what_they_mean_for_azure_servicebus(
    options: dict[str, Any], endpoint: ConnectionString, uses_websocket: bool, address: tuple[str, int]
) -> None:
    network = NetworkOptions(**options)
    assert network.uses_websocket is uses_websocket
    assert network.address(endpoint) == address


def test_a_proxy_is_read_from_a_url_or_from_the_options_of_the_sdk() -> None:
    assert HttpProxy.parse("http://proxy.example:3128") == PROXY
    assert HttpProxy.parse("proxy.example:3128") == PROXY
    assert HttpProxy.of({"proxy_hostname": "http://proxy.example", "proxy_port": 3128}) == PROXY
    named = HttpProxy.parse("http://proxy.example:3128", "twin:a:b")
    assert named.authorization() == "Basic " + base64.b64encode(b"twin:a:b").decode()
    assert PROXY.authorization() is None
    assert "a:b" not in repr(named)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: HttpProxy.parse("https://proxy.example:3128"), "write http://HOST:PORT"),
        (lambda: HttpProxy.parse("http://proxy.example"), "write http://HOST:PORT"),
        (lambda: HttpProxy.parse("http://proxy.example:x"), "write http://HOST:PORT"),
        (lambda: HttpProxy.parse("http://twin:secret@proxy.example:1"), "must not contain"),
        (lambda: HttpProxy.parse("http://twin:sec/secret@proxy.example:1"), "must not contain"),
        (lambda: HttpProxy.parse("http://twin:sec#secret@proxy.example:1"), "must not contain"),
        (lambda: HttpProxy.parse("http://twin:sec?secret@proxy.example:1"), "must not contain"),
        (lambda: HttpProxy.parse("http://twin:[secret@proxy.example:1"), "must not contain"),
        (lambda: HttpProxy.parse("http://twin:secret@proxy.example:312x"), "must not contain"),
        (lambda: HttpProxy.parse("http://twin:secret@proxy.example:3128:1"), "must not contain"),
        (lambda: HttpProxy.parse("https://twin:secret@proxy.example"), "must not contain"),
        (lambda: HttpProxy.parse("http://twin:secret%40proxy.example:1"), "write http://HOST:PORT"),
        (lambda: HttpProxy.parse("twin:secret"), "write http://HOST:PORT"),
        (lambda: HttpProxy.parse("http://proxy.example:1", "secret"), "user:password"),
        (lambda: HttpProxy.of({"proxy_hostname": "proxy.example"}), "proxy_port"),
        (lambda: HttpProxy.of({"proxy_hostname": "twin:secret@proxy.example", "proxy_port": 1}), "must not contain"),
        (lambda: NetworkOptions(custom_endpoint_address="sb://"), "custom_endpoint_address"),
        (lambda: NetworkOptions(custom_endpoint_address="sb://twin:secret@gateway:x"), "custom_endpoint_address"),
        (lambda: NetworkOptions(custom_endpoint_address="Endpoint=sb://h;SharedAccessKey=secret"), "write sb://HOST"),
        (lambda: NetworkOptions(connection_verify="/no/such/file").tls_context(), "/no/such/file"),
    ],
)
def test_an_option_that_cannot_be_used_is_named_without_its_secret(make: Callable[[], object], told: str) -> None:
    with pytest.raises(NetworkOptionError, match=told) as refused:
        make()
    assert "secret" not in str(refused.value)


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[HttpProxy]:
    """A server that answers everything with these bytes and closes."""

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    async with server:
        yield HttpProxy("127.0.0.1", server.sockets[0].getsockname()[1])


async def failure_through(network: NetworkOptions, endpoint: ConnectionString = LOCAL) -> ServiceBusError:
    async with connect(endpoint, network=network, timeout=SECONDS) as bus:
        with pytest.raises(ServiceBusError) as failed:
            await bus.open()
    assert failure_kind(failed.value) is FailureKind.CONNECTION_LOST
    return failed.value


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", ServiceBusHandshakeError, "407 Proxy Authentication"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", ServiceBusHandshakeError, "403 Forbidden"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", ServiceBusCommunicationError, "502 Bad Gateway"),
        (b"AMQP\0\1\0\0", ServiceBusHandshakeError, "is no HTTP proxy"),
        (b"", ServiceBusCommunicationError, "closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 10_000, ServiceBusHandshakeError, "is no HTTP proxy"),
        (b"HTTP/1.1 200 OK\r\n\r\nnot a tunnel", ServiceBusHandshakeError, "bytes of its own"),
        (b"HTTP/1.1 200 OK\r\n\r\n", ServiceBusError, "localhost:5673"),
    ],
)
async def test_a_proxy_that_does_not_connect_is_named_with_its_answer(
    answer: bytes, kind: type[ServiceBusError], told: str
) -> None:
    async with answering(answer) as proxy:
        failed = await failure_through(NetworkOptions(http_proxy=proxy))
    assert isinstance(failed, kind)
    assert told in str(failed)


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 7\r\n\r\nnowhere", ServiceBusHandshakeError, "404 nowhere"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n" + b"x" * 9000, ServiceBusHandshakeError, "404 xxx"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", ServiceBusCommunicationError, "503"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", ServiceBusHandshakeError, "200 hi"),
        (
            b"HTTP/1.1 101 Yes\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
            ServiceBusHandshakeError,
            "WebSocket",
        ),
        (b"AMQP\3\1\0\0", ServiceBusHandshakeError, "is not that of a WebSocket"),
    ],
)
async def test_a_server_that_takes_no_websocket_is_named_with_its_answer(
    answer: bytes, kind: type[ServiceBusError], told: str
) -> None:
    async with answering(answer) as server:
        failed = await failure_through(NetworkOptions(custom_endpoint_address=f"127.0.0.1:{server.proxy_port}"))
    assert isinstance(failed, kind)
    assert told in str(failed)
    assert len(str(failed)) < 5000


async def test_a_silent_proxy_is_given_up_in_time_and_its_socket_closed() -> None:
    gone = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        gone.set()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        network = NetworkOptions(http_proxy=HttpProxy("127.0.0.1", server.sockets[0].getsockname()[1]))
        async with connect(LOCAL, network=network, timeout=0.2) as bus:
            with pytest.raises(ServiceBusError, match=r"no answer in 0\.2 s"):
                await bus.open()
            await asyncio.wait_for(gone.wait(), SECONDS)


async def test_a_broken_tunnel_is_opened_again(namespace: LocalNamespace, queue: str, tmp_path: Any) -> None:
    with tinyproxy.running(tmp_path, username="twin", password="sesame") as proxy:
        network = NetworkOptions(http_proxy=HttpProxy.of(proxy.for_sdk))
        async with connect(namespace.connection_string, network=network, timeout=SECONDS) as bus:
            sender = await bus.sender(queue)
            await sender.send([Message(b"one")])
            namespace.faults.set("detach", entity=queue, points=["send"], count=1)
            with pytest.raises(ServiceBusError):
                await sender.send([Message(b"two")])
            assert bus._reconnector._transport is not None
            bus._reconnector._transport.abort(ServiceBusCommunicationError("cut by the test"))
            await sender.send([Message(b"three")])
            found = await bus.management(queue).peek(0, 10)
            assert [bytes(one.body) for one in found] == [b"one", b"three"]
        assert proxy.tunnels == 2
