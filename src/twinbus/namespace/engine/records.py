"""A description as the text that the store keeps with the entity, and back.

Unknown fields are refused by name: a store of a newer version must not be read as if it were understood.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, Final

from twinbus.namespace.engine.descriptions import (
    AuthorizationRule,
    Claim,
    Description,
    EntityStatus,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.rules.records import read_rule, rule_text

_KINDS: Final[dict[str, type[Description]]] = {
    "queue": QueueDescription,
    "topic": TopicDescription,
    "subscription": SubscriptionDescription,
}
_NAMES: Final = {described: kind for kind, described in _KINDS.items()}


def kind_of(description: Description) -> str:
    return _NAMES[type(description)]


def write_description(description: Description) -> str:
    values = {field.name: getattr(description, field.name) for field in fields(description)}
    if "authorization_rules" in values:
        values["authorization_rules"] = [_write_rule(rule) for rule in values["authorization_rules"]]
    rules = values.pop("rules", None)
    text = json.dumps(values, separators=(",", ":"))
    return text if rules is None else f'{text[:-1]},"rules":[{",".join(map(rule_text, rules))}]}}'


def read_description(kind: str, text: str) -> Description:
    described = _KINDS.get(kind)
    if described is None:
        raise ValueError(f"'{kind}' is no kind of entity")
    values: dict[str, Any] = json.loads(text)
    unknown = values.keys() - {field.name for field in fields(described)}
    if unknown:
        raise ValueError(f"the record of a {kind} has unknown fields: {', '.join(sorted(unknown))}")
    values["status"] = EntityStatus(values["status"])
    if "authorization_rules" in values:
        values["authorization_rules"] = tuple(_read_rule(rule) for rule in values["authorization_rules"])
    if "rules" in values:
        values["rules"] = tuple(read_rule(rule) for rule in values["rules"])
    return described(**values)


def _write_rule(rule: AuthorizationRule) -> dict[str, Any]:
    return {
        "name": rule.name,
        "primary_key": rule.primary_key,
        "secondary_key": rule.secondary_key,
        "claims": sorted(rule.claims),
    }


def _read_rule(values: dict[str, Any]) -> AuthorizationRule:
    claims = frozenset(Claim(claim) for claim in values["claims"])
    return AuthorizationRule(values["name"], values["primary_key"], values["secondary_key"], claims)
