"""Address and credential of a namespace for `connect`, from a connection string, a host with a credential, or a client.

Connects to nothing.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from twinbus.clock import SystemClock
from twinbus.connect import (
    PLAIN_PORT,
    SAS_TYPE,
    TLS_PORT,
    AzureTokenSource,
    ConnectionString,
    HttpProxy,
    NetworkOptions,
    SasTokenSource,
    ServiceBusConnection,
    Token,
    TokenSource,
    TransportType,
    connect,
    named_credential,
)
from twinbus.errors import CallerError

# Seconds after which a signature is sent again. When the signature expires is not known: its text is not parsed.
_SIGNATURE_SECONDS: Final = 600


class CredentialError(CallerError, TypeError):
    """The credential is of no kind that is supported."""


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
    def of(
        cls,
        given: NamespaceAccess | str | Any,
        network: NetworkOptions | None = None,
        credential: str | None = None,
    ) -> NamespaceAccess:
        """Return the access of a connection string, of a host name, or of a client of azure-servicebus, sync or aio.

        `network` is for a text. A client has its own proxy, transport and address. `credential` is the name of the
        credential for a host name (`named_credential`). Raises MissingExtraError without azure-identity.
        """
        if isinstance(given, NamespaceAccess):
            return given
        if not isinstance(given, str):
            return cls.of_client(given)
        endpoint = ConnectionString.of(given)
        if endpoint.has_key or credential is None:
            return cls(endpoint, network=network)
        return cls(endpoint, AzureTokenSource(named_credential(credential)), network=network)

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
    found = ConnectionString.of_host(name)
    if not plain:
        return found
    return replace(found, port=PLAIN_PORT if found.port == TLS_PORT else found.port, emulator=True)


def _named_key(credential: Any) -> tuple[str, str] | None:
    named = getattr(credential, "named_key", None)
    if named is not None:
        return str(named.name), str(named.key)
    # The credential that the SDK makes from a connection string.
    if hasattr(credential, "policy") and hasattr(credential, "key"):
        return str(credential.policy), str(credential.key)
    return None
