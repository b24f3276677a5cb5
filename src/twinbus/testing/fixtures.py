"""Fixtures that pytest finds if Twinbus is installed. A server starts when the first test requests its fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from twinbus.testing.local_namespaces import LocalNamespace, LocalNamespaces


@pytest.fixture(scope="session")
def twinbus_namespace() -> Iterator[LocalNamespace]:
    """One namespace for the whole test session, in its own process: `twinbus_namespace.connection_string`.

    Entities of one test still exist in the next test, so give each test its own entity names. A test that kills the
    namespace must start the namespace again.
    """
    with LocalNamespace() as namespace:
        yield namespace


@pytest.fixture(scope="session")
def twinbus_namespace_pair() -> Iterator[LocalNamespaces]:
    """A primary and a secondary in one process: `twinbus_namespace_pair["primary"].connection_string`."""
    with LocalNamespaces("primary", "secondary") as pair:
        yield pair
