"""An issuer of JSON web tokens for tests: signs with a key of its own, as Entra ID does."""

from __future__ import annotations

import json
import time
from functools import cached_property
from typing import Any, Final, Self, cast

import jwt
from azure.core.credentials import AccessToken
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

AUDIENCE: Final = "https://servicebus.azure.net"
ISSUER: Final = "https://issuer.example/tenant"
SENDER: Final = "Azure Service Bus Data Sender"
RECEIVER: Final = "Azure Service Bus Data Receiver"
OWNER: Final = "Azure Service Bus Data Owner"


class Issuer:
    """Signs tokens with one key. `key_set` is what it publishes."""

    def __init__(self, kid: str = "first", *, bits: int = 2048, curve: ec.EllipticCurve | None = None) -> None:
        self.kid = kid
        self._bits = bits
        self._curve = curve

    @cached_property
    def private_key(self) -> Any:
        if self._curve is not None:
            return ec.generate_private_key(self._curve)
        return rsa.generate_private_key(65537, self._bits)

    @property
    def public_jwk(self) -> dict[str, Any]:
        made = ECAlgorithm if self._curve is not None else RSAAlgorithm
        return {**json.loads(made.to_jwk(self.private_key.public_key())), "kid": self.kid, "use": "sig"}

    @property
    def key_set(self) -> dict[str, Any]:
        return {"keys": [self.public_jwk]}

    def token(
        self,
        *roles: str,
        seconds: float = 3600,
        algorithm: str | None = None,
        headers: dict[str, Any] | None = None,
        **fields: Any,
    ) -> str:
        """Return a token that is valid for `seconds`. `fields` replace fields of the token; None removes one."""
        now = int(time.time())
        payload = {"aud": AUDIENCE, "iss": ISSUER, "nbf": now, "iat": now, "exp": now + seconds, "roles": list(roles)}
        payload |= fields
        return jwt.encode(
            {name: value for name, value in payload.items() if value is not None},
            cast("Any", None if algorithm == "none" else self.private_key),
            algorithm or ("RS256" if self._curve is None else "ES256"),
            headers={"kid": self.kid, **(headers or {})},
        )


class IssuedTokens:
    """A credential as azure-servicebus takes it. `given` counts the tokens."""

    def __init__(self, issuer: Issuer, *roles: str, seconds: float = 3600, **fields: Any) -> None:
        self.issuer = issuer
        self.roles = roles
        self.seconds = seconds
        self.fields = fields
        self.given = 0
        self.scopes: set[str] = set()

    def get_token(self, *scopes: str, **_: Any) -> AccessToken:
        self.given += 1
        self.scopes |= set(scopes)
        token = self.issuer.token(*self.roles, seconds=self.seconds, **self.fields)
        return AccessToken(token, int(time.time() + self.seconds))


class AioIssuedTokens(IssuedTokens):
    async def get_token(self, *scopes: str, **options: Any) -> AccessToken:  # type: ignore[override]  # as the SDK's
        return super().get_token(*scopes, **options)

    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...
