"""A description as the text that the store keeps with the entity, and back.

Unknown fields are refused by name: a store of a newer version must not be read as if it were understood.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any, Final

from twinbus.amqp import decode_all, encode
from twinbus.namespace.engine.descriptions import (
    AuthorizationRule,
    Claim,
    CorrelationFilter,
    Description,
    EntityStatus,
    FalseFilter,
    QueueDescription,
    RuleDescription,
    RuleFilter,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
    TrueFilter,
)
from twinbus.namespace.engine.rules.values import plain, wire

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


_TEXTS = (
    "correlation_id",
    "message_id",
    "to",
    "reply_to",
    "label",
    "session_id",
    "reply_to_session_id",
    "content_type",
)


class _Itself:
    """A rule that is equal only to itself: its mappings have no hash."""

    __slots__ = ("rule",)

    def __init__(self, rule: RuleDescription) -> None:
        self.rule = rule

    def __hash__(self) -> int:
        return id(self.rule)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.rule is self.rule


def rule_text(rule: RuleDescription) -> str:
    """Made once: a subscription is written with all its rules whenever one of them changes."""
    return _text(_Itself(rule))


@lru_cache(maxsize=4096)
def _text(itself: _Itself) -> str:
    rule, action = itself.rule, itself.rule.action
    values = {
        "name": rule.name,
        "filter": _write_filter(rule.filter),
        "action": None if action is None else _write_sql(action.expression, action.parameters),
        "created": rule.created,
    }
    return json.dumps(values, separators=(",", ":"))


def read_rule(values: Mapping[str, Any]) -> RuleDescription:
    action = values["action"]
    return RuleDescription(
        values["name"],
        _read_filter(values["filter"]),
        None if action is None else SqlAction(action["sql"], _read_values(action["parameters"])),
        values["created"],
    )


def _write_filter(described: RuleFilter) -> dict[str, Any]:
    match described:
        case TrueFilter():
            return {"kind": "true"}
        case FalseFilter():
            return {"kind": "false"}
        case SqlFilter():
            return {"kind": "sql", **_write_sql(described.expression, described.parameters)}
        case CorrelationFilter():
            texts = {name: getattr(described, name) for name in _TEXTS}
            given = {name: text for name, text in texts.items() if text is not None}
            return {"kind": "correlation", **given, "properties": _write_values(described.properties)}


def _read_filter(values: Mapping[str, Any]) -> RuleFilter:
    match values["kind"]:
        case "true":
            return TrueFilter()
        case "false":
            return FalseFilter()
        case "sql":
            return SqlFilter(values["sql"], _read_values(values["parameters"]))
        case "correlation":
            texts = {name: values[name] for name in _TEXTS if name in values}
            return CorrelationFilter(**texts, properties=_read_values(values["properties"]))
        case unknown:
            raise ValueError(f"'{unknown}' is no kind of filter")


def _write_sql(expression: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"sql": expression, "parameters": _write_values(parameters)}


def _write_values(values: Mapping[str, Any]) -> str:
    return encode({name: wire(value) for name, value in values.items()}).hex() if values else ""


def _read_values(text: str) -> dict[str, Any]:
    return {name: plain(value) for name, value in decode_all(bytes.fromhex(text)).items()} if text else {}
