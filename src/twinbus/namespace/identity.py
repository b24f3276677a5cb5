"""Whose JSON web tokens a namespace accepts: the public keys of an issuer, the audiences and the issuers (N6).

The keys are a JSON Web Key Set (RFC 7517), as Entra ID and other issuers publish it. Each key has one algorithm, which
the key decides and never a token. So no token can choose how it is verified.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

DEFAULT_AUDIENCE: Final = "https://servicebus.azure.net"
"""The audience of the tokens that clients of Service Bus get from Entra ID."""
_RSA: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_CURVES: Final = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512"}
_RSA_BITS: Final = range(2048, 8192 + 1)
_MAX_KEYS: Final = 100


class KeySetError(ValueError):
    """A key set cannot be used. The text contains no key."""


@dataclass(frozen=True, slots=True)
class TokenKey:
    """One public key: its id, the only algorithm that it verifies, and the key itself as JSON with sorted names."""

    kid: str
    algorithm: str
    jwk: str


@dataclass(frozen=True, slots=True)
class IdentityOptions:
    """What a token must have: a signature by one of `keys`, one of `audiences`, and one of `issuers` if there are any.

    Example: `IdentityOptions(parse_key_set(text), ("https://servicebus.azure.net",))`.
    """

    keys: tuple[TokenKey, ...]
    audiences: tuple[str, ...] = (DEFAULT_AUDIENCE,)
    issuers: tuple[str, ...] = ()


def parse_key_set(text: str) -> tuple[TokenKey, ...]:
    """Return the keys of a key set that can verify tokens. Raises KeySetError.

    Keys for encryption and of unknown types are left out. A key set with a private key or a shared key is refused:
    a reader of the file could sign tokens.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise KeySetError(f"it is not JSON: {type(error).__name__}") from None
    keys = value.get("keys") if isinstance(value, dict) else None
    if not isinstance(keys, list) or not all(isinstance(key, dict) for key in keys):
        raise KeySetError('it is not a JSON Web Key Set: {"keys": [{"kty": "RSA", "kid": …, "n": …, "e": …}]}')
    if len(keys) > _MAX_KEYS:
        raise KeySetError(f"it has {len(keys)} keys; the most are {_MAX_KEYS}")
    found: dict[str, TokenKey] = {}
    for number, key in enumerate(keys, start=1):
        read = _read_key(f"key {number}", key)
        if read is not None and found.setdefault(read.kid, read) != read:
            raise KeySetError(f"the kid {read.kid!r} is there twice")
    if not found:
        raise KeySetError("it has no public key of type RSA or EC with a kid")
    return tuple(found.values())


def _read_key(name: str, key: dict[str, Any]) -> TokenKey | None:
    if key.get("kty") == "oct" or "d" in key:
        kind = "a shared" if key.get("kty") == "oct" else "a private"
        raise KeySetError(f"{name} is {kind} key: give the public keys only")
    kid, algorithm = key.get("kid"), _algorithm(key)
    if algorithm is None or key.get("use", "sig") != "sig" or not isinstance(kid, str) or not kid:
        return None
    from jwt import PyJWK  # noqa: PLC0415 - slow, and not needed without a key set
    from jwt.exceptions import PyJWTError  # noqa: PLC0415

    try:
        bits = PyJWK(key, algorithm).key.key_size
    except (PyJWTError, KeyError, TypeError, ValueError):
        raise KeySetError(f"{name} is not a valid key of type {key['kty']}") from None
    if key["kty"] == "RSA" and bits not in _RSA_BITS:
        raise KeySetError(f"{name} has {bits} bits; a key of type RSA has {_RSA_BITS[0]} to {_RSA_BITS[-1]}")
    return TokenKey(kid, algorithm, json.dumps(key, sort_keys=True))


def _algorithm(key: dict[str, Any]) -> str | None:
    """Return the only algorithm of a key, or None for a key that cannot be used."""
    named = key.get("alg")
    if key.get("kty") == "RSA":
        return named if named in _RSA else "RS256" if named is None else None
    if key.get("kty") == "EC":
        found = _CURVES.get(str(key.get("crv")))
        return found if named in (None, found) else None
    return None


def has_audience(found: object, wanted: Sequence[str]) -> bool:
    """Return whether `aud` of a token, a text or a list, has a wanted audience. A slash at the end does not matter."""
    given = found if isinstance(found, list) else [found]
    known = {one.rstrip("/") for one in wanted}
    return any(isinstance(one, str) and one.rstrip("/") in known for one in given)
