"""Hypothesis profiles, the tiers of the tests, and the order in which tests run.

Profiles: `ci` always generates the same inputs, `explore` new inputs in each run (HYPOTHESIS_PROFILE=explore).
"""

import logging
import os
import signal
from collections.abc import Iterator
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
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell lets background jobs ignore Ctrl-C. The verbs that tests interrupt would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out thorough tests in the tier `quick`. In the tier `soak`, no test has a limit of time."""
    if current_tier() is Tier.SOAK:
        for item in items:  # --timeout 0 alone does not change the limit of a mark
            item.add_marker(pytest.mark.timeout(0), append=False)
    if current_tier() is Tier.QUICK:
        thorough = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=thorough)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


@pytest.hookimpl(optionalhook=True)  # tests/pairing/mutation.py runs without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return SparkOnFewWorkers(config, log)


SESSION, DRIVERS = "tests with the Spark session", "tests that start Spark drivers"
STORES = "tests/pipeline/test_object_stores.py"
OWN_DRIVERS = tuple(
    f"tests/pipeline/test_{name}.py::"
    for name in ("servicebus_kills", "servicebus_secrets", "spark_elsewhere", "spark_kills", "tables_while_written")
)


class SparkOnFewWorkers(LoadScopeScheduling):  # type: ignore[misc]  # as above
    """Gives the tests of Spark to three workers, first of all; the files of other tests to free workers.

    One worker has the tests with the Spark session: another session would cost a JVM and half a minute. One worker has
    the tests that start drivers of their own, which take longest; one worker has those with object stores, which start
    drivers too. Tests of one file share servers, so they stay together.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(OWN_DRIVERS):
            return DRIVERS
        if nodeid.startswith(STORES):
            return STORES
        return SESSION if nodeid.startswith(("tests/pipeline/", "tests/report/")) else nodeid.partition("::")[0]

    def _assign_work_unit(self, node: Any) -> None:
        for scope in (STORES, DRIVERS, SESSION):
            if scope in self.workqueue:
                self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Undoes `configure_logging` after the test. Otherwise, tests that follow find log lines in what a verb printed."""
    root, ours = logging.getLogger(), logging.getLogger("twinbus")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], root.level, ours.level = before
