"""Chooses the port of a namespace that will be restarted on the same port."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

_EPHEMERAL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT: Final = 10_000


def find_free_port() -> int:
    """Return a free port below the range that the system uses for outgoing connections. Raises OSError if none is free.

    While the server is down, any outgoing connection could get a port of that range: even the connection of a client
    that tries to reach the server.
    """
    try:
        first = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    # The module's own generator is not used: tests that run at the same time may have given it the same seed.
    generator = random.SystemRandom()
    candidates = [generator.randrange(_LOWEST_PORT, first) for _ in range(100)] if first > _LOWEST_PORT else []
    for port in (*candidates, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no port is free")
