"""Paths of the queues that pairs make in the secondary, and normalized namespace endpoints (P3, P4, S16).

A backlog queue is in the secondary, with the path `<primary name>/x-servicebus-transfer/<index>`. The primary's name is
the first label of its host name. So all clients of the same primary compute the same paths, without network I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

PRIMARY_NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
TRANSFER_SEGMENT: Final = "x-servicebus-transfer"
STATE_SEGMENT: Final = "x-twinbus-state"
_LOOPBACK: Final = "localhost"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Host and port of a namespace. Two endpoints made by `of` are equal if they name the same namespace (P3)."""

    host: str
    port: int

    @classmethod
    def of(cls, host: str, port: int) -> Endpoint:
        """Return the endpoint with normalized host: lower case, no trailing dot, `localhost` for loopback addresses."""
        plain = host.strip().strip("[]").rstrip(".").lower()
        address = _ip_address(plain)
        if address is None:
            return cls(plain, port)
        return cls(_LOOPBACK if address.is_loopback else str(address), port)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def primary_name(primary: Endpoint) -> str:
    """Return the first part of the backlog queues' paths: `contoso` for contoso.servicebus.windows.net (P4).

    For an IP address or localhost, which has no such label, the name is host and port.
    """
    if primary.host == _LOOPBACK or _ip_address(primary.host) is not None:
        # A colon is not allowed in a path.
        return f"{primary.host.replace(':', '-')}-{primary.port}"
    return primary.host.partition(".")[0]


def backlog_queue_path(name: str, index: int) -> str:
    """Return the path of the backlog queue with this index, for the primary with this name."""
    return f"{name}/{TRANSFER_SEGMENT}/{index}"


def backlog_queue_paths(name: str, count: int) -> tuple[str, ...]:
    return tuple(backlog_queue_path(name, index) for index in range(count))


def state_queue_path(name: str) -> str:
    """Return the path of the state queue for the primary with this name (S16)."""
    return f"{name}/{STATE_SEGMENT}"


def backlog_queue_index(name: str, path: str) -> int | None:
    """Return the index of a backlog queue of this primary, or None for any other path. Paths ignore case."""
    start = backlog_queue_path(name, 0)[:-1].lower()
    number = path.strip("/").lower()
    if not number.startswith(start):
        return None
    number = number[len(start) :]
    return int(number) if number.isascii() and number.isdigit() and str(int(number)) == number else None


def extra_backlog_queues(name: str, count: int, paths: Iterable[str]) -> list[str]:
    """Return the paths that are backlog queues with an index of `count` or more, sorted by index (P6)."""
    found = [(index, path) for path in paths if (index := backlog_queue_index(name, path)) is not None]
    return [path for index, path in sorted(found) if index >= count]


def _ip_address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
