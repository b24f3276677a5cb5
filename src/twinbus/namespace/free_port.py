"""Chooses the port of a namespace that will be restarted on the same port."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Final

_EPHEMERAL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT: Final = 10_000
_TRIES: Final = 100


def find_free_port(taken: Collection[int] = ()) -> int:
    """Return a free port below the range that the system uses for outgoing connections. Raises OSError if none is free.

    While the server is down, any outgoing connection could get a port of that range: even the connection of a client
    that tries to reach the server. None of the ports `taken` is returned: the caller has chosen them already.
    """
    try:
        first = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    # The module's own generator is not used: tests that run at the same time may have given it the same seed.
    generator = random.SystemRandom()
    candidates = [generator.randrange(_LOWEST_PORT, first) for _ in range(_TRIES)] if first > _LOWEST_PORT else []
    # If all candidates are in use, the system chooses a port: it does so for port 0.
    for candidate in (*candidates, *[0] * _TRIES):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                continue
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port
    raise OSError("no port is free")


def find_free_ports(count: int, taken: Collection[int] = ()) -> list[int]:
    """Return different free ports, as `find_free_port` does."""
    ports: list[int] = []
    while len(ports) < count:
        ports.append(find_free_port({*ports, *taken}))
    return ports
