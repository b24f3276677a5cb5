"""The names that the room offers to others."""

from __future__ import annotations

import pytest

import twinbus.sdk


@pytest.mark.parametrize("name", twinbus.sdk.__all__)
def test_every_offered_name_can_be_imported(name: str) -> None:
    assert getattr(twinbus.sdk, name) is not None
    assert name in dir(twinbus.sdk)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        twinbus.sdk.nonsense  # noqa: B018 - the access itself is tested
