"""Gauges for Prometheus that are read when somebody asks: depth and size of every entity, and what connections hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twinbus.namespace.engine.registry import Namespace
from twinbus.namespace.resources import Resources

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


class ResourceCollector(Collector):
    """The figures of a `Resources` for Prometheus. They are those of the process, whatever namespace shows them."""

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
