"""How a client reaches a namespace: AMQP or WebSocket, through a proxy or not, at which address, with which CA.

The options have the names and the defaults of azure-servicebus. A proxy always means a WebSocket: proxies let CONNECT
through to port 443, and seldom to the port of AMQP.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final, Self
from urllib.parse import quote, urlsplit

from twinbus.connect.connection_string import TLS_PORT, ConnectionString
from twinbus.connect.errors import ServiceBusCommunicationError, ServiceBusHandshakeError
from twinbus.errors import CallerError

WEBSOCKET_PORT: Final = 443
_MAX_RESPONSE_BYTES: Final = 16 * 1024
_PIECE: Final = 4096
# Statuses of a proxy that cannot reach the namespace now. All others need a change by a person.
_UNREACHABLE: Final = frozenset({408, 429, 500, 502, 503, 504})
_CREDENTIALS_IN_ADDRESS: Final = "the address of a proxy must not contain a user name or a password"


class NetworkOptionError(CallerError, ValueError):
    """An option is not valid. The text never contains a password."""


class TransportType(StrEnum):
    """How AMQP travels. Names and values are those of azure-servicebus."""

    Amqp = "Amqp"
    AmqpOverWebsocket = "AmqpOverWebsocket"


TRANSPORT_NAMES: Final[Mapping[str, TransportType]] = {
    "amqp": TransportType.Amqp,
    "websocket": TransportType.AmqpOverWebsocket,
}
"""The values of --transport-type and of TWINBUS_TRANSPORT_TYPE."""


@dataclass(frozen=True, slots=True)
class HttpProxy:
    """An HTTP proxy that takes CONNECT. The proxy itself is reached over plain HTTP."""

    proxy_hostname: str
    proxy_port: int
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the proxy of a dict with the keys that azure-servicebus takes. Raises NetworkOptionError."""
        try:
            # As for azure-servicebus, the host of the asyncio client may begin with http://.
            host = str(given["proxy_hostname"]).removeprefix("http://")
            port = int(given["proxy_port"])
        except (KeyError, TypeError, ValueError):
            raise NetworkOptionError("http_proxy needs proxy_hostname and proxy_port") from None
        if "@" in host:
            raise NetworkOptionError(f"{_CREDENTIALS_IN_ADDRESS}: give username and password in http_proxy")
        return cls(host, port, given.get("username") or None, given.get("password") or None)

    @classmethod
    def parse(cls, url: str, credentials: str | None = None) -> Self:
        """Return the proxy of `http://host:port`. `credentials` is `user:password`. Raises NetworkOptionError.

        No error shows `url`: the text may have a password in it, also where it is not a URL.
        """
        if "@" in url:
            raise NetworkOptionError(_CREDENTIALS_IN_ADDRESS)
        try:
            parts = urlsplit(url if "//" in url else f"//{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
            parts = urlsplit("")
        if parts.scheme not in ("", "http") or not host or port is None or parts.path.strip("/") or parts.query:
            raise NetworkOptionError("it is not the address of a proxy: write http://HOST:PORT")
        user, colon, password = (credentials or "").partition(":")
        if credentials and not (user and colon):
            raise NetworkOptionError("the credentials of a proxy have the form user:password")
        return cls(host, port, user or None, password or None)

    @property
    def authority(self) -> str:
        return authority(self.proxy_hostname, self.proxy_port)

    def url_with_credentials(self) -> str:
        """Return the URL of the proxy. It contains the password."""
        if self.authorization() is None:
            return f"http://{self.authority}"
        user, password = quote(self.username or "", safe=""), quote(self.password or "", safe="")
        return f"http://{user}:{password}@{self.authority}"

    def authorization(self) -> str | None:
        """Return the value of Proxy-Authorization, or None if there are no credentials."""
        if self.username is None and self.password is None:
            return None
        text = f"{self.username or ''}:{self.password or ''}"
        return "Basic " + base64.b64encode(text.encode()).decode("ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """How a client reaches a namespace.

    `custom_endpoint_address` is where to connect instead of the namespace's own host, such as an application gateway:
    `sb://host:port`, `host:port` or `host`. Tokens are still for the namespace. `connection_verify` is a file with the
    certificates to trust. With a proxy or a custom endpoint, the default of `transport_type` is AmqpOverWebsocket.
    """

    transport_type: TransportType | None = None
    http_proxy: HttpProxy | None = None
    custom_endpoint_address: str | None = None
    connection_verify: str | None = None

    def __post_init__(self) -> None:
        if self.custom_endpoint_address is not None:
            _custom_endpoint(self.custom_endpoint_address)

    @classmethod
    def of_dict(cls, values: Mapping[str, Any] | None) -> Self | None:
        """Return the options that `dataclasses.asdict` made this dict from. JSON may have been between the two."""
        if values is None:
            return None
        kind, proxy = values["transport_type"], values["http_proxy"]
        return cls(
            transport_type=None if kind is None else TransportType(kind),
            http_proxy=None if proxy is None else HttpProxy(**proxy),
            custom_endpoint_address=values["custom_endpoint_address"],
            connection_verify=values["connection_verify"],
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], side: str) -> Self:
        """Return the options of the variables TWINBUS_TRANSPORT_TYPE, _PROXY, _CA and so on (settings.md).

        `side` is `primary` or `secondary`. An empty variable counts as not set. Raises NetworkOptionError with the name
        of the variable.
        """

        def given(name: str) -> str | None:
            return environment.get(f"TWINBUS_{name}") or None

        kind, proxy = given("TRANSPORT_TYPE"), given("PROXY")
        if kind is not None and kind not in TRANSPORT_NAMES:
            raise NetworkOptionError(f"TWINBUS_TRANSPORT_TYPE is {kind!r}, not {' or '.join(TRANSPORT_NAMES)}")
        endpoint = f"{side.upper()}_ENDPOINT"
        try:
            found = None if proxy is None else HttpProxy.parse(proxy, given("PROXY_CREDENTIALS"))
        except NetworkOptionError as error:
            raise NetworkOptionError(f"TWINBUS_PROXY: {error}") from None
        try:
            return cls(
                transport_type=None if kind is None else TRANSPORT_NAMES[kind],
                http_proxy=found,
                custom_endpoint_address=given(endpoint),
                connection_verify=given("CA"),
            )
        except NetworkOptionError as error:
            raise NetworkOptionError(f"TWINBUS_{endpoint}: {error}") from None

    @property
    def uses_websocket(self) -> bool:
        if self.transport_type is None:
            return self.http_proxy is not None or self.custom_endpoint_address is not None
        return self.transport_type is TransportType.AmqpOverWebsocket or self.http_proxy is not None

    def address(self, endpoint: ConnectionString) -> tuple[str, int]:
        """Return host and port to which the client connects, or to which the proxy connects for it.

        A WebSocket goes to port 443 unless the connection string or the custom endpoint has another port.
        """
        port = WEBSOCKET_PORT if self.uses_websocket and endpoint.port == TLS_PORT else endpoint.port
        if self.custom_endpoint_address is None:
            return endpoint.host, port
        host, given = _custom_endpoint(self.custom_endpoint_address)
        default = WEBSOCKET_PORT if self.uses_websocket and endpoint.tls else port
        return host, default if given is None else given

    def client_options(self, endpoint: ConnectionString, *, is_aio: bool) -> dict[str, Any]:
        """Return keyword arguments for the SDK's client of this namespace, sync or asyncio."""
        from azure.servicebus import TransportType as SdkTransportType  # noqa: PLC0415 - only callers with a client

        options: dict[str, Any] = {
            "transport_type": SdkTransportType.AmqpOverWebsocket if self.uses_websocket else SdkTransportType.Amqp
        }
        if self.http_proxy is not None:
            proxy = asdict(self.http_proxy)
            if is_aio:  # aiohttp takes the host of a proxy as a URL
                proxy["proxy_hostname"] = f"http://{self.http_proxy.proxy_hostname}"
            options["http_proxy"] = proxy
        if self.custom_endpoint_address is not None:
            options["custom_endpoint_address"] = self.custom_endpoint_address
        elif not endpoint.has_key and endpoint.port != TLS_PORT:
            # In TLS, the SDK takes another port from the custom endpoint only.
            options["custom_endpoint_address"] = f"sb://{endpoint.authority}"
        if self.connection_verify is not None:
            options["connection_verify"] = self.connection_verify
        return options

    def http_options(self) -> dict[str, Any]:
        """Return keyword arguments for the SDK's administration client: its proxy, and the certificates to trust."""
        options: dict[str, Any] = {}
        if self.http_proxy is not None:
            url = self.http_proxy.url_with_credentials()
            options["proxies"] = {"http": url, "https": url}
        if self.connection_verify is not None:
            options["connection_verify"] = self.connection_verify
        return options

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the context that trusts `connection_verify`, or None if that is not set. Reads the file."""
        if self.connection_verify is None:
            return None
        try:
            return ssl.create_default_context(cafile=self.connection_verify)
        except (OSError, ssl.SSLError) as error:
            raise NetworkOptionError(f"{self.connection_verify} cannot be used as a CA: {error}") from None


def _custom_endpoint(text: str) -> tuple[str, int | None]:
    try:
        parts = urlsplit(text if "//" in text else f"//{text}")
        if parts.hostname:
            return parts.hostname, parts.port
    except ValueError:
        pass
    # The error does not show the text, which may be a connection string by mistake.
    raise NetworkOptionError("custom_endpoint_address is not an address: write sb://HOST or sb://HOST:PORT")


async def open_tunnel(proxy: HttpProxy, host: str, port: int) -> socket.socket:
    """Return a socket that the proxy has connected to `host` and `port`. The caller sets a timeout.

    Raises ServiceBusCommunicationError, or ServiceBusHandshakeError if the proxy refuses.
    """
    try:
        made = await _connect(proxy)
    except OSError as error:
        raise ServiceBusCommunicationError(f"cannot connect to the proxy {proxy.authority}: {error}") from error
    try:
        await _request_tunnel(made, proxy, authority(host, port))
    except OSError as error:
        made.close()
        raise ServiceBusCommunicationError(f"the connection to the proxy {proxy.authority} broke: {error}") from error
    except BaseException:
        made.close()
        raise
    return made


async def _connect(proxy: HttpProxy) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(proxy.proxy_hostname, proxy.proxy_port, type=socket.SOCK_STREAM)
    failure: OSError = OSError("the name has no address")
    for family, kind, protocol, _, address in found:
        made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        try:
            await loop.sock_connect(made, address)
        except OSError as error:
            failure = error
            made.close()
            continue
        except BaseException:
            made.close()
            raise
        return made
    raise failure


async def _request_tunnel(made: socket.socket, proxy: HttpProxy, target: str) -> None:
    import h11  # noqa: PLC0415 - may not be installed

    loop = asyncio.get_running_loop()
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_RESPONSE_BYTES)
    headers = [("Host", target)]
    if (authorization := proxy.authorization()) is not None:
        headers.append(("Proxy-Authorization", authorization))
    request = http.send(h11.Request(method="CONNECT", target=target, headers=headers))
    await loop.sock_sendall(made, (request or b"") + (http.send(h11.EndOfMessage()) or b""))
    try:
        while not isinstance(event := http.next_event(), h11.Response):
            data = await loop.sock_recv(made, _PIECE)
            if not data and http.trailing_data[0]:
                raise ServiceBusHandshakeError(f"{proxy.authority} is no HTTP proxy: its answer is not complete")
            if not data:
                raise ServiceBusCommunicationError(
                    f"the proxy {proxy.authority} closed the connection without an answer"
                )
            http.receive_data(data)
    except h11.RemoteProtocolError as error:
        raise ServiceBusHandshakeError(f"{proxy.authority} is no HTTP proxy: {error}") from error
    if 200 <= event.status_code < 300:
        if http.trailing_data[0]:  # nothing may come before this side has spoken
            raise ServiceBusHandshakeError(f"{proxy.authority} is no HTTP proxy: it sent bytes of its own")
        return
    answer = f"{event.status_code} {bytes(event.reason).decode('latin-1')}".rstrip()
    text = f"the proxy {proxy.authority} does not connect to {target}: {answer}"
    if event.status_code in _UNREACHABLE:
        raise ServiceBusCommunicationError(text)
    raise ServiceBusHandshakeError(text)


def authority(host: str, port: int) -> str:
    """Return `host:port` as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
