"""Two namespaces, each in its own process, with a backlog for the syphon on Spark, and sources that kill at a step."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql import SparkSession

from tests.syphon.fixed_queues import FixedQueues
from tests.syphon.two_namespaces import ids, taken
from twinbus.backlog import backlog_queue_path
from twinbus.connect import connect
from twinbus.ledger import Intent, Ledger, Operation, Role, Stage, balance, read_ledger
from twinbus.message import Message
from twinbus.pipeline.syphon_job import SparkSyphon, SparkSyphonOptions, SyphonJob
from twinbus.pipeline.syphon_job.lane import SyphonSource
from twinbus.syphon import HeldMessage, MoveStep
from twinbus.testing import LocalNamespace

ENOUGH = 20
# The steps from the receipt of a message to its removal. A process is killed between two of them.
MOVES = (MoveStep.RECEIVED, MoveStep.INTENDED, MoveStep.SENDING, MoveStep.CONFIRMED, MoveStep.COMPLETED)
WINDOW = 500
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
        self, spark: SparkSession, job: SyphonJob | None = None, **options: Any
    ) -> AsyncIterator[SparkSyphon]:
        given = SparkSyphonOptions(**options)
        async with SparkSyphon(spark, FixedQueues(self.queues), job or self.job(), given) as made:
            yield made

    async def arrived(self, path: str | None = None) -> Counter[str]:
        """Receive and complete everything on the primary."""
        async with connect(self.primary.connection_string) as bus:
            return ids(await taken(bus, path or self.orders, 0.3))

    async def left(self) -> Counter[str]:
        async with connect(self.secondary.connection_string) as bus:
            return ids([one for queue in self.queues for one in await bus.management(queue).peek(0, 250)])

    def check_ledger(self, arrived: Counter[str], path: str | None = None) -> None:
        """Check that the ledger reports no loss, and that it has an intent for every copy on the primary."""
        entries = list(read_ledger(self.ledger))
        found = balance(entries)
        assert not found.lost
        intended = Counter(
            id_
            for one in entries
            if isinstance(one, Intent | Operation) and one.stage is Stage.RETURN_PRIMARY
            if one.entity == (path or self.orders)
            for id_ in one.ids
        )
        assert arrived <= intended


# --- killing ---------------------------------------------------------------------------------------------------------


def watched(watch: Callable[[MoveStep, Sequence[HeldMessage]], None]) -> type[SyphonSource]:
    """Return a source that calls `watch` in its tasks with each step of a message."""
    return type("Watched", (SyphonSource,), {"on_step": staticmethod(watch)})


def killing_workers(folder: Path) -> type[SyphonSource]:
    """Let a Python worker kill itself with -9, once at each step. Spark's second try of the task is not killed."""

    def watch(step: MoveStep, held: Sequence[HeldMessage]) -> None:
        if step in MOVES and is_first_try() and first(folder / step.name):
            os.kill(os.getpid(), signal.SIGKILL)

    return watched(watch)


def killing_when_told(order: Path) -> type[SyphonSource]:
    """If the file exists, kill the process that the file names, at the step that the file names."""

    def watch(step: MoveStep, held: Sequence[HeldMessage]) -> None:
        with suppress(FileNotFoundError):
            pid, at = order.read_text().split()
            if step.name == at:
                order.unlink()  # only the first process succeeds here
                os.kill(int(pid), signal.SIGKILL)

    return watched(watch)


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
