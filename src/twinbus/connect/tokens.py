"""Tokens that authorize a connection: shared access signatures, and the protocol class for other token sources."""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Final, Protocol
from urllib.parse import quote

from twinbus.clock import Clock
from twinbus.connect.connection_string import ConnectionString

SAS_TYPE: Final = "servicebus.windows.net:sastoken"
JWT_TYPE: Final = "jwt"
SAS_SCHEME: Final = "SharedAccessSignature"


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
