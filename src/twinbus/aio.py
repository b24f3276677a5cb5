"""The public API for asyncio: the same as `twinbus`, with the types of `azure.servicebus.aio`.

    async with pair_connection_strings(primary, secondary) as pair:
        async with pair.get_queue_sender("orders") as sender:
            await sender.send_messages(ServiceBusMessage("two coffees"))

Events, states and errors are in `twinbus`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from azure.servicebus.aio import ServiceBusClient

from twinbus import pairing
from twinbus.pairing import AioPair as Pair
from twinbus.pairing import AioPairedSender as PairedSender
from twinbus.pairing import AioPairSide as PairSide
from twinbus.pairing import AioQuietReceiver as QuietReceiver
from twinbus.pairing import BacklogHandle, EntityState, PairSyphon, SendAvailabilityOptions
from twinbus.sdk import given_keywords

if TYPE_CHECKING:
    from os import PathLike
    from ssl import SSLContext

    from azure.servicebus import TransportType
    from azure.servicebus.aio.management import ServiceBusAdministrationClient

    from twinbus.pairing import PairState

__all__ = [
    "BacklogHandle",
    "EntityState",
    "Pair",
    "PairSide",
    "PairSyphon",
    "PairedSender",
    "QuietReceiver",
    "SendAvailabilityOptions",
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
    """Pair the namespaces of two clients, which may have any credential. The caller must close the clients.

    Returns the pair without network I/O, as the SDK returns its client. `async with pair`, `await pair` or the first
    call of a sender pairs the namespaces and raises the error if pairing fails. If the secondary cannot be reached, a
    sender's call does not fail: a background task of the pair continues to look for the backlog queues. For
    `async with pair` and `await pair`, the option `on_secondary_down` decides whether they fail in this case. Use the
    pair in one event loop only, and close the pair.

    `state` replaces the option `state`: where processes share failovers and holds.

    Example: `async with pair_namespaces(ServiceBusClient(host, credential), other_client) as pair: ...`.
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
    retry_total: int = 3,
    retry_backoff_factor: float = 0.8,
    retry_backoff_max: float = 120,
    retry_mode: str = "exponential",
    transport_type: TransportType | None = None,
    http_proxy: dict[str, Any] | None = None,
    user_agent: str | None = None,
    logging_enable: bool = False,
    connection_verify: str | None = None,
    ssl_context: SSLContext | None = None,
    **kwargs: Any,
) -> Pair:
    """Pair two namespaces by their connection strings. The pair makes both clients, and closes them.

    The docstring of `pair_namespaces` explains when pairing happens. The keywords from `retry_total` on are those of
    `ServiceBusClient.from_connection_string`, and go to both clients. `connection_verify` is the path of a file
    with trusted certificates.

    Example: `pair = await pair_connection_strings(primary, secondary, retry_total=1)`.
    """
    return pairing.aio_pair_connection_strings(
        primary,
        secondary,
        options=options,
        state=state,
        syphon=_syphon,
        retry_total=retry_total,
        retry_backoff_factor=retry_backoff_factor,
        retry_backoff_max=retry_backoff_max,
        retry_mode=retry_mode,
        logging_enable=logging_enable,
        **given_keywords(
            transport_type=transport_type,
            http_proxy=http_proxy,
            user_agent=user_agent,
            connection_verify=connection_verify,
            ssl_context=ssl_context,
        ),
        **kwargs,
    )


def _syphon(primary: Any, secondary: Any, admin: Any, pair: PairState) -> PairSyphon:
    """Make the pair's syphon. Only pairs with `enable_syphon` load the module of the syphon and the AMQP codec."""
    from twinbus.syphon import AioPairSyphon  # noqa: PLC0415 - loads the codec

    return AioPairSyphon(primary, secondary, admin, pair)
