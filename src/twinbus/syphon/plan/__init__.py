"""What moves next and how (Y3, Y5–Y7): pure, so that a test can be any moment of any world.

`destinations` says which entities take messages now, `shelf` which messages of one backlog queue wait for which.
"""

from twinbus.syphon.plan.deferred import DeferredMessages, Recall
from twinbus.syphon.plan.destinations import (
    DestinationMemory,
    DestinationRoute,
    Destinations,
    FailedSendAction,
    Readiness,
    RetryPolicy,
    RoutingDecision,
    destination_key,
)

__all__ = [
    "DeferredMessages",
    "DestinationMemory",
    "DestinationRoute",
    "Destinations",
    "FailedSendAction",
    "Readiness",
    "Recall",
    "RetryPolicy",
    "RoutingDecision",
    "destination_key",
]
