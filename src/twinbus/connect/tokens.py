"""Where the tokens put on `$cbs` come from. When they are put and renewed is the connection's affair."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

from twinbus.clock import Clock
from twinbus.connect.connection_string import ConnectionString
from twinbus.connect.sas import make_token

SAS_TYPE: Final = "servicebus.windows.net:sastoken"
JWT_TYPE: Final = "jwt"


@dataclass(frozen=True, slots=True)
class Token:
    text: str = field(repr=False)
    type: str
    expires_at: int  # epoch seconds


class TokenSource(Protocol):
    """Makes a token for an audience such as `sb://host:port/entity`."""

    async def token(self, audience: str) -> Token: ...


class SasTokenSource:
    """Signs with the key of a connection string."""

    def __init__(self, endpoint: ConnectionString, clock: Clock, lifetime: int = 3600) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._lifetime = lifetime

    async def token(self, audience: str) -> Token:
        expires_at = self._clock.now() // 1000 + self._lifetime
        text = make_token(audience, self._endpoint.key_name, self._endpoint.key, expires_at)
        return Token(text, SAS_TYPE, expires_at)
