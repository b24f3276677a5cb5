"""Twinbus: paired Service Bus namespaces, and a local namespace that the official SDKs use unchanged."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from azure.servicebus import ServiceBusClient
    from azure.servicebus.management import ServiceBusAdministrationClient

    from twinbus.backlog import AliasInUseError as AliasInUseError
    from twinbus.errors import OptionError as OptionError
    from twinbus.pairing.calls import BacklogHandle as BacklogHandle
    from twinbus.pairing.errors import BacklogUnavailableError as BacklogUnavailableError
    from twinbus.pairing.errors import MessageTooLargeForBacklogError as MessageTooLargeForBacklogError
    from twinbus.pairing.errors import PartialSendError as PartialSendError
    from twinbus.pairing.errors import PrimaryUnusableError as PrimaryUnusableError
    from twinbus.pairing.errors import ScheduledInBacklogError as ScheduledInBacklogError
    from twinbus.pairing.errors import TimeToLiveError as TimeToLiveError
    from twinbus.pairing.options import SendAvailabilityOptions as SendAvailabilityOptions
    from twinbus.pairing.pair_sides import NotPairedError as NotPairedError
    from twinbus.pairing.pair_sides import PairClosedError as PairClosedError
    from twinbus.pairing.pair_sides import PairFaultedError as PairFaultedError
    from twinbus.pairing.pair_sides import PairForkedError as PairForkedError
    from twinbus.pairing.pair_sides import PairingRefusedError as PairingRefusedError
    from twinbus.pairing.pair_sides import PairLoopError as PairLoopError
    from twinbus.pairing.pair_state import PairState
    from twinbus.pairing.pair_state import PairSyphon as _Syphon
    from twinbus.pairing.provisioning import ProvisioningError as ProvisioningError
    from twinbus.pairing.sync.pair import Pair as Pair

# Looked up when first used: importing Twinbus brings no SDK with it.
_HOMES = {
    "BacklogHandle": "pairing.calls",
    "AliasInUseError": "backlog",
    "BacklogUnavailableError": "pairing.errors",
    "MessageTooLargeForBacklogError": "pairing.errors",
    "OptionError": "errors",
    "PartialSendError": "pairing.errors",
    "PrimaryUnusableError": "pairing.errors",
    "ScheduledInBacklogError": "pairing.errors",
    "TimeToLiveError": "pairing.errors",
    "SendAvailabilityOptions": "pairing.options",
    "Pair": "sync.pair",
    "ProvisioningError": "pairing.provisioning",
    "NotPairedError": "pairing.pair_sides",
    "PairClosedError": "pairing.pair_sides",
    "PairFaultedError": "pairing.pair_sides",
    "PairForkedError": "pairing.pair_sides",
    "PairingRefusedError": "pairing.pair_sides",
    "PairLoopError": "pairing.pair_sides",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'twinbus' has no attribute {name!r}")
    return getattr(import_module(f"twinbus.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def pair_namespaces(
    primary: ServiceBusClient,
    secondary: ServiceBusClient,
    *,
    secondary_admin: ServiceBusAdministrationClient | None = None,
    options: SendAvailabilityOptions | None = None,
) -> Pair:
    """Pair two namespaces on clients the caller made (P1). The clients stay the caller's to close."""
    from twinbus.pairing.sync import pair  # noqa: PLC0415 - as above

    return pair.pair_namespaces(primary, secondary, secondary_admin=secondary_admin, options=options, syphon=_syphon)


def pair_connection_strings(
    primary: str, secondary: str, *, options: SendAvailabilityOptions | None = None, **kwargs: Any
) -> Pair:
    """Pair two namespaces by their connection strings. Keywords go to both clients, which are the pair's own."""
    from twinbus.pairing.sync import pair  # noqa: PLC0415 - as above

    return pair.pair_connection_strings(primary, secondary, options=options, syphon=_syphon, **kwargs)


def _syphon(primary: Any, secondary: Any, admin: Any, pair: PairState) -> _Syphon:
    """For pairs with `enable_syphon` alone."""
    from twinbus.syphon import ThreadPairSyphon  # noqa: PLC0415 - as above

    return ThreadPairSyphon(primary, secondary, admin, pair)
