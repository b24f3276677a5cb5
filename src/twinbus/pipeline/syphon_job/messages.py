"""What the driver and its lanes tell each other: a plan of slices, and a report for each. Plain values, as JSON.

No message and no body is among them; sequence numbers and counts are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from twinbus.backlog import FailureKind
from twinbus.syphon import DestinationMemory, MessageCounts, Readiness, TimeToLive


@dataclass(frozen=True, slots=True, kw_only=True)
class SyphonJob:
    """What holds for every lane. `primary`, `secondary`: connection strings; the names are those in the ledger."""

    primary: str = field(repr=False)
    secondary: str = field(repr=False)
    primary_name: str
    secondary_name: str
    ledger: str | None = None
    ttl: TimeToLive = "restart"
    timeout: float = 10.0
    budget: float = 8.0
    """Seconds after which a lane takes no more messages."""
    window: int = 2000
    """Messages one lane holds at most: what may be delivered twice when it is killed."""
    first_pause: float = 1.0
    longest_pause: float = 300.0
    gone_after: float = 600.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class LaneTask:
    """One lane on one backlog queue, once.

    `seeds`: of destinations that are to be asked again, the number of one message put aside for each. `look`: from
    which number on messages that were put aside are to be looked for.
    """

    queue: str
    lane: int
    rate: float | None = None
    seeds: Mapping[str, int] = field(default_factory=dict)
    look: int | None = None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """`number` is unique among all runs."""

    number: str
    slices: tuple[LaneTask, ...]
    memories: tuple[DestinationMemory, ...] = ()

    def to_json(self) -> str:
        return json.dumps(
            {"number": self.number, "slices": [asdict(one) for one in self.slices], "memories": _plain(self.memories)}
        )

    @classmethod
    def of_json(cls, text: str) -> Self:
        told = json.loads(text)
        return cls(told["number"], tuple(LaneTask(**one) for one in told["slices"]), _memories(told["memories"]))


@dataclass(frozen=True, slots=True)
class ScanResult:
    """Messages were looked at from `start` on, up to `end`; None is the end of the queue. `clean`: there were none."""

    start: int
    end: int | None
    clean: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneReport:
    """What came of a slice. `dry`: the queue was found empty. `waiting`: put aside, by destination (count, least)."""

    plan: str
    queue: str
    lane: int
    worker: str
    seconds: float
    dry: bool
    failure: str | None
    tallies: Mapping[str, MessageCounts]
    operations: Mapping[str, int]
    memories: tuple[DestinationMemory, ...]
    waiting: Mapping[str, tuple[int, int]]
    seeds: Mapping[str, int]
    look: ScanResult | None

    def to_json(self) -> str:
        return json.dumps({name: _plain(getattr(self, name)) for name in self.__slots__})

    @classmethod
    def of_json(cls, text: str) -> Self:
        told: dict[str, Any] = json.loads(text)
        told["tallies"] = {path: MessageCounts(**tally) for path, tally in told["tallies"].items()}
        told["memories"] = _memories(told["memories"])
        told["waiting"] = {path: (count, least) for path, (count, least) in told["waiting"].items()}
        told["look"] = None if told["look"] is None else ScanResult(**told["look"])
        return cls(**told)


def _plain(value: Any) -> Any:
    match value:
        case ScanResult():
            return asdict(value)
        case tuple():
            return [one._replace(readiness=one.readiness.value) for one in value]
        case dict():
            return {key: asdict(one) if isinstance(one, MessageCounts) else one for key, one in value.items()}
        case _:
            return value


def _memories(told: Iterable[list[Any]]) -> tuple[DestinationMemory, ...]:
    return tuple(
        DestinationMemory(path, Readiness(readiness), None if cause is None else FailureKind(cause), *spans)
        for path, readiness, cause, *spans in told
    )
