"""The public API for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from azure.servicebus.aio import ServiceBusClient

from twinbus import pairing
from twinbus.pairing import AioPair as Pair
from twinbus.pairing import AioPairedSender as PairedSender
from twinbus.pairing import AioPairSide as PairSide
from twinbus.pairing import AioQuietReceiver as QuietReceiver
from twinbus.pairing import BacklogHandle, EntityState, SendAvailabilityOptions
from twinbus.pairing import PairSyphon as Syphon

if TYPE_CHECKING:
    from os import PathLike

    from azure.servicebus.aio.management import ServiceBusAdministrationClient

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
    state: str | PathLike[str] | None = None,
) -> Pair:
    """Pair two namespaces, with clients that the caller made (P1) and must close.

    Returns the pair without network I/O, as the SDK returns its client. `async with pair`, `await pair` or the first
    call of a sender pairs the namespaces and raises the error if pairing fails. If the secondary cannot be reached, a
    sender's call does not fail: a background task of the pair continues to look for the backlog queues. For
    `async with pair` and `await pair`, the option `on_secondary_down` decides whether they fail in this case. Use the
    pair in one event loop only, and close the pair.

    `state` replaces the option `state`: where processes share failovers and holds (S16).
    """
    return pairing.aio_pair_namespaces(
        primary, secondary, secondary_admin=secondary_admin, options=options, state=state, syphon=_syphon
    )


def pair_connection_strings(
    primary: str,
    secondary: str,
    *,
    options: SendAvailabilityOptions | None = None,
    state: str | PathLike[str] | None = None,
    **kwargs: Any,
) -> Pair:
    """Pair two namespaces by their connection strings. The pair makes both clients, with `kwargs`, and closes them.

    The docstring of `pair_namespaces` explains when pairing happens.
    """
    return pairing.aio_pair_connection_strings(
        primary, secondary, options=options, state=state, syphon=_syphon, **kwargs
    )


def _syphon(primary: Any, secondary: Any, admin: Any, pair: PairState) -> Syphon:
    """Make the pair's syphon. Only pairs with `enable_syphon` load the module of the syphon and the AMQP codec."""
    from twinbus.syphon import AioPairSyphon  # noqa: PLC0415 - as above

    return AioPairSyphon(primary, secondary, admin, pair)
