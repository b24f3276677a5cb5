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


# The groups of Spark's tests, the longest first. One worker runs a group. A group with a session starts a JVM for it,
# which takes half a minute.
_SESSION, _RESULTS_SESSION = "tests with a Spark session", "tests of results with a Spark session"
_OF_RESULTS = {
    "actual_cost", "clocks", "money_from_facts", "new_operations", "pipeline_run", "reconcile_audit", "results",
}  # fmt: skip
_DRIVERS = {
    "Spark drivers that are killed, and that write tables": {"spark_kills", "tables_while_written"},
    "Spark drivers whose source is killed": {"servicebus_kills"},
    "Spark drivers with object stores": {"object_stores"},
    "Spark drivers in other surroundings": {"servicebus_secrets", "spark_elsewhere"},
}
SPARK_GROUPS = (_SESSION, _RESULTS_SESSION, *_DRIVERS)
MOST_SPARK_WORKERS = 3


def spark_group(nodeid: str) -> str | None:
    """Returns the group of a test of Spark; None for other tests."""
    folder, _, name = nodeid.partition("::")[0].removeprefix("tests/").rpartition("/test_")
    if folder not in {"pipeline", "report"}:
        return None
    module = name.removesuffix(".py")
    for group, modules in _DRIVERS.items():
        if module in modules:
            return group
    # The tier `quick` has so few of these tests that a second JVM would cost more time than it saves.
    return _RESULTS_SESSION if module in _OF_RESULTS and current_tier() is not Tier.QUICK else _SESSION


class SparkOnFewWorkers(LoadScopeScheduling):  # type: ignore[misc]  # as above
    """Gives the groups of Spark's tests to at most three workers at a time, first of all; the files of other tests to
    free workers. Tests of one file share servers, so they stay together.
    """

    def _split_scope(self, nodeid: str) -> str:
        return spark_group(nodeid) or nodeid.partition("::")[0]

    def _assign_work_unit(self, node: Any) -> None:
        units = [unit for work in self.assigned_work.values() for unit in work.items()]
        at_work = [scope for scope, done in units if scope in SPARK_GROUPS and not all(done.values())]
        waiting = [scope for scope in SPARK_GROUPS if scope in self.workqueue]
        for scope in waiting:
            self.workqueue.move_to_end(scope)
        if waiting and len(at_work) < MOST_SPARK_WORKERS:
            self.workqueue.move_to_end(waiting[0], last=False)
        super()._assign_work_unit(node)


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Undoes `configure_logging` after the test. Otherwise, tests that follow find log lines in what a verb printed."""
    root, ours = logging.getLogger(), logging.getLogger("twinbus")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], root.level, ours.level = before
