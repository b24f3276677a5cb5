"""How many seeds, and from which on."""

from __future__ import annotations

import pytest

from tests.tiers import budget

SEEDS = budget(1, 20, 100)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--seeds", type=int, default=SEEDS, help=f"runs ({SEEDS})")
    group.addoption("--start", type=int, default=0, help="the first seed, as a failed test told it")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        # Where all tests run, this file is read too late for its options: then the defaults hold.
        start = metafunc.config.getoption("start", 0)
        seeds = metafunc.config.getoption("seeds", SEEDS)
        metafunc.parametrize("seed", range(start, start + seeds))
