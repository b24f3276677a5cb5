"""Chooses the port of a namespace that will be restarted on the same port."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Final

_EPHEMERAL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT: Final = 10_000


def find_free_port(taken: Collection[int] = ()) -> int:
    """Return a free port below the range that the system uses for outgoing connections. Raises OSError if none is free.

    While the server is down, any outgoing connection could get a port of that range: even the connection of a client
    that tries to reach the server. `taken` has ports that the caller has chosen already and does not use yet.
    """
    try:
        first = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    # The module's own generator is not used: tests that run at the same time may have given it the same seed.
    generator = random.SystemRandom()
    candidates = [generator.randrange(_LOWEST_PORT, first) for _ in range(100)] if first > _LOWEST_PORT else []
    for port in (*(one for one in candidates if one not in taken), 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no port is free")


def find_free_ports(count: int, taken: Collection[int] = ()) -> list[int]:
    """Return different free ports, as `find_free_port` does."""
    ports: list[int] = []
    while len(ports) < count:
        port = find_free_port({*ports, *taken})
        if port not in ports and port not in taken:  # the system chooses the port if all candidates are in use
            ports.append(port)
    return ports
