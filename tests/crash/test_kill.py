"""N2: killed with -9 at any instant under load, a namespace loses nothing acknowledged and repeats nothing settled.

A seed gives the same plan again: the loads, the kinds of kill and their instants. How far each task is at that instant
depends on the machine, so a failure may need several runs of its seed to occur again.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.crash.killed_server import KilledServer

pytestmark = pytest.mark.usefixtures("compiled")

FEWEST_FOR_FIGURES = 25
WITH_A_LONG_LAST_LIFE = 9
DONE = (
    "active confirmed",  # abandoned
    "cancelled",
    "dead-letter confirmed",
    "deferred confirmed",
    "ids sent again",
    "nowhere confirmed",  # completed or cancelled
    "nowhere unanswered",
    "received and deleted",
    "sends unanswered",
    "states set",
    "unanswered and not stored",
    "unanswered and stored",
)


@pytest.mark.timeout(600)
async def test_nothing_acknowledged_is_lost_and_nothing_settled_comes_again(
    crash_seed: int, kills: int, tmp_path: Path
) -> None:
    print(f"again with: pytest tests/crash --crash-seed {crash_seed}")
    async with KilledServer(crash_seed, tmp_path) as server:
        for life in range(kills):
            await server.live(life)
        await server.end()
    told = server.figures + server.oracle.figures
    print(dict(sorted(told.items())))
    assert told["kills"] == kills
    if kills >= FEWEST_FOR_FIGURES:
        # All kinds of operations were pending at the kills.
        assert [figure for figure in DONE if not told[figure]] == []
        assert [name for name in server.oracle.accounts if told[f"sends to {name} acknowledged"] <= kills] == []
        assert told["crashes at an operation"] > 0
        assert told["copies that share a body"] > 0


@pytest.mark.thorough
@pytest.mark.timeout(600)
async def test_a_store_that_returns_to_an_earlier_state_is_detected(tmp_path: Path) -> None:
    async with KilledServer(WITH_A_LONG_LAST_LIFE, tmp_path) as server:
        await server.live(0)
        await server.until_killed(1)
        shutil.copytree(server.data, tmp_path / "earlier")
        await server.start(1)
        await server.look("life 1")
        await server.until_killed(2)
        shutil.rmtree(server.data)
        shutil.copytree(tmp_path / "earlier", server.data)
        await server.start(2)
        with pytest.raises(AssertionError, match="wrong"):
            await server.look("life 2")
    wrong = server.oracle.wrong
    assert any("is lost" in line for line in wrong)
    assert any("has to be nowhere, and is active" in line for line in wrong)
