"""What moves next and how (Y3, Y5–Y7): pure, so that a test can be any moment of any world.

`destinations` says which entities take messages now, `shelf` which messages of one backlog queue wait for which.
"""

from twinbus.syphon.plan.deferred import Recall, Shelf
from twinbus.syphon.plan.destinations import Destinations, Memory, Policy, Readiness, Route, Routed, Verdict, key_of

__all__ = ["Destinations", "Memory", "Policy", "Readiness", "Recall", "Route", "Routed", "Shelf", "Verdict", "key_of"]
