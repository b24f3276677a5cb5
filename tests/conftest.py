"""Hypothesis profiles: `ci` repeats itself exactly, `explore` looks for something new (HYPOTHESIS_PROFILE=explore).

And the order of tests.
"""

import os

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a Spark session first: so the first of several workers has them all, and one JVM is warmed, not two.

    Workers take from each other at the end of their lists.
    """
    items.sort(key=lambda item: "spark" not in getattr(item, "fixturenames", ()))
