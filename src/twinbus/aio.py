"""The asyncio face of the public API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from azure.servicebus.aio import ServiceBusClient
from azure.servicebus.aio.management import ServiceBusAdministrationClient

from twinbus import pairing
from twinbus.pairing import AioPair as Pair
from twinbus.pairing import AioPairedSender as PairedSender
from twinbus.pairing import AioPairSide as PairSide
from twinbus.pairing import AioQuietReceiver as QuietReceiver
from twinbus.pairing import BacklogHandle, EntityState, SendAvailabilityOptions
from twinbus.pairing import PairSyphon as Syphon

if TYPE_CHECKING:
    from twinbus.pairing import PairState

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
) -> Pair:
    """Pair two namespaces on clients the caller made (P1). The clients stay the caller's to close.

    Returns the pair without network I/O, as the SDK returns its client. `async with pair`, `await pair` or the first
    call of a sender pairs the namespaces and raises the error if pairing fails. A secondary that cannot be reached does
    not fail a sender's call: the pair goes on looking for the backlog queues in the background. `async with pair` and
    `await pair` obey `on_secondary_down`. Use the pair in one event loop, and close it.
    """
    return pairing.aio_pair_namespaces(
        primary, secondary, secondary_admin=secondary_admin, options=options, syphon=_syphon
    )


def pair_connection_strings(
    primary: str, secondary: str, *, options: SendAvailabilityOptions | None = None, **kwargs: Any
) -> Pair:
    """Pair two namespaces by their connection strings. Keywords go to both clients, which are the pair's own.

    `pair_namespaces` explains when pairing happens.
    """
    return pairing.aio_pair_connection_strings(primary, secondary, options=options, syphon=_syphon, **kwargs)


def _syphon(primary: Any, secondary: Any, admin: Any, pair: PairState) -> Syphon:
    """Make the pair's syphon. Only pairs with `enable_syphon` load it, and the AMQP codec with it."""
    from twinbus.syphon import AioPairSyphon  # noqa: PLC0415 - as above

    return AioPairSyphon(primary, secondary, admin, pair)
