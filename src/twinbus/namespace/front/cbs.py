"""Which entities a connection may touch: the tokens put on `$cbs`, each for its audience and until it expires, and the
key it may have given with SASL PLAIN."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from twinbus.connect import SAS_SCHEME
from twinbus.namespace.engine.descriptions import AuthorizationRule, Claim, QueueDescription, TopicDescription
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.registry import EntityRegistry
from twinbus.namespace.front import refusals
from twinbus.namespace.front.addresses import parse_address
from twinbus.namespace.front.request_response import NodeReply, NodeRequest
from twinbus.namespace.front.sas_verifier import SasVerifier, TokenProblem, TokenRefusedError, token_expiry
from twinbus.values import Condition

_FOREVER = 1 << 62
_MOST_GRANTS = 10_000


class _Grant(NamedTuple):
    """`owner` is the entity whose own rule signed; '' for a rule of the namespace."""

    claims: frozenset[Claim]
    until: int
    owner: str

    def covers(self, path: str) -> bool:
        """An entity's rule is for itself, its sub-queues and subscriptions, not for entities named below it."""
        if not self.owner:
            return True
        rest = path.removeprefix(self.owner)
        return path.startswith(self.owner) and (not rest or rest.startswith(("/$", "/subscriptions/")))


_NOTHING = _Grant(frozenset(), 0, "")


class GrantedClaims:
    """The claims of one connection, by the path of the audience in lower case."""

    def __init__(
        self,
        verifier: SasVerifier,
        namespace: EntityRegistry,
        *,
        peer_is_loopback: bool,
        arrived_at: str | None = None,
        most: int = _MOST_GRANTS,
    ) -> None:
        """`arrived_at` is the address of this end of the connection."""
        self._verifier = verifier
        self._namespace = namespace
        self._loopback = peer_is_loopback
        self._arrived_at = arrived_at
        self._most = most
        self._granted: dict[str, _Grant] = {}
        self._longest = 0  # characters of the longest path in `_granted` so far
        self._forbidden: str | None = None

    def __len__(self) -> int:
        return len(self._granted)

    def put(self, audience: str, token: str, now: int) -> Refusal | None:
        """Take a token into account, or say why it is not kept; raises TokenRefusedError. `now` in milliseconds."""
        if self._forbidden is not None:
            raise TokenRefusedError(TokenProblem.FOREIGN_NAME, self._forbidden)
        if "://" in audience:
            self._verifier.check_name(audience, self._arrived_at)
        address = parse_address(audience)
        path, owner = address.path, ""
        try:
            claims = self._verified(token, path, (), now)
        except TokenRefusedError:
            owner, rules = _entity_rules(self._namespace, address.entity)
            if not rules:
                raise
            claims = self._verified(token, path, rules, now)
        if address.entity and self._namespace.find(address.entity) is None:
            return refusals.not_found(address.entity)
        if path not in self._granted and not self._has_room(now):
            text = f"The connection holds tokens for {self._most} audiences already. Put one for the whole namespace."
            return Refusal(Condition.RESOURCE_LIMIT_EXCEEDED, text)
        self._granted[path] = _Grant(claims, (token_expiry(token) or 0) * 1000, owner)
        self._longest = max(self._longest, len(path))
        return None

    def _has_room(self, now: int) -> bool:
        if len(self._granted) >= self._most:
            self._granted = {path: grant for path, grant in self._granted.items() if grant.until > now}
        return len(self._granted) < self._most

    def put_key(self, response: bytes) -> bool:
        """SASL PLAIN (RFC 4616): a rule's name and key open the namespace as far as the rule goes."""
        name, _, key = response.decode("utf-8", "replace").partition("\0")[2].partition("\0")
        claims = self._verifier.claims_of_key(name, key, peer_is_loopback=self._loopback)
        if claims:
            self._granted[""] = _Grant(claims, _FOREVER, "")
        return bool(claims)

    def forbid(self, why: str) -> bool:
        """Take back what was granted and refuse every token from now on. Returns whether anything was granted."""
        self._forbidden = why
        had = bool(self._granted)
        self._granted.clear()
        return had

    def allow(self, claim: Claim, path: str, now: int) -> bool:
        """Whether some token that is still valid covers the path: its own, its parents', or the namespace's."""
        # Prefixes longer than every granted path need no look: a path of many segments would take quadratic time.
        audience = path if len(path) <= self._longest else path[: self._longest + 1].rpartition("/")[0]
        while True:
            granted = self._granted.get(audience, _NOTHING)
            if claim in granted.claims and granted.until > now and granted.covers(path):
                return True
            if not audience:
                return False
            audience = audience.rpartition("/")[0]

    def next_expiry(self, now: int) -> int | None:
        """When the next token that is still valid ends."""
        return min((grant.until for grant in self._granted.values() if grant.until > now), default=None)

    def _verified(self, token: str, path: str, rules: Sequence[AuthorizationRule], now: int) -> frozenset[Claim]:
        return self._verifier.verify(
            token, path, rules, now / 1000, peer_is_loopback=self._loopback, arrived_at=self._arrived_at
        )


def _entity_rules(namespace: EntityRegistry, entity: str) -> tuple[str, Sequence[AuthorizationRule]]:
    """The rules of the entity itself, or of a subscription's topic, and whose they are."""
    found = namespace.find(entity) or namespace.find(entity.lower().partition("/subscriptions/")[0])
    if found is None:
        return "", ()
    description = found.description
    if isinstance(description, QueueDescription | TopicDescription):
        return description.path.lower(), description.authorization_rules
    return _entity_rules(namespace, description.topic)


_log = logging.getLogger(__name__)


def put_token(request: NodeRequest, claims: GrantedClaims, now: int) -> NodeReply:
    """Answer one put-token request."""
    audience, token = request.properties.get("name"), request.body
    if isinstance(token, bytes):
        token = token.decode("utf-8", "replace")
    if request.operation != "put-token" or not isinstance(audience, str) or not isinstance(token, str):
        return NodeReply(400, "A put-token request needs the property 'name' and a token as text in its body.")
    # By the text alone: Python's client gives a SAS token the type jwt.
    if not token.startswith(SAS_SCHEME):
        return NodeReply(401, "This namespace has no identity provider: it takes SAS tokens only.")
    try:
        refusal = claims.put(audience, token, now)
    except TokenRefusedError as refused:
        if refused.fault is TokenProblem.FOREIGN_NAME:
            # Python's client leaves the text of the refusal out of its error.
            _log.warning("token refused: %s", refused.text)
            return NodeReply(401, refused.text, condition="amqp:unauthorized-access")
        return NodeReply(401, f"InvalidSignature: {refused.text}", condition="amqp:unauthorized-access")
    return NodeReply(202, "Accepted") if refusal is None else NodeReply.refused(refusal)
