"""Tokens that authorize a connection: shared access signatures, and tokens of Entra ID from a credential."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import inspect
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import quote

from twinbus.clock import Clock
from twinbus.connect.connection_string import ConnectionString
from twinbus.connect.errors import ServiceBusCommunicationError, ServiceBusCredentialError, ServiceBusError

SAS_TYPE: Final = "servicebus.windows.net:sastoken"
JWT_TYPE: Final = "jwt"
SAS_SCHEME: Final = "SharedAccessSignature"
ENTRA_SCOPE: Final = "https://servicebus.azure.net//.default"
"""What a credential is asked for, as azure-servicebus asks. The tokens are for https://servicebus.azure.net."""
# The credential refuses, and will refuse again. All other errors of a credential may pass: its issuer does not answer.
_REFUSALS: Final = frozenset({"ClientAuthenticationError", "CredentialUnavailableError", "MissingExtraError"})
_LONGEST_REASON: Final = 300


@dataclass(frozen=True, slots=True)
class Token:
    """A token in the form that the client sends to `$cbs`. `expires_at` is in epoch seconds."""

    text: str = field(repr=False)
    type: str
    expires_at: int


class TokenSource(Protocol):
    """Makes a token for an audience such as `sb://host:port/entity`."""

    async def token(self, audience: str) -> Token: ...


class SasTokenSource:
    """Signs tokens with the key of a connection string."""

    def __init__(self, endpoint: ConnectionString, clock: Clock, lifetime: int = 3600) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._lifetime = lifetime

    async def token(self, audience: str) -> Token:
        expires_at = self._clock.now() // 1000 + self._lifetime
        text = make_sas_token(audience, self._endpoint.key_name, self._endpoint.key, expires_at)
        return Token(text, SAS_TYPE, expires_at)


class AzureTokenSource:
    """Gets tokens from a TokenCredential, sync or aio.

    The credential needs only the method `get_token`, so azure-identity does not have to be installed.
    """

    def __init__(self, credential: Any) -> None:
        self._credential = credential

    async def token(self, audience: str) -> Token:
        """Return a token. Raises ServiceBusCredentialError, or ServiceBusCommunicationError if a retry may help.

        The cause is the error of the credential.
        """
        get_token = self._credential.get_token
        try:
            if inspect.iscoroutinefunction(get_token):
                found = await get_token(ENTRA_SCOPE)
            else:
                # In a thread, because the requests of a sync credential would block the event loop.
                found = await asyncio.to_thread(get_token, ENTRA_SCOPE)
                if inspect.isawaitable(found):
                    found = await found
        except Exception as error:
            raise credential_failure(error) from error
        return Token(found.token, JWT_TYPE, int(found.expires_on))


def credential_failure(error: Exception) -> ServiceBusError:
    """Return the error for a credential that gave no token."""
    reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
    is_refused = not _REFUSALS.isdisjoint(kind.__name__ for kind in type(error).__mro__)
    made = ServiceBusCredentialError if is_refused else ServiceBusCommunicationError
    return made(f"the credential gave no token: {reason}")


def token_source(credential: TokenSource | Any) -> TokenSource:
    """Return the source of a credential's tokens: a TokenSource as it is, or a TokenCredential of azure-core."""
    found: TokenSource = AzureTokenSource(credential) if hasattr(credential, "get_token") else credential
    return found


def make_sas_token(resource: str, key_name: str, key: str, expires_at: int) -> str:
    """Return a token that is valid until `expires_at` (epoch seconds).

    The token covers a resource such as `sb://host/entity`, and all resources whose path starts with this resource.
    """
    encoded = quote(resource, safe="")
    signature = quote(sas_signature(key, encoded, str(expires_at)), safe="")
    return f"{SAS_SCHEME} sr={encoded}&sig={signature}&se={expires_at}&skn={quote(key_name, safe='')}"


def sas_signature(key: str, encoded_resource: str, expires_at: str) -> str:
    """Return the signature over resource and expiry time, both exactly as written in the token.

    The key is used as text. Keys look like base64, but must not be decoded.
    """
    signed = f"{encoded_resource}\n{expires_at}".encode()
    return base64.b64encode(hmac.digest(key.encode(), signed, hashlib.sha256)).decode()
