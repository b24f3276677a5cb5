"""Plans the micro-batches: when to start one, and which lane tasks it has (D2, Y2, Y5). Pure.

Lanes are planned for a queue if messages wait in it. The planner knows this in two cases: the long poll on the queue
ended with a message, or a lane ended before the queue was empty. For messages that were put aside, a queue has only one
lane. This lane probes a destination with one message when the pause of the destination is over. After the probe was
accepted, the lane brings back the other messages.

A drain needs a scan of each queue after the last message was moved, and scans a queue again while other receivers have
locked messages there, as `twinbus.syphon.plan.queue_drain` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from twinbus.backlog import FailureKind
from twinbus.pipeline.syphon_job.messages import BatchPlan, LaneReport, LaneTask
from twinbus.syphon import (
    SCAN_INTERVAL,
    DestinationMemory,
    HeldEntities,
    QueueCounts,
    Readiness,
    WaitingDestination,
    destination_key,
)

# Seconds between two scans of a queue, if a scan failed or other receivers have locked messages: at first, and at most.
_SCAN_PAUSE: Final = 2.0
_LONGEST_SCAN_PAUSE: Final = 30.0
LOCK_PATIENCE: Final = 65.0
"""Seconds for which a drain waits for messages that other receivers have locked: a lock of P5, and a margin."""
# Seconds before the first scan. In this time the long poll shows whether messages wait: they are received before a
# scan.
_FIRST_SCAN_SECONDS: Final = 1.0


@dataclass(slots=True)
class _QueueState:
    """What the planner knows about one backlog queue.

    `has_messages`: there are messages to receive. `is_known`: the whole queue was scanned, and nothing was moved since
    the scan began. `aside`: by destination, how many messages are put aside, and the least of their sequence numbers.
    `active` and `scheduled`: by destination, what the last scan of the whole queue found. The next scan starts at the
    time `scan_at`, from the sequence number `scan_from`. `rescans`: how often a drain has scanned the queue again.
    `failing_since` and `failure`: since when and why the queue does not answer.
    """

    has_messages: bool = False
    is_known: bool = False
    is_whole_scan: bool = False
    has_moved: bool = False
    aside: dict[str, tuple[int, int]] = field(default_factory=dict)
    active: Counter[str] = field(default_factory=Counter)
    active_since: float | None = None
    scheduled: Counter[str] = field(default_factory=Counter)
    scan_from: int | None = 0
    scan_at: float = -inf
    rescans: int = 0
    failing_since: float | None = None
    failure: FailureKind | None = None

    def is_waiting_for_locks(self, now: float) -> bool:
        return self.active_since is not None and now < self.active_since + LOCK_PATIENCE

    def scan_again(self, now: float, start: int | None = None) -> None:
        """Scan after a growing pause: from `start`, or the whole queue."""
        self.scan_from = start or 0
        self.scan_at = now + min(_SCAN_PAUSE * 2.0 ** min(self.rescans, 10), _LONGEST_SCAN_PAUSE)
        self.rescans += 1


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
        self.held = HeldEntities()
        """The entities that an operator holds: nothing is sent to them (S15)."""
        self._queues: dict[str, _QueueState] = {}
        self._memories: dict[str, tuple[DestinationMemory, float]] = {}
        self._failures: dict[str, tuple[int, float]] = {}
        """By destination, how often it was put aside since it was ready, and when the last report of this came."""
        self._plans = 0

    # --- events ------------------------------------------------------------------------------------------------------

    def queues_found(self, queues: Iterable[str], now: float) -> None:
        for queue in queues:
            self._queues.setdefault(queue, _QueueState(scan_at=now + _FIRST_SCAN_SECONDS))

    def message_arrived(self, queue: str) -> None:
        """Report that the long poll on a queue ended with a message, which was released."""
        self._queues[queue].has_messages = True

    def lanes_reported(self, reports: Sequence[LaneReport], now: float) -> None:
        for report in reports:
            self._remember(report.memories, now)
            for path, count in report.failures.items():
                key = destination_key(path)
                self._failures[key] = (self._failures.get(key, (0, now))[0] + count, now)
        for queue in {report.queue for report in reports}:
            state = self._queues.setdefault(queue, _QueueState())
            own = [report for report in reports if report.queue == queue]
            moved = any(
                one.returned or one.dead_lettered or one.kept for report in own for one in report.counts.values()
            )
            # If a backlog queue does not answer, no lane is planned for it until its long poll receives a message.
            state.has_messages = any(not report.is_empty and report.failure is None for report in own)
            for report in own:
                self._update_scan(state, report, now)
                self._update_aside(state, report, now)
            if moved:
                state.has_moved, state.is_known = True, False
            self._update_failure(state, own, now)
            if self._drain and state.scan_from is None and (not state.is_known or state.is_waiting_for_locks(now)):
                has_scanned_again = state.rescans > 0
                state.scan_again(now)
                if moved and not has_scanned_again:
                    state.scan_at = now

    def _remember(self, memories: Iterable[DestinationMemory], now: float) -> None:
        """Store the most recent memory of each destination."""
        for memory in memories:
            known = self._memories.get(destination_key(memory.path))
            if known is None or now - memory.age >= known[1] - known[0].age:
                self._memories[destination_key(memory.path)] = (memory, now)
                if memory.readiness is Readiness.READY:
                    self._failures.pop(destination_key(memory.path), None)

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

    @staticmethod
    def _update_scan(state: _QueueState, report: LaneReport, now: float) -> None:
        """Take in what a scan of the whole queue found. The scan may have run in several lanes, one after the other."""
        scan = report.scan
        if scan is None:
            return
        before = state.active.total()
        if scan.start == 0:
            state.active, state.scheduled, state.has_moved = Counter(), Counter(), False
        state.is_whole_scan = scan.start == 0 or (state.is_whole_scan and scan.start == state.scan_from)
        if not state.is_whole_scan:
            return
        state.active.update(scan.active)
        state.scheduled.update(scan.scheduled)
        if scan.end is None:
            state.is_known, state.is_whole_scan = not state.has_moved, False
            if not state.active:
                state.active_since = None
            elif state.active_since is None or state.active.total() < before:
                state.active_since = now

    @staticmethod
    def _update_failure(state: _QueueState, reports: Sequence[LaneReport], now: float) -> None:
        failures = [report.failure for report in reports if report.failure is not None]
        if len(failures) < len(reports):
            state.failing_since = state.failure = None
            return
        state.failing_since = now if state.failing_since is None else state.failing_since
        state.failure = FailureKind(failures[0])
        state.is_known = False
        state.scan_again(now, state.scan_from)

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
        return BatchPlan(f"{self._run}-{self._plans}", limited, self.memories(now), held=self.held)

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
        if path in self.held:
            return inf
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

    def is_settled(self, now: float, patience: float) -> bool:
        """Return whether no message can move now (Y11). A queue that failed for `patience` seconds is given up."""
        return all(self._is_queue_settled(state, now) for state in self._answering(now, patience))

    def _answering(self, now: float, patience: float) -> list[_QueueState]:
        """Return the queues that are not given up. A given-up queue has failed for `patience` seconds."""
        found = self._queues.values()
        return [one for one in found if one.failing_since is None or now < one.failing_since + patience]

    def _is_queue_settled(self, state: _QueueState, now: float) -> bool:
        is_looked_at = state.is_known and state.scan_from is None and not state.is_waiting_for_locks(now)
        is_answering = state.failing_since is None and not state.has_messages
        return is_answering and is_looked_at and all(self._due(path) > now for path in state.aside)

    def waiting(self, now: float, patience: float) -> list[WaitingDestination]:
        """Return the destinations for which messages are put aside, without those of queues that are given up.

        Nobody can bring back messages of such a queue, so their destinations cannot be tried once more.
        """
        found = []
        for path in {path for state in self._answering(now, patience) for path in state.aside}:
            failures, failed_at = self._failures.get(destination_key(path), (0, -inf))
            found.append(WaitingDestination(path, failed_at, failures, path in self.held))
        return found

    def retry_by(self, path: str, at: float, first_pause: float) -> None:
        """Probe a destination at time `at` at the latest, but not before its first pause is over."""
        key = destination_key(path)
        memory, known_at = self._memories.get(key, (None, 0.0))
        if memory is not None and memory.readiness is Readiness.ASIDE:
            at = max(at, known_at - memory.age + min(memory.pause, first_pause))
            self._memories[key] = (memory._replace(left=min(memory.left, at - known_at)), known_at)

    def queue_counts(self) -> list[QueueCounts]:
        return [QueueCounts(queue, one.active, one.scheduled, one.failure) for queue, one in self._queues.items()]

    def messages_that_cannot_move(self) -> int:
        """Return how many messages are put aside for a destination that is not ready, or scheduled."""
        aside = sum(count for path, count in self.messages_aside().items() if self._due(path) > -inf)
        return aside + sum(state.scheduled.total() for state in self._queues.values())

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
