"""The asyncio face of the public API."""

from __future__ import annotations

from typing import Any

from azure.servicebus.aio import ServiceBusClient
from azure.servicebus.aio.management import ServiceBusAdministrationClient

from twinbus.pairing import aio_pair
from twinbus.pairing.aio_pair import Pair, Pairing, PairSide
from twinbus.pairing.aio_receivers import QuietReceiver
from twinbus.pairing.aio_sender import PairedSender
from twinbus.pairing.calls import BacklogHandle
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.partnership import EntityState, Syphon
from twinbus.syphon.component import AioPairSyphon

__all__ = [
    "BacklogHandle",
    "EntityState",
    "Pair",
    "PairSide",
    "PairedSender",
    "QuietReceiver",
    "SendAvailabilityOptions",
    "Syphon",
    "pair_connection_strings",
    "pair_namespaces",
]


def pair_namespaces(
    primary: ServiceBusClient,
    secondary: ServiceBusClient,
    *,
    secondary_admin: ServiceBusAdministrationClient | None = None,
    options: SendAvailabilityOptions | None = None,
) -> Pairing:
    """Pair two namespaces on clients the caller made (P1). Await it, or use it with `async with`."""
    return aio_pair.pair_namespaces(
        primary, secondary, secondary_admin=secondary_admin, options=options, syphon=AioPairSyphon
    )


def pair_connection_strings(
    primary: str, secondary: str, *, options: SendAvailabilityOptions | None = None, **kwargs: Any
) -> Pairing:
    """Pair two namespaces by their connection strings. Keywords go to both clients, which are the pair's own."""
    return aio_pair.pair_connection_strings(primary, secondary, options=options, syphon=AioPairSyphon, **kwargs)
