"""The Prometheus metrics of pairs. Counters count notices; gauges read the pair's state when they are collected.

All pairs of a process share one set of metrics per registry. The label `pair` is the name of the pair. The text of
every metric explains the metric.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Final, NamedTuple, Self
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twinbus.backlog import FailureKind
from twinbus.pairing.decide.backlog_watch import QueueStatus
from twinbus.pairing.decide.failover import Entity, EntityMode
from twinbus.pairing.decide.failover_events import FailoverEngaged, PrimaryUnusable, Restored, TrialFailed, TrialPassed
from twinbus.pairing.decide.rotation import QueueLeft, Rotation

PING_SUCCEEDED: Final = "succeeded"


class _PairReaders(NamedTuple):
    """Functions that read the state of one pair."""

    entities: Callable[[], Iterable[Entity]]
    rotation: Callable[[], Rotation]
    backlog: Callable[[], Iterable[QueueStatus]]


class PairMetrics(Collector):
    """The metrics of all pairs in one registry."""

    _made: ClassVar[WeakKeyDictionary[CollectorRegistry, PairMetrics]] = WeakKeyDictionary()
    _making: ClassVar = threading.Lock()

    @classmethod
    def of(cls, registry: CollectorRegistry | None) -> PairMetrics:
        """Return the metrics of `registry`; if it is None, the metrics of the default registry of the process."""
        wanted = REGISTRY if registry is None else registry
        with cls._making:
            if wanted not in cls._made:
                cls._made[wanted] = cls()._registered(wanted)
            return cls._made[wanted]

    def __init__(self) -> None:
        self._watched: dict[str, _PairReaders] = {}
        self._failovers = _counter("failovers", "Failovers of an entity, by their cause.", "entity", "cause")
        self._restores = _counter("restores", "Returns of an entity to the primary.", "entity", "forced")
        self._unusable = _counter("unusable", "Times an entity was found gone or its credential refused.", "entity")
        self._trials = _counter(
            "trials", "Trials of an entity after its return, by their outcome.", "entity", "outcome"
        )
        self._outage = _counter("outage_seconds", "Time an entity spent failed over, once it is back.", "entity")
        self._diverted = _counter("diverted_messages", "Messages that the backlog has taken.", "entity")
        self._pings = _counter("pings", "Pings, by what came of them.", "entity", "outcome")
        self._left = _counter("backlog_queues_left", "Times a backlog queue left the rotation.", "queue", "cause")
        self._counters = (
            self._failovers,
            self._restores,
            self._unusable,
            self._trials,
            self._outage,
            self._diverted,
            self._pings,
            self._left,
        )

    def _registered(self, registry: CollectorRegistry) -> Self:
        registry.register(self)
        return self

    # --- counters -----------------------------------------------------------------------------------------------

    def count_notice(self, pair: str, notice: object) -> None:
        match notice:
            case FailoverEngaged():
                self._failovers.labels(pair, notice.entity, str(notice.cause)).inc()
            case Restored():
                self._restores.labels(pair, notice.entity, str(notice.forced).lower()).inc()
                self._outage.labels(pair, notice.entity).inc(max(0.0, notice.outage))
            case PrimaryUnusable():
                self._unusable.labels(pair, notice.entity).inc()
            case TrialPassed() | TrialFailed():
                outcome = "passed" if isinstance(notice, TrialPassed) else "failed"
                self._trials.labels(pair, notice.entity, outcome).inc()
            case QueueLeft():
                self._left.labels(pair, notice.queue, str(notice.kind)).inc()
            case _:
                pass  # the gauges show it

    def diverted(self, pair: str, entity: str, messages: int) -> None:
        self._diverted.labels(pair, entity).inc(messages)

    def pinged(self, pair: str, entity: str, failure: FailureKind | None) -> None:
        self._pings.labels(pair, entity, PING_SUCCEEDED if failure is None else str(failure)).inc()

    # --- gauges ------------------------------------------------------------------------------------------------

    def watch(
        self,
        pair: str,
        entities: Callable[[], Iterable[Entity]],
        rotation: Callable[[], Rotation],
        backlog: Callable[[], Iterable[QueueStatus]],
    ) -> Callable[[], None]:
        """Show a pair in the gauges. Returns a function that removes the pair from the gauges.

        The function does nothing if another pair of the same name has been shown since.
        """
        watched = self._watched[pair] = _PairReaders(entities, rotation, backlog)

        def unwatch() -> None:
            if self._watched.get(pair) is watched:
                del self._watched[pair]

        return unwatch

    def collect(self) -> Iterator[Metric]:
        for counter in self._counters:
            yield from counter.collect()
        state = _gauge("entity_state", "1 for the state an entity is in, 0 for the others.", "entity", "state")
        known = _gauge("backlog_queues", "Backlog queues the pair knows of.")
        usable = _gauge("backlog_queues_usable", "Backlog queues in the rotation now.")
        oldest = _backlog_gauge("oldest_seconds", "How long its oldest message had been there when last looked at.")
        unattended = _backlog_gauge("unattended", "1 while a message waits there that nobody brings home.")
        for pair, watched in list(self._watched.items()):
            for entity in watched.entities():
                for mode in EntityMode:
                    state.add_metric((pair, entity.path, mode), float(entity.mode is mode))
            rotation = watched.rotation()
            known.add_metric((pair,), len(rotation.queues))
            usable.add_metric((pair,), len(rotation.usable))
            for status in watched.backlog():
                oldest.add_metric((pair, status.queue), status.oldest_age)
                unattended.add_metric((pair, status.queue), float(status.unattended))
        yield from (state, known, usable, oldest, unattended)

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, so that registering reads no pair."""
        for counter in self._counters:
            yield from counter.describe()
        for name in ("entity_state", "backlog_queues", "backlog_queues_usable"):
            yield _gauge(name, "")
        for name in ("oldest_seconds", "unattended"):
            yield _backlog_gauge(name, "")


def _counter(name: str, meaning: str, *labels: str) -> Counter:
    return Counter(f"twinbus_pair_{name}", meaning, ("pair", *labels), registry=None)


def _gauge(name: str, meaning: str, *labels: str) -> Any:
    return GaugeMetricFamily(f"twinbus_pair_{name}", meaning, labels=("pair", *labels))


def _backlog_gauge(name: str, meaning: str) -> Any:
    return GaugeMetricFamily(f"twinbus_backlog_{name}", meaning, labels=("pair", "queue"))
