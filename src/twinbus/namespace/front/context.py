"""What all connections of one namespace share."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twinbus.amqp import LimitExceededError
from twinbus.namespace.faults import Faults
from twinbus.namespace.front.sas_verifier import SasVerifier
from twinbus.namespace.meter import OperationMeter
from twinbus.namespace.own_names import OwnNames
from twinbus.namespace.resources import Resources
from twinbus.namespace.runtime import NamespaceRuntime

if TYPE_CHECKING:
    from twinbus.namespace.front.accepted_connection import AcceptedConnection
    from twinbus.namespace.front.http_handler import HttpHandler


@dataclass(slots=True)
class NamespaceContext:
    """One namespace as its connections see it."""

    name: str
    runtime: NamespaceRuntime
    verifier: SasVerifier
    faults: Faults
    meter: OperationMeter
    tls: ssl.SSLContext
    http: HttpHandler
    names: OwnNames
    resources: Resources
    connections: set[AcceptedConnection] = field(default_factory=set)

    def refuse(self, exceeded: LimitExceededError) -> None:
        """Count and log that a peer exceeded a limit."""
        self.resources.refuse(exceeded, self.name)
