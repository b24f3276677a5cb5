"""What moves next and how (Y3, Y5–Y7). Pure.

`destinations` decides which entities take messages now; `deferred` remembers which messages of one backlog queue wait
for which destination.
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
