"""The metrics of a pair where prometheus-client is not installed: none. The extra `telemetry` installs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from twinbus.backlog import FailureKind
from twinbus.extras import is_installed

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from twinbus.pairing.metrics import PairMetrics


class NoMetrics:
    """Has the methods of `PairMetrics`, which then do nothing."""

    def count_notice(self, pair: str, notice: object) -> None:
        """Do nothing."""

    def diverted(self, pair: str, entity: str, messages: int) -> None:
        """Do nothing."""

    def pinged(self, pair: str, entity: str, failure: FailureKind | None) -> None:
        """Do nothing."""

    def watch(self, pair: str, *_readers: object) -> Callable[[], None]:
        """Return a function that does nothing."""
        return lambda: None


def pair_metrics(registry: CollectorRegistry | None) -> PairMetrics | NoMetrics:
    """Return the metrics of `registry`, or of the process' default registry; without prometheus-client, none."""
    if not is_installed("prometheus_client"):
        return NoMetrics()
    from twinbus.pairing.metrics import PairMetrics  # noqa: PLC0415 - may not be installed

    return PairMetrics.of(registry)
