"""Rules of subscriptions in a configuration file, in both dialects; what is wrong with one is told with its place."""

from __future__ import annotations

from typing import Any, Final

from twinbus.namespace.config_properties import Node
from twinbus.namespace.engine.descriptions import (
    DEFAULT_RULE,
    CorrelationFilter,
    Filter,
    RuleDescription,
    SqlAction,
    SqlFilter,
    TrueFilter,
)
from twinbus.namespace.engine.validation import refusal_of_rule

Rules = tuple[RuleDescription, ...]

_BORN_WITH: Final = (RuleDescription(DEFAULT_RULE),)
EMULATOR_FIELDS: Final = {
    "ContentType": "content_type",
    "CorrelationId": "correlation_id",
    "Label": "label",
    "MessageId": "message_id",
    "ReplyTo": "reply_to",
    "ReplyToSessionId": "reply_to_session_id",
    "SessionId": "session_id",
    "To": "to",
}


def own_rules(subscription: Node) -> Rules:
    """`rules` of our own dialect: `sql` or `correlation` (neither: everything), `action`, `parameters`."""
    found = []
    for node in subscription.objects("rules"):
        node.takes("name", "sql", "correlation", "action", "parameters")
        parameters = _values(node.object("parameters"))
        chosen: Filter = TrueFilter()
        if node.has("sql") and node.has("correlation"):
            node.bad("has both sql and correlation: a rule has one filter")
        elif node.has("sql"):
            chosen = SqlFilter(node.text("sql"), parameters)
        elif node.has("correlation"):
            inner = node.object("correlation")
            inner.takes(*EMULATOR_FIELDS.values(), "properties")
            chosen = _correlation(inner, {field: field for field in EMULATOR_FIELDS.values()}, "properties")
        action = SqlAction(node.text("action"), parameters) if node.has("action") else None
        found.append((node, RuleDescription(node.text("name"), chosen, action)))
    return _checked(found, subscription.get("rules"))


def emulator_rules(subscription: Node) -> Rules:
    """`Rules` of the emulator: FilterType Sql or Correlation."""
    found = []
    for node in subscription.objects("Rules"):
        node.takes("Name", "Properties")
        properties = node.object("Properties")
        properties.takes("FilterType", "SqlFilter", "CorrelationFilter", "Action")
        chosen: Filter = TrueFilter()
        match properties.get("FilterType").value:
            case "Sql":
                sql = properties.object("SqlFilter")
                sql.takes("SqlExpression")
                chosen = SqlFilter(sql.text("SqlExpression"))
            case "Correlation":
                correlation = properties.object("CorrelationFilter")
                correlation.takes(*EMULATOR_FIELDS, "Properties")
                chosen = _correlation(correlation, EMULATOR_FIELDS, "Properties")
            case other:
                properties.get("FilterType").bad(f"{other!r} is neither 'Sql' nor 'Correlation'")
        action = None
        if properties.has("Action"):
            properties.object("Action").takes("SqlExpression")
            action = SqlAction(properties.object("Action").text("SqlExpression"))
        found.append((node, RuleDescription(node.text("Name"), chosen, action)))
    return _checked(found, subscription.get("Rules"))


def _correlation(node: Node, fields: dict[str, str], properties: str) -> CorrelationFilter:
    texts: dict[str, Any] = {field: node.text(name) for name, field in fields.items() if node.has(name)}
    return CorrelationFilter(**texts, properties=_values(node.object(properties)))


def _values(node: Node) -> dict[str, Any]:
    found = {}
    for name, value in node.value.items():
        if not isinstance(value, str | int | float | bool):
            node.get(name).bad(f"{value!r} is neither a text, a number, true nor false")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            node.get(name).bad(f"{value} does not fit 64 bits")
        else:
            found[name] = value
    return found


def _checked(found: list[tuple[Node, RuleDescription]], rules: Node) -> Rules:
    names = [rule.name.lower() for _, rule in found]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        rules.bad(f"{name!r} is there twice")
    for node, rule in found:
        refusal = refusal_of_rule(rule)
        if refusal is not None and rule.name:
            node.bad(refusal.description)
    return tuple(rule for _, rule in found) or _BORN_WITH
