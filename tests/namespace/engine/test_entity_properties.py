"""The table of entity properties is complete and agrees with the descriptions."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from twinbus.namespace.engine.descriptions import (
    Description,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.entity_properties import ENTITY_PROPERTIES, FIXED_FIELDS, PropertyType, properties_of

KINDS: list[type[Description]] = [QueueDescription, TopicDescription, SubscriptionDescription]


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_has_every_field_of_a_description_once(kind: type[Description]) -> None:
    described = {field.name for field in fields(kind)} - {"path", "topic", "name", "rules"}
    assert sorted(row.field for row in properties_of(kind)) == sorted(described)


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_of_a_property_is_the_default_of_every_description_that_has_it(kind: type[Description]) -> None:
    defaults = {field.name: field.default for field in fields(kind)}
    for row in properties_of(kind):
        assert row.default == defaults[row.field]


def test_a_configuration_name_is_the_atom_name_in_lower_case_with_underscores() -> None:
    for row in ENTITY_PROPERTIES:
        assert row.config_name in (None, re.sub("(?<=.)([A-Z])", r"_\1", row.atom_name).lower())


def test_only_authorization_rules_and_an_obsolete_setting_have_no_configuration_name() -> None:
    missing = {row.field for row in ENTITY_PROPERTIES if row.config_name is None}
    assert missing == {"authorization_rules", "filtering_messages_before_publishing"}


def test_every_default_is_within_its_range() -> None:
    for row in ENTITY_PROPERTIES:
        if row.type is PropertyType.DURATION_OR_NEVER:
            assert row.default is None
        if row.minimum is not None and row.default is not None:
            assert row.minimum <= row.default
        if row.maximum is not None:
            assert row.default <= row.maximum
        if row.choices:
            assert row.default in row.choices


def test_an_update_cannot_change_the_fixed_properties() -> None:
    assert set(FIXED_FIELDS) == {"requires_duplicate_detection", "requires_session", "enable_partitioning"}
