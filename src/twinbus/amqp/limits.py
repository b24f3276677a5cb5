"""Limits of one connection, for every buffer and table of the AMQP core.

A server may apply smaller limits until `Connection.authenticate` is called. The values that `open` and `begin` announce
(frame size, channels, handles, window) cannot change during the connection. So the core announces the larger value, and
enforces the smaller value until the peer is authenticated. If a peer exceeds a limit before authentication, the core
closes the connection. After authentication the core ends only the link or the session, if this brings the connection
below the limit.
"""

import sys
from dataclasses import dataclass
from typing import Any

from twinbus.amqp.errors import AmqpError
from twinbus.values import Condition, NumberKeyedMap

KIB = 1024
MIB = 1024 * KIB

# Memory, in bytes, of a session and of a link without the data that the peer sent, rounded up.
SESSION_BYTES = 2 * KIB
LINK_BYTES = 1 * KIB
# Memory, in bytes, of one entry of a NumberKeyedMap without the key and the value. Measured: 190 to 206.
ENTRY_BYTES = 208


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a connection. A field that is None sets no limit, unless the field's comment says otherwise."""

    max_frame_size: int | None = None  # largest frame accepted; None: the size that our open announces
    performative_bytes: int | None = None  # largest frame without payload; such a frame is decoded as a whole
    received_bytes: int | None = None  # that the peer may send on this connection; one read may exceed the limit
    max_sessions: int = 5000  # of the connection
    handle_max: int = 8191  # of each session
    max_links: int = 10_000  # of the connection
    attach_bytes: int = 32 * MIB  # memory of the peer's open and of the attaches of all links
    incoming_window: int = 65_536  # transfers that the peer may send on a session before our next flow
    max_unsettled: int = 262_144  # unsettled deliveries of a session in one direction
    max_message_size: int = 128 * MIB  # for a link that announces no max-message-size
    partial_bytes: int = 256 * MIB  # of all deliveries whose last frame has not arrived
    # False: deliveries beyond the credit are accepted, because the Python SDK's sender grants itself new credit.
    enforce_credit: bool = True
    handshake_seconds: float = 60.0  # from the first byte to open
    authentication_seconds: float | None = None  # from the first byte to `Connection.authenticate`
    closing_seconds: float = 10.0  # from our close to the peer's
    shortest_idle_seconds: float = 0.1  # a peer that demands more frequent heartbeats is refused


class LimitExceededError(AmqpError):
    """The peer exceeded a limit. `limit` is the limit's name in metrics; the description names the limit's value."""

    def __init__(self, limit: str, description: str, condition: str = Condition.RESOURCE_LIMIT_EXCEEDED) -> None:
        super().__init__(condition, description)
        self.limit = limit


def memory_of(value: Any) -> int:
    """Return the memory of a decoded value with everything inside it, in bytes.

    A decoded value takes far more memory than its encoding: an empty list has 1 byte on the wire and 56 in memory.
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
