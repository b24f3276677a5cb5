"""Ports on which several namespaces answer under the names that they have in Azure (`twinbus serve --azure-names`).

Clients of Service Bus go to fixed ports of `NAME.servicebus.windows.net`: 5671 for AMQP, 443 for HTTPS and WebSockets,
always in TLS. Here both ports serve all namespaces. The name that a client uses chooses its namespace. One certificate
has all names. Its authority may sign for these names only, and the authority's key is never written to a disk.

The names must lead to this machine, and clients must trust the authority. Twinbus changes neither by itself:
`set_up_lines` says what to do.
"""

from __future__ import annotations

import errno
import shlex
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from twinbus.errors import OperatorError
from twinbus.namespace.engine.descriptions import AuthorizationRule
from twinbus.namespace.front import Listener, SharedPort, azure_ca_path, constrained_context
from twinbus.namespace.own_names import Authority, SharedNames, is_wildcard
from twinbus.namespace.serve_plan import AMQPS_PORT, HTTPS_PORT, AzureNames
from twinbus.namespace.server import NamespaceServer, bind_port, is_loopback

_FIRST_UNPRIVILEGED: Final = 1024
_SYSTEM_STORE: Final = "/usr/local/share/ca-certificates"  # Debian's


class AzurePorts:
    """The two ports. The constructor binds them. `listen` is called when the namespaces have started."""

    def __init__(self, names: AzureNames, host: str, tls: Path) -> None:
        """Bind the ports. `tls` is the directory of the certificates. Raises OperatorError."""
        self.namespaces = names.namespaces
        self.host = host
        self.ca = azure_ca_path(tls)
        self.replaces_ca = False
        """Whether `listen` made a CA in the place of an earlier one, which clients may still trust."""
        self._tls = tls
        self._listeners: list[Listener] = []
        with ExitStack() as undone:
            self._sockets = [undone.enter_context(_bind(host, port)) for port in (names.amqps_port, names.https_port)]
            undone.pop_all()
        self.ports = tuple(int(one.getsockname()[1]) for one in self._sockets)
        self._address = str(self._sockets[0].getsockname()[0])

    def names_of(self, namespace: str) -> list[str]:
        """Return the host names of a namespace."""
        return [name for name, owner in self.namespaces.items() if owner == namespace]

    def own_names(self, namespace: str) -> tuple[str, ...]:
        """Return `NAME:PORT` for each name and port under which the namespace may be addressed.

        These include the ports that clients use: a redirection may lead from them to the ports here.
        """
        ports = dict.fromkeys((AMQPS_PORT, HTTPS_PORT, *self.ports))
        return tuple(f"{name}:{port}" for name in self.names_of(namespace) for port in ports)

    def listen(self, servers: Sequence[NamespaceServer]) -> None:
        """Listen for the namespaces, which have started. Makes the certificates if needed. Blocks on the disk."""
        contexts = {server.options.name: server.context for server in servers}
        earlier = self.ca.read_bytes() if self.ca.exists() else None
        tls = constrained_context(self._tls, sorted(self.namespaces))
        self.replaces_ca = earlier not in (None, self.ca.read_bytes())
        shared = SharedPort(
            tls,
            SharedNames(self.namespaces, (AMQPS_PORT, HTTPS_PORT, *self.ports)),
            contexts,
        )
        first = contexts[next(iter(self.namespaces.values()))]
        self._listeners = [Listener(first, one, shared) for one in self._sockets]

    def close(self) -> None:
        """Stop accepting. Accepted connections belong to their namespaces and continue."""
        for listener in self._listeners:
            listener.close()
        for one in self._sockets:
            one.close()

    def connection_string(self, name: str, rule: AuthorizationRule) -> str:
        """Return a connection string as the portal of Azure shows it."""
        return f"Endpoint=sb://{name}/;SharedAccessKeyName={rule.name};SharedAccessKey={rule.primary_key}"

    def set_up_lines(self) -> list[str]:
        """Return what to do so that clients reach the namespaces and trust them."""
        lines = [*self._hosts_lines(), *self._redirection_lines()]
        if self.replaces_ca:
            lines += [
                "The CA is new: the names have changed, or the earlier CA was about to expire. Remove the earlier one",
                "from each store that trusts it. In the system's store, the command below replaces it. In Java's:",
                "  keytool -delete -alias twinbus -keystore a.p12 -storepass changeit",
            ]
        path = str(self.ca.absolute())
        ca = shlex.quote(path)
        lines += [
            "Let clients trust the CA, which can sign for these names only (no process has its key any more):",
            f"  system:  sudo cp {ca} {_SYSTEM_STORE}/twinbus-azure.crt && sudo update-ca-certificates",
            f"  Python:  connection_verify={path!r} for each client,",
            f"           REQUESTS_CA_BUNDLE={ca} for administration clients",
            f"  Node:    NODE_EXTRA_CA_CERTS={ca}",
            f"  Java:    keytool -importcert -noprompt -alias twinbus -file {ca} -keystore a.p12 -storepass changeit",
            "           then -Djavax.net.ssl.trustStore=a.p12 -Djavax.net.ssl.trustStorePassword=changeit",
        ]
        return lines

    def _hosts_lines(self) -> list[str]:
        if not is_wildcard(self.host):
            lines = ["Add to /etc/hosts, where the clients run (and remove when you are done):"]
            return lines + [f"  {self._address} {name}" for name in self.namespaces]
        lines = ["Add to /etc/hosts of this machine, if clients run on it (and remove when you are done):"]
        lines += [f"  127.0.0.1 {name}" for name in self.namespaces]
        lines.append("Add to /etc/hosts of each other machine or container where clients run:")
        return lines + [f"  ADDRESS-OF-THIS-MACHINE {name}" for name in self.namespaces]

    def _redirection_lines(self) -> list[str]:
        """Return how to redirect the ports that clients use, if the ports here are others.

        On this machine, REDIRECT leads to 127.0.0.1 or ::1, where a server with another address does not listen.
        """
        moved = [pair for pair in zip((AMQPS_PORT, HTTPS_PORT), self.ports, strict=True) if pair[0] != pair[1]]
        if not moved:
            return []
        is_local, is_everywhere = is_loopback(self.host), is_wildcard(self.host)
        own = "ip6tables" if ":" in self._address else "iptables"
        # A server on `::` is reached over IPv4 too. The lines for this machine have 127.0.0.1.
        inner = "iptables" if is_everywhere else own
        outer = ("iptables", "ip6tables") if is_everywhere and ":" in self._address else (own,)
        lines = ["Clients use the ports 5671 and 443. Redirect them on this machine, for its own clients:"]
        for theirs, ours in moved:
            target = f"REDIRECT --to-ports {ours}"
            if not is_everywhere and self._address not in ("127.0.0.1", "::1"):
                target = f"DNAT --to-destination {Authority(self._address, ours)}"
            lines.append(f"  sudo {inner} -t nat -A OUTPUT -o lo -p tcp --dport {theirs} -j {target}")
        if not is_local:
            lines.append("And for clients on other machines or in containers:")
            for tool in outer:
                for theirs, ours in moved:
                    lines.append(
                        f"  sudo {tool} -t nat -A PREROUTING -p tcp --dport {theirs} -j REDIRECT --to-ports {ours}"
                    )
        return lines


def _bind(host: str, port: int) -> socket.socket:
    try:
        return bind_port(host, port)
    except OSError as error:
        text = f"--azure-names cannot listen on {host}:{port}: {error.strerror or error}"
        hint = "End the program that uses the port, or give others with --azure-ports."
        if error.errno in (errno.EACCES, errno.EPERM):
            text += f". Ports below {_FIRST_UNPRIVILEGED} are for root"
            hint = (
                f"Allow them, until the machine starts again: sudo sysctl net.ipv4.ip_unprivileged_port_start={port}. "
                "Or give other ports with --azure-ports 15671,10443, and redirect 5671 and 443 as it then prints."
            )
        raise OperatorError(text, hint) from error
