"""Twinbus: paired Service Bus namespaces, and a local namespace that the official SDKs use unchanged."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinbus.pairing.calls import BacklogHandle as BacklogHandle
    from twinbus.pairing.errors import AliasInUseError as AliasInUseError
    from twinbus.pairing.errors import BacklogUnavailableError as BacklogUnavailableError
    from twinbus.pairing.errors import MessageTooLargeForBacklogError as MessageTooLargeForBacklogError
    from twinbus.pairing.errors import OptionError as OptionError
    from twinbus.pairing.errors import PartialSendError as PartialSendError
    from twinbus.pairing.errors import PrimaryUnusableError as PrimaryUnusableError
    from twinbus.pairing.errors import ScheduledInBacklogError as ScheduledInBacklogError
    from twinbus.pairing.errors import TimeToLiveError as TimeToLiveError
    from twinbus.pairing.options import SendAvailabilityOptions as SendAvailabilityOptions
    from twinbus.pairing.pair import Pair as Pair
    from twinbus.pairing.pair import pair_connection_strings as pair_connection_strings
    from twinbus.pairing.pair import pair_namespaces as pair_namespaces
    from twinbus.pairing.provisioning import ProvisioningError as ProvisioningError
    from twinbus.pairing.sides import PairClosedError as PairClosedError
    from twinbus.pairing.sides import PairFaultedError as PairFaultedError
    from twinbus.pairing.sides import PairForkedError as PairForkedError
    from twinbus.pairing.sides import PairingRefusedError as PairingRefusedError

# Looked up when first used: importing Twinbus brings no SDK with it.
_HOMES = {
    "BacklogHandle": "calls",
    "AliasInUseError": "errors",
    "BacklogUnavailableError": "errors",
    "MessageTooLargeForBacklogError": "errors",
    "OptionError": "errors",
    "PartialSendError": "errors",
    "PrimaryUnusableError": "errors",
    "ScheduledInBacklogError": "errors",
    "TimeToLiveError": "errors",
    "SendAvailabilityOptions": "options",
    "Pair": "pair",
    "pair_connection_strings": "pair",
    "pair_namespaces": "pair",
    "ProvisioningError": "provisioning",
    "PairClosedError": "sides",
    "PairFaultedError": "sides",
    "PairForkedError": "sides",
    "PairingRefusedError": "sides",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'twinbus' has no attribute {name!r}")
    return getattr(import_module(f"twinbus.pairing.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
