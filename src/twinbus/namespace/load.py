"""Depth and size of every entity for Prometheus, read from the engine when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twinbus.namespace.engine.namespace import Namespace

_STATES: Final = ("active", "deferred", "scheduled", "dead_letter", "transfer", "transfer_dead_letter")


class LoadCollector(Collector):
    """Gauges that cost nothing until they are read."""

    def __init__(self, namespace: Namespace) -> None:
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
