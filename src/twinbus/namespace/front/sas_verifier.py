"""Verifies SharedAccessSignature tokens: whether a token is valid, and which claims the token grants on a resource.

The signature is computed from the field `sr` exactly as the client sent it, because clients encode this field in
different ways before they sign it.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final
from urllib.parse import unquote, unquote_plus, urlsplit

from twinbus.connect import SAS_SCHEME, sas_signature
from twinbus.namespace.engine.descriptions import AuthorizationRule, Claim
from twinbus.namespace.own_names import OwnNames

DEFAULT_KEY_NAME: Final = "RootManageSharedAccessKey"
DEFAULT_KEY: Final = "SAS_KEY_VALUE"

_FIELDS: Final = ("sr", "sig", "se", "skn")
_MAX_TOKEN: Final = 8 * 1024
_MAX_EXPIRY_DIGITS: Final = 15


class TokenProblem(StrEnum):
    """The reasons for which a token is refused."""

    MALFORMED = "malformed"
    UNKNOWN_KEY_NAME = "unknown key name"
    BAD_SIGNATURE = "bad signature"
    EXPIRED = "expired"
    FOREIGN_NAME = "not a name of this namespace"
    FOREIGN_AUDIENCE = "not for this audience, or not of this issuer"
    NOT_COVERED = "resource not covered"
    DEFAULT_KEY_ABROAD = "default key away from loopback"


class TokenRefusedError(Exception):
    """A token is not valid and grants no claim. The text is sent to the client; it contains no key and no signature."""

    def __init__(self, problem: TokenProblem, text: str) -> None:
        super().__init__(text)
        self.problem = problem
        self.text = text


def no_key_set() -> TokenRefusedError:
    """Return the error for a JSON web token that a namespace without a key set gets."""
    return TokenRefusedError(
        TokenProblem.MALFORMED,
        "this namespace takes SAS tokens only: it was started without a key set for JSON web tokens (--jwks)",
    )


@dataclass(frozen=True, slots=True)
class SigningKey:
    """The key that signed a token, or that a peer sent with SASL PLAIN, and the authorization rule that it is of."""

    rule: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class _Token:
    resource: str
    signature: str
    expires_at: str
    key_names: frozenset[str]


def default_rule(key: str = DEFAULT_KEY) -> AuthorizationRule:
    """Return the authorization rule of a namespace for which no rules are configured."""
    return AuthorizationRule(DEFAULT_KEY_NAME, key, key, frozenset({Claim.MANAGE}))


def implied_claims(claims: Iterable[Claim]) -> frozenset[Claim]:
    """Return the claims and the claims that they imply: Manage implies Send and Listen."""
    claims = frozenset(claims)
    return frozenset(Claim) if Claim.MANAGE in claims else claims


def rule_covers(owner: str, path: str) -> bool:
    """Return whether a rule or a role of `owner` applies to a path, both in lower case. '' is the namespace.

    The rule of an entity applies to the entity, its sub-queues and its subscriptions. It does not apply to other
    entities whose path starts with the path of the entity.
    """
    rest = path.removeprefix(owner)
    return not owner or (path.startswith(owner) and (not rest or rest.startswith(("/$", "/subscriptions/"))))


def token_expiry(token: str) -> int | None:
    """Return the expiry (`se`) of a token in epoch seconds, without verifying the token, or None if malformed."""
    try:
        return int(_parse(token).expires_at)
    except TokenRefusedError:
        return None


def resource_path(resource: str) -> str:
    """Return the entity path of `sb://host:port/entity` (with any scheme). Returns a path unchanged."""
    _, scheme, rest = resource.rpartition("://")
    return (rest.partition("/")[2] if scheme else rest).strip("/")


class SasVerifier:
    """Checks tokens against the rules of the namespace and of an entity, and against the namespace's names."""

    def __init__(self, namespace_rules: Sequence[AuthorizationRule], names: OwnNames) -> None:
        self._rules = tuple(namespace_rules)
        self._names = names

    def verify(
        self,
        token: str,
        resource: str,
        entity_rules: Sequence[AuthorizationRule],
        now: float,
        *,
        peer_is_loopback: bool,
        arrived_at: str | None = None,
    ) -> frozenset[Claim]:
        """Return the claims that the token grants on `resource` (a path or a URI). Raises TokenRefusedError.

        The arguments are those of `signing_key`.
        """
        key = self.signing_key(
            token, resource, entity_rules, now, peer_is_loopback=peer_is_loopback, arrived_at=arrived_at
        )
        return self.current_claims(key, entity_rules)

    def signing_key(
        self,
        token: str,
        resource: str,
        entity_rules: Sequence[AuthorizationRule],
        now: float,
        *,
        peer_is_loopback: bool,
        arrived_at: str | None = None,
    ) -> SigningKey:
        """Return the key that signed a token that is valid for `resource` (a path or a URI). Raises TokenRefusedError.

        `entity_rules` are the authorization rules of the entity that owns `resource`. `now` is in epoch seconds.
        `arrived_at` is the address of this end of the connection. A key with the well-known default value grants no
        claim to a peer on another machine.
        """
        parsed = _parse(token)
        signed_by = self._signed_by(parsed, entity_rules)
        if int(parsed.expires_at) <= now:
            raise TokenRefusedError(TokenProblem.EXPIRED, f"the token expired at {parsed.expires_at}")
        self.check_name(_signed_url(parsed.resource), arrived_at)
        if not _covers(parsed.resource, resource_path(resource)):
            raise TokenRefusedError(
                TokenProblem.NOT_COVERED, f"the token is for {unquote_plus(parsed.resource)!r}, not for {resource!r}"
            )
        if signed_by.key == DEFAULT_KEY and not peer_is_loopback:
            raise TokenRefusedError(
                TokenProblem.DEFAULT_KEY_ABROAD,
                f"the default key of {DEFAULT_KEY_NAME} is for loopback only: set another",
            )
        return signed_by

    def current_claims(self, key: SigningKey, entity_rules: Sequence[AuthorizationRule]) -> frozenset[Claim]:
        """Return the claims that a key has now. Empty if no rule has the key any more, because it was rotated."""
        for rule in (*entity_rules, *self._rules):
            if rule.name == key.rule and key.key in (rule.primary_key, rule.secondary_key):
                return implied_claims(rule.claims)
        return frozenset()

    def replace_rules(self, namespace_rules: Sequence[AuthorizationRule]) -> None:
        """Replace the rules of the namespace. Keys that are in none of the new rules have no claims from now on."""
        self._rules = tuple(namespace_rules)

    def check_name(self, url: str, arrived_at: str | None = None) -> None:
        """Raise TokenRefusedError unless the host in `sb://host:port/entity` is a name of this namespace."""
        host = re.split(r"[/?#]", url.partition("://")[2], maxsplit=1)[0]
        if not self._names.is_own(host, arrived_at):
            raise TokenRefusedError(TokenProblem.FOREIGN_NAME, self._names.refusal(host or url, arrived_at))

    def known_key(self, name: str, key: str, *, peer_is_loopback: bool) -> SigningKey | None:
        """Return the key if the namespace has a rule with this name and key, else None."""
        for rule in self._rules:
            for right in (rule.primary_key, rule.secondary_key):
                known = right and rule.name == name and hmac.compare_digest(right.encode(), key.encode())
                if known and (peer_is_loopback or right != DEFAULT_KEY):
                    return SigningKey(name, right)
        return None

    def _signed_by(self, token: _Token, entity_rules: Sequence[AuthorizationRule]) -> SigningKey:
        named = [rule for rule in (*entity_rules, *self._rules) if rule.name in token.key_names]
        if not named:
            raise TokenRefusedError(
                TokenProblem.UNKNOWN_KEY_NAME, f"there is no key named {min(token.key_names, key=len)!r}"
            )
        given = token.signature.encode()
        for rule in named:
            for key in (rule.primary_key, rule.secondary_key):
                right = sas_signature(key, token.resource, token.expires_at).encode()
                if key and hmac.compare_digest(right, given):
                    return SigningKey(rule.name, key)
        raise TokenRefusedError(TokenProblem.BAD_SIGNATURE, "the signature does not match the key")


def _signed_url(encoded: str) -> str:
    """Return the URL that a token is for. The JavaScript client signs `host:port/` for the target of a forward."""
    url = unquote_plus(encoded)
    return url if "://" in url else f"sb://{url}"


def _covers(encoded: str, path: str) -> bool:
    """Return whether the signed URL is the URL of the path or of a parent of the path."""
    try:
        signed, wanted = urlsplit(_signed_url(encoded)).path, _segments(path)
    except ValueError:
        return False
    # A client that signs a URL escapes the names in the URL; a client that signs an AMQP address does not escape names.
    return any(wanted[: len(given)] == given for given in (_segments(signed), _segments(unquote(signed))))


def _parse(token: str) -> _Token:
    scheme, _, rest = token.strip().partition(" ")
    if scheme.lower() != SAS_SCHEME.lower():
        raise TokenRefusedError(TokenProblem.MALFORMED, f"a token of the form '{SAS_SCHEME} sr=…' is required")
    if len(token) > _MAX_TOKEN:
        raise TokenRefusedError(TokenProblem.MALFORMED, f"the token is longer than {_MAX_TOKEN} characters")
    fields: dict[str, str] = {}
    for part in rest.strip().split("&"):
        name, _, value = part.partition("=")
        if name in fields:
            raise TokenRefusedError(TokenProblem.MALFORMED, f"the token holds {name!r} twice")
        fields[name] = value
    for name in _FIELDS:
        if not fields.get(name):
            raise TokenRefusedError(TokenProblem.MALFORMED, f"the token lacks {name!r}")
    if not (fields["se"].isascii() and fields["se"].isdigit() and len(fields["se"]) <= _MAX_EXPIRY_DIGITS):
        raise TokenRefusedError(TokenProblem.MALFORMED, "'se' of the token is not a number of seconds")
    # The Python client encodes the key name twice.
    once = unquote_plus(fields["skn"])
    # Base64 has no spaces: a space was a plus sign that the client did not escape.
    signed = unquote_plus(fields["sig"]).replace(" ", "+")
    return _Token(fields["sr"], signed, fields["se"], frozenset({once, unquote_plus(once)}))


def _segments(path: str) -> list[str]:
    return [segment for segment in path.lower().split("/") if segment]
