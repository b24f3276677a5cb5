"""Two namespaces, each in its own process, with a backlog for the syphon on Spark, and sources that kill at a step."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from pyspark import TaskContext
from pyspark.sql import SparkSession

from tests.crash.ledger_oracle import contradictions
from tests.syphon.fixed_queues import FixedQueues
from tests.syphon.two_namespaces import ids, taken
from twinbus.backlog import backlog_queue_path
from twinbus.connect import connect
from twinbus.ledger import Balance, Ledger, Role, Stage, balance, dead_writers, read_ledger
from twinbus.message import Message
from twinbus.pipeline.syphon_job import SparkSyphon, SparkSyphonOptions, SyphonJob
from twinbus.pipeline.syphon_job.lane import SyphonSource
from twinbus.syphon import HeldMessage, MoveStep, SharedHolds
from twinbus.testing import LocalNamespace

ENOUGH = 60
# The steps from the receipt of a message to its removal. A process is killed between two of them.
MOVES = (MoveStep.RECEIVED, MoveStep.INTENDED, MoveStep.SENDING, MoveStep.CONFIRMED, MoveStep.COMPLETED)
# For Python workers, whose kills are cheap, also the instant between the record of a delivery and its completion (L1).
WORKER_STEPS = (*MOVES[:-1], MoveStep.RECORDED, MoveStep.COMPLETED)
WINDOW = 500
TRIES = 4
"""Times that Spark tries a task."""
_RANDOM_SECONDS = 0.03
_numbers = itertools.count()


@contextmanager
def namespaces() -> Iterator[tuple[LocalNamespace, LocalNamespace]]:
    # Short, so that a lock ends soon after its lane was killed.
    backlog: dict[str, Any] = {"lock_duration": "PT5S", "max_delivery_count": 2**31 - 1}
    watchful: dict[str, Any] = {
        "requires_duplicate_detection": True,
        "duplicate_detection_history_time_window": "PT10M",
    }
    primary: list[dict[str, Any]] = [{"name": f"orders-{n}"} for n in range(ENOUGH)]
    primary += [{"name": f"watchful-{n}", **watchful} for n in range(ENOUGH)]
    secondary = [{"name": backlog_queue_path(f"t{n}", index), **backlog} for n in range(ENOUGH) for index in range(2)]
    configs = [
        {"namespaces": [{"name": name, "queues": queues}]}
        for name, queues in (("primary", primary), ("secondary", secondary))
    ]
    with LocalNamespace("primary", config=configs[0]) as one, LocalNamespace("secondary", config=configs[1]) as other:
        yield one, other


class Backlog:
    """The entities of one test: two backlog queues, a destination, and a destination that detects duplicates."""

    def __init__(self, primary: LocalNamespace, secondary: LocalNamespace, folder: Path) -> None:
        number = next(_numbers)
        self.queues = [backlog_queue_path(f"t{number}", index) for index in range(2)]
        self.orders, self.watchful = f"orders-{number}", f"watchful-{number}"
        self.primary, self.secondary = primary, secondary
        self.ledger = folder / "ledger"
        self._first = 0

    def job(self, **settings: Any) -> SyphonJob:
        usual: dict[str, Any] = {"budget": 3.0, "window": WINDOW, "first_pause": 0.2, "longest_pause": 0.5}
        return SyphonJob(
            primary=self.primary.connection_string,
            secondary=self.secondary.connection_string,
            primary_name="primary",
            secondary_name="secondary",
            ledger=str(self.ledger),
            **{**usual, **settings},
        )

    async def fill(self, count: int, path: str | None = None, queue: int = 0, body: bytes = b"x") -> None:
        """Divert messages and record them in the ledger, as a paired sender does."""
        path, name = path or self.orders, self.queues[queue]
        numbers = [str(number) for number in range(self._first, self._first + count)]
        self._first += count
        properties = {"x-ms-path": path}
        with Ledger(self.ledger, Role.CLIENT) as ledger:
            async with connect(self.secondary.connection_string) as bus:
                sender = await bus.sender(name)
                await sender.send([Message(body, message_id=one, application_properties=properties) for one in numbers])
            sizes = (len(body),) * count
            ledger.done(Stage.SEND_BACKLOG, "secondary", name, numbers, sizes, f"primary/{path}", seconds=0.1)

    @asynccontextmanager
    async def syphon(
        self, spark: SparkSession, job: SyphonJob | None = None, shared_holds: SharedHolds | None = None, **options: Any
    ) -> AsyncIterator[SparkSyphon]:
        given, queues = SparkSyphonOptions(**options), FixedQueues(self.queues)
        async with SparkSyphon(spark, queues, job or self.job(), given, shared_holds) as made:
            yield made

    async def arrived(self, path: str | None = None) -> Counter[str]:
        """Receive and complete everything on the primary."""
        async with connect(self.primary.connection_string) as bus:
            return ids(await taken(bus, path or self.orders, 0.3))

    async def left(self) -> Counter[str]:
        async with connect(self.secondary.connection_string) as bus:
            return ids([one for queue in self.queues for one in await bus.management(queue).peek(0, 250)])

    def check_ledger(self, orders: Counter[str], watchful: Counter[str] | None = None) -> Balance:
        """The ledger agrees with the count of messages that arrived, after everything was brought home (L1)."""
        once = watchful or Counter()
        counted = orders + once
        dead = dead_writers(self.ledger)
        found = balance(read_ledger(self.ledger), dead)
        safe = {str(number) for number in range(self._first)}
        wrong = contradictions(found, arrived=counted, left=(), safe=safe, is_over=True, deduplicated=once)
        assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong[:20]])
        assert found.delivered.total() == len(counted) == self._first
        return found


# --- killing ---------------------------------------------------------------------------------------------------------


def watched(watch: Callable[[MoveStep, Sequence[HeldMessage]], None]) -> type[SyphonSource]:
    """Return a source that calls `watch` in its tasks with each step of a message."""
    return type("Watched", (SyphonSource,), {"on_step": staticmethod(watch)})


def killing_workers(folder: Path, kills: int) -> type[SyphonSource]:
    """Python workers end themselves with kill -9: at each step in turn, and at a random instant after a receive.

    The folder gets one file for each kill. The last try of a task is left alone: the batch would fail with it.
    """

    def watch(step: MoveStep, held: Sequence[HeldMessage]) -> None:
        number = len(list(folder.iterdir()))
        turn = number % (len(WORKER_STEPS) + 1)
        is_random = turn == len(WORKER_STEPS)
        if (
            step is not (MoveStep.RECEIVED if is_random else WORKER_STEPS[turn])
            or number >= kills
            or not may_be_killed()
        ):
            return
        if first(folder / str(number)):
            seconds = Random(number).uniform(0, _RANDOM_SECONDS) if is_random else 0.0
            if seconds:
                threading.Timer(seconds, _kill_unless_last_try).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    return watched(watch)


def _kill_unless_last_try() -> None:
    """Spark uses a Python worker again: after some time, it may have another task, in its last try."""
    if may_be_killed():
        os.kill(os.getpid(), signal.SIGKILL)


def killing_when_told(order: Path) -> type[SyphonSource]:
    """If the file exists, kill the process that the file names, at the step that the file names."""

    def watch(step: MoveStep, held: Sequence[HeldMessage]) -> None:
        with suppress(FileNotFoundError):
            pid, at = order.read_text().split()
            if step.name == at:
                order.unlink()  # only the first process succeeds here
                os.kill(int(pid), signal.SIGKILL)

    return watched(watch)


def may_be_killed() -> bool:
    task = TaskContext.get()
    return task is not None and task.attemptNumber() < TRIES - 1


def is_first_try() -> bool:
    task = TaskContext.get()
    return task is not None and task.attemptNumber() == 0


def first(mark: Path) -> bool:
    """Return whether this process is the first of all processes."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
