"""Every implementation of the store under one set of tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.namespace.store.sample_writes import Home, counters, entity


@pytest.fixture(params=["memory", "sqlite"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """An open store with the entities of two queues, 1 and 2."""
    made = Home(request.param, tmp_path)
    made.commit(entity(1, "orders"), counters(1), entity(2, "invoices"), counters(2))
    yield made
    made.store.close()
