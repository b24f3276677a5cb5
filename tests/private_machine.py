"""A machine of its own for a test: its own network, and its own copies of /etc/hosts and of certifi's certificates.

Linux namespaces make it (`unshare`), without root and without a change of this machine. Inside, every port is free, 443
and 5671 included, and a line in /etc/hosts works. So clients run there as in production.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import certifi
import pytest

from tests.cli.running import serving

_SECONDS = 30
# Variables of this machine that would replace certifi's certificates, or send requests to a proxy.
_OTHER_TRUST = (
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "http_proxy",
    "https_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
)
# Brings up the loopback device, and holds the namespaces until its input ends.
_HOLDER = """
import fcntl, socket, struct, sys
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: IFF_UP, IFF_RUNNING
print("ready", flush=True)
sys.stdin.read()
"""


class PrivateMachine:
    """A running machine. The process id of a command that runs in it is that of the command itself."""

    def __init__(self, holder: int, folder: Path) -> None:
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        self._enter = ["nsenter", f"--target={holder}", "--mount", "--net", *user]
        self.hosts = folder / "hosts"
        self.certificates = folder / "certificates.pem"
        self.hosts.write_text("127.0.0.1 localhost\n")
        self.certificates.write_bytes(Path(certifi.where()).read_bytes())
        for own, path in ((self.hosts, "/etc/hosts"), (self.certificates, certifi.where())):
            self.run("mount", "--bind", str(own), path)

    def inside(self, command: Sequence[str], folder: Path | None = None) -> list[str]:
        """Return the command that runs `command` in this machine, in `folder` or in the present folder."""
        without = [f"--unset={name}" for name in _OTHER_TRUST]
        return [*self._enter, f"--wdns={folder or Path.cwd()}", "--", "env", *without, *command]

    def name_here(self, *names: str, ca: str | Path) -> None:
        """Do what `twinbus serve --azure-names` asks for: names in /etc/hosts, and a CA that Python trusts."""
        with self.hosts.open("a") as lines:
            lines.writelines(f"127.0.0.1 {name}\n" for name in names)
        with self.certificates.open("ab") as bundle:
            bundle.write(Path(ca).read_bytes())

    def run(self, *command: str, environment: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
        """Run a command and return its output. Raises AssertionError with all that it printed if it fails."""
        done = subprocess.run(
            self.inside(command, folder),
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=4 * _SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout


@contextmanager
def running(folder: Path) -> Iterator[PrivateMachine]:
    """Start a machine, which ends with the block. Skips the test where the kernel does not allow namespaces.

    Also CI skips it then: it can install a component (`components`), but cannot change what its kernel allows. The
    summary of pytest has the reason. Any other failure fails the test.
    """
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    holder = subprocess.Popen(
        ["unshare", "--mount", "--net", *user, "--", sys.executable, "-c", _HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        if holder.stdout.readline() != b"ready\n":
            told = holder.communicate()[1].decode()
            refused = told.startswith("unshare: ") or "PermissionError" in told
            assert refused, f"the private machine did not start: {told}"
            pytest.skip(
                f"clients at the real ports of Azure: the kernel allows no namespaces here ({told.splitlines()[-1]}). "
                "Run as root, in a container with CAP_SYS_ADMIN and CAP_NET_ADMIN."
            )
        yield PrivateMachine(holder.pid, folder)
    finally:
        with contextlib.suppress(BrokenPipeError):
            holder.stdin.close()
        holder.wait(_SECONDS)
        holder.stdout.close()
        if holder.stderr is not None:
            holder.stderr.close()


@contextmanager
def with_contoso(folder: Path, *options: str) -> Iterator[tuple[PrivateMachine, dict[str, Any]]]:
    """Start a machine with a namespace as contoso.servicebus.windows.net, which Python trusts there.

    `options` are further options of `twinbus serve`. Returns the machine, and what `serve` printed about the name.
    """
    named = ("--json", "--memory", "--azure-names", "contoso=primary", *options)
    with running(folder) as machine, serving(*named, prefix=machine.inside([])) as server:
        told = server.namespaces["primary"]["azure"]
        assert told["ports"] == [5671, 443]
        machine.name_here("contoso.servicebus.windows.net", ca=told["ca"])
        yield machine, told
