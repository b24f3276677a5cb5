"""Hypothesis profiles, the tiers of the tests, and the order in which tests run.

Profiles: `ci` repeats itself exactly, `explore` looks for something new (HYPOTHESIS_PROFILE=explore).
"""

import os

import pytest
from hypothesis import settings

from tests.tiers import VARIABLE, Tier, current_tier

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=list(Tier), help="how much of each proof to run: tests/tiers.py (all)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thorough: only the tiers `all` and `soak` run it")
    if tier := config.getoption("tier"):
        os.environ[VARIABLE] = tier


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out thorough tests in the tier `quick`; give all tests with a Spark session to one worker, and start there.

    One worker means one session: a second one costs a JVM and half a minute. Its tests start first because they take
    longest. pytest-xdist reads the mark `xdist_group` with `--dist loadgroup`, in a hook that must run after this one.
    """
    if current_tier() is Tier.QUICK:
        thorough = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=thorough)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    with_spark = {item for item in items if "spark" in getattr(item, "fixturenames", ())}
    for item in with_spark:
        item.add_marker(pytest.mark.xdist_group("spark"))
    items.sort(key=lambda item: item not in with_spark)
