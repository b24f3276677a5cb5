"""One namespace as a server: makes store, runtime, front, faults and metrics, connects them, starts and stops them."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from twinbus.clock import SystemClock
from twinbus.errors import OperatorError
from twinbus.ledger import Ledger, Role
from twinbus.namespace.engine.descriptions import (
    AuthorizationRule,
    Description,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.registry import forward_targets_first
from twinbus.namespace.faults import Faults
from twinbus.namespace.front import (
    DEFAULT_KEY,
    HttpHandler,
    Listener,
    NamespaceContext,
    SasVerifier,
    ca_path,
    crash,
    default_rule,
    server_context,
)
from twinbus.namespace.identity import IdentityOptions
from twinbus.namespace.meter import DepthCollector, LedgerMeter, OperationMeter, ResourceCollector
from twinbus.namespace.own_names import Authority, OwnNames, is_wildcard, parse_authority
from twinbus.namespace.resources import Resources
from twinbus.namespace.runtime import LockTokens, NamespaceRuntime
from twinbus.namespace.store import MemoryStore, SqliteStore, Store

_log = logging.getLogger(__name__)

DEFAULT_RULES = (default_rule(),)
_BACKLOG = 1024
# The longest wait when a namespace stops: until pending writes are on disk, and until peers answer the close.
_DRAIN_SECONDS = 5.0
_FAREWELL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class NamespaceOptions:
    """Options of a namespace.

    If `file` is None, all data is only in memory. `ledger` is the folder to which the meter writes (N5). `host_names`
    are further names that clients may use, each `NAME` or `NAME:PORT` (X3). `azure_names` are more such names, with a
    certificate of their own (`azure_ports`). `requested_by` maps the path of an entity, in lower case, to the
    command-line option that asked for the entity; error messages name this option. With `accept_damage`, a damaged
    store is rebuilt from what is intact (X2). `identity` says which JSON web tokens are accepted; None means none (N6).
    """

    name: str
    file: Path | None
    tls: Path
    host: str = "127.0.0.1"
    port: int = 0
    rules: tuple[AuthorizationRule, ...] = DEFAULT_RULES
    entities: tuple[Description, ...] = ()
    ledger: Path | None = None
    host_names: tuple[str, ...] = ()
    azure_names: tuple[str, ...] = ()
    requested_by: Mapping[str, str] = field(default_factory=dict)
    accept_damage: bool = False
    identity: IdentityOptions | None = None


class NamespaceServer:
    """One namespace that listens on a port."""

    runtime: NamespaceRuntime
    port: int

    def __init__(self, options: NamespaceOptions, resources: Resources | None = None) -> None:
        """`resources` are shared by the namespaces of a process. If None, the namespace makes its own `Resources`."""
        self.options = options
        self.resources = resources or Resources()
        self.faults = Faults(SystemClock())
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._faults_timer: asyncio.TimerHandle | None = None
        self._listener: Listener | None = None
        self._ledger_meter: LedgerMeter | None = None

    @property
    def context(self) -> NamespaceContext:
        """The objects that all connections of the namespace share. Set by `start`."""
        return self._context

    @property
    def ca(self) -> Path:
        """The certificate of the local authority, which clients of the management API must trust."""
        return ca_path(self.options.tls)

    @property
    def connection_string(self) -> str:
        """The connection string for the official SDKs."""
        rule = self.options.rules[0]
        return (
            f"Endpoint=sb://{self._endpoint()};SharedAccessKeyName={rule.name};"
            f"SharedAccessKey={rule.primary_key};UseDevelopmentEmulator=true;"
        )

    def _endpoint(self) -> Authority:
        """Return a name and port that clients can use.

        If the namespace listens on every address, this is the first of `host_names`.
        """
        host = self.options.host
        if not is_wildcard(host):
            # Other loopback addresses, such as 127.0.0.2, are not what `localhost` stands for.
            return Authority("localhost" if host in ("localhost", "127.0.0.1", "::1") else host.strip("[]"), self.port)
        named = parse_authority(next(iter(self.options.host_names), "localhost"))
        return Authority(named.host, named.port or self.port)

    async def start(self) -> None:
        """Open the store and listen. Raises OperatorError."""
        options = self.options
        refuse_public_default_key(options)
        listener = _listen(options)
        self.port = listener.getsockname()[1]
        try:
            self._context = self._open()
        except BaseException:
            listener.close()
            raise
        try:
            await self._create_entities()
            self._listener = Listener(self._context, listener)
        except BaseException:
            listener.close()
            await self.runtime.close()
            raise
        if self._ledger_meter is not None:
            self._ledger_meter.start()
        _log.info("listening", extra={"namespace": options.name, "port": self.port})

    async def stop(self) -> None:
        """Stop accepting connections, answer pending requests, close every connection, write all changes to disk."""
        if self._listener is not None:
            self._listener.close()
        connections = self._context.connections
        for connection in list(connections):
            connection.stream.pause_reading("stopping")
        with suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_SECONDS):
                await self.runtime.group_commit.flushed()
        for connection in list(connections):
            connection.shut_down()
        await self._connections_end()
        if self._faults_timer is not None:
            self._faults_timer.cancel()
        await self.runtime.close()
        if self._ledger_meter is not None:
            await self._ledger_meter.close()
        if not self.ended.done():
            self.ended.set_result(None)

    def _open(self) -> NamespaceContext:
        options, meter = self.options, OperationMeter()
        names = OwnNames(self.port, options.host, (*options.host_names, *options.azure_names))
        tls = server_context(options.tls, options.host, *(parse_authority(name).host for name in options.host_names))
        store: Store = MemoryStore()
        if options.file is not None:
            store = SqliteStore(options.file, accept_damage=options.accept_damage)
        self.runtime = NamespaceRuntime(store, SystemClock(), meter, new_token=LockTokens(), failed=self._failed)
        meter.registry.register(DepthCollector(self.runtime.namespace))
        meter.registry.register(ResourceCollector(self.resources))
        if options.ledger is not None:
            ledger = Ledger(options.ledger, Role.NAMESPACE)
            self._ledger_meter = LedgerMeter(ledger, options.name, meter, SystemClock())
        verifier, jwt_verifier = SasVerifier(options.rules, names), None
        if options.identity is not None:
            from twinbus.namespace.front.jwt_verifier import JwtVerifier  # noqa: PLC0415 - slow

            jwt_verifier = JwtVerifier(options.identity)
        http = HttpHandler(
            options.name,
            self.runtime,
            verifier,
            self.faults,
            meter.registry,
            self.ca.read_bytes(),
            self._keys_changed,
            jwt_verifier,
        )
        self.faults.on_change(self._faults_changed)
        return NamespaceContext(
            options.name, self.runtime, verifier, self.faults, meter, tls, http, names, self.resources, jwt_verifier
        )

    async def _connections_end(self) -> None:
        """Wait `_FAREWELL_SECONDS` until peers answer the close, then abort the remaining connections."""
        for seconds in (_FAREWELL_SECONDS, None):
            pending = [connection.gone for connection in self._context.connections]
            if pending:
                await asyncio.wait(pending, timeout=seconds)
            for connection in list(self._context.connections):
                connection.stream.abort()

    async def _create_entities(self) -> None:
        """Create the missing entities. If an entity exists with another kind, creates none and raises OperatorError."""
        options, namespace = self.options, self.runtime.namespace
        missing: list[Description] = []
        for description in forward_targets_first(options.entities):
            existing = namespace.info(description.path)
            if existing is None:
                missing.append(description)
            elif type(existing.description) is not type(description):
                raise OperatorError(
                    f"{self._requested_by(description)}: {description.path!r} is a {_kind(description)}, but namespace "
                    f"{options.name!r} already has a {_kind(existing.description)} with this name",
                    f"Choose another name, delete the {_kind(existing.description)}, or keep the data in another "
                    "folder (--data).",
                )
        for description in missing:
            created = await self.runtime.create(description)
            if isinstance(created, Refusal):
                raise OperatorError(
                    f"{self._requested_by(description)}: the entity {description.path!r} of namespace "
                    f"{options.name!r} cannot be created: {created.description}",
                    "Correct it there.",
                )

    def _requested_by(self, description: Description) -> str:
        return self.options.requested_by.get(description.path.lower(), "the configuration")

    def _failed(self, error: Exception) -> None:
        """Abort every connection, because the store failed: no change that is not on disk may be acknowledged."""
        _log.critical("namespace ends: %s", error, extra={"namespace": self.options.name})
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._context.connections):
            connection.stream.abort()
        if not self.ended.done():
            self.ended.set_exception(error)

    def replace_rules(self, rules: tuple[AuthorizationRule, ...]) -> None:
        """Replace the authorization rules of the namespace. Links that a removed key opened are detached (X4)."""
        self.options = replace(self.options, rules=rules)
        self._context.verifier.replace_rules(rules)
        self._keys_changed(None)

    def replace_identity(self, identity: IdentityOptions) -> None:
        """Replace the key set of a namespace that was started with one. Links of removed keys are detached (X4)."""
        assert self._context.jwt_verifier is not None
        self.options = replace(self.options, identity=identity)
        self._context.jwt_verifier.replace(identity)
        self._keys_changed(None)

    def _keys_changed(self, entity: str | None) -> None:
        for connection in list(self._context.connections):
            connection.keys_changed(entity)

    def _faults_changed(self) -> None:
        if self.faults.crash_now:
            crash()
        if self._faults_timer is not None:
            self._faults_timer.cancel()
        end = self.faults.next_end()
        loop = asyncio.get_running_loop()
        if end is not None:
            seconds = max(0.0, (end - self.runtime.now()) / 1000)
            self._faults_timer = loop.call_later(seconds, self.faults.expire)
        # In the next turn of the event loop: the operation that used up a fault is still being carried out.
        loop.call_soon(self._notify_connections)

    def _notify_connections(self) -> None:
        for connection in list(self._context.connections):
            connection.faults_changed()


def _kind(description: Description) -> str:
    match description:
        case QueueDescription():
            return "queue"
        case TopicDescription():
            return "topic"
        case SubscriptionDescription():
            return "subscription"


def refuse_public_default_key(options: NamespaceOptions) -> None:
    """Raise OperatorError if the namespace would listen beyond loopback with the well-known default key."""
    if is_loopback(options.host):
        return
    if any(DEFAULT_KEY in (rule.primary_key, rule.secondary_key) for rule in options.rules):
        raise OperatorError(
            f"Namespace {options.name!r} would listen on {options.host} with the well-known default key",
            "Give it keys of its own in the configuration, or listen on 127.0.0.1.",
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(options: NamespaceOptions) -> socket.socket:
    try:
        return bind_port(options.host, options.port)
    except OSError as error:
        raise OperatorError(
            f"Namespace {options.name!r} cannot listen on {options.host}:{options.port}: {error.strerror or error}",
            "Choose another port (0 picks a free one), or end the program that uses it.",
        ) from error


def bind_port(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises OSError."""
    host = "127.0.0.1" if host == "localhost" else host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as undone:
        listener = undone.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # The socket listens before the namespace is ready: two processes can bind the same port as long as neither
        # of them listens. Clients that connect wait until they are accepted.
        listener.listen(_BACKLOG)
        undone.pop_all()
    return listener
