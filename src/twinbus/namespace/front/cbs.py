"""The `$cbs` node, and the claims that a connection has been granted.

A client puts tokens on `$cbs`. A token grants claims for its audience until it expires: a SAS token grants the claims
of its rule, a JSON web token those of its roles. A key that the client sent with SASL PLAIN grants the claims of the
rule of the key for the whole namespace.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from twinbus.connect import SAS_SCHEME
from twinbus.namespace.engine.descriptions import AuthorizationRule, Claim, QueueDescription, TopicDescription
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.registry import EntityRegistry
from twinbus.namespace.front import refusals
from twinbus.namespace.front.addresses import LinkAddress, parse_address
from twinbus.namespace.front.request_response import NodeReply, NodeRequest
from twinbus.namespace.front.sas_verifier import (
    SasVerifier,
    SigningKey,
    TokenProblem,
    TokenRefusedError,
    no_key_set,
    rule_covers,
    token_expiry,
)
from twinbus.values import Condition

if TYPE_CHECKING:
    from twinbus.namespace.front.jwt_verifier import JwtVerifier, TokenRoles

_FOREVER = 1 << 62
_MAX_GRANTS = 10_000


class _Grant(NamedTuple):
    """A token that is valid until an instant, or a key.

    The claims of the grant are the claims that the key has when they are needed: a rotated key has none (X4). `owner`
    is the entity whose authorization rule signed the token, or '' for a rule of the namespace and for roles.
    """

    key: SigningKey | TokenRoles
    until: int
    owner: str


class GrantedClaims:
    """The claims that one connection was granted, by the path of the token's audience in lower case."""

    def __init__(
        self,
        verifier: SasVerifier,
        namespace: EntityRegistry,
        *,
        peer_is_loopback: bool,
        arrived_at: str | None = None,
        max_grants: int = _MAX_GRANTS,
        jwt_verifier: JwtVerifier | None = None,
    ) -> None:
        """`arrived_at` is the address of this end of the connection. Without `jwt_verifier`, only SAS is accepted."""
        self._verifier = verifier
        self._jwt_verifier = jwt_verifier
        self._namespace = namespace
        self._loopback = peer_is_loopback
        self._arrived_at = arrived_at
        self._max_grants = max_grants
        self._granted: dict[str, _Grant] = {}
        self._owners: set[str] = set()  # the entities whose rules signed tokens, in lower case
        self._longest = 0  # characters of the longest path that was ever in `_granted`
        self._forbidden: str | None = None  # why no token is accepted

    def __len__(self) -> int:
        return len(self._granted)

    def put(self, audience: str, token: str, now: int) -> Refusal | None:
        """Grant the claims of a token, or return the refusal: no such entity, or too many tokens.

        `now` is in milliseconds.

        Raises TokenRefusedError if the token is not valid.
        """
        if self._forbidden is not None:
            raise TokenRefusedError(TokenProblem.FOREIGN_NAME, self._forbidden)
        if "://" in audience:
            self._verifier.check_name(audience, self._arrived_at)
        address = parse_address(audience)
        path = address.path
        # A SAS token is recognised by its text, because the Python client declares the type jwt for SAS tokens, too.
        is_sas = token.startswith(SAS_SCHEME)
        grant = self._sas_grant(token, address, now) if is_sas else self._jwt_grant(token, path, now)
        if address.entity and self._namespace.find(address.entity) is None:
            return refusals.not_found(address.entity)
        if path not in self._granted and not self._has_room(now):
            text = (
                f"The connection holds tokens for {self._max_grants} audiences already. "
                "Put one for the whole namespace."
            )
            return Refusal(Condition.RESOURCE_LIMIT_EXCEEDED, text)
        self._granted[path] = grant
        self._longest = max(self._longest, len(path))
        if grant.owner:
            self._owners.add(grant.owner)
        return None

    def _sas_grant(self, token: str, address: LinkAddress, now: int) -> _Grant:
        owner = ""
        try:
            key = self._verified(token, address.path, (), now)
        except TokenRefusedError:
            owner, rules = _entity_rules(self._namespace, address.entity)
            if not rules:
                raise
            key = self._verified(token, address.path, rules, now)
        return _Grant(key, (token_expiry(token) or 0) * 1000, owner)

    def _jwt_grant(self, token: str, path: str, now: int) -> _Grant:
        if self._jwt_verifier is None:
            raise no_key_set()
        roles = self._jwt_verifier.verify(token, path, now / 1000)
        return _Grant(roles, roles.expires_at * 1000, "")

    def _has_room(self, now: int) -> bool:
        if len(self._granted) >= self._max_grants:
            self._granted = {path: grant for path, grant in self._granted.items() if grant.until > now}
        return len(self._granted) < self._max_grants

    def put_key(self, response: bytes) -> bool:
        """Grant the claims of the rule whose name and key the peer sent with SASL PLAIN (RFC 4616).

        Returns False if there is no such rule, or the key is wrong.
        """
        name, _, text = response.decode("utf-8", "replace").partition("\0")[2].partition("\0")
        key = self._verifier.known_key(name, text, peer_is_loopback=self._loopback)
        if key is not None:
            self._granted[""] = _Grant(key, _FOREVER, "")
        return key is not None

    def forbid(self, why: str) -> bool:
        """Revoke all claims, and refuse every token from now on. Returns whether there were any claims."""
        self._forbidden = why
        had_claims = bool(self._granted)
        self._granted.clear()
        return had_claims

    def allow(self, claim: Claim, path: str, now: int) -> bool:
        """Return whether a valid token grants the claim for the path, for one of its parents, or for the namespace."""
        # Prefixes that are longer than every granted path are skipped. Otherwise a path of many segments would take
        # quadratic time (X1).
        audience = path if len(path) <= self._longest else path[: self._longest + 1].rpartition("/")[0]
        while True:
            granted = self._granted.get(audience)
            if granted is not None and granted.until > now and claim in self._claims(granted, path):
                return True
            if not audience:
                return False
            audience = audience.rpartition("/")[0]

    def next_expiry(self, now: int) -> int | None:
        """Return the instant at which the next valid token expires, or None if there is no valid token."""
        return min((grant.until for grant in self._granted.values() if grant.until > now), default=None)

    def uses_rules_of(self, entity: str) -> bool:
        """Return whether an authorization rule of this entity signed a token of the connection."""
        return entity.lower() in self._owners

    def _claims(self, grant: _Grant, path: str) -> frozenset[Claim]:
        """Return the claims that a grant gives for a path now."""
        if not isinstance(grant.key, SigningKey):
            assert self._jwt_verifier is not None
            return self._jwt_verifier.current_claims(grant.key, path)
        if not rule_covers(grant.owner, path):
            return frozenset()
        rules = _entity_rules(self._namespace, grant.owner)[1] if grant.owner else ()
        return self._verifier.current_claims(grant.key, rules)

    def _verified(self, token: str, path: str, rules: Sequence[AuthorizationRule], now: int) -> SigningKey:
        return self._verifier.signing_key(
            token, path, rules, now / 1000, peer_is_loopback=self._loopback, arrived_at=self._arrived_at
        )


def _entity_rules(namespace: EntityRegistry, entity: str) -> tuple[str, Sequence[AuthorizationRule]]:
    """Return the authorization rules for an entity, and the path of their owner: for a subscription, its topic."""
    found = namespace.find(entity) or namespace.find(entity.lower().partition("/subscriptions/")[0])
    if found is None:
        return "", ()
    description = found.description
    if isinstance(description, QueueDescription | TopicDescription):
        return description.path.lower(), description.authorization_rules
    return _entity_rules(namespace, description.topic)


_log = logging.getLogger(__name__)


def put_token(request: NodeRequest, claims: GrantedClaims, now: int) -> NodeReply:
    """Return the reply to a put-token request."""
    audience, token = request.properties.get("name"), request.body
    if isinstance(token, bytes):
        token = token.decode("utf-8", "replace")
    if request.operation != "put-token" or not isinstance(audience, str) or not isinstance(token, str):
        return NodeReply(400, "A put-token request needs the property 'name' and a token as text in its body.")
    try:
        refusal = claims.put(audience, token, now)
    except TokenRefusedError as refused:
        if refused.problem is TokenProblem.FOREIGN_NAME:
            # The refusal is logged, because the Python client leaves the text of the refusal out of its error.
            _log.warning("token refused: %s", refused.text)
            return NodeReply(401, refused.text, condition="amqp:unauthorized-access")
        if not token.startswith(SAS_SCHEME):
            _log.warning("token refused: %s", refused.text)
            return NodeReply(401, f"InvalidToken: {refused.text}", condition="amqp:unauthorized-access")
        return NodeReply(401, f"InvalidSignature: {refused.text}", condition="amqp:unauthorized-access")
    return NodeReply(202, "Accepted") if refusal is None else NodeReply.refused(refusal)
