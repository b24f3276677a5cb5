"""How much of a peer's wishes one connection carries: every buffer and table of the core has its bound here."""

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class Limits:
    handle_max: int = 8191  # of each session
    max_links: int = 10_000  # of the connection
    attach_bytes: int = 16 * MIB  # of all attach frames whose links are alive: their termini and properties are kept
    incoming_window: int = 65_536  # transfers a session may send before our next flow; renewed by itself
    max_unsettled: int = 262_144  # deliveries of a session and direction that nobody has settled
    max_message_size: int = 128 * MIB  # where the link names none
    partial_bytes: int = 256 * MIB  # of all deliveries whose last frame has not come
    # False: deliveries beyond the credit are taken, because the Python SDK's sender grants itself new credit.
    enforce_credit: bool = True
    handshake_seconds: float = 60.0  # from the first byte to open
    closing_seconds: float = 10.0  # from our close to the peer's
    shortest_idle_seconds: float = 0.1  # a peer that wants heartbeats more often than this is refused
