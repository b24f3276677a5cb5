"""A port for a namespace that is to come back on it: which one is chosen, and why not just any free one."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

_EPHEMERAL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT: Final = 10_000


def find_free_port() -> int:
    """A free port below those the system gives to outgoing connections. OSError where there is none.

    One of those could be taken by any connection while the server is down, even by a client that tries to reach it.
    """
    try:
        first = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    # Tests that run side by side may share a seed: the system's chance does not.
    chance = random.SystemRandom()
    candidates = [chance.randrange(_LOWEST_PORT, first) for _ in range(100)] if first > _LOWEST_PORT else []
    for port in (*candidates, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no port is free")
