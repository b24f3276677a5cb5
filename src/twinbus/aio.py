"""The asyncio face of the public API."""

from twinbus.pairing.aio_pair import Pair, PairSide, pair_connection_strings, pair_namespaces
from twinbus.pairing.aio_receivers import QuietReceiver
from twinbus.pairing.aio_sender import PairedSender
from twinbus.pairing.calls import BacklogHandle
from twinbus.pairing.options import SendAvailabilityOptions
from twinbus.pairing.partnership import EntityState, Syphon

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
