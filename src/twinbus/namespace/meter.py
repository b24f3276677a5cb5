"""The namespace's meter (N5): counts its own operations by entity and kind, and its load, for Prometheus.

It only counts what it is told; what an operation is, the engine says.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from twinbus.namespace.engine.effects import Meter

_COMMIT_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LABELS = ("entity", "operation")


class OperationMeter(Collector):
    """Metrics of one namespace in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.connections = Gauge("twinbus_connections", "Open connections.", ("protocol",), registry=self.registry)
        self.commit_seconds = Histogram(
            "twinbus_commit_seconds", "Time to bring a group to disk.", buckets=_COMMIT_BUCKETS, registry=self.registry
        )
        # Operations and their bytes. Plain numbers: all counting is done on one thread, and for every message.
        self._counted: dict[tuple[str, str], list[int]] = {}

    def count(self, meter: Meter) -> None:
        """Count operations of one entity."""
        key = (meter.entity, meter.operation.value)
        counted = self._counted.get(key)
        if counted is None:
            counted = self._counted[key] = [0, 0]
        counted[0] += meter.count
        counted[1] += meter.bytes

    def forget(self, entity: str) -> None:
        """Drop the series of an entity that is gone, so that short-lived entities leave nothing behind."""
        for key in [key for key in self._counted if key[0] == entity]:
            del self._counted[key]

    def collect(self) -> Iterator[Metric]:
        """What Prometheus is shown."""
        operations = CounterMetricFamily("twinbus_operations", "Operations by entity and kind.", labels=_LABELS)
        carried = CounterMetricFamily("twinbus_operation_bytes", "Bytes carried by operations.", labels=_LABELS)
        for key, (count, size) in self._counted.items():
            operations.add_metric(key, count)
            carried.add_metric(key, size)
        yield operations
        yield carried
