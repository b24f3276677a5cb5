"""How many kills, and from which seed. Runs of equal length, so that workers share them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

KILLS_PER_RUN = 25


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("crash")
    group.addoption("--kills", type=int, default=None, help="kills in all (100; with --crash-seed: one run)")
    group.addoption("--crash-seed", type=int, default=None, help="the seed of the first run, as a failed test told it")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "crash_seed" in metafunc.fixturenames:
        # Where other tests run too, these options are not known to the command line.
        first = metafunc.config.getoption("crash_seed", None)
        kills = metafunc.config.getoption("kills", None) or (100 if first is None else KILLS_PER_RUN)
        first = 1 if first is None else first
        runs = [
            (first + run, min(KILLS_PER_RUN, kills - start)) for run, start in enumerate(range(0, kills, KILLS_PER_RUN))
        ]
        metafunc.parametrize(("crash_seed", "kills"), runs, ids=[f"seed-{seed}-kills-{kills}" for seed, kills in runs])


@pytest.fixture(autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers started again and again find their modules compiled, also where nothing may be written beside them."""
    if "PYTHONDONTWRITEBYTECODE" in os.environ:
        monkeypatch.delenv("PYTHONDONTWRITEBYTECODE")
        monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(Path(tmp_path_factory.getbasetemp()) / "compiled"))
