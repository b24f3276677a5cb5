"""Hypothesis profiles, the tiers of the tests, and the order in which tests run.

Profiles: `ci` always generates the same inputs, `explore` new inputs in each run (HYPOTHESIS_PROFILE=explore).
"""

import os
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # it has no type hints

from tests.tiers import VARIABLE, Tier, current_tier

pytest_plugins = ("tests.spark_fixtures",)

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=list(Tier), help="how much of each proof to run: tests/tiers.py (all)")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "thorough: only the tiers `all` and `soak` run it")
    if tier := config.getoption("tier"):
        os.environ[VARIABLE] = tier


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out thorough tests in the tier `quick`."""
    if current_tier() is Tier.QUICK:
        thorough = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=thorough)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


@pytest.hookimpl(optionalhook=True)  # tests/pairing/mutation.py runs without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return SparkOnOneWorker(config, log)


class SparkOnOneWorker(LoadScopeScheduling):  # type: ignore[misc]  # as above
    """Gives all tests with a Spark session to one worker, first of all; the files of other tests to free workers.

    One worker means one session: a second one costs a JVM and half a minute. Tests of one file share servers, so they
    stay together.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "spark" if nodeid.startswith(("tests/pipeline/", "tests/report/")) else nodeid.partition("::")[0]
