"""Where a namespace is and what proves who we are, read from what the caller has: a connection string, a host with a
TokenCredential, or a client of azure-servicebus. Nothing is connected here.
"""

from __future__ import annotations

import asyncio
import inspect
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from twinbus.clock import SystemClock
from twinbus.connect import (
    JWT_TYPE,
    PLAIN_PORT,
    SAS_TYPE,
    TLS_PORT,
    ConnectionString,
    SasTokenSource,
    ServiceBusConnection,
    Token,
    TokenSource,
    connect,
)
from twinbus.errors import CallerError

SCOPE: Final = "https://servicebus.azure.net//.default"
# A signature made elsewhere tells its end inside; it is put again well before that.
_SIGNATURE_SECONDS: Final = 600


class CredentialError(CallerError, TypeError):
    """The credential is of no kind that is known here."""


class AzureTokenSource:
    """Any TokenCredential, sync or aio: told by `get_token`, so that azure-identity need not be installed."""

    def __init__(self, credential: Any) -> None:
        self._credential = credential

    async def token(self, audience: str) -> Token:
        get_token = self._credential.get_token
        if inspect.iscoroutinefunction(get_token):
            found = await get_token(SCOPE)
        else:
            # Its network is its own: it must not hold up ours.
            found = await asyncio.to_thread(get_token, SCOPE)
            if inspect.isawaitable(found):
                found = await found
        return Token(found.token, JWT_TYPE, int(found.expires_on))


class SignatureSource:
    """A shared access signature that somebody else made, and may replace (AzureSasCredential)."""

    def __init__(self, credential: Any) -> None:
        self._credential = credential

    async def token(self, audience: str) -> Token:
        return Token(self._credential.signature, SAS_TYPE, SystemClock().now() // 1000 + _SIGNATURE_SECONDS)


@dataclass(frozen=True, slots=True)
class NamespaceAccess:
    """One namespace, as the native transport connects to it."""

    endpoint: ConnectionString
    source: TokenSource | None = None
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, given: NamespaceAccess | str | Any) -> NamespaceAccess:
        """From a connection string, or a client of azure-servicebus, sync or aio."""
        if isinstance(given, NamespaceAccess):
            return given
        if isinstance(given, str):
            return cls(ConnectionString.parse(given))
        return cls.of_client(given)

    @classmethod
    def of_client(cls, client: Any) -> Self:
        # Not at the top: without a client, azure-servicebus is not needed.
        from twinbus.sdk import connection_settings  # noqa: PLC0415

        namespace, use_tls, authority, credential = connection_settings(client)
        tls = ssl.create_default_context(cafile=authority) if use_tls and authority else None
        return cls.with_credential(_endpoint(namespace, plain=not use_tls), credential, tls)

    @classmethod
    def with_credential(
        cls, endpoint: ConnectionString | str, credential: Any, tls: ssl.SSLContext | Path | None = None
    ) -> Self:
        """A host, or host:port, with a TokenCredential, an AzureNamedKeyCredential or an AzureSasCredential."""
        at = _endpoint(endpoint) if isinstance(endpoint, str) else endpoint
        context = ssl.create_default_context(cafile=tls) if isinstance(tls, Path) else tls
        key = _named_key(credential)
        if key is not None:
            signing = ConnectionString(at.host, at.port, key[0], key[1], emulator=at.emulator)
            return cls(signing, SasTokenSource(signing, SystemClock()), context)
        if hasattr(credential, "signature"):
            return cls(at, SignatureSource(credential), context)
        if hasattr(credential, "get_token"):
            return cls(at, AzureTokenSource(credential), context)
        raise CredentialError(f"a {type(credential).__name__} gives no token: it has no get_token")

    def connect(self, *, timeout: float) -> ServiceBusConnection:
        return connect(self.endpoint, tls=self.tls, credential=self.source, timeout=timeout)


def _endpoint(name: str, *, plain: bool = False) -> ConnectionString:
    host, _, port = name.rpartition(":")
    if not host or not port.isdigit():
        host, port = name, str(PLAIN_PORT if plain else TLS_PORT)
    return ConnectionString(host.strip("[]"), int(port), "", "", emulator=plain)


def _named_key(credential: Any) -> tuple[str, str] | None:
    named = getattr(credential, "named_key", None)
    if named is not None:
        return str(named.name), str(named.key)
    # What the SDK makes of a connection string.
    if hasattr(credential, "policy") and hasattr(credential, "key"):
        return str(credential.policy), str(credential.key)
    return None
