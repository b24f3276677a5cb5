"""A kombu transport, `twinbus://`: Celery and kombu publish through a pair, and consume from the primary.

    from celery import Celery
    from twinbus.kombu import broker_url

    app = Celery("shop", broker=broker_url())

The connection strings come from the variables TWINBUS_PRIMARY_CONNECTION_STRING and
TWINBUS_SECONDARY_CONNECTION_STRING, or from the URL. A host may stand in the place of a connection string; then a
credential signs in with Entra ID. While the primary cannot be reached, published tasks divert to the backlog. A syphon
brings them home, and workers run them then.

Importing this module makes the scheme known to kombu: kombu has no entry points for transports. Where nothing can be
imported, name the class: `broker_transport = "twinbus.kombu:KombuTransport"` in Celery, `transport=` in kombu.

How it works. The transport is kombu's own for Service Bus, with three differences. Its client is a pair, which has the
methods of the SDK's client. Its declarations of queues succeed while the primary cannot be reached. Its publishing
raises kombu's OperationalError if neither the primary nor the backlog takes a message. All connections of a process
with the same settings share one pair, which closes with the last of them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import cached_property
from queue import Empty
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from azure.core.exceptions import AzureError, ServiceRequestError, ServiceResponseError
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import (
    MessagingEntityNotFoundError,
    OperationTimeoutError,
    ServiceBusCommunicationError,
    ServiceBusConnectionError,
    ServiceBusServerBusyError,
)

import twinbus
from twinbus.backlog import COUNTING_FAILURES, FailureKind, failure_kind
from twinbus.connect import (
    ConnectionString,
    ConnectionStringError,
    NetworkOptions,
    check_credential_name,
    named_credential,
)
from twinbus.errors import OperatorError, RetryError
from twinbus.extras import missing_extra
from twinbus.pairing import Administration, Pair, SendAvailabilityOptions, management_failure

try:
    from kombu.exceptions import OperationalError
    from kombu.transport import TRANSPORT_ALIASES, azureservicebus
    from kombu.transport.virtual.base import queue_declare_ok_t
    from kombu.utils.json import dumps
    from kombu.utils.uuid import uuid
except ImportError as error:
    raise missing_extra(error, "celery") or error from None

__all__ = ["KombuTransport", "broker_url"]

_log = logging.getLogger(__name__)

_SCHEME: Final = "twinbus"
_VARIABLES: Final = {
    "primary": "TWINBUS_PRIMARY_CONNECTION_STRING",
    "secondary": "TWINBUS_SECONDARY_CONNECTION_STRING",
}
# A program that publishes a task has no code for errors of Service Bus: the failing call itself diverts (S4).
_DEFAULTS: Final = SendAvailabilityOptions(failover_interval=timedelta(0))
_CLIENT_DEFAULTS: Final[Mapping[str, Any]] = {"retry_total": 3, "retry_backoff_factor": 0.8, "retry_backoff_max": 120}
_TEMPORARY: Final = (
    OperationTimeoutError,
    ServiceBusCommunicationError,
    ServiceBusConnectionError,
    ServiceBusServerBusyError,
    RetryError,
)
# Failures at which a queue is declared later. A local namespace that refuses connections does not offer its
# certificate either.
_PUTS_OFF: Final = COUNTING_FAILURES | {FailureKind.CERTIFICATE}

TRANSPORT_ALIASES[_SCHEME] = "twinbus.kombu:KombuTransport"


def broker_url(
    primary: str | None = None, secondary: str | None = None, *, options: Mapping[str, str] | None = None
) -> str:
    """Return a URL for `broker_url` of Celery or for `kombu.Connection`.

    `primary` and `secondary` are connection strings, or hosts. One that is not given is read from its variable by every
    process that connects. `options` are options of a pair, as texts. The URL has the keys of the connection strings;
    kombu and Celery do not print it.

    Example: `broker_url(options={"failover_interval": "10s"})` returns `twinbus://?failover_interval=10s`.
    """
    given = {"primary": primary, "secondary": secondary, **(options or {})}
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in given.items() if value is not None)
    return f"{_SCHEME}://" + (f"?{query}" if query else "")


# --- settings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BrokerSettings:
    """What a connection was made with. Two connections with equal settings share a pair."""

    primary: str = field(repr=False)
    secondary: str = field(repr=False)
    options: SendAvailabilityOptions
    credential: Any = field(repr=False)
    """The name of a credential of azure-identity, a credential, or None. For namespaces that are given by host."""
    network: Mapping[str, NetworkOptions] = field(repr=False)
    """How each side is reached."""
    client: Mapping[str, Any] = field(repr=False)
    """Options of both clients. They replace equal options of `network`."""

    def make_client(self, text: str, network: NetworkOptions) -> ServiceBusClient:
        """Return the SDK's client of a namespace. Connects to nothing. Raises MissingExtraError."""
        endpoint = ConnectionString.of(text)
        options = {**network.client_options(endpoint, is_aio=False), **self.client}
        if endpoint.has_key:
            return ServiceBusClient.from_connection_string(text, **options)
        credential = named_credential(self.credential) if isinstance(self.credential, str) else self.credential
        return ServiceBusClient(endpoint.namespace, credential, **options)


def _read_settings(url: str, transport_options: Mapping[str, Any]) -> BrokerSettings:
    """Return the settings of a connection. The URL counts before `transport_options`, and these before the environment.

    Raises OperatorError, OptionError, CredentialNameError or NetworkOptionError. No error has a connection string.
    """
    given = _read_url(url)
    texts = {side: given.pop(side, "") or os.environ.get(name, "") for side, name in _VARIABLES.items()}
    credential = transport_options.get("credential") or os.environ.get("TWINBUS_CREDENTIAL") or None
    if isinstance(credential, str):
        credential = check_credential_name(credential)
    for side, text in texts.items():
        if side in transport_options:
            hint = f"Celery prints these options in its reports. Use the variable {_VARIABLES[side]}, or broker_url()."
            raise OperatorError(f"the transport options have a connection string of the {side}", hint)
        _check_namespace(side, text, credential)
    options = transport_options.get("pairing", {})
    _refuse_unknown(given)
    if not isinstance(options, SendAvailabilityOptions):
        _refuse_unknown(options)
        from_environment = SendAvailabilityOptions.from_environment(os.environ, defaults=_DEFAULTS)
        options = SendAvailabilityOptions.from_mapping(options, defaults=from_environment)
    retries = {name: transport_options.get(name, value) for name, value in _CLIENT_DEFAULTS.items()}
    return BrokerSettings(
        **texts,
        options=SendAvailabilityOptions.from_mapping(given, defaults=options),
        credential=credential,
        network={side: NetworkOptions.from_environment(os.environ, side) for side in _VARIABLES},
        client={**retries, **transport_options.get("client", {})},
    )


def _check_namespace(side: str, text: str, credential: object) -> None:
    """Raise OperatorError if a text is neither a connection string nor a host with a credential."""
    if not text:
        name = _VARIABLES[side]
        raise OperatorError(f"there is no connection string of the {side}", f"Set {name}, or use broker_url().")
    try:
        found = ConnectionString.of(text)
    except ConnectionStringError as error:
        hint = f"Give a connection string, or a host and a credential, in {_VARIABLES[side]} or to broker_url()."
        raise OperatorError(f"the {side} cannot be used: {error}", hint) from None
    if not found.has_key and credential is None:
        hint = "Name a credential in TWINBUS_CREDENTIAL or in the transport options. Or give a connection string."
        raise OperatorError(f"the {side}, {found.host}, is a host name, which has no key", hint)


def _refuse_unknown(options: Iterable[str]) -> None:
    """Raise OperatorError for a name that is no option of a pair. The value is not shown: it may have a key in it."""
    known = [option.name for option in fields(SendAvailabilityOptions)]
    for name in options:
        if name not in known:
            raise OperatorError(f"{name} is not an option of a pair", f"The options are {', '.join(known)}.")


def _read_url(url: str | None) -> dict[str, str]:
    """Return the names and values of a URL. Raises OperatorError if the URL has more, which may be a key.

    kombu passes None instead of `twinbus://` if it was given a list of URLs and tries the next one.
    """
    found = urlsplit(url or "")
    if found.netloc or found.path not in ("", "/"):
        raise OperatorError(
            f"a URL of {_SCHEME}:// has neither a host nor a path",
            f"Write {_SCHEME}:// and set {' and '.join(_VARIABLES.values())}, or use broker_url().",
        )
    # Not `parse_qsl`: it makes a space of each plus, and keys have pluses.
    parts = [part.partition("=") for part in found.query.split("&") if part]
    return {unquote(name): unquote(value) for name, _, value in parts}


# --- the pair of a process -------------------------------------------------------------------------------------------


class _ProcessPair:
    """A pair with its clients. All transports of one process with these settings use it."""

    def __init__(self, settings: BrokerSettings) -> None:
        self.settings = settings
        self.process = os.getpid()
        self.users = 0
        self._clients = [
            settings.make_client(settings.primary, settings.network["primary"]),
            settings.make_client(settings.secondary, settings.network["secondary"]),
        ]
        try:
            self.pair: Pair = twinbus.pair_namespaces(*self._clients, options=settings.options)
        except BaseException:
            self._close_clients()
            raise
        seconds = settings.options.try_timeout.total_seconds()
        self.queues = _PrimaryQueues(Administration.of(self._clients[0], seconds=seconds))

    def close(self) -> None:
        self.queues.close()
        self.pair.close()
        self._close_clients()

    def _close_clients(self) -> None:
        for client in self._clients:
            client.close()


class _PrimaryQueues:
    """The methods of an administration client that kombu's channel calls, for the primary. Each ends in time (S12)."""

    def __init__(self, administration: Administration) -> None:
        self._administration = administration

    def create_queue(self, queue_name: str, **properties: Any) -> Any:
        return self._request("create_queue", queue_name, **properties)

    def delete_queue(self, queue_name: str) -> None:
        self._request("delete_queue", queue_name)

    def get_queue_runtime_properties(self, queue_name: str) -> Any:
        return self._request("get_queue_runtime_properties", queue_name)

    def close(self) -> None:
        self._administration.close()

    def _request(self, method: str, queue_name: str, **properties: Any) -> Any:
        return self._administration.request(getattr(self._administration.client, method), queue_name, **properties)


_shared: Final[list[_ProcessPair]] = []
_sharing = threading.Lock()


def _forget_after_fork() -> None:
    """Give the child of a fork a lock and credentials of its own. The pairs are the parent's: the child makes its own.

    The parent's credentials may have open connections, on which the child must not write.
    """
    global _sharing  # noqa: PLW0603 - another thread of the parent may have held the lock
    _sharing = threading.Lock()
    named_credential.cache_clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def _take(settings: BrokerSettings) -> _ProcessPair:
    """Return the pair of this process with these settings; pair if there is none. Other threads wait meanwhile."""
    with _sharing:
        for shared in _shared:
            if shared.settings == settings and shared.process == os.getpid():
                break
        else:
            shared = _ProcessPair(settings)
            _shared.append(shared)
        shared.users += 1
        return shared


def _give_back(shared: _ProcessPair) -> None:
    """Close the pair if no other transport uses it."""
    with _sharing:
        shared.users -= 1
        is_last = not shared.users
        if is_last:
            _shared.remove(shared)
    if is_last:
        shared.close()


# --- kombu -----------------------------------------------------------------------------------------------------------


class KombuChannel(azureservicebus.Channel):
    """A channel of kombu's Service Bus transport on a pair. It publishes through the pair."""

    connection: KombuTransport

    def _try_parse_connection_string(self) -> None:
        """Check the settings when the channel is made: a wrong setting is an error of connecting."""
        self.connection.settings  # noqa: B018 - reads them

    @property
    def queue_service(self) -> Pair:
        return self.connection.shared.pair

    @property
    def queue_mgmt_service(self) -> _PrimaryQueues:
        return self.connection.shared.queues

    def queue_declare(self, queue: str | None = None, passive: bool = False, **kwargs: Any) -> queue_declare_ok_t:
        """Create a queue on the primary. While the primary cannot be reached, succeed and create the queue later.

        A worker creates it before it receives, a publisher when the primary says that there is none.
        """
        name = queue or f"amq.gen-{uuid()}"
        self.connection.shared  # noqa: B018 - pairs first: an error of pairing is not one of the primary
        # kombu takes a queue that has a sender for one that exists.
        entity = self.entity_name(self.queue_name_prefix + name)
        cached = self._queue_cache.pop(entity, None) if name in self.connection.undeclared else None
        try:
            found = super().queue_declare(name, passive, **kwargs)
        except (AzureError, OSError) as error:
            failure = management_failure(error)
            if failure.kind not in _PUTS_OFF:
                raise
            if name not in self.connection.undeclared:
                _log.warning("queue %r is not declared: the primary cannot be reached (%s)", name, failure.detail)
            self.connection.undeclared.add(name)
            return queue_declare_ok_t(name, 0, 0)
        finally:
            if cached is not None:
                self._queue_cache[entity] = cached
        self.connection.undeclared.discard(name)
        return found

    def _put(self, queue: str, message: Any, **kwargs: Any) -> None:
        """Publish to the primary or, while it cannot be reached, to the backlog."""
        entity = self.entity_name(self.queue_name_prefix + queue)
        encoded = ServiceBusMessage(dumps(message))
        sender = self._get_asb_sender(entity).sender
        try:
            try:
                sender.send_messages(encoded)
            except MessagingEntityNotFoundError:
                if queue not in self.connection.undeclared:
                    raise
                self.queue_declare(queue)
                sender.send_messages(encoded)
        except _TEMPORARY as error:
            raise OperationalError(str(error)) from error

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        """Receive a message from the primary. Raises Empty while the primary cannot be reached."""
        if queue in self.connection.undeclared:
            self.queue_declare(queue)
            if queue in self.connection.undeclared:
                raise Empty
        try:
            found: dict[str, Any] = super()._get(queue, timeout)
        except (AzureError, OSError) as error:
            if failure_kind(error) not in COUNTING_FAILURES:
                raise
            _log.warning("nothing is received from %r: the primary cannot be reached (%s)", queue, error)
            raise Empty from error
        return found


class KombuTransport(azureservicebus.Transport):
    """The transport of `twinbus://`. kombu makes it; programs only name it.

    Example: `kombu.Connection("twinbus://", transport="twinbus.kombu:KombuTransport")`.
    """

    Channel = KombuChannel
    client: Any
    driver_type = _SCHEME
    driver_name = _SCHEME
    # The pause of a worker that has as many messages as it may have, or found none. kombu's transport has 1 s: a worker
    # that takes one task at a time then does one in a second.
    polling_interval = 0.1  # type: ignore[assignment] # an int in kombu's class, a float in the base of that class
    # A worker that meets one of these connects again. Celery ends a worker at other errors.
    connection_errors = (  # type: ignore[assignment] # kombu's type has one error; its own transports add more
        *azureservicebus.Transport.connection_errors,
        *_TEMPORARY,
        ServiceRequestError,
        ServiceResponseError,
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.undeclared: set[str] = set()
        self._shared: _ProcessPair | None = None

    @cached_property
    def settings(self) -> BrokerSettings:
        """The settings of the connection.

        Example: `connection.transport.settings.options.failover_interval`.
        """
        return _read_settings(self.client.hostname, self.client.transport_options)

    @property
    def shared(self) -> _ProcessPair:
        """The pair of this process, made at the first use.

        Example: `connection.transport.shared.pair.entities()`.
        """
        if self._shared is None:
            self._shared = _take(self.settings)
        return self._shared

    def close_connection(self, connection: Any) -> None:
        """Close senders and receivers, and the pair with the last connection of the process.

        Example: `connection.release()` calls it.
        """
        shared, self._shared = self._shared, None
        is_ours = shared is None or shared.process == os.getpid()
        if not is_ours:
            # After a fork, the links and threads are the parent's.
            self._queue_cache.clear()
            self._renewer = None
        try:
            super().close_connection(connection)
        finally:
            if shared is not None and is_ours:
                _give_back(shared)

    def driver_version(self) -> str:
        """Return the version of Twinbus, for `celery report`.

        Example: `connection.transport.driver_version()`.
        """
        return twinbus.__version__

    @classmethod
    def as_uri(cls, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """Return a URL that can be printed: it has the names of both namespaces, and no key.

        Example: `connection.as_uri()` is `twinbus://contoso.servicebus.windows.net,contoso-backup.…`.
        """
        if include_password:
            return uri
        try:
            given = _read_url(uri)
            texts = [given.get(side) or os.environ[name] for side, name in _VARIABLES.items()]
            hosts = [ConnectionString.of(text).namespace for text in texts]
        except (OperatorError, KeyError, ConnectionStringError):
            return f"{_SCHEME}://{mask}"
        return f"{_SCHEME}://{','.join(hosts)}"
