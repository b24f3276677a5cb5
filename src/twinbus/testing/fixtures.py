"""Fixtures that pytest finds by itself where Twinbus is installed. They cost nothing until a test asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from twinbus.testing.local import LocalNamespace, LocalNamespaces


@pytest.fixture(scope="session")
def twinbus_namespace() -> Iterator[LocalNamespace]:
    """One namespace for the whole session, in a process of its own: `twinbus_namespace.connection_string`.

    Entities stay from test to test: give each test names of its own. A test that kills it must start it again.
    """
    with LocalNamespace() as namespace:
        yield namespace


@pytest.fixture(scope="session")
def twinbus_namespace_pair() -> Iterator[LocalNamespaces]:
    """A primary and a secondary in one process: `twinbus_namespace_pair["primary"].connection_string`."""
    with LocalNamespaces("primary", "secondary") as pair:
        yield pair
