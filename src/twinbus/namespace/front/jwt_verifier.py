"""Verifies JSON web tokens, as Entra ID issues them: whether a token is valid, and which claims its roles grant.

The roles are those of Azure, in the claim `roles` of the token. A role is for the whole namespace, or after a colon for
one entity: `Azure Service Bus Data Sender:orders`. Spaces and case do not matter, because the values of app roles in
Entra ID have no spaces. In Azure itself, roles are not in the token: Azure looks them up (docs/decisions/0043).

The text of a refusal goes to the client and to the log. It names what was expected, and never the token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jwt
from jwt.exceptions import InvalidSignatureError, PyJWTError

from twinbus.namespace.engine.descriptions import Claim
from twinbus.namespace.front.sas_verifier import TokenProblem, TokenRefusedError, implied_claims, rule_covers
from twinbus.namespace.identity import IdentityOptions, TokenKey, has_audience
from twinbus.namespace.own_names import shortened

MAX_TOKEN: Final = 16 * 1024
"""The longest token in characters. Entra ID leaves out the groups of a user before a token gets this long."""
_CLOCK_DIFFERENCE: Final = 300
"""Seconds that the issuer's clock may be ahead. Issuers set `nbf` to the time at which they made the token."""
_MAX_INSTANT: Final = 10**15
_ROLES: Final = {
    "azureservicebusdatasender": Claim.SEND,
    "azureservicebusdatareceiver": Claim.LISTEN,
    "azureservicebusdataowner": Claim.MANAGE,
}


class TokenRole(NamedTuple):
    """A role of a token: the claim that it grants, and the path of its entity in lower case; '' for the namespace."""

    claim: Claim
    entity: str


@dataclass(frozen=True, slots=True)
class TokenRoles:
    """What a valid token grants for one resource: the key that signed the token, its roles, its end in epoch seconds.

    `roles` are only the roles that cover the resource.
    """

    key: TokenKey
    roles: frozenset[TokenRole]
    expires_at: int

    def claims(self, path: str) -> frozenset[Claim]:
        """Return the claims for a path, in lower case, that is the resource or below it."""
        return implied_claims(role.claim for role in self.roles if rule_covers(role.entity, path))


class JwtVerifier:
    """Checks tokens against the key set, the audiences and the issuers of a namespace."""

    def __init__(self, options: IdentityOptions) -> None:
        self.replace(options)

    def replace(self, options: IdentityOptions) -> None:
        """Use other keys. Tokens of keys that are gone grant nothing from now on."""
        self._options = options
        self._keys = {key.kid: (key, jwt.PyJWK(json.loads(key.jwk), key.algorithm)) for key in options.keys}

    def verify(self, token: str, path: str, now: float) -> TokenRoles:
        """Return what a token grants for a path, in lower case. Raises TokenRefusedError. `now` is in epoch seconds."""
        if len(token) > MAX_TOKEN:
            raise TokenRefusedError(TokenProblem.MALFORMED, f"the token is longer than {MAX_TOKEN} characters")
        key, fields = self._signed(token)
        expires_at = self._checked(fields, now)
        covering = frozenset(role for role in _roles(fields) if rule_covers(role.entity, path))
        if not covering:
            raise TokenRefusedError(
                TokenProblem.NOT_COVERED,
                f"the claim 'roles' of the token has no role for {shortened(path) if path else 'the namespace'}: "
                "Azure Service Bus Data Sender, Data Receiver or Data Owner is required",
            )
        return TokenRoles(key, covering, expires_at)

    def current_claims(self, granted: TokenRoles, path: str) -> frozenset[Claim]:
        """Return the claims that a token grants now. Empty if the key set does not have its key any more."""
        known = self._keys.get(granted.key.kid)
        return granted.claims(path) if known is not None and known[0] == granted.key else frozenset()

    def _signed(self, token: str) -> tuple[TokenKey, Mapping[str, Any]]:
        """Return the key that signed the token, and the token's fields."""
        try:
            header = jwt.get_unverified_header(token)
            kid = header.get("kid", "")
            if (known := self._keys.get(kid)) is None:
                text = f"there is no key with the kid {_shown(kid)}" if kid else "the token names no key (kid)"
                raise TokenRefusedError(TokenProblem.UNKNOWN_KEY_NAME, text)
            key, verifying = known
            if header.get("alg") != key.algorithm:
                raise TokenRefusedError(
                    TokenProblem.BAD_SIGNATURE,
                    f"the token is signed with {_shown(header.get('alg'))}, the key is for {key.algorithm}",
                )
            fields = json.loads(jwt.api_jws.decode(token, verifying, [key.algorithm]))
        except InvalidSignatureError:
            raise TokenRefusedError(TokenProblem.BAD_SIGNATURE, "the signature does not match the key") from None
        except (PyJWTError, ValueError, RecursionError):
            raise TokenRefusedError(TokenProblem.MALFORMED, "it is not a signed JSON web token") from None
        if not isinstance(fields, dict):
            raise TokenRefusedError(TokenProblem.MALFORMED, "the token is not a JSON object")
        return key, fields

    def _checked(self, fields: Mapping[str, Any], now: float) -> int:
        """Return when the token expires. Raises TokenRefusedError if the token is not for now, or not for here."""
        expires_at, not_before = _instant(fields, "exp"), _instant(fields, "nbf")
        if expires_at is None:
            raise TokenRefusedError(TokenProblem.MALFORMED, "the token lacks 'exp'")
        if expires_at <= now:
            raise TokenRefusedError(TokenProblem.EXPIRED, f"the token expired at {expires_at}")
        if not_before is not None and not_before > now + _CLOCK_DIFFERENCE:
            raise TokenRefusedError(TokenProblem.EXPIRED, f"the token is not valid before {not_before}")
        audiences, issuers = self._options.audiences, self._options.issuers
        if not has_audience(fields.get("aud"), audiences):
            raise TokenRefusedError(
                TokenProblem.FOREIGN_AUDIENCE,
                f"the token's audience is {_shown(fields.get('aud'))}, not {' or '.join(audiences)}",
            )
        if issuers and fields.get("iss") not in issuers:
            raise TokenRefusedError(
                TokenProblem.FOREIGN_AUDIENCE,
                f"the token's issuer is {_shown(fields.get('iss'))}, not {' or '.join(issuers)}",
            )
        return expires_at


def _instant(fields: Mapping[str, Any], name: str) -> int | None:
    """Return an instant of the token in whole epoch seconds, or None if the token does not have it."""
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_INSTANT:
        raise TokenRefusedError(TokenProblem.MALFORMED, f"{name!r} of the token is not a number of seconds")
    return int(value)


def _roles(fields: Mapping[str, Any]) -> list[TokenRole]:
    given = fields.get("roles")
    found = []
    for text in given if isinstance(given, list) else ():
        name, colon, entity = text.partition(":") if isinstance(text, str) else ("", "", "")
        claim = _ROLES.get("".join(name.split()).lower())
        path = entity.strip().strip("/").lower()
        if claim is not None and bool(colon) == bool(path):  # a role for an entity without a name is for nothing
            found.append(TokenRole(claim, path))
    return found


def _shown(value: object) -> str:
    """Return a field of a token for a text: quoted and short. The sender of the token chose it."""
    return shortened(value if isinstance(value, str) else json.dumps(value))
