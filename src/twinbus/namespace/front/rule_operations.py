"""The rules of a subscription over `$management`: add-rule, remove-rule, enumerate-rules.

Who listens to a subscription may choose what it takes, as in the service: no Manage claim is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from twinbus.namespace.engine import events
from twinbus.namespace.engine.descriptions import Claim
from twinbus.namespace.engine.rules.descriptions import (
    FALSE_EXPRESSION,
    TRUE_EXPRESSION,
    CorrelationFilter,
    FalseFilter,
    Filter,
    RuleDescription,
    SqlAction,
    SqlFilter,
    TrueFilter,
)
from twinbus.namespace.front.asking import MAX_INT, NOTHING, BadRequestError, Body, Translated
from twinbus.namespace.front.requests import Reply, Request
from twinbus.values import Described, Timestamp, ULong

# Descriptors of the lists that a rule is told in.
_RULE: Final = ULong(0x137_0000_0004)
_EMPTY_ACTION: Final = ULong(0x137_0000_0005)
_SQL_ACTION: Final = ULong(0x137_0000_0006)
_SQL_FILTER: Final = ULong(0x13_7000_0006)
_TRUE_FILTER: Final = ULong(0x13_7000_0007)
_FALSE_FILTER: Final = ULong(0x13_7000_0008)
_CORRELATION_FILTER: Final = ULong(0x13_7000_0009)
_COMPATIBILITY: Final = 20

_FIELDS: Final = {
    "correlation-id": "correlation_id",
    "message-id": "message_id",
    "to": "to",
    "reply-to": "reply_to",
    "label": "label",
    "session-id": "session_id",
    "reply-to-session-id": "reply_to_session_id",
    "content-type": "content_type",
}
"""Of a correlation filter, in the order of its list."""


def add_rule(body: Body, request: Request) -> Translated:
    name, described = body.needed_text("rule-name"), body.properties("rule-description") or {}
    rule = RuleDescription(name, _filter(described), _action(described))
    return Translated(Claim.LISTEN, lambda reply: events.RuleAdded(reply, rule), lambda _: Reply(200))


def remove_rule(body: Body, request: Request) -> Translated:
    name = body.needed_text("rule-name")
    return Translated(Claim.LISTEN, lambda reply: events.RuleRemoved(reply, name), lambda _: Reply(200))


def enumerate_rules(body: Body, request: Request) -> Translated:
    skip, top = body.number("skip", 0, 0, MAX_INT), body.number("top", MAX_INT, 0, MAX_INT)

    def respond(rules: list[RuleDescription]) -> Reply:
        if not rules:
            return NOTHING
        return Reply(200, body={"rules": [{"rule-description": _told(rule)} for rule in rules]})

    return Translated(Claim.LISTEN, lambda reply: events.RulesListed(reply, skip, top), respond)


def _filter(described: Mapping[str, Any]) -> Filter:
    match _inner(described, "sql-filter"), _inner(described, "correlation-filter"):
        case (None, None):
            if "true-filter" in described:
                return TrueFilter()
            if "false-filter" in described:
                return FalseFilter()
            raise BadRequestError("'rule-description' of 'add-rule' needs a sql-filter or a correlation-filter.")
        case (dict() as sql, None):
            return SqlFilter(_expression(sql, "sql-filter"))
        case (None, dict() as correlation):
            return _correlation(correlation)
        case _:
            raise BadRequestError("'rule-description' of 'add-rule' has two filters.")


def _correlation(described: Mapping[str, Any]) -> CorrelationFilter:
    for name in _FIELDS:
        value = described.get(name)
        if value is not None and not isinstance(value, str):
            raise BadRequestError(f"'{name}' of a correlation filter has to be a string, not {value!r}.")
    texts = {field: described.get(name) for name, field in _FIELDS.items()}
    return CorrelationFilter(**texts, properties=_inner(described, "properties") or {})


def _action(described: Mapping[str, Any]) -> SqlAction | None:
    action = _inner(described, "sql-rule-action")
    return None if action is None else SqlAction(_expression(action, "sql-rule-action"))


def _expression(described: Mapping[str, Any], owner: str) -> str:
    expression = described.get("expression")
    if not isinstance(expression, str):
        raise BadRequestError(f"'{owner}' of 'add-rule' needs its 'expression' as a string.")
    return expression


def _inner(described: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    value = described.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadRequestError(f"'{name}' of 'add-rule' has to be a map.")
    return {str(key): entry for key, entry in value.items()}


def _told(rule: RuleDescription) -> Described:
    if rule.action is None:
        action = Described(_EMPTY_ACTION, [])
    else:
        action = Described(_SQL_ACTION, [rule.action.expression, _COMPATIBILITY])
    return Described(_RULE, [_told_filter(rule.filter), action, rule.name, Timestamp(rule.created)])


def _told_filter(described: Filter) -> Described:
    match described:
        case TrueFilter():
            return Described(_TRUE_FILTER, [TRUE_EXPRESSION, _COMPATIBILITY])
        case FalseFilter():
            return Described(_FALSE_FILTER, [FALSE_EXPRESSION, _COMPATIBILITY])
        case SqlFilter():
            return Described(_SQL_FILTER, [described.expression, _COMPATIBILITY])
        case CorrelationFilter():
            texts = [getattr(described, field) for field in _FIELDS.values()]
            return Described(_CORRELATION_FILTER, [*texts, dict(described.properties)])
