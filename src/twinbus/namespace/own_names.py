"""The names of a namespace: each `host:port` that a client may use for the namespace (X3).

The owner of a web page cannot change the origin of the page, but can change the address to which the page's host name
resolves. After a page was loaded from `evil.example`, this name may resolve to 127.0.0.1 (DNS rebinding). The browser
then lets the page read the answers of the namespace. But the request still contains the page's host name: in `Host`,
and in the audience of any token that the page signs with the public default key. So a namespace accepts requests only
for names whose address an attacker cannot change:

- `localhost`, and every loopback address: they are resolved without a name server;
- the IP address at which the connection arrived: an IP address is not resolved at all;
- the address or name of `--host`, and the names of `--host-name`: the operator is responsible for these.

The host name of the machine is not accepted, because the name server of the network decides to which address it
resolves. This module is pure and resolves no name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple, Protocol

_PORT: Final = r"(?::(?P<port>[0-9]{1,5}))?"
_IPV6: Final = r"(?P<address>[0-9A-Fa-f:.]{2,45})"
_ZONE: Final = r"(?P<zone>[A-Za-z0-9_.\-]{1,32})"
_BARE_IPV6: Final = re.compile(rf"{_IPV6}(?:%{_ZONE})?")
# In a URL the % before a zone is written as %25 (RFC 6874).
_BRACKETED_IPV6: Final = re.compile(rf"\[{_IPV6}(?:%(?:25)?{_ZONE})?\]{_PORT}")
_NAMED: Final = re.compile(rf"(?P<name>[\w.\-]+){_PORT}")
_LABELS: Final = re.compile(r"[a-z0-9_\-]+(?:\.[a-z0-9_\-]+)*")
_WILDCARDS: Final = ("", "0.0.0.0", "::")  # noqa: S104 - compared with, never bound
_LONGEST_NAME: Final = 253
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class Authority(NamedTuple):
    """A host in its canonical spelling, and a port. The port is None if the text had no port.

    An IPv6 address may have a zone: `fe80::1%eth0`.
    """

    host: str
    port: int | None = None

    def __str__(self) -> str:
        """Return the authority as it is written in a URL."""
        host = f"[{self.host.replace('%', '%25')}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"


def parse_authority(text: str) -> Authority:
    """Parse `host`, `host:port` or `[address]:port`. Raises ValueError for other texts, also for one with a user name.

    An IPv6 address without a port may be written without brackets, as AMQP clients do.
    """
    unreadable = ValueError(f"{shortened(text)} is not a host name or an address, with or without a port")
    if len(text) > _LONGEST_NAME + len(":65535"):
        raise unreadable
    if text.count(":") > 1:
        found = (_BRACKETED_IPV6 if text.startswith("[") else _BARE_IPV6).fullmatch(text)
        if found is None or _address(found["address"]) is None:
            raise unreadable
        host = one_spelling(found["address"])
        if found["zone"] is not None:
            if ":" not in host:  # an IPv4 address in IPv6 form
                raise unreadable
            host = f"{host}%{found['zone'].lower()}"
    else:
        found = _NAMED.fullmatch(text)
        host = "" if found is None else one_spelling(found["name"])
        if found is None or not _LABELS.fullmatch(host):
            raise unreadable
    digits = found.groupdict().get("port")
    port = None if digits is None else int(digits)
    if port is not None and port > 65535:
        raise ValueError(f"{shortened(text)} has a port above 65535")
    return Authority(host, port)


def one_spelling(host: str) -> str:
    """Return the canonical spelling of a host: lower case, addresses in their short form, names in ASCII.

    The zone of an IPv6 address is not changed.
    """
    host = host.removeprefix("[").removesuffix("]").lower().removesuffix(".")
    plain, percent, zone = host.partition("%")
    if (address := _address(plain)) is not None:
        return f"{address}{percent}{zone}"
    if not host.isascii():
        try:
            return host.encode("idna").decode()
        except UnicodeError:
            return host
    return host


def is_wildcard(host: str) -> bool:
    """Return whether listening on `host` means listening on every address of the machine."""
    return host.strip("[]") in _WILDCARDS


def shortened(text: str) -> str:
    """Return a name that a client sent, quoted and cut to 100 characters, for an error message."""
    return repr(text if len(text) <= 100 else f"{text[:100]}…")


class OwnNames:
    """The names of one namespace.

    `host` is the address or name on which the namespace listens. `names` are the names of `--host-name`: `NAME:PORT`,
    or `NAME` for the port of the namespace. Raises ValueError for an invalid name.
    """

    def __init__(self, port: int, host: str = "127.0.0.1", names: Iterable[str] = ()) -> None:
        self.port = port
        given = [] if is_wildcard(host) else [Authority(one_spelling(host), port)]
        for name in names:
            read = parse_authority(name)
            given.append(read if read.port is not None else read._replace(port=port))
        self._given = tuple(given)

    def owns(self, authority: Authority, arrived_at: str | None) -> bool:
        """Return whether `authority` is a name of this namespace. An authority without a port matches.

        `arrived_at` is the address of this end of the connection, or None if that address is unknown. The zone of an
        IPv6 address has a meaning only on the client's machine, so zones are not compared. A loopback address needs no
        zone, so a loopback address with a zone matches only if it is the address of `--host`, of `--host-name` or of
        the connection.
        """
        host, zone = _split_zone(authority.host)
        for own in self._given:
            if host == _split_zone(own.host)[0] and authority.port in (None, own.port):
                return True
        if authority.port not in (None, self.port):
            return False
        address = _address(host)
        if address is None:
            return host == "localhost"
        if arrived_at is not None and host == _split_zone(one_spelling(arrived_at))[0]:
            return True
        return address.is_loopback and not zone

    def is_own(self, text: str, arrived_at: str | None) -> bool:
        """Return whether `host` or `host:port`, as a client wrote it, is a name of this namespace."""
        try:
            return self.owns(parse_authority(text), arrived_at)
        except ValueError:
            return False

    def refusal(self, given: str, arrived_at: str | None) -> str:
        """Return why a client that gave this name is refused, and what the operator can do."""
        names = [Authority("localhost", self.port), Authority("127.0.0.1", self.port), Authority("::1", self.port)]
        if arrived_at is not None:
            names.append(Authority(one_spelling(arrived_at), self.port))
        known = ", ".join(map(str, dict.fromkeys([*names, *self._given])))
        return (
            f"{shortened(given)} is not a name of this namespace; its names are {known}. If clients reach it under "
            "another name or port, start it with --host-name NAME or --host-name NAME:PORT."
        )


class SharedNames:
    """Host names of several namespaces, on ports that these namespaces share (`azure_ports`)."""

    def __init__(self, namespaces: Mapping[str, str], ports: Collection[int]) -> None:
        """`namespaces` maps each host name to the name of its namespace. `ports` are those that clients may name."""
        self._namespaces = {one_spelling(host): name for host, name in namespaces.items()}
        self._ports = frozenset(ports)

    def namespace_of(self, text: str) -> str | None:
        """Return the namespace that `host` or `host:port` belongs to, or None."""
        try:
            authority = parse_authority(text)
        except ValueError:
            return None
        return self._namespaces.get(authority.host) if authority.port in (None, *self._ports) else None

    def owns(self, authority: Authority, arrived_at: str | None) -> bool:
        """Return whether `authority` is a name of one of the namespaces. The address of the connection is no name."""
        return self.namespace_of(str(authority)) is not None

    def is_own(self, text: str, arrived_at: str | None) -> bool:
        return self.namespace_of(text) is not None

    def refusal(self, given: str, arrived_at: str | None) -> str:
        """Return why a client that gave this name is refused, and what the operator can do."""
        known = ", ".join(f"{host} ({name})" for host, name in self._namespaces.items())
        return (
            f"{shortened(given)} is not a name of a namespace on this port; the names are {known}. Another one is "
            "added with --azure-names NAME=NAMESPACE."
        )


class HostNames(Protocol):
    """Tells own names from foreign ones: `OwnNames` or `SharedNames`."""

    def owns(self, authority: Authority, arrived_at: str | None) -> bool: ...
    def is_own(self, text: str, arrived_at: str | None) -> bool: ...
    def refusal(self, given: str, arrived_at: str | None) -> str: ...


def is_same_origin(origin: str, authority: Authority) -> bool:
    """Return whether an `Origin` header belongs to a page on this host and port, over HTTP or HTTPS."""
    scheme, _, rest = origin.partition("://")
    default = _DEFAULT_PORTS.get(scheme.lower())
    if default is None:
        return False
    try:
        theirs = parse_authority(rest)
    except ValueError:
        return False
    return theirs.host == authority.host and (theirs.port or default) == (authority.port or default)


def _split_zone(host: str) -> tuple[str, str]:
    plain, _, zone = host.partition("%")
    return plain, zone


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return `host` as an address, or None if `host` is a name. An IPv4 address mapped into IPv6 becomes IPv4."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
