"""Decides which messages a syphon moves next, and what happens after a failed send (Y3, Y5–Y7). Pure.

`destinations` decides which entities can receive messages now. `deferred` remembers, for one backlog queue, which
messages wait for which destination. `queue_drain` decides when no message of a queue can move, and `drain_end` when a
drain ends (Y11). `queue_searches` decides when to search for backlog queues.
"""

from twinbus.syphon.plan.deferred import SCAN_INTERVAL, DeferredMessages, Recall
from twinbus.syphon.plan.destinations import (
    DestinationMemory,
    DestinationRoute,
    Destinations,
    DestinationStatus,
    FailedSendAction,
    HeldEntities,
    Readiness,
    RetryPolicy,
    RoutingDecision,
    destination_key,
)
from twinbus.syphon.plan.drain_end import DrainEnd, WaitingDestination
from twinbus.syphon.plan.queue_drain import QueueDrain
from twinbus.syphon.plan.queue_searches import QueueSearches

__all__ = [
    "SCAN_INTERVAL",
    "DeferredMessages",
    "DestinationMemory",
    "DestinationRoute",
    "DestinationStatus",
    "Destinations",
    "DrainEnd",
    "FailedSendAction",
    "HeldEntities",
    "QueueDrain",
    "QueueSearches",
    "Readiness",
    "Recall",
    "RetryPolicy",
    "RoutingDecision",
    "WaitingDestination",
    "destination_key",
]
