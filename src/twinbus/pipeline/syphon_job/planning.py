"""Plans the micro-batches: when to start one, and which lane tasks it has (D2, Y2, Y5). Pure.

Lanes are planned for a queue if messages wait in it. The planner knows this in two cases: the long poll on the queue
ended with a message, or a lane ended before the queue was empty. For messages that were put aside, a queue has only one
lane. This lane probes a destination with one message when the pause of the destination is over. After the probe was
accepted, the lane brings back the other messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from twinbus.pipeline.syphon_job.messages import BatchPlan, LaneReport, LaneTask
from twinbus.syphon import SCAN_INTERVAL, DestinationMemory, Readiness, destination_key

# Seconds between two scans of a queue that a drain has found empty: other receivers may still have locked messages.
_DRAIN_SCAN_SECONDS: Final = 2.0
# Seconds before the first scan. In this time the long poll shows whether messages wait: they are received before a
# scan.
_FIRST_SCAN_SECONDS: Final = 1.0


@dataclass(slots=True)
class _QueueState:
    """What the planner knows about one backlog queue.

    `has_messages`: there are messages to receive. `clean`: the last scan of the whole queue found no message. `aside`:
    by destination, how many messages are put aside, and the least of their sequence numbers. The next scan starts at
    the time `scan_at`, from the sequence number `scan_from`.
    """

    has_messages: bool = False
    clean: bool = False
    aside: dict[str, tuple[int, int]] = field(default_factory=dict)
    scan_from: int | None = 0
    scan_at: float = -inf


class BatchPlanner:
    """Plans the micro-batches of one run.

    `lanes`: the most lanes on one queue. If it is None, the lanes of all queues together use Spark's `slots`.
    """

    def __init__(
        self, run: str, *, lanes: int | None = None, slots: int = 1, rate: float | None = None, drain: bool = False
    ) -> None:
        self._run = run
        self._lanes = lanes
        self._slots = slots
        self.rate = rate
        self._drain = drain
        self._queues: dict[str, _QueueState] = {}
        self._memories: dict[str, tuple[DestinationMemory, float]] = {}
        self._plans = 0

    # --- events ------------------------------------------------------------------------------------------------------

    def queues_found(self, queues: Iterable[str], now: float) -> None:
        for queue in queues:
            self._queues.setdefault(queue, _QueueState(scan_at=now + _FIRST_SCAN_SECONDS))

    def message_arrived(self, queue: str) -> None:
        """Report that the long poll on a queue ended with a message, which was released."""
        self._queues[queue].has_messages = True
        self._queues[queue].clean = False

    def lanes_reported(self, reports: Sequence[LaneReport], now: float) -> None:
        for report in reports:
            self._remember(report.memories, now)
        for queue in {report.queue for report in reports}:
            state = self._queues.setdefault(queue, _QueueState())
            own = [report for report in reports if report.queue == queue]
            moved = any(report.counts for report in own)
            # If a backlog queue does not answer, no lane is planned for it until its long poll receives a message.
            state.has_messages = any(not report.is_empty and report.failure is None for report in own)
            for report in own:
                self._update_aside(state, report, now)
            whole_scans = [report.scan for report in own if report.scan is not None and report.scan.start == 0]
            state.clean = not state.has_messages and not moved and any(scan.clean for scan in whole_scans)
            if self._drain and not state.clean and not state.aside and state.scan_from is None:
                state.scan_from, state.scan_at = 0, now + (0.0 if moved else _DRAIN_SCAN_SECONDS)

    def _remember(self, memories: Iterable[DestinationMemory], now: float) -> None:
        """Store the most recent memory of each destination."""
        for memory in memories:
            known = self._memories.get(destination_key(memory.path))
            if known is None or now - memory.age >= known[1] - known[0].age:
                self._memories[destination_key(memory.path)] = (memory, now)

    @staticmethod
    def _update_aside(state: _QueueState, report: LaneReport, now: float) -> None:
        scan = report.scan
        for path, number in report.probes.items():
            if path in state.aside and path not in report.waiting and scan is None:
                # The message of the probe does not exist, or another receiver has locked it. A scan has to find
                # another.
                state.scan_from, state.scan_at = min(number, state.scan_from or number), now
        if scan is not None:
            for path, (_, least) in list(state.aside.items()):
                if scan.start <= least:  # the scan finds all of these messages again, or the next scan does
                    del state.aside[path]
            state.scan_from = scan.end
            state.scan_at = now if scan.end is not None else now + SCAN_INTERVAL
        for path, (count, least) in report.waiting.items():
            before = state.aside.get(path, (0, least))
            again = 1 if path in report.probes and path in state.aside else 0
            state.aside[path] = (before[0] + count - again, min(before[1], least))

    # --- decisions ---------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> BatchPlan | None:
        """Return the plan of the next micro-batch; None if there is no work now."""
        draining = [queue for queue, state in self._queues.items() if state.has_messages]
        recalls = {queue: task for queue, state in self._queues.items() if (task := self._recall(queue, state, now))}
        if not draining and not recalls:
            return None
        lanes = max(1, self._slots // len(draining)) if draining and self._lanes is None else self._lanes or 1
        tasks = [
            recalls.pop(queue, LaneTask(queue, 0)) if lane == 0 else LaneTask(queue, lane)
            for lane in range(lanes)
            for queue in draining
        ]
        tasks += recalls.values()
        self._plans += 1
        rate = None if self.rate is None else self.rate / len(tasks)
        limited = tuple(replace(task, rate=rate) for task in tasks)
        return BatchPlan(f"{self._run}-{self._plans}", limited, self.memories(now))

    def due(self, now: float) -> float:
        """Return the time at which `plan` will return a plan, if nothing is reported before."""
        if any(state.has_messages for state in self._queues.values()):
            return now
        instants = [state.scan_at for state in self._queues.values()]
        instants += [self._due(path) for state in self._queues.values() for path in state.aside]
        return max(now, min(instants, default=inf))

    def queues_to_poll(self) -> set[str]:
        """Return the queues in which no message is known to wait. The driver keeps a long poll open on each."""
        return {queue for queue, state in self._queues.items() if not state.has_messages}

    def _recall(self, queue: str, state: _QueueState, now: float) -> LaneTask | None:
        """Return the task that probes or scans for messages that were put aside; None if neither is due."""
        probes: dict[str, int] = {}
        scans = [state.scan_from or 0] if now >= state.scan_at else []
        for path, (_, least) in state.aside.items():
            due = self._due(path)
            if due == -inf:
                scans.append(least)
            elif due <= now:
                probes[path] = least
        if not probes and not scans:
            return None
        return LaneTask(queue, 0, probes=probes, scan_from=min(scans, default=None))

    def _due(self, path: str) -> float:
        """Return the time at which messages for `path` can be brought back, as `Destinations.due` does."""
        memory, at = self._memories.get(destination_key(path), (None, 0.0))
        if not path or memory is None or memory.readiness is not Readiness.ASIDE:
            return -inf
        return at + memory.left

    # --- progress ----------------------------------------------------------------------------------------------------

    @property
    def queues(self) -> tuple[str, ...]:
        return tuple(self._queues)

    @property
    def plans(self) -> int:
        return self._plans

    def is_drained(self) -> bool:
        return all(state.clean and not state.aside for state in self._queues.values())

    def messages_aside(self) -> Counter[str]:
        """Return by destination how many messages are put aside."""
        aside: Counter[str] = Counter()
        for state in self._queues.values():
            aside.update({path: count for path, (count, _) in state.aside.items()})
        return aside

    def memories(self, now: float) -> tuple[DestinationMemory, ...]:
        """Return what is known about the destinations. The durations in the result are those at the time `now`."""
        return tuple(
            memory._replace(
                age=memory.age + now - at,
                left=memory.left - (now - at),
                missing=None if memory.missing is None else memory.missing + now - at,
            )
            for memory, at in self._memories.values()
        )
