"""Which entities a connection may touch: the tokens put on `$cbs`, each for its audience and until it expires."""

from __future__ import annotations

from collections.abc import Sequence

from twinbus.namespace.engine.descriptions import AuthorizationRule, Claim, QueueDescription, TopicDescription
from twinbus.namespace.engine.namespace import Namespace
from twinbus.namespace.front.addresses import parse_address
from twinbus.namespace.front.sas import SasVerifier, token_expiry


class Claims:
    """The claims of one connection, by the path of the audience in lower case."""

    def __init__(self, verifier: SasVerifier, namespace: Namespace, *, peer_is_loopback: bool) -> None:
        self._verifier = verifier
        self._namespace = namespace
        self._loopback = peer_is_loopback
        self._granted: dict[str, tuple[frozenset[Claim], int]] = {}

    def put(self, audience: str, token: str, now: int) -> None:
        """Take a token into account; raises TokenRefusedError. `now` in milliseconds."""
        address = parse_address(audience)
        rules = entity_rules(self._namespace, address.entity)
        claims = self._verifier.verify(token, address.path, rules, now / 1000, peer_is_loopback=self._loopback)
        self._granted[address.path] = (claims, (token_expiry(token) or 0) * 1000)

    def allow(self, claim: Claim, path: str, now: int) -> bool:
        """Whether some token that is still valid covers the path: its own, its parents', or the namespace's."""
        while True:
            claims, until = self._granted.get(path, (frozenset(), 0))
            if claim in claims and until > now:
                return True
            if not path:
                return False
            path = path.rpartition("/")[0]

    def next_expiry(self, now: int) -> int | None:
        """When the next token that is still valid ends."""
        return min((until for _, until in self._granted.values() if until > now), default=None)


def entity_rules(namespace: Namespace, entity: str) -> Sequence[AuthorizationRule]:
    """The rules of the entity itself, or of a subscription's topic."""
    found = namespace.find(entity) or namespace.find(entity.lower().partition("/subscriptions/")[0])
    if found is None:
        return ()
    description = found.description
    if isinstance(description, QueueDescription | TopicDescription):
        return description.authorization_rules
    return entity_rules(namespace, description.topic)
