"""Options of the chaos tests: how many seeds to run, and the first seed."""

from __future__ import annotations

import pytest

from tests.tiers import budget


def seeds_of_tier() -> int:
    """Not a constant: pytest may import this file before it knows the tier."""
    return budget(1, 20, 100)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--seeds", type=int, default=None, help="runs (1, 20 or 100, by tier)")
    group.addoption("--start", type=int, default=0, help="the first seed, as a failed test told it")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        # When the whole suite runs, pytest reads this file too late for its options: use the defaults.
        start = metafunc.config.getoption("start", 0)
        seeds = metafunc.config.getoption("seeds", None) or seeds_of_tier()
        metafunc.parametrize("seed", range(start, start + seeds))
