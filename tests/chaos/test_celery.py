"""A Celery application through outages of its primary, with kill -9 of the primary and of its workers (S17).

The count is taken from a file that the tasks write, not from the books of Twinbus.
"""

from __future__ import annotations

import subprocess
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cli.running import COMMAND
from tests.compat.celery.workers import Publisher, Shop, kill_group
from tests.tiers import budget
from twinbus.testing import LocalNamespace

ROUNDS = budget(0, 1, 20)
ORDERS = 250
"""The orders of a round. Each is two tasks: `brew`, which publishes `serve`."""
QUEUES = ("brewing", "serving")
SECONDS = 180.0
Process = subprocess.Popen[bytes]
OPTIONS = {
    "TWINBUS_PRIMARY_NAME": "shop",
    "TWINBUS_BACKLOG_QUEUE_COUNT": "2",
    "TWINBUS_TRY_TIMEOUT": "3s",
    "TWINBUS_PING_INTERVAL": "1s",
    "SHOP_LOCK": "10",
    "SHOP_WORK": "0.05",
}


class Cafe:
    """The namespaces, a syphon, and the application: a publisher, and workers that are killed and started again."""

    def __init__(self, primary: LocalNamespace, shop: Shop, publisher: Publisher, syphon: Process) -> None:
        self.primary = primary
        self.shop = shop
        self.publisher = publisher
        self.processes = {"syphon": syphon}
        self.published = 0
        self.start_workers()

    def publish(self, part: float) -> None:
        """Publish this part of a round's orders. Returns when Celery has taken them."""
        last = self.published + round(part * ORDERS)
        self.publisher.publish(self.published, last)
        self.published = last

    def until_done(self, task: str, count: int) -> None:
        """Wait until so many different tasks are done."""

        def holds() -> bool:
            return sum(name.startswith(task) for name in self.shop.done()) >= count

        self.shop.until(holds, self.processes, SECONDS)

    def until_at_work(self) -> None:
        """Wait until a worker is at a task: it has begun and not ended."""
        self.shop.until(lambda: sum(self.shop.begun().values()) > len(self.shop.runs()), self.processes, SECONDS)

    def start_workers(self) -> None:
        """Start a worker for each queue: a worker of both would wait at the empty one."""
        self.processes |= {name: self.shop.start_worker("-Q", name, "-n", name) for name in QUEUES}

    def kill_workers(self) -> None:
        for name in QUEUES:
            kill_group(self.processes[name])

    def end(self) -> None:
        for process in self.processes.values():
            kill_group(process)


@contextmanager
def cafe(folder: Path) -> Iterator[Cafe]:
    with LocalNamespace("primary") as primary, LocalNamespace("secondary") as secondary:
        strings = {
            "TWINBUS_PRIMARY_CONNECTION_STRING": primary.connection_string,
            "TWINBUS_SECONDARY_CONNECTION_STRING": secondary.connection_string,
        }
        shop = Shop(folder, "twinbus://", **OPTIONS, **strings)
        with shop.log.open("ab") as log:
            syphon = subprocess.Popen(
                [*COMMAND, "syphon"], env=shop.environment, stdout=log, stderr=log, start_new_session=True
            )
        with ExitStack() as stack:
            stack.callback(kill_group, syphon)
            made = Cafe(primary, shop, stack.enter_context(shop.publisher()), syphon)
            stack.callback(made.end)
            yield made


def one_round(cafe: Cafe) -> None:
    """Publish the orders of a round in five parts, each under another trouble."""
    before = cafe.published
    cafe.publish(0.2)
    cafe.until_done("brew", before + ORDERS // 10)
    # The primary is killed while a worker is at a task: the publisher goes on, and so does the worker.
    cafe.until_at_work()
    cafe.primary.kill()
    cafe.publish(0.2)
    cafe.primary.start()
    # One queue takes nothing: the worker goes on brewing, and publishes each serving to the backlog.
    cafe.primary.faults.set("internal-error", entity="serving", points=["send"])
    cafe.publish(0.2)
    cafe.until_done("brew", before + ORDERS * 5 // 10)
    cafe.primary.faults.clear()
    # The workers are killed at their tasks, and then the primary.
    cafe.until_at_work()
    cafe.kill_workers()
    cafe.publish(0.2)
    cafe.primary.kill()
    cafe.start_workers()
    cafe.publish(0.2)
    cafe.primary.start()
    cafe.until_done("brew", cafe.published)
    cafe.until_done("serve", cafe.published)


@pytest.mark.thorough
@pytest.mark.timeout(300 * max(ROUNDS, 1))
def test_s17_every_task_runs_through_outages_and_kills_and_those_that_ran_twice_are_named(tmp_path: Path) -> None:
    with cafe(tmp_path) as running:
        for _ in range(ROUNDS):
            one_round(running)
        shop, published = running.shop, running.published
    assert published == ROUNDS * ORDERS
    done, begun = shop.done(), shop.begun()
    assert set(done) == {f"{task} {number}" for task in ("brew", "serve") for number in range(published)}
    ids: dict[str, set[str]] = defaultdict(set)
    for run in shop.runs():
        ids[run.name].add(run.task_id)
    repeated = {name: count for name, count in done.items() if count > 1}
    for name, count in sorted(repeated.items()):
        # A warning, not an output: pytest's summary shows it for a test that passes, too.
        warnings.warn(f"{name} ran {count} times, as {len(ids[name])} tasks", stacklevel=1)
    print(f"{sum(done.values())} runs of {len(done)} tasks; {len(repeated)} ran more than once")
    # Nobody but a publisher makes a task: the publisher made each `brew` once, and each run of `brew` one `serve`.
    assert [name for name in ids if name.startswith("brew") and len(ids[name]) > 1] == []
    assert [n for n in range(published) if len(ids[f"serve {n}"]) > begun[f"brew {n}"]] == []
