"""Descriptions of entities and rules as JSON, the format of the records in the store.

`read_description` raises an error for a record with unknown fields: a newer version of Twinbus wrote such a record, and
this version would ignore settings. Values of rule parameters and properties are written in AMQP encoding, as
hexadecimal text, because JSON has fewer types than AMQP.
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
from twinbus.namespace.engine.entity_properties import PropertyType, properties_of
from twinbus.namespace.engine.rules.values import ZonelessTime, from_amqp, to_amqp
from twinbus.values import Described, Symbol, Timestamp

_KINDS: Final[dict[str, type[Description]]] = {
    "queue": QueueDescription,
    "topic": TopicDescription,
    "subscription": SubscriptionDescription,
}
_KIND_NAMES: Final = {described: kind for kind, described in _KINDS.items()}


# --- entities ----------------------------------------------------------------------------------------------------


def kind_of(description: Description) -> str:
    """Return the kind of the described entity: `queue`, `topic` or `subscription`."""
    return _KIND_NAMES[type(description)]


def write_description(description: Description) -> str:
    values = {field.name: getattr(description, field.name) for field in fields(description)}
    for row in properties_of(type(description)):
        if row.type is PropertyType.AUTHORIZATION_RULES:
            values[row.field] = [_write_authorization_rule(rule) for rule in values[row.field]]
    rules = values.pop("rules", None)
    text = json.dumps(values, separators=(",", ":"))
    # `rule_json` caches the JSON text of each rule. So the rules are added to the text here, and not to `values`.
    return text if rules is None else f'{text[:-1]},"rules":[{",".join(map(rule_json, rules))}]}}'


def read_description(kind: str, text: str) -> Description:
    """Return the description in a record of the store. Raises ValueError if the record cannot be understood."""
    described = _KINDS.get(kind)
    if described is None:
        raise ValueError(f"'{kind}' is no kind of entity")
    values: dict[str, Any] = json.loads(text)
    unknown = values.keys() - {field.name for field in fields(described)}
    if unknown:
        raise ValueError(f"the record of a {kind} has unknown fields: {', '.join(sorted(unknown))}")
    for row in properties_of(described):
        if row.field not in values:
            continue
        if row.type is PropertyType.STATUS:
            values[row.field] = EntityStatus(values[row.field])
        elif row.type is PropertyType.AUTHORIZATION_RULES:
            values[row.field] = tuple(_read_authorization_rule(rule) for rule in values[row.field])
    if "rules" in values:
        values["rules"] = tuple(_read_rule(rule) for rule in values["rules"])
    return described(**values)


def _write_authorization_rule(rule: AuthorizationRule) -> dict[str, Any]:
    return {
        "name": rule.name,
        "primary_key": rule.primary_key,
        "secondary_key": rule.secondary_key,
        "claims": sorted(rule.claims),
    }


def _read_authorization_rule(values: dict[str, Any]) -> AuthorizationRule:
    claims = frozenset(Claim(claim) for claim in values["claims"])
    return AuthorizationRule(values["name"], values["primary_key"], values["secondary_key"], claims)


# --- rules -------------------------------------------------------------------------------------------------------

_ZONELESS: Final = Symbol("twinbus:zoneless-time")
"""The descriptor of a `ZonelessTime` in a record of the store."""
_CORRELATION_TEXTS: Final = (
    "correlation_id",
    "message_id",
    "to",
    "reply_to",
    "label",
    "session_id",
    "reply_to_session_id",
    "content_type",
)


class _ByIdentity:
    """A cache key for a rule. Two keys are equal only for the same object: a rule contains mappings and has no hash."""

    __slots__ = ("rule",)

    def __init__(self, rule: RuleDescription) -> None:
        self.rule = rule

    def __hash__(self) -> int:
        return id(self.rule)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.rule is self.rule


def rule_json(rule: RuleDescription) -> str:
    """Return the JSON text of a rule. Raises EncodeError for a value that no AMQP type can hold.

    The text is cached: a subscription is written with all its rules whenever one of them changes.
    """
    return _rule_json(_ByIdentity(rule))


@lru_cache(maxsize=4096)
def _rule_json(key: _ByIdentity) -> str:
    rule, action = key.rule, key.rule.action
    values = {
        "name": rule.name,
        "filter": _write_filter(rule.filter),
        "action": None if action is None else _write_sql(action.expression, action.parameters),
        "created": rule.created,
    }
    return json.dumps(values, separators=(",", ":"))


def _read_rule(values: Mapping[str, Any]) -> RuleDescription:
    action = values["action"]
    return RuleDescription(
        name=values["name"],
        filter=_read_filter(values["filter"]),
        action=None if action is None else SqlAction(action["sql"], _read_values(action["parameters"])),
        created=values["created"],
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
            texts = {name: getattr(described, name) for name in _CORRELATION_TEXTS}
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
            texts = {name: values[name] for name in _CORRELATION_TEXTS if name in values}
            return CorrelationFilter(**texts, properties=_read_values(values["properties"]))
        case unknown:
            raise ValueError(f"'{unknown}' is no kind of filter")


def _write_sql(expression: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"sql": expression, "parameters": _write_values(parameters)}


def _write_values(values: Mapping[str, Any]) -> str:
    return encode({name: _stored(value) for name, value in values.items()}).hex() if values else ""


def _read_values(text: str) -> dict[str, Any]:
    return {name: _restored(value) for name, value in decode_all(bytes.fromhex(text)).items()} if text else {}


def _stored(value: Any) -> Any:
    return Described(_ZONELESS, Timestamp(value)) if value.__class__ is ZonelessTime else to_amqp(value)


def _restored(value: Any) -> Any:
    if isinstance(value, Described) and value.descriptor == _ZONELESS:
        return ZonelessTime(value.value)
    return from_amqp(value)
