"""The demo's state at one instant and for each second, from the pair's metrics and the application's records.

`display` and `screen` show this state.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import REGISTRY

from twinbus.aio import Pair
from twinbus.cli.demo.application import ENTITIES, PLACES, Records
from twinbus.pairing import PING_SUCCEEDED

_DIVERTED: Final = "twinbus_pair_diverted_messages_total"
_PINGS: Final = "twinbus_pair_pings_total"
# Rates are averages over this time. With a shorter time, the rates would change too much; with a longer time, they
# would be too old.
_RATE_SECONDS: Final = 1.5


@dataclass(frozen=True, slots=True)
class FlowCounts:
    """Numbers of messages since the start: sent to the primary, diverted to the backlog, received."""

    direct: int = 0
    diverted: int = 0
    received: int = 0

    def less(self, before: FlowCounts) -> FlowCounts:
        return FlowCounts(self.direct - before.direct, self.diverted - before.diverted, self.received - before.received)


@dataclass(frozen=True, slots=True)
class DemoEntity:
    path: str
    state: str
    flow: FlowCounts
    rates: tuple[float, float, float]
    """Messages per second: direct, diverted, received."""


@dataclass(frozen=True, slots=True)
class DemoState:
    """The state of the demo at one instant.

    `waiting` is the number of messages in the backlog, `returned` the number of messages that the syphon delivered.
    """

    seconds: float
    entities: tuple[DemoEntity, ...]
    pings: Mapping[bool, int]
    """The number of successful pings (key True) and of failed pings (key False)."""
    waiting: int
    returned: int
    primary_up: bool
    errors: int = 0
    """The number of sends that raised an error in the application."""

    @property
    def flow(self) -> FlowCounts:
        flows = [one.flow for one in self.entities]
        return FlowCounts(*(sum(getattr(flow, name) for flow in flows) for name in FlowCounts.__slots__))

    @property
    def rates(self) -> tuple[float, float, float]:
        sums = [sum(one.rates[index] for one in self.entities) for index in range(3)]
        return sums[0], sums[1], sums[2]


@dataclass(frozen=True, slots=True)
class SecondCounts:
    """The counts of one second. They are shown in one column of a chart."""

    flow: FlowCounts
    waiting: int
    returned: int
    pings: Mapping[bool, int]


@dataclass(slots=True)
class Monitor:
    """Reads the state of the demo, and counts it by second. The script sets `waiting`, `returned` and `primary_up`."""

    pair: Pair
    kept: Records
    began: float = field(default_factory=time.monotonic)
    waiting: int = 0
    returned: int = 0
    primary_up: bool = True
    seconds: list[SecondCounts] = field(default_factory=list)
    _recent: deque[tuple[float, dict[str, FlowCounts]]] = field(default_factory=deque)
    _last: DemoState | None = None

    def age(self) -> float:
        return time.monotonic() - self.began

    def read_state(self) -> DemoState:
        now = time.monotonic()
        diverted, pings = _read_metrics()
        flows = {}
        for entity in ENTITIES:
            sent = sum(len(self.kept.accepted[place]) for place in PLACES[entity])
            received = sum(len(self.kept.received[place]) for place in PLACES[entity])
            # The metric counts a diverted message just before its send returns.
            flows[entity] = FlowCounts(max(0, sent - diverted[entity]), diverted[entity], received)
        self._recent.append((now, flows))
        while len(self._recent) > 2 and now - self._recent[1][0] >= _RATE_SECONDS:
            self._recent.popleft()
        states = {one.path: str(one.state) for one in self.pair.entities()}
        entities = tuple(
            DemoEntity(entity, states.get(entity, "-"), flows[entity], self._rates(entity)) for entity in ENTITIES
        )
        errors = len(self.kept.errors)
        state = DemoState(now - self.began, entities, pings, self.waiting, self.returned, self.primary_up, errors)
        self._note_seconds(state)
        return state

    def _rates(self, entity: str) -> tuple[float, float, float]:
        (then, before), (now, after) = self._recent[0], self._recent[-1]
        moved, span = after[entity].less(before[entity]), max(now - then, 0.25)
        return max(0.0, moved.direct / span), moved.diverted / span, moved.received / span

    def _note_seconds(self, state: DemoState) -> None:
        if self._last is None:
            self._last = state
        missing = int(state.seconds) - len(self.seconds)
        if missing <= 0:
            return
        before, self._last = self._last, state
        moved, returned = state.flow.less(before.flow), state.returned - before.returned
        pings = Counter(state.pings)
        pings.subtract(before.pings)
        # If the state was read late, it also sets the counts of the seconds before it.
        share = max(missing, state.seconds - before.seconds)
        flow = FlowCounts(*(max(0, round(getattr(moved, name) / share)) for name in FlowCounts.__slots__))
        for _ in range(missing):
            self.seconds.append(SecondCounts(flow, self.waiting, round(returned / share), pings))
            pings = Counter()


def _read_metrics() -> tuple[Counter[str], Counter[bool]]:
    """Return two counts from the metrics: diverted messages by entity, and pings by success (True or False)."""
    diverted: Counter[str] = Counter()
    pings: Counter[bool] = Counter()
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name == _DIVERTED:
                diverted[sample.labels["entity"]] += int(sample.value)
            elif sample.name == _PINGS:
                pings[sample.labels["outcome"] == PING_SUCCEEDED] += int(sample.value)
    return diverted, pings
