"""Local namespaces for tests and demonstrations: real servers in a separate process, which a test can kill."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from twinbus.extras import require
from twinbus.namespace import find_free_ports
from twinbus.testing.server_process import LocalNamespaceError, ServedNamespace, ServerProcess

if TYPE_CHECKING:
    from twinbus.namespace import AuthorizationRule, FaultClient

_START_SECONDS: Final = 30.0
_TRIES: Final = 5

# A path to a configuration file, or the content of a file in our own format (see `twinbus serve --config`).
Config = Path | Mapping[str, Any]


class LocalNamespaces:
    """Several namespaces in one process: `with LocalNamespaces("primary", "secondary") as pair: pair["primary"]…`.

    Without `data`, the data of the namespaces is in a temporary directory that `close()` removes. With `memory`, the
    data is not on disk. After a second start, ports and data are the same as before. `host_names` are further names
    that clients may use, each `NAME` or `NAME:PORT`; the server refuses requests and tokens for other names. `jwks` is
    a file with the public keys of an issuer, or its content: the namespaces accept JSON web tokens of this issuer, for
    `audience`, and if `issuer` is given only with this issuer.

    Example: `with LocalNamespaces("primary", "secondary") as pair: text = pair["primary"].connection_string`.
    """

    def __init__(
        self,
        *names: str,
        data: Path | None = None,
        memory: bool = False,
        ports: Mapping[str, int] | None = None,
        config: Config | None = None,
        rules: Sequence[AuthorizationRule] = (),
        host_names: Sequence[str] = (),
        jwks: Path | Mapping[str, Any] | None = None,
        audience: str | None = None,
        issuer: str | None = None,
        log_level: str = "info",
    ) -> None:
        if memory and data is not None:
            raise ValueError("data and memory exclude each other: give one of them")
        if config is not None and rules:
            raise ValueError("config and rules exclude each other: put the rules into the config")
        self.names = names or ("primary", "secondary")
        self._directory = tempfile.TemporaryDirectory(prefix="twinbus-", ignore_cleanup_errors=True)
        folder = Path(self._directory.name)
        self.data = None if memory else (data or folder / "data").absolute()
        self._ports = {name: port for name, port in (ports or {}).items() if port}
        config = _rules_config(self.names, rules) if rules else config
        self._config = None if config is None else _file(folder / "config.json", config)
        self._host_names = tuple(host_names)
        self._identity = {
            "jwks": None if jwks is None else str(_file(folder / "jwks.json", jwks)),
            "audiences": () if audience is None else (audience,),
            "issuers": () if issuer is None else (issuer,),
        }
        self._log_level = log_level
        # A server without a data directory writes its certificates to TMPDIR. `close()` removes this folder, even if
        # the server was killed.
        self._process = ServerProcess(folder / "serve.log", {"TMPDIR": str(folder)})
        self._served: dict[str, LocalEndpoint] = {}

    def start(self, timeout: float = _START_SECONDS) -> Self:
        """Start the server and wait until it is ready. Raises LocalNamespaceError with the server's stderr.

        Raises MissingExtraError if packages of the server are not installed. The error has the command to install them.

        Example: `namespace.start()` after `namespace.kill()`.
        """
        require("serve")
        for left in reversed(range(_TRIES)):
            free = iter(find_free_ports(len(self.names), set(self._ports.values())))
            ports = {name: self._ports.get(name) or next(free) for name in self.names}
            try:
                found = self._process.start(self._request(ports), timeout)
            except LocalNamespaceError as error:
                # Another process took a port after `find_free_ports` had found it free.
                if "cannot listen" in str(error) and not set(self.names) <= set(self._ports) and left:
                    continue
                raise
            self._ports = {namespace.name: namespace.port for namespace in found}
            self._served = {namespace.name: LocalEndpoint(namespace) for namespace in found}
            break
        return self

    def stop(self) -> int:
        """Drain the server and end its process. Returns the exit code.

        Example: `assert namespace.stop() == 0`.
        """
        return self._process.stop()

    def kill(self) -> None:
        """End the process with SIGKILL, as in a crash, and wait until it is gone.

        Example: `namespace.kill()`.
        """
        self._process.kill()

    def wait(self, timeout: float = _START_SECONDS) -> int:
        """Wait until the process ends by itself, as after a fault of kind crash. Returns the exit code.

        Example: `namespace.wait(timeout=10)`.
        """
        return self._process.wait(timeout)

    def restart(self, timeout: float = _START_SECONDS) -> Self:
        """Stop the server if it is running, and start it again on the same ports and data.

        Example: `namespace.restart()`.
        """
        if self.running:
            self.stop()
        return self.start(timeout)

    def close(self) -> None:
        """End the process, and remove the temporary directory. The server cannot be started again.

        Example: `namespace.close()`.
        """
        try:
            if self.running:
                self.stop()
        finally:
            self._directory.cleanup()

    @property
    def running(self) -> bool:
        """Whether the process of the server runs.

        Example: `assert namespace.running`.
        """
        return self._process.running

    @property
    def pid(self) -> int:
        """The process id of the server.

        Example: `os.kill(namespace.pid, signal.SIGSTOP)`.
        """
        return self._process.pid

    @property
    def log(self) -> Path:
        """The file with the stderr of the process. `close()` removes it.

        Example: `print(namespace.log.read_text())`.
        """
        return self._process.log

    def __getitem__(self, name: str) -> LocalEndpoint:
        return self._served[name]

    def __iter__(self) -> Iterator[LocalEndpoint]:
        return iter(self._served.values())

    def __enter__(self) -> Self:
        try:
            return self if self.running else self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, ports: Mapping[str, int]) -> dict[str, Any]:
        return {
            "data": None if self.data is None else str(self.data),
            "namespaces": [f"{name}={port}" for name, port in ports.items()],
            "config": None if self._config is None else str(self._config),
            "host_names": self._host_names,
            "log_level": self._log_level,
            **self._identity,
        }


class LocalEndpoint:
    """The connection string, port and certificate of one namespace of a running server.

    Example: `LocalNamespaces("primary")["primary"].connection_string`, once it is started.
    """

    def __init__(self, served: ServedNamespace) -> None:
        self.name = served.name
        self.connection_string = served.connection_string
        self.port = served.port
        self.ca = served.ca
        self.file = served.file

    @cached_property
    def faults(self) -> FaultClient:
        """Sets faults: `faults.set("server-busy", entity="orders", count=3)`, `clear()`, `list()`.

        Example: `namespace.faults.set("server-busy", entity="orders", count=3)`.
        """
        from twinbus.namespace import FaultClient  # noqa: PLC0415 - this module is loaded by every pytest

        return FaultClient(self.connection_string, ca=self.ca)


class LocalNamespace:
    """One namespace in its own process: `with LocalNamespace() as namespace: namespace.connection_string`.

    Without `data`, the data of the namespace is in a temporary directory that `close()` removes. With `memory`, the
    data is not on disk. After a second start, port and data are the same as before, also after `kill()`. `host_names`
    are further names that clients may use, each `NAME` or `NAME:PORT`; the server refuses requests and tokens for other
    names. `jwks` is a file with the public keys of an issuer, or its content: the namespace accepts JSON web tokens of
    this issuer, for `audience`, and if `issuer` is given only with this issuer.

    Example: `with LocalNamespace() as namespace: client =
    ServiceBusClient.from_connection_string(namespace.connection_string)`.
    """

    def __init__(
        self,
        name: str = "primary",
        *,
        data: Path | None = None,
        memory: bool = False,
        port: int = 0,
        config: Config | None = None,
        rules: Sequence[AuthorizationRule] = (),
        host_names: Sequence[str] = (),
        jwks: Path | Mapping[str, Any] | None = None,
        audience: str | None = None,
        issuer: str | None = None,
        log_level: str = "info",
    ) -> None:
        self.name = name
        self._server = LocalNamespaces(
            name,
            data=data,
            memory=memory,
            ports={name: port},
            config=config,
            rules=rules,
            host_names=host_names,
            jwks=jwks,
            audience=audience,
            issuer=issuer,
            log_level=log_level,
        )

    def start(self, timeout: float = _START_SECONDS) -> Self:
        """Start the server and wait until it is ready. Raises LocalNamespaceError with the server's stderr.

        Example: `namespace.start()` after `namespace.kill()`.
        """
        self._server.start(timeout)
        return self

    def stop(self) -> int:
        """Drain the server and end its process. Returns the exit code.

        Example: `assert namespace.stop() == 0`.
        """
        return self._server.stop()

    def kill(self) -> None:
        """End the process with SIGKILL, as in a crash, and wait until it is gone.

        Example: `namespace.kill()`.
        """
        self._server.kill()

    def wait(self, timeout: float = _START_SECONDS) -> int:
        """Wait until the process ends by itself, as after a fault of kind crash. Returns the exit code.

        Example: `namespace.wait(timeout=10)`.
        """
        return self._server.wait(timeout)

    def restart(self, timeout: float = _START_SECONDS) -> Self:
        """Stop the server if it is running, and start it again on the same port and data.

        Example: `namespace.restart()`.
        """
        self._server.restart(timeout)
        return self

    def close(self) -> None:
        """End the process, and remove the temporary directory. The server cannot be started again.

        Example: `namespace.close()`.
        """
        self._server.close()

    @property
    def connection_string(self) -> str:
        """The connection string for the official clients.

        Example: `ServiceBusClient.from_connection_string(namespace.connection_string)`.
        """
        return self._endpoint.connection_string

    @property
    def port(self) -> int:
        """The port that the namespace listens on.

        Example: `namespace.port`.
        """
        return self._endpoint.port

    @property
    def ca(self) -> Path:
        """The certificate that an administration client must trust: the value for the client's `connection_verify=`.

        Example: `ServiceBusAdministrationClient.from_connection_string(text, connection_verify=str(namespace.ca))`.
        """
        return self._endpoint.ca

    @property
    def faults(self) -> FaultClient:
        """Sets faults: `faults.set("server-busy", entity="orders", count=3)`, `clear()`, `list()`.

        Example: `namespace.faults.set("server-busy", entity="orders", count=3)`.
        """
        return self._endpoint.faults

    @property
    def data(self) -> Path | None:
        """The data directory, or None if the data is only in memory.

        Example: `namespace.data`.
        """
        return self._server.data

    @property
    def running(self) -> bool:
        """Whether the process of the server runs.

        Example: `assert namespace.running`.
        """
        return self._server.running

    @property
    def pid(self) -> int:
        """The process id of the server.

        Example: `os.kill(namespace.pid, signal.SIGSTOP)`.
        """
        return self._server.pid

    @property
    def log(self) -> Path:
        """The file with the stderr of the process. `close()` removes it.

        Example: `print(namespace.log.read_text())`.
        """
        return self._server.log

    @property
    def _endpoint(self) -> LocalEndpoint:
        try:
            return self._server[self.name]
        except KeyError:
            raise LocalNamespaceError("the server was not started: call start() first") from None

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _rules_config(names: Sequence[str], rules: Sequence[AuthorizationRule]) -> dict[str, Any]:
    entries = [
        {
            "name": rule.name,
            "claims": sorted(rule.claims),
            "primary_key": rule.primary_key,
            "secondary_key": rule.secondary_key,
        }
        for rule in rules
    ]
    return {"namespaces": [{"name": name, "authorization_rules": entries} for name in names]}


def _file(file: Path, given: Path | Mapping[str, Any]) -> Path:
    """Return the given file, or write the given content to `file`."""
    if isinstance(given, Path):
        return given
    file.touch(mode=0o600)
    file.write_text(json.dumps(given), encoding="utf-8")
    return file
