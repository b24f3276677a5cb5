"""The CA of a local namespace, for the administration client of this namespace only.

A local namespace (on this machine) has a certificate that no public CA signed. The namespace offers the certificate of
its own CA on its plain AMQP port. `LocalAuthority` fetches that certificate. No remote host is asked for one.
"""

from __future__ import annotations

import http.client
import ipaddress
import ssl
import tempfile
import threading
from typing import Final

_CA_PATH: Final = "/$ca"
_HTTPS_PORT: Final = 443
_MOST_BYTES: Final = 64 * 1024


class LocalAuthority:
    """The certificate file of a local namespace for `connection_verify=`. Fetched at first use, removed by `close`."""

    def __init__(self, namespace: str, seconds: float) -> None:
        self._host, self._port = split_namespace(namespace)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._fetches = 0
        self._file: tempfile._TemporaryFileWrapper[bytes] | None = None
        # Other requests may still read these files, so they stay until `close`.
        self._outdated: list[tempfile._TemporaryFileWrapper[bytes]] = []
        self._is_closed = False

    @property
    def is_local(self) -> bool:
        """Whether the namespace is on this machine."""
        return is_loopback(self._host)

    def file(self) -> str | None:
        """Return the path of the file, or None if the namespace offers no certificate. Blocks."""
        before = self._fetches
        with self._lock:
            # A caller that waited while another caller fetched uses the result of that fetch: requests for ten queues
            # fetch only once.
            if self._file is None and self.is_local and self._fetches == before:
                self._fetches += 1
                offered = fetch_authority(self._host, self._port, self._seconds)
                if offered is not None and not self._is_closed:
                    # The file stays open, because closing removes the file.
                    self._file = tempfile.NamedTemporaryFile(prefix="twinbus-ca-", suffix=".pem")  # noqa: SIM115
                    self._file.write(offered.encode("ascii"))
                    self._file.flush()
            return None if self._file is None else self._file.name

    def instead_of(self, used: str | None) -> str | None:
        """Return a newer file than `used`, with the certificate that the namespace offers now. Blocks."""
        with self._lock:
            if self._file is not None and self._file.name == used:
                self._outdated.append(self._file)
                self._file = None
        return self.file()

    def close(self) -> None:
        # Without the lock: a fetch holds it, and an asyncio pair that closes must not wait for a silent namespace.
        self._is_closed = True
        for file in (*self._outdated, *([] if self._file is None else [self._file])):
            file.close()
        self._outdated, self._file = [], None


def split_namespace(namespace: str) -> tuple[str, int]:
    """Return host and port of a `fully_qualified_namespace`."""
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
    """Return the PEM text that a local namespace offers, or None."""
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    try:
        connection.connect()
        # Whatever address the name resolves to: the certificate must come from this machine.
        if not is_loopback(str(connection.sock.getpeername()[0])):
            return None
        connection.request("GET", _CA_PATH)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            return None
        text = response.read(_MOST_BYTES).decode("ascii")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
        return text
    except (OSError, http.client.HTTPException, ValueError):
        # ssl.SSLError is an OSError: a text that is no certificate is not trusted.
        return None
    finally:
        connection.close()
