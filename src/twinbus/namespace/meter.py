"""The measurements of a namespace (N5): operations, connections, commits, depth, memory.

    OperationMeter      counts operations by entity and kind. The engine decides what an operation is; the runtime
                        reports each operation. The class also has the gauge of connections and the histogram of
                        commit times.
    LedgerMeter         writes the counted operations to the ledger, once a second
    DepthCollector      gauges for the messages and bytes of every entity
    ResourceCollector   gauges for the connections and memory of the process

Prometheus reads all of them except LedgerMeter from `OperationMeter.registry`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twinbus.clock import Clock
from twinbus.ledger import Ledger
from twinbus.namespace.engine.effects import Meter
from twinbus.namespace.engine.registry import EntityRegistry
from twinbus.namespace.resources import Resources

_COMMIT_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LABELS = ("entity", "operation")

_STATES: Final = ("active", "deferred", "scheduled", "dead_letter", "transfer", "transfer_dead_letter")
INTERVAL_SECONDS: Final = 1.0
"""The time between two writes of the counted operations to the ledger."""

OperationKey = tuple[str, str]
"""The path of an entity, and the kind of an operation."""
OperationCount = list[int]
"""Three sums over operations: their number, their bytes, their billable units."""
_NOTHING: Final[OperationCount] = [0, 0, 0]


class OperationMeter(Collector):
    """Counts the operations of one namespace, and holds its Prometheus registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.connections = Gauge("twinbus_connections", "Open connections.", ("protocol",), registry=self.registry)
        self.commit_seconds = Histogram(
            "twinbus_commit_seconds", "Time to bring a group to disk.", buckets=_COMMIT_BUCKETS, registry=self.registry
        )
        # Plain numbers are faster than Prometheus counters, and need no lock: only the event loop's thread counts.
        self._counted: dict[OperationKey, OperationCount] = {}
        """Operations since the last `take`."""
        self._taken: dict[OperationKey, OperationCount] = {}
        """Operations before the last `take`."""
        self._gone: list[tuple[OperationKey, OperationCount]] = []
        """Operations of deleted entities since the last `take`."""

    def count(self, meter: Meter) -> None:
        """Count operations of one entity."""
        key = (meter.entity, meter.operation.value)
        counted = self._counted.get(key)
        if counted is None:
            counted = self._counted[key] = [0, 0, 0]
        counted[0] += meter.count
        counted[1] += meter.bytes
        counted[2] += meter.count + meter.more_units

    def take(self) -> list[tuple[OperationKey, OperationCount]]:
        """Return the operations since the last call of `take`, as pairs of key and count."""
        taken = [*self._gone, *self._counted.items()]
        for key, counted in self._counted.items():
            before = self._taken.get(key, _NOTHING)
            self._taken[key] = [one + other for one, other in zip(before, counted, strict=True)]
        self._counted, self._gone = {}, []
        return taken

    def forget(self, entity: str) -> None:
        """Remove the metrics of a deleted entity. The next `take` still returns its latest operations."""
        self._gone += [(key, self._counted.pop(key)) for key in list(self._counted) if key[0] == entity]
        for key in [key for key in self._taken if key[0] == entity]:
            del self._taken[key]

    def collect(self) -> Iterator[Metric]:
        """Yield the counters for Prometheus."""
        operations = CounterMetricFamily("twinbus_operations", "Operations by entity and kind.", labels=_LABELS)
        carried = CounterMetricFamily("twinbus_operation_bytes", "Bytes carried by operations.", labels=_LABELS)
        for key in self._taken | self._counted:
            before, since = self._taken.get(key, _NOTHING), self._counted.get(key, _NOTHING)
            operations.add_metric(key, before[0] + since[0])
            carried.add_metric(key, before[1] + since[1])
        yield operations
        yield carried


class LedgerMeter:
    """Writes the operations of each second to the ledger, one line for each entity and operation.

    Runs on the event loop from `start` until `close`, which also closes the ledger. A ledger that cannot be written
    does not stop the namespace.
    """

    def __init__(self, ledger: Ledger, namespace: str, meter: OperationMeter, clock: Clock) -> None:
        self._ledger = ledger
        self._namespace = namespace
        self._meter = meter
        self._clock = clock
        self._since = clock.now()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_SECONDS, self._next)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._write()
        await asyncio.to_thread(self._ledger.close)

    def _next(self) -> None:
        self._write()
        self.start()

    def _write(self) -> None:
        until = self._clock.now()
        for (entity, operation), (count, size, units) in self._meter.take():
            self._ledger.metered(self._namespace, entity, operation, count, size, units, self._since, until)
        self._since = until


class DepthCollector(Collector):
    """Gauges of the messages and bytes of every entity. The values are computed only when Prometheus reads them."""

    def __init__(self, namespace: EntityRegistry) -> None:
        self._namespace = namespace

    def collect(self) -> Iterator[Metric]:
        depth = GaugeMetricFamily("twinbus_messages", "Messages held, by state.", labels=("entity", "state"))
        size = GaugeMetricFamily("twinbus_bytes", "Bytes held.", labels=("entity",))
        topics = self._namespace.topics()
        subscriptions = [found for topic in topics for found in self._namespace.subscriptions(topic.description.path)]
        for info in (*self._namespace.queues(), *topics, *subscriptions):
            path, counts = info.description.path, info.counts
            for state in _STATES:
                depth.add_metric((path, state), getattr(counts, state))
            size.add_metric((path,), counts.size_bytes)
        yield depth
        yield size


class ResourceCollector(Collector):
    """Gauges of the connections and memory of the process. All namespaces of a process show the same values."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    def collect(self) -> Iterator[Metric]:
        resources = self._resources
        held = GaugeMetricFamily(
            "twinbus_held_bytes", "Bytes that connections make the process hold.", labels=("authenticated",)
        )
        held.add_metric(("no",), resources.unauthenticated_held)
        held.add_metric(("yes",), resources.held - resources.unauthenticated_held)
        yield held
        opened = GaugeMetricFamily(
            "twinbus_process_connections", "Open connections of the process.", labels=("authenticated",)
        )
        opened.add_metric(("no",), resources.unauthenticated_connections)
        opened.add_metric(("yes",), resources.connections - resources.unauthenticated_connections)
        yield opened
        refused = CounterMetricFamily(
            "twinbus_limit_exceeded", "Refusals by the limit that was exceeded, of the process.", labels=("limit",)
        )
        for limit, count in sorted(resources.refused.items()):
            refused.add_metric((limit,), count)
        yield refused
