"""Checks of descriptions: whether an entity or rule can be created or changed as the description says.

The checks look only at the description, and at the description that it replaces. The registry checks which entities
exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from twinbus.amqp import EncodeError
from twinbus.namespace.engine import limits
from twinbus.namespace.engine.description_json import rule_json
from twinbus.namespace.engine.descriptions import (
    AuthorizationRule,
    Claim,
    CorrelationFilter,
    Description,
    QueueDescription,
    RuleDescription,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.effects import Refusal, not_found
from twinbus.namespace.engine.entity_properties import FIXED_FIELDS, PROPERTY_BY_FIELD
from twinbus.namespace.engine.events import RuleAdded, RuleChanged, RuleRemoved
from twinbus.namespace.engine.rules.errors import RuleSyntaxError
from twinbus.namespace.engine.rules.ruleset import compile_rule
from twinbus.values import Condition

MAX_METADATA_CHARACTERS: Final = 1024
MAX_AUTHORIZATION_RULES: Final = 12
MAX_AUTHORIZATION_RULE_NAME_CHARACTERS: Final = 256
MAX_RULE_NAME_CHARACTERS: Final = 50
MAX_EXPRESSION_CHARACTERS: Final = 1024
MAX_SUBSCRIPTIONS: Final = 2_000
"""Subscriptions of a topic."""
# The service has these limits for a topic. Here they are for a subscription.
MAX_SQL_RULES: Final = 2_000
MAX_CORRELATION_RULES: Final = 100_000
MAX_RULES_CHARACTERS: Final = 16 * limits.MIB
"""The greatest length of the stored description of a subscription with all its rules."""

_PATH: Final = re.compile(r"[A-Za-z0-9._~/-]+")
_NAME: Final = re.compile(r"[A-Za-z0-9._~-]+")
_NOT_IN_RULE_NAMES: Final = frozenset("@?#*/\\")


# --- entities ----------------------------------------------------------------------------------------------------


def new_entity_refusal(description: Description) -> Refusal | None:
    """Return why no entity can be created with this description; None if the description is valid."""
    return next(_faults(description), None)


def change_refusal(before: Description, after: Description) -> Refusal | None:
    """Return why an entity cannot be changed to the description `after`; None if the change is allowed."""
    for field in FIXED_FIELDS:
        if getattr(before, field, None) != getattr(after, field, None):
            name = PROPERTY_BY_FIELD[field].atom_name
            return _argument(f"The value of {name} cannot be changed once '{before.path}' exists.")
    return new_entity_refusal(after)


def _faults(description: Description) -> Iterator[Refusal]:
    yield from _name_faults(description)
    if isinstance(description, SubscriptionDescription):
        yield from _receiving_faults(description)
        if (refusal := rules_refusal(description.rules)) is not None:
            yield refusal
    elif isinstance(description, TopicDescription):
        yield from _sending_faults(description)
    else:
        yield from _sending_faults(description)
        yield from _receiving_faults(description)
    yield from _duration_faults(description, "default_time_to_live")
    yield from _duration_faults(description, "auto_delete_on_idle")
    if description.user_metadata is not None and len(description.user_metadata) > MAX_METADATA_CHARACTERS:
        yield _out_of_range(f"UserMetadata has at most {MAX_METADATA_CHARACTERS} characters.")


def _name_faults(description: Description) -> Iterator[Refusal]:
    if isinstance(description, SubscriptionDescription):
        name, longest, allowed = description.name, limits.MAX_SUBSCRIPTION_NAME_CHARACTERS, _NAME
        marks = "periods (.), hyphens (-), underscores (_) and tildes (~)"
    else:
        name, longest, allowed = description.path, limits.MAX_PATH_CHARACTERS, _PATH
        marks = "periods (.), hyphens (-), underscores (_), tildes (~) and slashes (/)"
    if not name:
        yield _argument("The name of an entity cannot be empty.")
    elif len(name) > longest:
        yield _out_of_range(f"The name '{name[:60]}…' has {len(name)} characters; at most {longest} are allowed.")
    elif not allowed.fullmatch(name):
        yield _argument(
            f"'{name}' contains character(s) that are not allowed by Service Bus. Entity names can contain only"
            f" letters, numbers, {marks}."
        )
    elif name.startswith("/") or name.endswith("/") or "//" in name:
        yield _argument(f"'{name}' has an empty segment: a name neither begins nor ends with '/', nor has it twice.")
    elif any(segment in {".", ".."} for segment in name.split("/")):
        yield _argument(f"'{name}' has a segment that consists of periods only.")
    elif "subscriptions" in name.lower().split("/") and not isinstance(description, SubscriptionDescription):
        yield _argument(f"'{name}' has the segment 'Subscriptions', which is reserved for subscriptions.")


def _sending_faults(description: QueueDescription | TopicDescription) -> Iterator[Refusal]:
    sizes_allowed: tuple[int, ...] = limits.QUEUE_MEGABYTES
    if description.enable_partitioning:
        # The service multiplies the size by the number of partitions, and clients send back the size that they read.
        sizes_allowed += tuple(limits.PARTITIONS * size for size in limits.QUEUE_MEGABYTES)
    if description.max_size_megabytes not in sizes_allowed:
        sizes = ", ".join(map(str, sizes_allowed))
        yield _out_of_range(f"MaxSizeInMegabytes is one of {sizes}; {description.max_size_megabytes} is not.")
    yield from _duration_faults(description, "duplicate_window")
    yield from _authorization_rule_faults(description.authorization_rules)


def _receiving_faults(description: QueueDescription | SubscriptionDescription) -> Iterator[Refusal]:
    yield from _duration_faults(description, "lock_duration")
    if not 1 <= description.max_delivery_count <= limits.MAX_DELIVERY_COUNT:
        yield _out_of_range(
            f"MaxDeliveryCount is 1 to {limits.MAX_DELIVERY_COUNT}; {description.max_delivery_count} is not."
        )


def _duration_faults(description: Description, field: str) -> Iterator[Refusal]:
    row, value = PROPERTY_BY_FIELD[field], getattr(description, field)
    assert row.minimum is not None, "every duration has a minimum"
    if value is None:
        return
    if value < row.minimum or (row.maximum is not None and value > row.maximum):
        shortest = f"{row.minimum / 1000:g} s"
        bounds = f"at least {shortest}" if row.maximum is None else f"{shortest} to {row.maximum / 1000:g} s"
        yield _out_of_range(f"{row.atom_name} is {bounds}; {value / 1000:g} s is not.")


def _authorization_rule_faults(rules: tuple[AuthorizationRule, ...]) -> Iterator[Refusal]:
    if len(rules) > MAX_AUTHORIZATION_RULES:
        yield _out_of_range(f"An entity has at most {MAX_AUTHORIZATION_RULES} authorization rules.")
    if len({rule.name.lower() for rule in rules}) < len(rules):
        yield _argument("Two authorization rules have the same name.")
    for rule in rules:
        if not 0 < len(rule.name) <= MAX_AUTHORIZATION_RULE_NAME_CHARACTERS:
            longest = MAX_AUTHORIZATION_RULE_NAME_CHARACTERS
            yield _argument(f"The name of an authorization rule has 1 to {longest} characters.")
        if not rule.primary_key:
            yield _argument(f"The authorization rule '{rule.name}' has no key.")
        if not rule.claims:
            yield _argument(f"The authorization rule '{rule.name}' allows nothing.")
        if Claim.MANAGE in rule.claims and len(rule.claims) < len(Claim):
            yield _argument(f"The authorization rule '{rule.name}' allows Manage, which includes Send and Listen.")


# --- rules of subscriptions --------------------------------------------------------------------------------------

Rules = tuple[RuleDescription, ...]


def rule_refusal(rule: RuleDescription) -> Refusal | None:
    """Return why a subscription cannot have this rule; None if the rule is valid."""
    if not rule.name or rule.name.isspace():
        return _argument("The name of a rule cannot be empty.")
    if len(rule.name) > MAX_RULE_NAME_CHARACTERS:
        return _out_of_range(
            f"The name of rule '{rule.name[:60]}' is longer than {MAX_RULE_NAME_CHARACTERS} characters."
        )
    if _NOT_IN_RULE_NAMES.intersection(rule.name):
        return _argument(f"The name of rule '{rule.name}' has one of @ ? # * / \\ in it.")
    for what, described in (("filter", rule.filter), ("action", rule.action)):
        expression = getattr(described, "expression", "")
        if len(expression) > MAX_EXPRESSION_CHARACTERS:
            return _out_of_range(
                f"The {what} of rule '{rule.name}' is longer than {MAX_EXPRESSION_CHARACTERS} characters."
            )
    try:
        rule_json(rule)
    except EncodeError as error:  # for example a number of a configuration file that no AMQP type can hold
        return _argument(f"A value of rule '{rule.name}' is no value of a message: {error}.")
    return _syntax_refusal(rule)


def _syntax_refusal(rule: RuleDescription) -> Refusal | None:
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


def _not_understood(what: str, rule: RuleDescription, expression: str, error: RuleSyntaxError) -> Refusal:
    return _argument(f"The {what} of rule '{rule.name}' cannot be understood. {error} It says: {expression}")


def _quota_refusal(rules: Rules) -> Refusal | None:
    """Return that these are too many rules for one subscription; None if they are not."""
    correlations = sum(isinstance(rule.filter, CorrelationFilter) and rule.action is None for rule in rules)
    for number, most, what in (
        (len(rules) - correlations, MAX_SQL_RULES, "rules with a SQL expression"),
        (correlations, MAX_CORRELATION_RULES, "rules with a correlation filter"),
    ):
        if number > most:
            return Refusal(Condition.RESOURCE_LIMIT_EXCEEDED, f"A subscription has at most {most} {what}.")
    return None


def rules_refusal(rules: Rules) -> Refusal | None:
    """Return why no subscription can be created with these rules; None if the rules are valid."""
    names: set[str] = set()
    for rule in rules:
        if rule.name.lower() in names:
            return _argument(f"Two rules have the name '{rule.name}'.")
        names.add(rule.name.lower())
        refusal = rule_refusal(rule)
        if refusal is not None:
            return refusal
    return _quota_refusal(rules)


def changed_rules(rules: Rules, event: RuleAdded | RuleChanged | RuleRemoved, path: str, now: int) -> Rules | Refusal:
    """Return the rules of the subscription `path` after the event, or why the event is refused."""
    name = event.name if isinstance(event, RuleRemoved) else event.rule.name
    before = next((rule for rule in rules if rule.name.lower() == name.lower()), None)
    if isinstance(event, RuleAdded):
        if before is not None:
            return Refusal(Condition.ENTITY_ALREADY_EXISTS, f"The rule '{name}' of '{path}' already exists.")
        added = (*rules, replace(event.rule, created=now))
        return rule_refusal(event.rule) or _quota_refusal(added) or added
    if before is None:
        return not_found(f"{path}/Rules/{name}")
    if isinstance(event, RuleRemoved):
        return tuple(rule for rule in rules if rule is not before)
    after = replace(event.rule, name=before.name, created=before.created)
    changed = tuple(after if rule is before else rule for rule in rules)
    return rule_refusal(after) or _quota_refusal(changed) or changed


def _argument(text: str) -> Refusal:
    return Refusal(Condition.ARGUMENT_ERROR, text)


def _out_of_range(text: str) -> Refusal:
    return Refusal(Condition.ARGUMENT_OUT_OF_RANGE, text)
