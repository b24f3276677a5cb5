"""Where a pair's backlog queues are, and whether two endpoints are one (P3, P4). Nothing is looked up here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

PRIMARY_NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
TRANSFER_SEGMENT: Final = "x-servicebus-transfer"
LOOPBACK: Final = "localhost"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Host and port of a namespace, in one spelling of each: `Endpoint.of("127.0.0.1", 5672)` is localhost's."""

    host: str
    port: int

    @classmethod
    def of(cls, host: str, port: int) -> Endpoint:
        plain = host.strip().strip("[]").rstrip(".").lower()
        address = _address(plain)
        if address is None:
            return cls(plain, port)
        return cls(LOOPBACK if address.is_loopback else str(address), port)


def same_endpoint(one: Endpoint, other: Endpoint) -> bool:
    """P3: a namespace cannot be its own secondary."""
    return one == other


def primary_name(primary: Endpoint) -> str:
    """`contoso` of contoso.servicebus.windows.net; an address or localhost has no label: host and port."""
    if primary.host == LOOPBACK or _address(primary.host) is not None:
        # A colon is no character of an entity's path.
        return f"{primary.host.replace(':', '-')}-{primary.port}"
    return primary.host.partition(".")[0]


def backlog_queue_path(name: str, index: int) -> str:
    return f"{name}/{TRANSFER_SEGMENT}/{index}"


def backlog_queue_paths(name: str, count: int) -> tuple[str, ...]:
    return tuple(backlog_queue_path(name, index) for index in range(count))


def backlog_queue_index(name: str, path: str) -> int | None:
    """Which backlog queue of this primary a path is, if it is one. Paths are case-insensitive."""
    start = backlog_queue_path(name, 0)[:-1].lower()
    number = path.strip("/").lower()
    if not number.startswith(start):
        return None
    number = number[len(start) :]
    return int(number) if number.isascii() and number.isdigit() and str(int(number)) == number else None


def extra_backlog_queues(name: str, count: int, paths: Iterable[str]) -> list[str]:
    """P6: those with an index of `count` or more, in the order of their indices."""
    found = [(index, path) for path in paths if (index := backlog_queue_index(name, path)) is not None]
    return [path for index, path in sorted(found) if index >= count]


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
