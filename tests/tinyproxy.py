"""A real CONNECT proxy for tests: tinyproxy, on a free port. Without it, a test is skipped, and fails in CI."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.components import component_missing
from twinbus.namespace import find_free_port

_SECONDS = 20
_CONFIGURATION = """Port {port}
Listen 127.0.0.1
Allow 127.0.0.1
MaxClients 100
Timeout 600
LogLevel Connect
LogFile "{log}"
{credentials}
"""


@dataclass(frozen=True)
class Tinyproxy:
    """A running proxy. Its log names every host that it connected to."""

    port: int
    log: Path
    username: str | None
    password: str | None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def for_sdk(self) -> dict[str, object]:
        """The option `http_proxy` of azure-servicebus."""
        credentials = {"username": self.username, "password": self.password} if self.username else {}
        return {"proxy_hostname": "127.0.0.1", "proxy_port": self.port, **credentials}

    @property
    def tunnels(self) -> int:
        """How many CONNECT requests the proxy has carried out."""
        return self.log.read_text().count("Established connection to host")


@contextmanager
def running(folder: Path, *, username: str | None = None, password: str | None = None) -> Iterator[Tinyproxy]:
    """Run a proxy that listens, with or without credentials. It ends with the block."""
    command = shutil.which("tinyproxy")
    if command is None:
        component_missing("tinyproxy", "tinyproxy")
    port, log, file = find_free_port(), folder / "tinyproxy.log", folder / "tinyproxy.conf"
    credentials = f"BasicAuth {username} {password}" if username else ""
    log.touch(mode=0o666)
    file.write_text(_CONFIGURATION.format(port=port, log=log, credentials=credentials))
    process = subprocess.Popen([command, "-d", "-c", str(file)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_it_listens(process, port)
        yield Tinyproxy(port, log, username, password)
    finally:
        process.terminate()
        process.wait(_SECONDS)


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=_SECONDS).close()
        except ConnectionRefusedError:
            continue
        return
    raise AssertionError(f"tinyproxy ended with {process.returncode}")
