"""Rules made, changed, removed and listed: what may be, and what the subscription then has."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from twinbus.amqp.errors import EncodeError
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.events import RuleAdded, RuleChanged, RuleRemoved
from twinbus.namespace.engine.refusals import not_found
from twinbus.namespace.engine.rules.descriptions import RuleDescription, SqlFilter
from twinbus.namespace.engine.rules.errors import RuleSyntaxError
from twinbus.namespace.engine.rules.records import rule_text
from twinbus.namespace.engine.rules.ruleset import compile_rule
from twinbus.values import Condition

MAX_NAME_CHARACTERS: Final = 50
MAX_EXPRESSION_CHARACTERS: Final = 1024
_NO_NAME: Final = frozenset("@?#*/\\")

Rules = tuple[RuleDescription, ...]


def refusal_of_rule(rule: RuleDescription) -> Refusal | None:
    """Why there cannot be such a rule."""
    if not rule.name or rule.name.isspace():
        return Refusal(Condition.ARGUMENT_ERROR, "The name of a rule cannot be empty.")
    if len(rule.name) > MAX_NAME_CHARACTERS:
        text = f"The name of rule '{rule.name[:60]}' is longer than {MAX_NAME_CHARACTERS} characters."
        return Refusal(Condition.ARGUMENT_OUT_OF_RANGE, text)
    if _NO_NAME.intersection(rule.name):
        return Refusal(Condition.ARGUMENT_ERROR, f"The name of rule '{rule.name}' has one of @ ? # * / \\ in it.")
    for what, described in (("filter", rule.filter), ("action", rule.action)):
        expression = getattr(described, "expression", "")
        if len(expression) > MAX_EXPRESSION_CHARACTERS:
            text = f"The {what} of rule '{rule.name}' is longer than {MAX_EXPRESSION_CHARACTERS} characters."
            return Refusal(Condition.ARGUMENT_OUT_OF_RANGE, text)
    try:
        rule_text(rule)
    except EncodeError as error:  # a number from a file or a document may be of any size
        return Refusal(Condition.ARGUMENT_ERROR, f"A value of rule '{rule.name}' is no value of a message: {error}.")
    return _refusal_of_texts(rule)


def _refusal_of_texts(rule: RuleDescription) -> Refusal | None:
    try:
        compile_rule(replace(rule, action=None))
    except RuleSyntaxError as error:
        expression = rule.filter.expression if isinstance(rule.filter, SqlFilter) else ""
        return _not_understood("filter", rule, expression, error)
    try:
        compile_rule(rule)
    except RuleSyntaxError as error:
        return _not_understood("action", rule, rule.action.expression if rule.action else "", error)
    return None


def refusal_of_rules(rules: Rules) -> Refusal | None:
    """Why no subscription can be born with these."""
    names: set[str] = set()
    for rule in rules:
        if rule.name.lower() in names:
            return Refusal(Condition.ARGUMENT_ERROR, f"Two rules have the name '{rule.name}'.")
        names.add(rule.name.lower())
        refusal = refusal_of_rule(rule)
        if refusal is not None:
            return refusal
    return None


def changed(rules: Rules, event: RuleAdded | RuleChanged | RuleRemoved, path: str, now: int) -> Rules | Refusal:
    """The rules after the event."""
    name = event.name if isinstance(event, RuleRemoved) else event.rule.name
    before = next((rule for rule in rules if _is_named(rule, name)), None)
    if isinstance(event, RuleAdded):
        if before is not None:
            return Refusal(Condition.ENTITY_ALREADY_EXISTS, f"The rule '{name}' of '{path}' already exists.")
        return refusal_of_rule(event.rule) or (*rules, replace(event.rule, created=now))
    if before is None:
        return not_found(f"{path}/Rules/{name}")
    if isinstance(event, RuleRemoved):
        return tuple(rule for rule in rules if rule is not before)
    after = replace(event.rule, name=before.name, created=before.created)
    return refusal_of_rule(after) or tuple(after if rule is before else rule for rule in rules)


def _is_named(rule: RuleDescription, name: str) -> bool:
    return rule.name.lower() == name.lower()


def _not_understood(what: str, rule: RuleDescription, expression: str, error: RuleSyntaxError) -> Refusal:
    text = f"The {what} of rule '{rule.name}' cannot be understood. {error} It says: {expression}"
    return Refusal(Condition.ARGUMENT_ERROR, text)
