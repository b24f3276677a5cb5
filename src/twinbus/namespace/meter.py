"""The namespace's meter (N5): counts its own operations by entity and kind, and its load, for Prometheus.

It only counts what it is told; what an operation is, the engine says.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from twinbus.namespace.engine.effects import Meter

_COMMIT_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class OperationMeter:
    """Metrics of one namespace in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._operations = Counter(
            "twinbus_operations", "Operations by entity and kind.", ("entity", "operation"), registry=self.registry
        )
        self._bytes = Counter(
            "twinbus_operation_bytes", "Bytes carried by operations.", ("entity", "operation"), registry=self.registry
        )
        self.connections = Gauge("twinbus_connections", "Open connections.", ("protocol",), registry=self.registry)
        self.commit_seconds = Histogram(
            "twinbus_commit_seconds", "Time to bring a group to disk.", buckets=_COMMIT_BUCKETS, registry=self.registry
        )
        self._series: dict[tuple[str, str], tuple[Counter, Counter]] = {}

    def count(self, meter: Meter) -> None:
        """Count operations of one entity."""
        key = (meter.entity, meter.operation.value)
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = (self._operations.labels(*key), self._bytes.labels(*key))
        series[0].inc(meter.count)
        if meter.bytes:
            series[1].inc(meter.bytes)

    def forget(self, entity: str) -> None:
        """Drop the series of an entity that is gone, so that short-lived entities leave nothing behind."""
        for key in [key for key in self._series if key[0] == entity]:
            del self._series[key]
            self._operations.remove(*key)
            self._bytes.remove(*key)
