"""Options of the crash tests: the number of kills and the seed. Kills are split into equal runs for the workers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tiers import budget

KILLS_PER_RUN = 25


def kills_of_tier() -> int:
    """Not a constant: pytest may import this file before it knows the tier."""
    return budget(5, 100, 1000)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("crash")
    group.addoption(
        "--kills", type=int, default=None, help="kills in all (5, 100 or 1000, by tier; with --crash-seed: one run)"
    )
    group.addoption("--crash-seed", type=int, default=None, help="seed of the first run, as a failed test told it")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "crash_seed" in metafunc.fixturenames:
        # When the whole suite runs, pytest reads this file too late for its options: use the defaults.
        first = metafunc.config.getoption("crash_seed", None)
        kills = metafunc.config.getoption("kills", None) or (kills_of_tier() if first is None else KILLS_PER_RUN)
        seed = 1 if first is None else first
        runs = [
            (seed + run, min(KILLS_PER_RUN, kills - before))
            for run, before in enumerate(range(0, kills, KILLS_PER_RUN))
        ]
        metafunc.parametrize(("crash_seed", "kills"), runs, ids=[f"seed {seed}, {kills} kills" for seed, kills in runs])


@pytest.fixture
def compiled(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep compiled modules for the servers that are started many times, whatever this process does."""
    if "PYTHONDONTWRITEBYTECODE" in os.environ:
        monkeypatch.delenv("PYTHONDONTWRITEBYTECODE")
        monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(Path(tmp_path_factory.getbasetemp()) / "compiled"))
