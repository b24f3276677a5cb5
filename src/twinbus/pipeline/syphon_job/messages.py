"""What the driver and its lanes exchange as JSON: the job, a plan of lane tasks, a report for each task.

These objects contain sequence numbers and counts, never the messages of a queue.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from twinbus.backlog import FailureKind
from twinbus.connect import NetworkOptions
from twinbus.pipeline.syphon_job.lane_counts import CountsAddress, LaneTry
from twinbus.syphon import DestinationMemory, HeldEntities, MessageCounts, NamespaceAccess, Readiness, TimeToLive


@dataclass(frozen=True, slots=True, kw_only=True)
class SyphonJob:
    """The settings of every lane.

    `primary` and `secondary` are connection strings, or host names with a `credential`, whose name it is
    (`named_credential`): each machine makes its own tokens. `…_network` says how the namespaces are reached.
    `primary_name` and `secondary_name` are the names of the namespaces in the ledger.
    """

    primary: str = field(repr=False)
    secondary: str = field(repr=False)
    primary_name: str
    secondary_name: str
    primary_network: NetworkOptions | None = field(default=None, repr=False)
    secondary_network: NetworkOptions | None = field(default=None, repr=False)
    credential: str | None = None
    ledger: str | None = None
    ttl: TimeToLive = "restart"
    timeout: float = 10.0
    budget: float = 8.0
    """Seconds after which a lane receives no more messages."""
    window: int = 2000
    """The most messages that one lane holds. If a lane is killed, at most this number may be delivered twice."""
    first_pause: float = 1.0
    longest_pause: float = 300.0
    gone_after: float = 600.0
    counts_to: CountsAddress | None = None
    """Where lanes send their counts while they run; None if they report only at their end."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Self:
        values: dict[str, Any] = json.loads(text)
        address = values.pop("counts_to", None)
        for name in ("primary_network", "secondary_network"):
            values[name] = NetworkOptions.of_dict(values[name])
        return cls(**values, counts_to=None if address is None else CountsAddress(**address))

    @property
    def primary_access(self) -> NamespaceAccess:
        return NamespaceAccess.of(self.primary, self.primary_network, self.credential)

    @property
    def secondary_access(self) -> NamespaceAccess:
        return NamespaceAccess.of(self.secondary, self.secondary_network, self.credential)


@dataclass(frozen=True, slots=True)
class LaneTask:
    """One run of one lane on one backlog queue.

    `probes`: for each destination to be probed, the sequence number of one message that was put aside for the
    destination. `scan_from`: the sequence number from which to scan for messages that were put aside; None for no scan.
    """

    queue: str
    lane: int
    rate: float | None = None
    probes: Mapping[str, int] = field(default_factory=dict)
    scan_from: int | None = None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The tasks of one micro-batch. `number` is unique among all runs. `locks` are the lock durations of the queues, in
    seconds, as far as they are known. Nothing is sent to `held` entities.

    Spark's checkpoint contains plans as JSON, so the keys of the JSON must not change.
    """

    number: str
    tasks: tuple[LaneTask, ...]
    memories: tuple[DestinationMemory, ...] = ()
    locks: Mapping[str, float] = field(default_factory=dict)
    held: HeldEntities = field(default_factory=HeldEntities)

    def to_json(self) -> str:
        tasks = [
            {"queue": one.queue, "lane": one.lane, "rate": one.rate, "seeds": dict(one.probes), "look": one.scan_from}
            for one in self.tasks
        ]
        locks = {"locks": dict(self.locks)} if self.locks else {}
        held = {} if self.held == HeldEntities() else {"held": _plain_holds(self.held)}
        values = {"number": self.number, "slices": tasks, "memories": _plain_memories(self.memories), **locks, **held}
        return json.dumps(values)

    @classmethod
    def of_json(cls, text: str) -> Self:
        values = json.loads(text)
        tasks = tuple(
            LaneTask(one["queue"], one["lane"], one["rate"], one["seeds"], one["look"]) for one in values["slices"]
        )
        # A plan in the checkpoint of an older Twinbus has no lock durations and no holds.
        locks, held = values.get("locks", {}), values.get("held")
        return cls(values["number"], tasks, _memories(values["memories"]), locks, _holds(held))


@dataclass(frozen=True, slots=True)
class ScanResult:
    """What a scan has seen: the sequence numbers from `start` until before `end`; None for the end of the queue.

    `active` and `scheduled`: by destination, how many messages the scan found in these states. No receiver of the lane
    had received the active ones.
    """

    start: int
    end: int | None
    active: Mapping[str, int] = field(default_factory=dict)
    scheduled: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        # Not `asdict`: it makes a wrong copy of a Counter, with tuples as keys.
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneReport:
    """The result of a lane task.

    `waiting`: by destination, how many messages are put aside, and the least of their sequence numbers.
    `earlier_tries`: how many tries of this task ended without a report, because a worker or an executor died.
    `failures`: by destination, how often a send of this lane put the destination aside.
    """

    plan: str
    queue: str
    lane: int
    worker: str
    seconds: float
    is_empty: bool
    """Whether the last receive of the lane returned no message."""
    failure: str | None
    counts: Mapping[str, MessageCounts]
    operations: Mapping[str, int]
    memories: tuple[DestinationMemory, ...]
    waiting: Mapping[str, tuple[int, int]]
    probes: Mapping[str, int]
    scan: ScanResult | None
    earlier_tries: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)

    @property
    def tries(self) -> list[LaneTry]:
        """All tries of this task. The last one made this report."""
        return [LaneTry(self.plan, self.queue, self.lane, number) for number in range(self.earlier_tries + 1)]

    def to_json(self) -> str:
        values = {name: getattr(self, name) for name in self.__slots__}
        values["counts"] = {path: asdict(counts) for path, counts in self.counts.items()}
        values["memories"] = _plain_memories(self.memories)
        values["scan"] = None if self.scan is None else self.scan.to_dict()
        return json.dumps(values)

    @classmethod
    def of_json(cls, text: str) -> Self:
        values: dict[str, Any] = json.loads(text)
        values["counts"] = {path: MessageCounts(**counts) for path, counts in values["counts"].items()}
        values["memories"] = _memories(values["memories"])
        values["waiting"] = {path: (count, least) for path, (count, least) in values["waiting"].items()}
        values["scan"] = None if values["scan"] is None else ScanResult(**values["scan"])
        return cls(**values)


def _plain_memories(memories: Iterable[DestinationMemory]) -> list[list[Any]]:
    return [[path, readiness.value, *others] for path, readiness, *others in memories]


def _plain_holds(held: HeldEntities) -> dict[str, Any]:
    return {"paths": sorted(held.paths), "every": held.every, "released": sorted(held.released)}


def _holds(values: Mapping[str, Any] | None) -> HeldEntities:
    if values is None:
        return HeldEntities()
    return HeldEntities(frozenset(values["paths"]), values["every"], frozenset(values["released"]))


def _memories(values: Iterable[list[Any]]) -> tuple[DestinationMemory, ...]:
    return tuple(
        DestinationMemory(path, Readiness(readiness), None if cause is None else FailureKind(cause), *durations)
        for path, readiness, cause, *durations in values
    )
