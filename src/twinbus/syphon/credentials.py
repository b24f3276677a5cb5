"""Address and credential of a namespace for `connect`, from a connection string, a host with a credential, or a client.

Connects to nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import ssl
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from twinbus.clock import SystemClock
from twinbus.connect import (
    JWT_TYPE,
    PLAIN_PORT,
    SAS_TYPE,
    TLS_PORT,
    ConnectionString,
    HttpProxy,
    NetworkOptions,
    SasTokenSource,
    ServiceBusConnection,
    Token,
    TokenSource,
    TransportType,
    connect,
)
from twinbus.errors import CallerError

SCOPE: Final = "https://servicebus.azure.net//.default"
# Seconds after which a signature is sent again. When the signature expires is not known: its text is not parsed.
_SIGNATURE_SECONDS: Final = 600


class CredentialError(CallerError, TypeError):
    """The credential is of no kind that is supported."""


class AzureTokenSource:
    """Gets tokens from a TokenCredential, sync or aio.

    The credential needs only the method `get_token`, so azure-identity does not have to be installed.
    """

    def __init__(self, credential: Any) -> None:
        self._credential = credential

    async def token(self, audience: str) -> Token:
        get_token = self._credential.get_token
        if inspect.iscoroutinefunction(get_token):
            found = await get_token(SCOPE)
        else:
            # In a thread, because the requests of a sync credential would block the event loop.
            found = await asyncio.to_thread(get_token, SCOPE)
            if inspect.isawaitable(found):
                found = await found
        return Token(found.token, JWT_TYPE, int(found.expires_on))


class SignatureSource:
    """The signature of an AzureSasCredential, which its owner may replace at any time."""

    def __init__(self, credential: Any) -> None:
        self._credential = credential

    async def token(self, audience: str) -> Token:
        return Token(self._credential.signature, SAS_TYPE, SystemClock().now() // 1000 + _SIGNATURE_SECONDS)


@dataclass(frozen=True, slots=True)
class NamespaceAccess:
    """What the native transport needs to connect to one namespace."""

    endpoint: ConnectionString
    source: TokenSource | None = None
    tls: ssl.SSLContext | None = None
    network: NetworkOptions | None = None

    @classmethod
    def of(cls, given: NamespaceAccess | str | Any, network: NetworkOptions | None = None) -> NamespaceAccess:
        """Return the access of a connection string, or of a client of azure-servicebus, sync or aio.

        `network` is for a connection string. A client has its own proxy, transport and address.
        """
        if isinstance(given, NamespaceAccess):
            return given
        if isinstance(given, str):
            return cls(ConnectionString.parse(given), network=network)
        return cls.of_client(given)

    @classmethod
    def of_client(cls, client: Any) -> Self:
        # Imported here: only a caller that has a client needs azure-servicebus.
        from twinbus.sdk import connection_settings  # noqa: PLC0415

        found = connection_settings(client)
        authority = found.authority_file
        tls = ssl.create_default_context(cafile=authority) if found.use_tls and authority else None
        network = NetworkOptions(
            transport_type=TransportType.AmqpOverWebsocket if found.uses_websocket else TransportType.Amqp,
            http_proxy=None if found.http_proxy is None else HttpProxy.of(found.http_proxy),
            custom_endpoint_address=found.custom_endpoint,
        )
        made = cls.with_credential(_endpoint(found.namespace, plain=not found.use_tls), found.credential, tls)
        return replace(made, network=network)

    @classmethod
    def with_credential(
        cls, endpoint: ConnectionString | str, credential: Any, tls: ssl.SSLContext | None = None
    ) -> Self:
        """Return the access of an endpoint (host or host:port) with a credential.

        The credential is a TokenCredential, an AzureNamedKeyCredential or an AzureSasCredential.
        """
        address = _endpoint(endpoint) if isinstance(endpoint, str) else endpoint
        key = _named_key(credential)
        if key is not None:
            signing = ConnectionString(address.host, address.port, key[0], key[1], emulator=address.emulator)
            return cls(signing, SasTokenSource(signing, SystemClock()), tls)
        if hasattr(credential, "signature"):
            return cls(address, SignatureSource(credential), tls)
        if hasattr(credential, "get_token"):
            return cls(address, AzureTokenSource(credential), tls)
        raise CredentialError(f"a {type(credential).__name__} is no credential: it has no get_token")

    def connect(self, *, timeout: float) -> ServiceBusConnection:
        return connect(self.endpoint, tls=self.tls, credential=self.source, network=self.network, timeout=timeout)


def _endpoint(name: str, *, plain: bool = False) -> ConnectionString:
    host, _, port = name.rpartition(":")
    if not host or not port.isdigit():
        host, port = name, str(PLAIN_PORT if plain else TLS_PORT)
    return ConnectionString(host.strip("[]"), int(port), "", "", emulator=plain)


def _named_key(credential: Any) -> tuple[str, str] | None:
    named = getattr(credential, "named_key", None)
    if named is not None:
        return str(named.name), str(named.key)
    # The credential that the SDK makes from a connection string.
    if hasattr(credential, "policy") and hasattr(credential, "key"):
        return str(credential.policy), str(credential.key)
    return None
