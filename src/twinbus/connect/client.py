"""The connection a caller holds: one socket for many senders and receivers, made when it is needed and made again
after it broke. Whatever was under way when it broke fails; whether to repeat it is the caller's decision.

What the links do is theirs; here is how they come by an open and authorized wire.
"""

from __future__ import annotations

import asyncio
import ssl
import uuid
from contextlib import suppress
from itertools import count
from types import TracebackType
from typing import Final, Self

from twinbus.amqp import MIB, Connection
from twinbus.clock import Clock, SystemClock
from twinbus.connect.cbs import CbsClient
from twinbus.connect.connection_string import ConnectionString
from twinbus.connect.errors import (
    ConnectionClosedError,
    ServiceBusArgumentError,
    ServiceBusCertificateError,
    ServiceBusCommunicationError,
    ServiceBusError,
)
from twinbus.connect.link_session import LinkSession
from twinbus.connect.management import Management
from twinbus.connect.receiver import ReceiveMode, Receiver, SessionChoice
from twinbus.connect.sender import Sender
from twinbus.connect.timeouts import deadline
from twinbus.connect.tokens import SasTokenSource, TokenSource
from twinbus.connect.transport import AmqpTransport

DEFAULT_TIMEOUT: Final = 60.0
DEFAULT_PREFETCH: Final = 1000
_CLOSE_SECONDS: Final = 5.0
_WRITE_BUFFER: Final = 2 * MIB
_DEAD_LETTER: Final = "/$DeadLetterQueue"


def connect(
    connection_string: str | ConnectionString,
    *,
    tls: ssl.SSLContext | None = None,
    credential: TokenSource | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    idle_timeout: float = 30.0,
    max_frame_size: int = MIB,
    clock: Clock | None = None,
) -> ServiceBusConnection:
    """A connection that opens with its first use: `async with connect(text) as bus`.

    Plain TCP with UseDevelopmentEmulator=true, unless `tls` is given; TLS otherwise. `timeout` is the deadline, in
    seconds, of every operation that names none. A peer silent for twice `idle_timeout` is taken for dead.
    """
    endpoint = (
        connection_string
        if isinstance(connection_string, ConnectionString)
        else ConnectionString.parse(connection_string)
    )
    return ServiceBusConnection(
        endpoint,
        tls=tls,
        credential=credential,
        timeout=timeout,
        idle_timeout=idle_timeout,
        max_frame_size=max_frame_size,
        clock=clock or SystemClock(),
    )


class ServiceBusConnection:
    """Made by `connect`."""

    def __init__(
        self,
        endpoint: ConnectionString,
        *,
        tls: ssl.SSLContext | None,
        credential: TokenSource | None,
        timeout: float,
        idle_timeout: float,
        max_frame_size: int,
        clock: Clock,
    ) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        self.clock = clock
        self._tls = tls
        self._source = credential or SasTokenSource(endpoint, clock)
        self._idle_timeout = idle_timeout
        self._max_frame_size = max_frame_size
        self._container = f"twinbus-{uuid.uuid4().hex[:12]}"
        self._numbers = count(1)
        self._wire: AmqpTransport | None = None
        self._claims: CbsClient | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False
        self._members: dict[Sender | Receiver, None] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_connected(self) -> bool:
        return self._wire is not None and self._wire.is_open

    async def open(self, *, timeout: float | None = None) -> None:
        """Connects, unless it is connected."""
        async with deadline(self.timeout if timeout is None else timeout, f"connect to {self.endpoint.authority}"):
            await self._connected()

    # --- what is made of it ------------------------------------------------------------------------------------

    async def sender(self, entity: str, *, timeout: float | None = None) -> Sender:
        """Attached on return, to a queue or a topic."""
        sender = Sender(self, entity, self.timeout if timeout is None else timeout)
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
        """Attached on return, to a queue, or to a subscription of the topic `entity`.

        `prefetch` is 1000 with peek-lock. With receive-and-delete it is 0 unless given: what is prefetched then is
        deleted on the server, and lost with this process.
        """
        if prefetch is None:
            prefetch = DEFAULT_PREFETCH if mode is ReceiveMode.PEEK_LOCK else 0
        if prefetch < 0:
            raise ServiceBusArgumentError("prefetch cannot be negative", entity=entity)
        path = f"{entity}/Subscriptions/{subscription}" if subscription is not None else entity
        receiver = Receiver(
            self,
            path,
            path + _DEAD_LETTER if dead_letter else path,
            mode=mode,
            prefetch=prefetch,
            session=session,
            session_timeout=session_timeout,
            timeout=self.timeout if timeout is None else timeout,
        )
        await receiver.open()
        self._members[receiver] = None
        return receiver

    def management(self, entity: str, *, address: str | None = None, timeout: float | None = None) -> Management:
        """The `$management` node of an entity; it attaches with its first request. `address` names a sub-queue."""
        node = f"{address or entity}/$management"
        return Management(self, entity, node, self.timeout if timeout is None else timeout)

    async def close(self) -> None:
        """Closes what was made of it, then the connection, in a bounded time and whatever the peer does."""
        self._is_closed = True
        await asyncio.gather(*(member.close() for member in list(self._members)))
        wire = self._wire
        if wire is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await wire.close()
            wire.abort(ConnectionClosedError("the connection was closed by its owner"))

    # --- for the links -----------------------------------------------------------------------------------------

    async def authorized(self, entity: str) -> AmqpTransport:
        """An open wire with a token for the entity on it; the caller bounds the wait."""
        wire = await self._connected()
        assert self._claims is not None
        await self._claims.ensure(self.endpoint.resource(entity), entity)
        return wire

    def link_name(self, address: str) -> str:
        return f"{address}-{self._container}-{next(self._numbers)}"

    def forget(self, member: Sender | Receiver) -> None:
        self._members.pop(member, None)

    async def close_attachment(self, attachment: LinkSession) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await attachment.close()

    # --- the wire ----------------------------------------------------------------------------------------------

    async def _connected(self) -> AmqpTransport:
        if self._wire is not None and self._wire.is_open and not self._is_closed:
            return self._wire
        async with self._connecting:
            if self._is_closed:
                raise ConnectionClosedError("the connection is closed")
            if self._wire is None or not self._wire.is_open:
                self._wire = await self._dial()
                self._claims = CbsClient(self._wire, self._source, self.clock, self.link_name("$cbs"))
            return self._wire

    async def _dial(self) -> AmqpTransport:
        endpoint = self.endpoint
        core = Connection.client(
            self._container,
            endpoint.host,
            max_frame_size=self._max_frame_size,
            idle_timeout=self._idle_timeout,
        )
        wire = AmqpTransport(core, endpoint.authority)
        context = self._tls or (ssl.create_default_context() if endpoint.tls else None)
        try:
            transport, _ = await wire.loop.create_connection(
                lambda: wire,
                endpoint.host,
                endpoint.port,
                ssl=context,
                server_hostname=endpoint.host if context is not None else None,
            )
            transport.set_write_buffer_limits(high=_WRITE_BUFFER)
            await wire.opened
        except ssl.SSLCertVerificationError as error:
            raise ServiceBusCertificateError(f"{endpoint.authority}: {error.verify_message}") from error
        except OSError as error:
            raise ServiceBusCommunicationError(f"cannot connect to {endpoint.authority}: {error}") from error
        except ServiceBusError as error:
            raise error.again() from None
        except asyncio.CancelledError:
            wire.abort(ConnectionClosedError("connecting was given up"))
            raise
        return wire
