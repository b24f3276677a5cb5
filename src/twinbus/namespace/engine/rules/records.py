"""A rule as the values that the store keeps with its subscription, and back.

Parameters and properties are kept in their AMQP encoding, which alone tells all their types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from twinbus.amqp.decoding import decode_all
from twinbus.amqp.encoding import encode
from twinbus.namespace.engine.rules.descriptions import (
    CorrelationFilter,
    FalseFilter,
    Filter,
    RuleDescription,
    SqlAction,
    SqlFilter,
    TrueFilter,
)
from twinbus.namespace.engine.rules.values import plain, wire

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


def _write_filter(described: Filter) -> dict[str, Any]:
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


def _read_filter(values: Mapping[str, Any]) -> Filter:
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
