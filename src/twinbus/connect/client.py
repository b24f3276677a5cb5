"""The client: `connect` returns a `ServiceBusConnection`, which makes senders, receivers and management nodes.

All objects that a `ServiceBusConnection` makes share one socket. The first operation opens the socket (`reconnection`).
"""

from __future__ import annotations

import asyncio
import ssl
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from twinbus.amqp import MIB
from twinbus.clock import Clock, SystemClock
from twinbus.connect.connection_string import ConnectionString
from twinbus.connect.errors import ServiceBusArgumentError
from twinbus.connect.management import Management
from twinbus.connect.network import NetworkOptions
from twinbus.connect.receiver import ReceiveMode, Receiver, SessionChoice
from twinbus.connect.reconnection import Reconnector
from twinbus.connect.sender import Sender
from twinbus.connect.timeouts import deadline
from twinbus.connect.tokens import SasTokenSource, TokenSource, token_source

if TYPE_CHECKING:
    from azure.core.credentials import TokenCredential as SyncTokenCredential
    from azure.core.credentials_async import AsyncTokenCredential

    TokenCredential = SyncTokenCredential | AsyncTokenCredential

DEFAULT_TIMEOUT: Final = 60.0
DEFAULT_PREFETCH: Final = 1000
_DEAD_LETTER_SUFFIX: Final = "/$DeadLetterQueue"


def connect(
    connection_string: str | ConnectionString,
    *,
    tls: ssl.SSLContext | None = None,
    credential: TokenSource | TokenCredential | None = None,
    network: NetworkOptions | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    idle_timeout: float = 30.0,
    max_frame_size: int = MIB,
    clock: Clock | None = None,
) -> ServiceBusConnection:
    """Return a connection whose socket opens with the first operation: `async with connect(text) as bus`.

    With a `credential`, the text may be the host of the namespace: `connect("contoso.servicebus.windows.net",
    credential=DefaultAzureCredential())`. The credential is one of azure-identity, sync or aio, or a TokenSource.

    The connection uses TLS, except that UseDevelopmentEmulator=true without `tls` means plain TCP. `network` selects a
    WebSocket, a proxy or another address. `timeout`, in seconds, is for every operation that is called without a
    timeout. The connection fails if the peer is silent for twice `idle_timeout` seconds.
    """
    endpoint = (
        connection_string if isinstance(connection_string, ConnectionString) else ConnectionString.of(connection_string)
    )
    endpoint.require_credential(credential)
    return ServiceBusConnection(
        endpoint,
        tls=tls,
        credential=None if credential is None else token_source(credential),
        network=network or NetworkOptions(),
        timeout=timeout,
        idle_timeout=idle_timeout,
        max_frame_size=max_frame_size,
        clock=clock or SystemClock(),
    )


class ServiceBusConnection:
    """A connection to one namespace. Made by `connect`."""

    def __init__(
        self,
        endpoint: ConnectionString,
        *,
        tls: ssl.SSLContext | None,
        credential: TokenSource | None,
        network: NetworkOptions,
        timeout: float,
        idle_timeout: float,
        max_frame_size: int,
        clock: Clock,
    ) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        self._reconnector = Reconnector(
            endpoint,
            tls=tls,
            network=network,
            source=credential or SasTokenSource(endpoint, clock),
            idle_timeout=idle_timeout,
            max_frame_size=max_frame_size,
            clock=clock,
        )
        self._members: dict[Sender | Receiver, None] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_connected(self) -> bool:
        return self._reconnector.is_connected

    async def open(self, *, timeout: float | None = None) -> None:
        """Open the socket and the AMQP connection, if they are not open."""
        async with deadline(self.timeout if timeout is None else timeout, f"connect to {self.endpoint.authority}"):
            await self._reconnector.connected()

    async def sender(self, entity: str, *, timeout: float | None = None) -> Sender:
        """Return a sender that is attached to a queue or topic."""
        sender = Sender(
            self._reconnector,
            entity,
            self.timeout if timeout is None else timeout,
            management=self.management(entity),
            on_close=self._forget,
        )
        await sender.open()
        self._members[sender] = None
        return sender

    async def receiver(
        self,
        entity: str,
        *,
        subscription: str | None = None,
        mode: ReceiveMode = ReceiveMode.PEEK_LOCK,
        prefetch: int | None = None,
        session: SessionChoice = None,
        dead_letter: bool = False,
        session_timeout: float = DEFAULT_TIMEOUT,
        timeout: float | None = None,
    ) -> Receiver:
        """Return a receiver that is attached to a queue, or to a subscription of the topic `entity`.

        The default of `prefetch` is 1000 with peek-lock and 0 with receive-and-delete: the server deletes a prefetched
        message, and the message is lost if this process ends before it handles the message.
        """
        if prefetch is None:
            prefetch = DEFAULT_PREFETCH if mode is ReceiveMode.PEEK_LOCK else 0
        if prefetch < 0:
            raise ServiceBusArgumentError("prefetch cannot be negative", entity=entity)
        path = f"{entity}/Subscriptions/{subscription}" if subscription is not None else entity
        address = path + _DEAD_LETTER_SUFFIX if dead_letter else path
        receiver = Receiver(
            self._reconnector,
            path,
            address,
            mode=mode,
            prefetch=prefetch,
            session=session,
            session_timeout=session_timeout,
            timeout=self.timeout if timeout is None else timeout,
            management=self.management(path, address=address),
            on_close=self._forget,
        )
        await receiver.open()
        self._members[receiver] = None
        return receiver

    def management(self, entity: str, *, address: str | None = None, timeout: float | None = None) -> Management:
        """Return an object for requests to the `$management` node of an entity. The first request attaches the links.

        `address` is the path of a sub-queue, such as the dead-letter queue; None means the entity itself.
        """
        node = f"{address or entity}/$management"
        return Management(self._reconnector, entity, node, self.timeout if timeout is None else timeout)

    async def close(self) -> None:
        """Close all senders and receivers, then the connection. Each step waits at most 5 seconds for the peer."""
        self._reconnector.refuse_connecting()
        await asyncio.gather(*(member.close() for member in list(self._members)))
        await self._reconnector.close()

    def _forget(self, member: Sender | Receiver) -> None:
        self._members.pop(member, None)
