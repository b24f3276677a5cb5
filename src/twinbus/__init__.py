"""Twinbus: paired Service Bus namespaces, and a local namespace that the official SDKs use unchanged."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from os import PathLike

    from azure.servicebus import ServiceBusClient
    from azure.servicebus.management import ServiceBusAdministrationClient

    from twinbus.backlog import AliasInUseError
    from twinbus.errors import OptionError
    from twinbus.pairing import (
        BacklogHandle,
        BacklogUnavailableError,
        MessageTooLargeForBacklogError,
        NotPairedError,
        Pair,
        PairClosedError,
        PairFaultedError,
        PairForkedError,
        PairingRefusedError,
        PairLoopError,
        PairState,
        PairSyphon,
        PartialSendError,
        PrimaryUnusableError,
        ProvisioningError,
        ScheduledInBacklogError,
        SendAvailabilityOptions,
        TimeToLiveError,
    )

__all__ = [
    "AliasInUseError",
    "BacklogHandle",
    "BacklogUnavailableError",
    "MessageTooLargeForBacklogError",
    "NotPairedError",
    "OptionError",
    "Pair",
    "PairClosedError",
    "PairFaultedError",
    "PairForkedError",
    "PairLoopError",
    "PairingRefusedError",
    "PartialSendError",
    "PrimaryUnusableError",
    "ProvisioningError",
    "ScheduledInBacklogError",
    "SendAvailabilityOptions",
    "TimeToLiveError",
    "pair_connection_strings",
    "pair_namespaces",
]


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used, so that `import twinbus` loads no SDK."""
    if name not in __all__:
        raise AttributeError(f"module 'twinbus' has no attribute {name!r}")
    room = {"AliasInUseError": "backlog", "OptionError": "errors"}.get(name, "pairing")
    return getattr(import_module(f"twinbus.{room}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def pair_namespaces(
    primary: ServiceBusClient,
    secondary: ServiceBusClient,
    *,
    secondary_admin: ServiceBusAdministrationClient | None = None,
    options: SendAvailabilityOptions | None = None,
    state: str | PathLike[str] | None = None,
) -> Pair:
    """Pair two namespaces, with clients that the caller made (P1) and must close.

    `state` replaces the option `state`: where processes share failovers and holds (S16).
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
    **kwargs: Any,
) -> Pair:
    """Pair two namespaces by their connection strings. The pair makes both clients, with `kwargs`, and closes them.

    `state` replaces the option `state`: where processes share failovers and holds (S16).
    """
    from twinbus import pairing  # noqa: PLC0415 - loads the SDK

    return pairing.pair_connection_strings(primary, secondary, options=options, state=state, syphon=_syphon, **kwargs)


def _syphon(primary: Any, secondary: Any, admin: Any, pair: PairState) -> PairSyphon:
    """Make the syphon of a pair with the option `enable_syphon`. Other pairs do not call this function."""
    from twinbus.syphon import ThreadPairSyphon  # noqa: PLC0415 - loads the SDK

    return ThreadPairSyphon(primary, secondary, admin, pair)
