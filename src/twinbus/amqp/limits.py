"""Limits of one connection: every buffer and table of the core has its bound here.

A server may hold a connection to smaller limits until `Connection.authenticate` is called. The counts that `open` and
`begin` announce (frame size, channels, handles, window) cannot change later, so the core announces the larger value
and enforces the smaller one until then. A peer that exceeds a limit before that loses the connection; afterwards it
loses the link or session where that is enough.
"""

import sys
from dataclasses import dataclass
from typing import Any

from twinbus.amqp.errors import AmqpError
from twinbus.values import Condition, NumberKeyedMap

KIB = 1024
MIB = 1024 * KIB

# Memory of a session and of a link without anything the peer sent, rounded up.
SESSION_BYTES = 2 * KIB
LINK_BYTES = 1 * KIB
# Memory that a NumberKeyedMap needs for an entry, beside the key and the value. Measured: 190 to 206.
ENTRY_BYTES = 208


@dataclass(frozen=True, slots=True)
class Limits:
    max_frame_size: int | None = None  # largest frame taken; None: what our open announces
    performative_bytes: int | None = None  # of a frame without payload, which is decoded whole; None: no other limit
    received_bytes: int | None = None  # most bytes the peer may send on this connection; may be exceeded by one read
    max_sessions: int = 5000  # of the connection
    handle_max: int = 8191  # of each session
    max_links: int = 10_000  # of the connection
    attach_bytes: int = 32 * MIB  # memory of the peer's open, and of the attaches of links that are alive
    incoming_window: int = 65_536  # transfers a session may send before our next flow; renewed by itself
    max_unsettled: int = 262_144  # deliveries of a session and direction that nobody has settled
    max_message_size: int = 128 * MIB  # where the link names none
    partial_bytes: int = 256 * MIB  # of all deliveries whose last frame has not come
    # False: deliveries beyond the credit are taken, because the Python SDK's sender grants itself new credit.
    enforce_credit: bool = True
    handshake_seconds: float = 60.0  # from the first byte to open
    authentication_seconds: float | None = None  # from the first byte to `Connection.authenticate`; None: no limit
    closing_seconds: float = 10.0  # from our close to the peer's
    shortest_idle_seconds: float = 0.1  # a peer that wants heartbeats more often than this is refused


class LimitExceededError(AmqpError):
    """The peer exceeded a limit. `limit` names it for metrics; the description names limit and value for the peer."""

    def __init__(self, limit: str, description: str, condition: str = Condition.RESOURCE_LIMIT_EXCEEDED) -> None:
        super().__init__(condition, description)
        self.limit = limit


def memory_of(value: Any) -> int:
    """Memory of a decoded value with everything inside it, in bytes.

    Decoded values take far more memory than their bytes: an empty list is one byte on the wire and 56 in memory.
    """
    total, open_values = 0, [value]
    while open_values:
        one = open_values.pop()
        if one is None or one is True or one is False:
            continue
        total += sys.getsizeof(one)
        if isinstance(one, dict | NumberKeyedMap):
            open_values.extend(one)
            open_values.extend(one.values())
            if isinstance(one, NumberKeyedMap):
                total += len(one) * ENTRY_BYTES
        elif isinstance(one, (list, tuple)):
            open_values.extend(one)
        elif (fields := getattr(one, "__dataclass_fields__", None)) is not None:
            open_values.extend(getattr(one, name) for name in fields)
    return total
