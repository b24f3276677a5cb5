"""How an administration client comes to trust a local namespace, whose certificate no public authority signed.

Only where the host is this very machine: the authority that the namespace offers beside its plain AMQP is trusted for
this one client, as its plain AMQP is. Anywhere else nothing is asked and nothing of the verification is taken away.
"""

from __future__ import annotations

import http.client
import ipaddress
import ssl
import tempfile
import threading
from typing import Final

AUTHORITY_PATH: Final = "/$ca"
_HTTPS_PORT: Final = 443
_MOST_BYTES: Final = 64 * 1024


class LocalAuthority:
    """The certificate file for `connection_verify=`, fetched when it is first wanted, removed on close."""

    def __init__(self, namespace: str, seconds: float) -> None:
        self._host, self._port = split_namespace(namespace)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._fetches = 0
        self._file: tempfile._TemporaryFileWrapper[bytes] | None = None

    @property
    def is_for(self) -> bool:
        """Whether the namespace is one on this machine."""
        return is_loopback(self._host)

    def file(self) -> str | None:
        """None where nothing is offered: then the client verifies as it always does. Blocks."""
        before = self._fetches
        with self._lock:
            # Whoever waited here for another's fetch takes what came of it: ten queues ask a silent namespace once.
            if self._file is None and self.is_for and self._fetches == before:
                self._fetches += 1
                offered = fetch_authority(self._host, self._port, self._seconds)
                if offered is not None:
                    # Kept open: closing removes it.
                    self._file = tempfile.NamedTemporaryFile(prefix="twinbus-ca-", suffix=".pem")  # noqa: SIM115
                    self._file.write(offered.encode("ascii"))
                    self._file.flush()
            return None if self._file is None else self._file.name

    def forget(self) -> None:
        """A namespace that was started anew may have another authority."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    close = forget


def split_namespace(namespace: str) -> tuple[str, int]:
    """Host and port of a `fully_qualified_namespace`."""
    host, colon, port = namespace.rpartition(":")
    if colon and port.isdigit() and not host.endswith(":") and (":" not in host or host.startswith("[")):
        return host.strip("[]"), int(port)
    return namespace.strip("[]"), _HTTPS_PORT


def is_loopback(host: str) -> bool:
    plain = host.rstrip(".").lower()
    if plain == "localhost":
        return True
    try:
        return ipaddress.ip_address(plain.partition("%")[0]).is_loopback
    except ValueError:
        return False


def fetch_authority(host: str, port: int, seconds: float) -> str | None:
    """The PEM text that a local namespace offers; None if nobody there offers one."""
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        connection.connect()
        # Whatever the machine's resolver makes of the name: the certificate comes from this machine or not at all.
        if not is_loopback(str(connection.sock.getpeername()[0])):
            return None
        connection.request("GET", AUTHORITY_PATH)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            return None
        text = response.read(_MOST_BYTES).decode("ascii")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
        return text
    except (OSError, http.client.HTTPException, ValueError):
        # ssl.SSLError is an OSError: what is no certificate is not trusted.
        return None
    finally:
        connection.close()
