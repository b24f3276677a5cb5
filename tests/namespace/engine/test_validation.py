"""Every description that the service refuses is refused, with the same condition and the name of the property."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from twinbus.namespace.engine.descriptions import (
    AuthorizationRule,
    Claim,
    Description,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.validation import change_refusal, new_entity_refusal
from twinbus.values import Condition

ARGUMENT, RANGE, ALLOWED = Condition.ARGUMENT_ERROR, Condition.ARGUMENT_OUT_OF_RANGE, Condition.NOT_ALLOWED
QUEUE = QueueDescription(path="q")
TOPIC = TopicDescription(path="t")
SUBSCRIPTION = SubscriptionDescription(topic="t", name="s")
ALL = frozenset(Claim)


def rule(name: str = "r", key: str = "k", claims: frozenset[Claim] = ALL) -> AuthorizationRule:
    return AuthorizationRule(name, key, key, claims)


@pytest.mark.parametrize("entity", [QUEUE, TOPIC])
@pytest.mark.parametrize(
    ("path", "condition"),
    [
        ("", ARGUMENT),
        ("/q", ARGUMENT),
        ("q/", ARGUMENT),
        ("a//b", ARGUMENT),
        ("a?b", ARGUMENT),
        ("a#b", ARGUMENT),
        ("a\\b", ARGUMENT),
        ("a b", ARGUMENT),
        ("a*", ARGUMENT),
        ("a@b", ARGUMENT),
        ("$cbs", ARGUMENT),
        ("q/$deadletterqueue", ARGUMENT),
        ("é", ARGUMENT),
        ("a\n", ARGUMENT),
        ("a/../b", ARGUMENT),
        ("t/Subscriptions/s", ARGUMENT),
        ("x" * 261, RANGE),
    ],
)
def test_a_path_that_the_service_does_not_allow_is_refused(
    entity: Description, path: str, condition: Condition
) -> None:
    refusal = new_entity_refusal(replace(entity, path=path))  # type: ignore[arg-type]  # both of these have a path
    assert refusal is not None
    assert refusal.condition is condition


@pytest.mark.parametrize(
    "path",
    ["q", "Q-1_2.3~4", "a/b/c", "x" * 260, "contoso/x-servicebus-transfer/0", "localhost-5672/x-servicebus-transfer/9"],
)
@pytest.mark.parametrize("entity", [QUEUE, TOPIC])
def test_a_path_of_letters_digits_and_marks_is_taken(entity: Description, path: str) -> None:
    assert new_entity_refusal(replace(entity, path=path)) is None  # type: ignore[arg-type]  # both of these have a path


@pytest.mark.parametrize(
    ("name", "condition"),
    [("", ARGUMENT), ("a/b", ARGUMENT), ("a b", ARGUMENT), ("$Default", ARGUMENT), ("x" * 51, RANGE)],
)
def test_a_subscription_name_is_shorter_and_has_no_slash(name: str, condition: Condition) -> None:
    refusal = new_entity_refusal(replace(SUBSCRIPTION, name=name))
    assert refusal is not None
    assert refusal.condition is condition
    assert new_entity_refusal(replace(SUBSCRIPTION, name="x" * 50)) is None


REFUSED: list[tuple[Description, dict[str, Any], Condition, str]] = [
    *[
        (entity, {"lock_duration": duration}, RANGE, "LockDuration")
        for entity in (QUEUE, SUBSCRIPTION)
        for duration in (0, 4_999, 300_001, 25 * 86_400_000)
    ],
    *[
        (entity, {"max_delivery_count": count}, RANGE, "MaxDeliveryCount")
        for entity in (QUEUE, SUBSCRIPTION)
        for count in (0, -1, 2_147_483_648)
    ],
    *[
        (entity, {"duplicate_window": window}, RANGE, "DuplicateDetectionHistoryTimeWindow")
        for entity in (QUEUE, TOPIC)
        for window in (19_999, 7 * 86_400_000 + 1)
    ],
    *[
        (entity, {"max_size_megabytes": size}, RANGE, "MaxSizeInMegabytes")
        for entity in (QUEUE, TOPIC)
        for size in (0, 1000, 1023, 6144)
    ],
    *[
        (entity, {name: value}, RANGE, wire)
        for entity in (QUEUE, TOPIC, SUBSCRIPTION)
        for name, value, wire in (
            ("default_time_to_live", 999, "DefaultMessageTimeToLive"),
            ("auto_delete_on_idle", 299_999, "AutoDeleteOnIdle"),
            ("user_metadata", "x" * 1025, "UserMetadata"),
        )
    ],
    *[
        (entity, {"authorization_rules": rules}, condition, "authorization rule")
        for entity in (QUEUE, TOPIC)
        for rules, condition in (
            ((rule("a"), rule("A")), ARGUMENT),
            (tuple(rule(str(number)) for number in range(13)), RANGE),
            ((rule(""),), ARGUMENT),
            ((rule(key=""),), ARGUMENT),
            ((rule(claims=frozenset()),), ARGUMENT),
            ((rule(claims=frozenset({Claim.MANAGE})),), ARGUMENT),
        )
    ],
]


@pytest.mark.parametrize(("entity", "changes", "condition", "named"), REFUSED)
def test_a_value_out_of_its_range_is_refused_by_name_on_create_and_on_update(
    entity: Description, changes: dict[str, Any], condition: Condition, named: str
) -> None:
    wrong = replace(entity, **changes)
    for refusal in (new_entity_refusal(wrong), change_refusal(entity, wrong)):
        assert refusal is not None
        assert refusal.condition is condition
        assert named in refusal.description


@pytest.mark.parametrize(
    ("entity", "changes"),
    [
        (QUEUE, {"lock_duration": 5_000}),
        (QUEUE, {"lock_duration": 300_000}),
        (QUEUE, {"max_delivery_count": 1}),
        (QUEUE, {"max_delivery_count": 2_147_483_647}),
        (QUEUE, {"duplicate_window": 20_000}),
        (TOPIC, {"duplicate_window": 7 * 86_400_000}),
        (QUEUE, {"max_size_megabytes": 5120}),
        (TOPIC, {"default_time_to_live": 1_000, "auto_delete_on_idle": 300_000}),
        (SUBSCRIPTION, {"user_metadata": "x" * 1024}),
        (QUEUE, {"authorization_rules": tuple(rule(str(number)) for number in range(12))}),
        (QUEUE, {"authorization_rules": (rule(claims=frozenset({Claim.SEND})),)}),
    ],
)
def test_a_value_at_the_edge_of_its_range_is_taken(entity: Description, changes: dict[str, Any]) -> None:
    assert new_entity_refusal(replace(entity, **changes)) is None


@pytest.mark.parametrize(
    ("entity", "name"),
    [
        (QUEUE, "requires_session"),
        (QUEUE, "requires_duplicate_detection"),
        (QUEUE, "enable_partitioning"),
        (TOPIC, "requires_duplicate_detection"),
        (TOPIC, "enable_partitioning"),
        (SUBSCRIPTION, "requires_session"),
    ],
)
def test_a_fixed_property_cannot_be_changed(entity: Description, name: str) -> None:
    for before, after in ((False, True), (True, False)):
        refusal = change_refusal(replace(entity, **{name: before}), replace(entity, **{name: after}))  # type: ignore[arg-type]  # the names are right
        assert refusal is not None
        assert refusal.condition is ARGUMENT
        assert name.replace("_", "") in refusal.description.lower()


def test_n1_a_partitioned_entity_may_have_the_size_of_all_its_partitions() -> None:
    for size in (1024, 5120, 16 * 1024, 81_920):
        assert new_entity_refusal(QueueDescription(path="q", enable_partitioning=True, max_size_megabytes=size)) is None
    for partitioned in (False, True):
        described = QueueDescription(path="q", enable_partitioning=partitioned, max_size_megabytes=81_921)
        assert new_entity_refusal(described) is not None
    assert new_entity_refusal(QueueDescription(path="q", max_size_megabytes=81_920)) is not None
