"""Decides which messages a syphon moves next, and what happens after a failed send (Y3, Y5–Y7). Pure.

`destinations` decides which entities can receive messages now. `deferred` remembers, for one backlog queue, which
messages wait for which destination.
"""

from twinbus.syphon.plan.deferred import SCAN_INTERVAL, DeferredMessages, Recall
from twinbus.syphon.plan.destinations import (
    DestinationMemory,
    DestinationRoute,
    Destinations,
    DestinationStatus,
    FailedSendAction,
    Readiness,
    RetryPolicy,
    RoutingDecision,
    destination_key,
)

__all__ = [
    "SCAN_INTERVAL",
    "DeferredMessages",
    "DestinationMemory",
    "DestinationRoute",
    "DestinationStatus",
    "Destinations",
    "FailedSendAction",
    "Readiness",
    "Recall",
    "RetryPolicy",
    "RoutingDecision",
    "destination_key",
]
