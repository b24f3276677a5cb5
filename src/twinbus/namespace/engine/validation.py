"""The checks the service makes of a description before an entity is created or updated.

They look at the description alone, and at the one it replaces. Which entities exist is the namespace's to know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from twinbus.namespace.engine import limits
from twinbus.namespace.engine.descriptions import (
    AuthorizationRule,
    Claim,
    Description,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.rules.administration import refusal_of_rules
from twinbus.values import Condition

MAX_DELIVERY_COUNT: Final = 2_147_483_647
MAX_METADATA_CHARACTERS: Final = 1024
MAX_RULES: Final = 12
MAX_RULE_NAME_CHARACTERS: Final = 256

_PATH: Final = re.compile(r"[A-Za-z0-9._~/-]+")
_NAME: Final = re.compile(r"[A-Za-z0-9._~-]+")
# What may not change once the entity exists.
_FIXED: Final = ("requires_session", "requires_duplicate_detection", "enable_partitioning")


def refusal_of_new(description: Description) -> Refusal | None:
    """Why no entity can be made like this."""
    return next(_faults(description), None)


def refusal_of_change(before: Description, after: Description) -> Refusal | None:
    """Why the entity cannot be changed like this."""
    for name in _FIXED:
        if getattr(before, name, None) != getattr(after, name, None):
            return _argument(f"The value of {_wire_name(name)} cannot be changed once '{before.path}' exists.")
    return refusal_of_new(after)


def _faults(description: Description) -> Iterator[Refusal]:
    yield from _name_faults(description)
    if isinstance(description, SubscriptionDescription):
        yield from _receiving_faults(description)
        if (refusal := refusal_of_rules(description.rules)) is not None:
            yield refusal
    elif isinstance(description, TopicDescription):
        yield from _sending_faults(description)
    else:
        yield from _sending_faults(description)
        yield from _receiving_faults(description)
    yield from _range("DefaultMessageTimeToLive", description.default_time_to_live, limits.MIN_TTL, None)
    yield from _range("AutoDeleteOnIdle", description.auto_delete_on_idle, limits.MIN_IDLE_DELETE, None)
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
    if description.max_size_megabytes not in limits.QUEUE_MEGABYTES:
        sizes = ", ".join(map(str, limits.QUEUE_MEGABYTES))
        yield _out_of_range(f"MaxSizeInMegabytes is one of {sizes}; {description.max_size_megabytes} is not.")
    window = description.duplicate_window
    shortest, longest = limits.MIN_DUPLICATE_WINDOW, limits.MAX_DUPLICATE_WINDOW
    yield from _range("DuplicateDetectionHistoryTimeWindow", window, shortest, longest)
    yield from _rule_faults(description.authorization_rules)


def _receiving_faults(description: QueueDescription | SubscriptionDescription) -> Iterator[Refusal]:
    yield from _range("LockDuration", description.lock_duration, limits.MIN_LOCK, limits.MAX_LOCK)
    if not 1 <= description.max_delivery_count <= MAX_DELIVERY_COUNT:
        yield _out_of_range(f"MaxDeliveryCount is 1 to {MAX_DELIVERY_COUNT}; {description.max_delivery_count} is not.")
    if description.forward_to and description.requires_session:
        yield _argument(f"ForwardTo ('{description.forward_to}') cannot be set where RequiresSession is.")


def _rule_faults(rules: tuple[AuthorizationRule, ...]) -> Iterator[Refusal]:
    if len(rules) > MAX_RULES:
        yield _out_of_range(f"An entity has at most {MAX_RULES} authorization rules.")
    if len({rule.name.lower() for rule in rules}) < len(rules):
        yield _argument("Two authorization rules have the same name.")
    for rule in rules:
        if not 0 < len(rule.name) <= MAX_RULE_NAME_CHARACTERS:
            yield _argument(f"The name of an authorization rule has 1 to {MAX_RULE_NAME_CHARACTERS} characters.")
        if not rule.primary_key:
            yield _argument(f"The authorization rule '{rule.name}' has no key.")
        if not rule.claims:
            yield _argument(f"The authorization rule '{rule.name}' allows nothing.")
        if Claim.MANAGE in rule.claims and len(rule.claims) < len(Claim):
            yield _argument(f"The authorization rule '{rule.name}' allows Manage, which includes Send and Listen.")


def _range(name: str, value: int | None, shortest: int, longest: int | None) -> Iterator[Refusal]:
    if value is None:
        return
    if value < shortest or (longest is not None and value > longest):
        bounds = (
            f"at least {shortest / 1000:g} s" if longest is None else f"{shortest / 1000:g} s to {longest / 1000:g} s"
        )
        yield _out_of_range(f"{name} is {bounds}; {value / 1000:g} s is not.")


def _argument(text: str) -> Refusal:
    return Refusal(Condition.ARGUMENT_ERROR, text)


def _out_of_range(text: str) -> Refusal:
    return Refusal(Condition.ARGUMENT_OUT_OF_RANGE, text)


def _wire_name(name: str) -> str:
    """As the management API spells it."""
    return "".join(part.capitalize() for part in name.split("_"))
