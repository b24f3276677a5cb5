"""A namespace for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from twinbus.testing import LocalNamespace


@pytest.fixture(scope="module")
def namespace() -> Iterator[LocalNamespace]:
    with LocalNamespace() as made:
        yield made
