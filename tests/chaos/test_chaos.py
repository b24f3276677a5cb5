"""S4 to S6, Y1, Y3 to Y5 and the balance: whatever is killed, frozen or cut off, messages reported safe arrive.

A seed gives the same plan again. How far each process is when it is stopped depends on the machine.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.conftest import seeds_of_tier
from tests.chaos.outage_plan import Outage, OutagePlan, Trouble, outage_plan
from tests.chaos.run import ChaosNamespaces, ChaosRun
from tests.chaos.sending import TASKS, THREADS
from tests.chaos.syphoning import FATAL

# A busy machine is slow.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def ground() -> Iterator[ChaosNamespaces]:
    with ChaosNamespaces() as found:
        yield found


def lived(ground: ChaosNamespaces, told: OutagePlan, folder: Path, variant: str | None = None) -> ChaosRun:
    print(f"{told.text}; again with: make chaos SEEDS=1 START={told.seed}")
    with ground.clean():
        run = ChaosRun(ground, told, folder, variant=variant)
        run.live()
    print(dict(sorted(run.books.figures.items())))
    return run


def test_nothing_reported_safe_is_lost_and_every_further_copy_is_explained(
    ground: ChaosNamespaces, tmp_path: Path, seed: int
) -> None:
    told = outage_plan(seed)
    books = lived(ground, told, tmp_path).books
    assert not books.wrong, "\n".join([f"{len(books.wrong)} wrong", *books.wrong[:20]])
    # The run proves something: every planned kill happened, and there were messages to bring home.
    struck = [fate for lives in told.fates for fate in lives if fate.signal is signal.SIGKILL]
    assert books.figures["syphons that ended with -9"] == len(struck) + told.struck
    assert books.figures["completed by syphons"] > 0


@pytest.mark.thorough
def test_the_seeds_meet_every_outage_every_trouble_and_every_place() -> None:
    stories = [outage_plan(seed) for seed in range(seeds_of_tier())]
    assert {one.outage for one in stories} == set(Outage)
    assert {one.trouble for one in stories} == set(Trouble)
    fates = [fate for one in stories for lives in one.fates for fate in lives]
    assert {fate.place for fate in fates if fate.signal is signal.SIGKILL} == set(FATAL)
    assert any(fate.signal is signal.SIGSTOP for fate in fates)
    assert {len(one.fates) for one in stories} == {1, 2}
    assert {one.senders for one in stories} == {(THREADS,), (TASKS,), (THREADS, TASKS)}


BUSY = OutagePlan(-1, Outage.KILL, 1.0, Trouble.PRIMARY_BUSY, (THREADS,), ((),), struck=False)


@pytest.mark.thorough
def test_a_syphon_that_completes_before_it_sends_is_found_out(ground: ChaosNamespaces, tmp_path: Path) -> None:
    books = lived(ground, BUSY, tmp_path, "completes first").books
    assert books.lost
    assert any(line.startswith("ledger: ") and line.endswith(" is lost") for line in books.wrong)


@pytest.mark.thorough
def test_a_syphon_that_sends_twice_is_found_out(ground: ChaosNamespaces, tmp_path: Path) -> None:
    books = lived(ground, replace(BUSY, trouble=Trouble.NONE), tmp_path, "sends twice").books
    assert any("received 2 times, sent 1 times" in line for line in books.wrong)
    assert any("nothing explains them" in line for line in books.wrong)
