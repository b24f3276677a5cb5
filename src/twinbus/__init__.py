"""Twinbus keeps applications sending while their Azure Service Bus namespace is down.

A pair of two namespaces has the methods of the SDK's client. While the primary, or one of its queues and topics, cannot
be reached, messages divert to backlog queues on the secondary. A syphon brings them home.

    from datetime import timedelta
    from azure.servicebus import ServiceBusMessage
    from twinbus import SendAvailabilityOptions, pair_connection_strings

    options = SendAvailabilityOptions(failover_interval=timedelta(seconds=30), enable_syphon=True)
    with pair_connection_strings(primary, secondary, options=options) as pair:
        with pair.get_queue_sender("orders") as sender:
            sender.send_messages(ServiceBusMessage("two coffees"))

    make a pair     pair_connection_strings, pair_namespaces; twinbus.aio has the same for asyncio
    choose          SendAvailabilityOptions
    look            Pair.entities, EntityState, EntityMode, SideState
    hear            Pair.on, EVENTS and the classes of events, such as FailoverEngaged
    handle          TwinbusError and its families CallerError, RetryError and OperatorError
    record          Ledger
    test            twinbus.testing: local namespaces and pytest fixtures (the extra `serve`)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from os import PathLike
    from ssl import SSLContext

    from azure.servicebus import ServiceBusClient, TransportType
    from azure.servicebus.management import ServiceBusAdministrationClient

    from twinbus.backlog import (
        AliasInUseError,
        FailureKind,
    )
    from twinbus.errors import (
        CallerError,
        OperatorError,
        OptionError,
        RetryError,
        TwinbusError,
    )
    from twinbus.extras import (
        MissingExtraError,
    )
    from twinbus.ledger import (
        Ledger,
    )
    from twinbus.pairing import (
        EVENTS,
        BacklogDrained,
        BacklogHandle,
        BacklogQueueGone,
        BacklogQueueUnsafe,
        BacklogUnattended,
        BacklogUnavailableError,
        EntityMode,
        EntityState,
        FailoverEngaged,
        FailoverHeld,
        FailoverTakenOver,
        MessageTooLargeForBacklogError,
        NotPairedError,
        Pair,
        PairClosedError,
        PairedSender,
        PairFaultedError,
        PairForkedError,
        PairingRefusedError,
        PairLoopError,
        PairSide,
        PairState,
        PairSyphon,
        PartialSendError,
        PrimaryUnusable,
        PrimaryUnusableError,
        ProvisioningError,
        QueueLeft,
        QueueReturned,
        QuietReceiver,
        Restored,
        ScheduledInBacklogError,
        SecondaryUnreachable,
        SendAvailabilityOptions,
        SideClosed,
        SideFaulted,
        SideState,
        TimeToLiveError,
        TrialFailed,
        TrialPassed,
        UnknownEventError,
    )

    __version__: str

__all__ = [
    "EVENTS",
    "AliasInUseError",
    "BacklogDrained",
    "BacklogHandle",
    "BacklogQueueGone",
    "BacklogQueueUnsafe",
    "BacklogUnattended",
    "BacklogUnavailableError",
    "CallerError",
    "EntityMode",
    "EntityState",
    "FailoverEngaged",
    "FailoverHeld",
    "FailoverTakenOver",
    "FailureKind",
    "Ledger",
    "MessageTooLargeForBacklogError",
    "MissingExtraError",
    "NotPairedError",
    "OperatorError",
    "OptionError",
    "Pair",
    "PairClosedError",
    "PairFaultedError",
    "PairForkedError",
    "PairLoopError",
    "PairSide",
    "PairSyphon",
    "PairedSender",
    "PairingRefusedError",
    "PartialSendError",
    "PrimaryUnusable",
    "PrimaryUnusableError",
    "ProvisioningError",
    "QueueLeft",
    "QueueReturned",
    "QuietReceiver",
    "Restored",
    "RetryError",
    "ScheduledInBacklogError",
    "SecondaryUnreachable",
    "SendAvailabilityOptions",
    "SideClosed",
    "SideFaulted",
    "SideState",
    "TimeToLiveError",
    "TrialFailed",
    "TrialPassed",
    "TwinbusError",
    "UnknownEventError",
    "__version__",
    "pair_connection_strings",
    "pair_namespaces",
]

_ROOMS: Final = {
    "AliasInUseError": "backlog",
    "FailureKind": "backlog",
    "CallerError": "errors",
    "OperatorError": "errors",
    "OptionError": "errors",
    "RetryError": "errors",
    "TwinbusError": "errors",
    "MissingExtraError": "extras",
    "Ledger": "ledger",
}
"""The room of each name. Names that are not here are in `pairing`."""


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used, so that `import twinbus` loads no SDK."""
    if name not in __all__:
        raise AttributeError(f"module 'twinbus' has no attribute {name!r}")
    if name == "__version__":
        return _version()
    return getattr(import_module(f"twinbus.{_ROOMS.get(name, 'pairing')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    """Return the version of the installed distribution. The sources alone have none."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - slow, and rarely needed

    try:
        return version("twinbus")
    except PackageNotFoundError:
        return "0+unknown"


def pair_namespaces(
    primary: ServiceBusClient,
    secondary: ServiceBusClient,
    *,
    secondary_admin: ServiceBusAdministrationClient | None = None,
    options: SendAvailabilityOptions | None = None,
    state: str | PathLike[str] | None = None,
) -> Pair:
    """Pair the namespaces of two clients, which may have any credential. The caller must close the clients.

    Returns when every backlog queue was found or created on the secondary. `secondary_admin` creates them; without it,
    the pair makes an administration client with the credential of `secondary`. `state` replaces the option `state`:
    where processes share failovers and holds.

    Raises PairingRefusedError, ProvisioningError or OptionError. The options decide what happens if the secondary
    cannot be reached.

    Example: `pair = pair_namespaces(ServiceBusClient(host, credential), ServiceBusClient(other_host, credential))`.
    """
    from twinbus import pairing  # noqa: PLC0415 - loads the SDK

    return pairing.pair_namespaces(
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

    `state` replaces the option `state`: where processes share failovers and holds. The other keywords are those of
    `ServiceBusClient.from_connection_string`, and go to both clients. `connection_verify` is the path of a file
    with trusted certificates.

    Example: `with pair_connection_strings(primary, secondary, retry_total=1) as pair: ...`.
    """
    from twinbus import pairing  # noqa: PLC0415 - loads the SDK
    from twinbus.sdk import given_keywords  # noqa: PLC0415 - loads the SDK

    return pairing.pair_connection_strings(
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
    """Make the syphon of a pair with the option `enable_syphon`. Other pairs do not call this function."""
    from twinbus.syphon import ThreadPairSyphon  # noqa: PLC0415 - loads the SDK

    return ThreadPairSyphon(primary, secondary, admin, pair)
