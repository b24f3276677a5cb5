"""When a batch is worth its while, and which lanes it has (D2, Y2, Y5). Pure: told what happened and the time.

A queue is drained when its long poll, or a lane that ran out of time, says that messages wait. What was put aside is
asked after by one lane: a single message once its destination's pause is over, all of them once that one arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from twinbus.pipeline.syphon_job.messages import BatchPlan, LaneReport, LaneTask
from twinbus.syphon import SCAN_INTERVAL, DestinationMemory, Readiness, destination_key

# Between two looks whether a queue that is being drained is empty: others may hold messages.
_LOOK_AGAIN_SECONDS: Final = 2.0
# The long poll tells before that whether messages wait: they come first.
_FIRST_LOOK_SECONDS: Final = 1.0


@dataclass(slots=True)
class _Queue:
    """`waits`: messages are there to be received. `look`: from where to look for what was put aside, at `look_at`."""

    waits: bool = False
    clean: bool = False
    aside: dict[str, tuple[int, int]] = field(default_factory=dict)
    look: int | None = 0
    look_at: float = -inf


class BatchPlanner:
    """`lanes`: for each queue at most; None: as many as fill Spark's `slots`."""

    def __init__(
        self, run: str, *, lanes: int | None = None, slots: int = 1, rate: float | None = None, drain: bool = False
    ) -> None:
        self._run = run
        self._lanes = lanes
        self._slots = slots
        self.rate = rate
        self._drain = drain
        self._queues: dict[str, _Queue] = {}
        self._memories: dict[str, tuple[DestinationMemory, float]] = {}
        self._plans = 0

    # --- what it is told ---------------------------------------------------------------------------------------------

    def found(self, queues: Iterable[str], now: float) -> None:
        for queue in queues:
            self._queues.setdefault(queue, _Queue(look_at=now + _FIRST_LOOK_SECONDS))

    def arrived(self, queue: str) -> None:
        """The long poll has ended with a message, which was given back."""
        self._queues[queue].waits = True
        self._queues[queue].clean = False

    def reported(self, reports: Sequence[LaneReport], now: float) -> None:
        for report in reports:
            self._learn(report.memories, now)
        for queue in {report.queue for report in reports}:
            one = self._queues.setdefault(queue, _Queue())
            told = [report for report in reports if report.queue == queue]
            moved = any(report.tallies for report in told)
            # While the backlog does not answer, the long poll is what finds out when it does.
            one.waits = any(not report.dry and report.failure is None for report in told)
            for report in told:
                self._put_aside(one, report, now)
            looks = [report.look for report in told if report.look is not None and report.look.start == 0]
            one.clean = not one.waits and not moved and any(look.clean for look in looks)
            if self._drain and not one.clean and not one.aside and one.look is None:
                one.look, one.look_at = 0, now + (0.0 if moved else _LOOK_AGAIN_SECONDS)

    def _learn(self, memories: Iterable[DestinationMemory], now: float) -> None:
        """The latest news is the one that holds."""
        for memory in memories:
            known = self._memories.get(destination_key(memory.path))
            if known is None or now - memory.age >= known[1] - known[0].age:
                self._memories[destination_key(memory.path)] = (memory, now)

    @staticmethod
    def _put_aside(one: _Queue, report: LaneReport, now: float) -> None:
        look = report.look
        for path, number in report.seeds.items():
            if path in one.aside and path not in report.waiting and look is None:
                # Gone, or held by another: a message of this destination has to be found anew.
                one.look, one.look_at = min(number, one.look or number), now
        if look is not None:
            for path, (_, least) in list(one.aside.items()):
                if look.start <= least:  # those still there are among what was found, or will be
                    del one.aside[path]
            one.look = look.end
            one.look_at = now if look.end is not None else now + SCAN_INTERVAL
        for path, (count, least) in report.waiting.items():
            before = one.aside.get(path, (0, least))
            again = 1 if path in report.seeds and path in one.aside else 0
            one.aside[path] = (before[0] + count - again, min(before[1], least))

    # --- what follows ------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> BatchPlan | None:
        busy = [queue for queue, one in self._queues.items() if one.waits]
        asked = {queue: found for queue, one in self._queues.items() if (found := self._asked(one, now))}
        if not busy and not asked:
            return None
        lanes = max(1, self._slots // len(busy)) if busy and self._lanes is None else self._lanes or 1
        slices = [
            LaneTask(queue, lane, None, *(asked.pop(queue, ({}, None)) if lane == 0 else ({}, None)))
            for lane in range(lanes)
            for queue in busy
        ]
        slices += [LaneTask(queue, 0, None, *found) for queue, found in asked.items()]
        self._plans += 1
        rate = None if self.rate is None else self.rate / len(slices)
        paced = tuple(LaneTask(one.queue, one.lane, rate, one.seeds, one.look) for one in slices)
        return BatchPlan(f"{self._run}-{self._plans}", paced, self.memories(now))

    def due(self, now: float) -> float:
        """When `plan` has something, if nothing happens first."""
        if any(one.waits for one in self._queues.values()):
            return now
        instants = [one.look_at for one in self._queues.values()]
        instants += [self._due(path) for one in self._queues.values() for path in one.aside]
        return max(now, min(instants, default=inf))

    def polled(self) -> set[str]:
        """Queues that nobody is known to have messages in: a long poll is to be out on each."""
        return {queue for queue, one in self._queues.items() if not one.waits}

    def _asked(self, one: _Queue, now: float) -> tuple[dict[str, int], int | None] | None:
        seeds: dict[str, int] = {}
        looks = [one.look or 0] if now >= one.look_at else []
        for path, (_, least) in one.aside.items():
            due = self._due(path)
            if due == -inf:
                looks.append(least)
            elif due <= now:
                seeds[path] = least
        return (seeds, min(looks, default=None)) if seeds or looks else None

    def _due(self, path: str) -> float:
        """As `Destinations.due` has it."""
        memory, at = self._memories.get(destination_key(path), (None, 0.0))
        if not path or memory is None or memory.readiness is not Readiness.ASIDE:
            return -inf
        return at + memory.left

    # --- how far it is -----------------------------------------------------------------------------------------------

    @property
    def queues(self) -> tuple[str, ...]:
        return tuple(self._queues)

    @property
    def plans(self) -> int:
        return self._plans

    def is_drained(self) -> bool:
        return all(one.clean and not one.aside for one in self._queues.values())

    def aside(self) -> int:
        return sum(count for one in self._queues.values() for count, _ in one.aside.values())

    def memories(self, now: float) -> tuple[DestinationMemory, ...]:
        return tuple(
            memory._replace(
                age=memory.age + now - at,
                left=memory.left - (now - at),
                missing=None if memory.missing is None else memory.missing + now - at,
            )
            for memory, at in self._memories.values()
        )
