"""Two namespaces for the tests of one file."""

from collections.abc import Iterator

import pytest

from tests.cli.syphoned import CONFIG
from twinbus.testing import LocalNamespaces


@pytest.fixture(scope="module")
def namespaces() -> Iterator[LocalNamespaces]:
    with LocalNamespaces("primary", "secondary", memory=True, config=CONFIG) as found:
        yield found
