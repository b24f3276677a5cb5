"""Tiers of the tests: how much of each proof a run does. docs/testing.md lists what each tier holds.

    quick   `make test`       every proof once, in a few minutes
    all     `make test-all`   every test, with the budgets of continuous integration; the default of a plain `pytest`
    soak    `make soak`       the large budgets, for hours

A test that only the tiers `all` and `soak` run carries the mark `thorough`. A test whose size depends on the tier takes
its size from `budget`. The variable TWINBUS_TEST_TIER names the tier, so that workers and modules agree on it.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Final

VARIABLE: Final = "TWINBUS_TEST_TIER"


class Tier(StrEnum):
    QUICK = "quick"
    ALL = "all"
    SOAK = "soak"


def current_tier() -> Tier:
    return Tier(os.environ.get(VARIABLE, Tier.ALL))


def budget(quick: int, full: int, soak: int | None = None) -> int:
    """Return how many seeds, kills or inputs the current tier allows; `soak` defaults to `full`."""
    match current_tier():
        case Tier.QUICK:
            return quick
        case Tier.ALL:
            return full
        case Tier.SOAK:
            return full if soak is None else soak
