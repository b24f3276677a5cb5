"""Connecting and reconnecting: at most one open transport to a namespace, with tokens for the namespace's entities.

The transport is made when a link first needs a transport, and again when a link needs one after the transport broke.
Operations that were running on a broken transport fail; the caller decides whether to repeat them.
"""

from __future__ import annotations

import asyncio
import ssl
import uuid
from contextlib import suppress
from itertools import count
from typing import Any, Final

from twinbus.amqp import MIB, Connection
from twinbus.clock import Clock
from twinbus.connect.cbs import CbsClient
from twinbus.connect.connection_string import ConnectionString
from twinbus.connect.errors import (
    ConnectionClosedError,
    ServiceBusCertificateError,
    ServiceBusCommunicationError,
    ServiceBusError,
)
from twinbus.connect.link_session import LinkSession
from twinbus.connect.network import NetworkOptions, authority, open_tunnel
from twinbus.connect.tokens import TokenSource
from twinbus.connect.transport import AmqpTransport

_CLOSE_SECONDS: Final = 5.0
_WRITE_BUFFER: Final = 2 * MIB


class Reconnector:
    """Provides links with an open transport that holds a token for their entity."""

    def __init__(
        self,
        endpoint: ConnectionString,
        *,
        tls: ssl.SSLContext | None,
        network: NetworkOptions,
        source: TokenSource,
        idle_timeout: float,
        max_frame_size: int,
        clock: Clock,
    ) -> None:
        self.endpoint = endpoint
        self.clock = clock
        self._tls = tls or (network.tls_context() if endpoint.tls else None)
        self._network = network
        self._source = source
        self._idle_timeout = idle_timeout
        self._max_frame_size = max_frame_size
        self._container_id = f"twinbus-{uuid.uuid4().hex[:12]}"
        self._link_numbers = count(1)
        self._transport: AmqpTransport | None = None
        self._cbs: CbsClient | None = None
        self._connecting = asyncio.Lock()
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        return self._transport is not None and self._transport.is_open

    async def connected(self) -> AmqpTransport:
        """Return the open transport; connect first if no transport is open. The caller sets a timeout."""
        if self._transport is not None and self._transport.is_open and not self._is_closed:
            return self._transport
        async with self._connecting:
            if self._is_closed:
                raise ConnectionClosedError("the connection is closed")
            if self._transport is None or not self._transport.is_open:
                self._transport = await self._connect()
                self._cbs = CbsClient(self._transport, self._source, self.clock, self.link_name("$cbs"))
            return self._transport

    async def authorized(self, entity: str) -> AmqpTransport:
        """Return an open transport that has a token for the entity. The caller sets a timeout."""
        transport = await self.connected()
        assert self._cbs is not None
        await self._cbs.ensure_token(self.endpoint.resource(entity), entity)
        return transport

    def link_name(self, address: str) -> str:
        """Return a link name that no other link of this process has."""
        return f"{address}-{self._container_id}-{next(self._link_numbers)}"

    async def close_links(self, links: LinkSession) -> None:
        """Detach the links. Returns after 5 seconds even if the peer does not answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await links.close()

    def refuse_connecting(self) -> None:
        """From now on, make no new transport. Links on the present transport can still be closed."""
        self._is_closed = True

    async def close(self) -> None:
        """Close the transport. Returns after 5 seconds even if the peer does not answer."""
        self.refuse_connecting()
        transport = self._transport
        if transport is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await transport.close()
            transport.abort(ConnectionClosedError("the connection was closed by its owner"))

    async def _connect(self) -> AmqpTransport:
        endpoint = self.endpoint
        core = Connection.client(
            self._container_id,
            endpoint.host,
            max_frame_size=self._max_frame_size,
            idle_timeout=self._idle_timeout,
        )
        network = self._network
        host, port = network.address(endpoint)
        websocket_host = authority(host, port) if network.uses_websocket else None
        transport = AmqpTransport(core, endpoint.authority, websocket_host=websocket_host)
        context = self._tls or (ssl.create_default_context() if endpoint.tls else None)
        where: dict[str, Any] = {"host": host, "port": port}
        try:
            if network.http_proxy is not None:
                where = {"sock": await open_tunnel(network.http_proxy, host, port)}
            socket, _ = await transport.loop.create_connection(
                lambda: transport, **where, ssl=context, server_hostname=host if context is not None else None
            )
            socket.set_write_buffer_limits(high=_WRITE_BUFFER)
            await transport.opened
        except ssl.SSLCertVerificationError as error:
            raise ServiceBusCertificateError(f"{endpoint.authority}: {error.verify_message}") from error
        except OSError as error:
            raise ServiceBusCommunicationError(f"cannot connect to {endpoint.authority}: {error}") from error
        except ServiceBusError as error:
            raise error.copy() from None
        except asyncio.CancelledError:
            transport.abort(ConnectionClosedError("connecting was given up"))
            raise
        return transport
