"""The entities of a namespace as the Config.json of Microsoft's emulator, and what that format has no words for.

`config` reads what is written here. Nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from enum import Enum
from typing import Any, Final

from twinbus.namespace.config_properties import QUEUE, SUBSCRIPTION, TOPIC, Properties, emulator_name
from twinbus.namespace.config_rules import EMULATOR_FIELDS
from twinbus.namespace.engine.descriptions import (
    FALSE_EXPRESSION,
    TRUE_EXPRESSION,
    CorrelationFilter,
    Description,
    FalseFilter,
    QueueDescription,
    RuleDescription,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.iso8601 import render_duration

# What the emulator's own file always says; the rest only where it is not what an entity is born with.
_ALWAYS: Final = frozenset(
    {
        "dead_lettering_on_message_expiration",
        "default_message_time_to_live",
        "duplicate_detection_history_time_window",
        "forward_dead_lettered_messages_to",
        "forward_to",
        "lock_duration",
        "max_delivery_count",
        "requires_duplicate_detection",
        "requires_session",
    }
)
_DURATIONS: Final = frozenset({"default_time_to_live", "duplicate_window", "lock_duration", "auto_delete_on_idle"})
_TARGETS: Final = frozenset({"forward_to", "forward_dead_letters_to"})


def emulator_config(name: str, descriptions: Iterable[Description]) -> tuple[dict[str, Any], list[str]]:
    """The file, and what of the namespace it does not say."""
    lost: list[str] = []
    queues: list[dict[str, Any]] = []
    topics: dict[str, dict[str, Any]] = {}
    waiting: list[SubscriptionDescription] = []
    for each in descriptions:
        if isinstance(each, SubscriptionDescription):
            waiting.append(each)
            continue
        if each.authorization_rules:
            lost.append(f"{each.path}: its authorization rules, as keys do not belong into such a file")
        if isinstance(each, QueueDescription):
            queues.append({"Name": each.path, "Properties": _properties(each, QUEUE)})
        else:
            topics[each.path] = {"Name": each.path, "Properties": _properties(each, TOPIC), "Subscriptions": []}
    for each in waiting:
        rules = [_rule(each.path, rule, lost) for rule in each.rules]
        if not rules:
            lost.append(f"{each.path}: that it has no rule, for the emulator gives it one that takes everything")
        told = {"Name": each.name, "Properties": _properties(each, SUBSCRIPTION), "Rules": rules}
        topics[each.topic]["Subscriptions"].append(told)
    namespace = {"Name": name, "Queues": queues, "Topics": list(topics.values())}
    return {"UserConfig": {"Namespaces": [namespace], "Logging": {"Type": "File"}}}, lost


def _properties(description: Description, properties: Properties) -> dict[str, Any]:
    born_with = _born_with(description)
    found: dict[str, Any] = {}
    for name, (field, _) in properties.items():
        value = getattr(description, field)
        if name in _ALWAYS or value != born_with[field]:
            found[emulator_name(name)] = _written(field, value)
    return dict(sorted(found.items()))


def _born_with(description: Description) -> dict[str, Any]:
    if isinstance(description, SubscriptionDescription):
        fresh: Description = SubscriptionDescription(topic="", name="")
    else:
        fresh = QueueDescription(path="") if isinstance(description, QueueDescription) else TopicDescription(path="")
    return {field.name: getattr(fresh, field.name) for field in fields(fresh)}


def _written(field: str, value: Any) -> Any:
    if field in _DURATIONS:
        return render_duration(value)
    if field in _TARGETS:
        return "" if value is None else value.partition("://")[2].partition("/")[2] if "://" in value else value
    return value.value if isinstance(value, Enum) else value


def _rule(path: str, rule: RuleDescription, lost: list[str]) -> dict[str, Any]:
    place = f"{path}, rule {rule.name}"
    chosen = rule.filter
    told: dict[str, Any]
    if isinstance(chosen, CorrelationFilter):
        named = {name: getattr(chosen, field) for name, field in EMULATOR_FIELDS.items()}
        correlation: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        plain = {name: value for name, value in chosen.properties.items() if type(value) in (str, int, float, bool)}
        lost += [f"{place}: the property {name}" for name in chosen.properties if name not in plain]
        if plain:
            correlation["Properties"] = plain
        told = {"FilterType": "Correlation", "CorrelationFilter": correlation}
    else:
        if isinstance(chosen, SqlFilter):
            expression = chosen.expression
            if chosen.parameters:
                lost.append(f"{place}: the parameters of its filter")
        else:
            expression = FALSE_EXPRESSION if isinstance(chosen, FalseFilter) else TRUE_EXPRESSION
        told = {"FilterType": "Sql", "SqlFilter": {"SqlExpression": expression}}
    if rule.action is not None:
        told["Action"] = {"SqlExpression": rule.action.expression}
        if rule.action.parameters:
            lost.append(f"{place}: the parameters of its action")
    return {"Name": rule.name, "Properties": told}
