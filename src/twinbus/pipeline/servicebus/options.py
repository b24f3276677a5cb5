"""The options of the data source `servicebus`: parses the texts that Spark passes, and refuses unknown options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from twinbus.backlog import Endpoint
from twinbus.connect import (
    AzureTokenSource,
    ConnectionString,
    ConnectionStringError,
    HttpProxy,
    NetworkOptionError,
    NetworkOptions,
    TokenSource,
    TransportType,
    check_credential_name,
    named_credential,
)
from twinbus.errors import CallerError

STREAM_BATCH: Final = 10_000
_MAX_SESSIONS: Final = 8
CONNECTION_OPTIONS: Final = frozenset({"connectionstring", "connectionstringenv", "fullyqualifiednamespace"})
"""Names in lower case of the options that name the namespace."""
_FIRST, _LATEST = "earliest", "latest"
# The values of the command line's --transport-type.
_SHORT_TRANSPORT_TYPES: Final = {"amqp": TransportType.Amqp, "websocket": TransportType.AmqpOverWebsocket}
_TRANSPORT_TYPES: Final = {**{kind.lower(): kind for kind in TransportType}, **_SHORT_TRANSPORT_TYPES}


class SourceOptionError(CallerError, ValueError):
    """An option is missing, unknown or out of range. The text never contains a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options of one reader or writer. The names of options are case-insensitive in Spark.

    `connectionString`, or `connectionStringEnv`: the name of an environment variable, on the driver and on each
    executor, whose value is the connection string. Or `fullyQualifiedNamespace`: the host of the namespace, with
    `credential`: default, cli, environment or managed-identity[=ID]. The driver and each executor make own tokens.
    `entity`, `subscription`, `deadLetter`: what a reader reads. A writer sends rows without an entity to `entity`.
    `caFile`: the CA of a local namespace. `timeout`: seconds for one operation, and how long a stream that runs waits
    for a namespace that is away.
    `transportType` (Amqp or AmqpOverWebsocket; in short amqp or websocket), `httpProxy` (`http://host:port`),
    `customEndpointAddress`: as for azure-servicebus. `httpProxyCredentialsEnv`: the name of a variable, as with
    `connectionStringEnv`, whose value is `user:password`.
    `fromSequenceNumber`, `toSequenceNumber`: the range of a batch read, both included.
    `partitions`: the number of tasks that read. `includeRaw`: fill the column `raw` of every row.
    For a stream read: `maxMessagesPerTrigger`, `startingPosition` (earliest, latest or a sequence number),
    `pollInterval` (seconds), `completeCommitted` (whether the messages of committed batches are completed).
    For an entity that requires sessions: `sessions` (each session is read by one task, in order; a stream holds the
    lock of each session that it reads), `maxSessions` (the most sessions that a stream holds at a time).
    """

    connection_string: str | None = field(default=None, repr=False)
    connection_string_env: str | None = None
    fully_qualified_namespace: str | None = None
    credential: str | None = None
    entity: str | None = None
    subscription: str | None = None
    dead_letter: bool = False
    ca_file: str | None = None
    transport_type: TransportType | None = None
    http_proxy: str | None = None
    http_proxy_credentials_env: str | None = None
    custom_endpoint_address: str | None = None
    network: NetworkOptions | None = field(default=None, repr=False)
    """How the namespace is reached, instead of the four options before it. Not an option of Spark."""
    timeout: float = 60.0
    from_sequence_number: int = 0
    to_sequence_number: int | None = None
    partitions: int = 4
    include_raw: bool = False
    max_messages_per_trigger: int = STREAM_BATCH
    starting_position: int | None = 0
    """The first sequence number to read; None for only the messages that arrive after the start of the stream."""
    poll_interval: float = 5.0
    complete_committed: bool = True
    sessions: bool = False
    max_sessions: int = _MAX_SESSIONS

    @classmethod
    def parse(cls, texts: Mapping[str, str]) -> Self:
        """Returns the options. Raises SourceOptionError if a text is not valid."""
        values: dict[str, Any] = {}
        for name, text in texts.items():
            if name.lower() in _SPARK_OPTIONS:
                continue
            known = _BY_LOWER_NAME.get(name.lower())
            if known is None:
                raise SourceOptionError(f"servicebus has no option {name!r}; it knows {', '.join(sorted(_OPTIONS))}")
            spelled, attribute, read = known
            try:
                values[attribute] = read(text)
            except NetworkOptionError as error:
                raise SourceOptionError(f"option {spelled} cannot be used: {error}") from None
            except ValueError as error:
                raise SourceOptionError(f"option {spelled} {error}") from None
        if values.get("sessions"):
            values.setdefault("partitions", values.get("max_sessions", _MAX_SESSIONS))
        options = cls(**values)
        _check_sessions(options, values)
        named = (options.connection_string, options.connection_string_env, options.fully_qualified_namespace)
        if sum(one is not None for one in named) != 1:
            raise SourceOptionError(
                "give one of connectionString, connectionStringEnv and fullyQualifiedNamespace. A table keeps its "
                "options only if it was created without a list of columns."
            )
        if (options.fully_qualified_namespace is None) != (options.credential is None):
            raise SourceOptionError("options fullyQualifiedNamespace and credential need each other")
        if options.http_proxy_credentials_env is not None and options.http_proxy is None:
            raise SourceOptionError("option httpProxyCredentialsEnv needs httpProxy")
        return options

    def network_options(self) -> NetworkOptions:
        """Returns how the namespace is reached. Reads the variable with the proxy's credentials now."""
        if self.network is not None:
            return self.network
        proxy = None
        if self.http_proxy is not None:
            name = self.http_proxy_credentials_env
            proxy = HttpProxy.parse(
                self.http_proxy, None if name is None else _variable(name, "httpProxyCredentialsEnv")
            )
        return NetworkOptions(
            transport_type=self.transport_type,
            http_proxy=proxy,
            custom_endpoint_address=self.custom_endpoint_address,
            connection_verify=self.ca_file,
        )

    def endpoint(self) -> ConnectionString:
        """Returns the connection string. Reads the environment variable now: each machine may have another value."""
        if self.fully_qualified_namespace is not None:
            return ConnectionString.of_host(self.fully_qualified_namespace)
        text = self.connection_string
        if text is None:
            assert self.connection_string_env is not None
            text = _variable(self.connection_string_env, "connectionStringEnv")
        return ConnectionString.parse(text)

    def token_source(self) -> TokenSource | None:
        """Returns what makes tokens on this machine; None if the connection string has a key.

        The tasks of one Python worker share the tokens. Raises MissingExtraError if azure-identity is not installed.
        """
        if self.fully_qualified_namespace is None:
            return None
        assert self.credential is not None
        return AzureTokenSource(named_credential(self.credential))

    @property
    def path(self) -> str:
        """The path of the entity that is read."""
        if self.entity is None:
            raise SourceOptionError("option entity is missing: the queue, or the topic with option subscription")
        return self.entity if self.subscription is None else f"{self.entity}/Subscriptions/{self.subscription}"

    @property
    def address(self) -> str:
        """The address that is read: the path of the entity, or of its dead-letter queue."""
        return f"{self.path}/$DeadLetterQueue" if self.dead_letter else self.path

    @property
    def qualified_address(self) -> str:
        """The namespace and the address that is read. Every spelling of the same host and path gives the same text.

        A gateway or proxy that the namespace is reached through does not matter. Reads the environment variable now.
        """
        endpoint = self.endpoint()
        return f"{Endpoint.of(endpoint.host, endpoint.port)}/{self.address.strip('/').lower()}"


def _check_sessions(options: SourceOptions, given: Mapping[str, Any]) -> None:
    """Raises SourceOptionError if an option does not fit the option `sessions`."""
    if not options.sessions:
        if "max_sessions" in given:
            raise SourceOptionError("option maxSessions is only for sessions=true")
        return
    if options.dead_letter:
        raise SourceOptionError(
            "options sessions and deadLetter do not fit together: a dead-letter queue has no sessions. Remove sessions."
        )
    if not options.complete_committed:
        raise SourceOptionError(
            "options sessions=true and completeCommitted=false do not fit together: a stream locks sessions in order "
            "to complete what it has read. Without sessions, completeCommitted=false streams this entity, too."
        )
    if options.starting_position != 0:
        raise SourceOptionError(
            "with sessions=true, startingPosition has to be earliest: a receiver gets the messages of a session from "
            "the first on"
        )


def _variable(name: str, option: str) -> str:
    text = os.environ.get(name)
    if not text:
        raise SourceOptionError(
            f"the variable {name} (option {option}) is not set here; set it on the driver and on every executor"
        )
    return text


def options_of_table(texts: Mapping[str, str]) -> dict[str, str] | None:
    """Returns the options of a table that is created, with names in lower case; None if no table is created.

    For a new table Spark passes each option twice, as NAME and as option.NAME, and beside them the properties of the
    table: its provider, owner, comment and others. Raises SourceOptionError if an option is not for tables.
    """
    named = {name.lower(): text for name, text in texts.items()}
    found = {name: text for name, text in named.items() if f"option.{name}" in named}
    if "connectionstring" in found:
        raise SourceOptionError(
            "servicebus does not take connectionString for a table: the catalog and files written from the table would "
            "contain the key. Use connectionStringEnv, or fullyQualifiedNamespace with credential."
        )
    return found or None


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    return text.strip()


def _host(text: str) -> str:
    try:
        ConnectionString.of_host(_text(text))
    except ConnectionStringError:  # its text is for an option that also takes a connection string
        raise ValueError("is not a host such as contoso.servicebus.windows.net") from None
    return _text(text)


def _transport_type(text: str) -> TransportType:
    found = _TRANSPORT_TYPES.get(text.strip().lower())
    if found is None:
        raise ValueError(
            f"is {text!r}, not {' or '.join(TransportType)} (in short {' or '.join(_SHORT_TRANSPORT_TYPES)})"
        )
    return found


def _proxy(text: str) -> str:
    HttpProxy.parse(text)  # raises NetworkOptionError
    return text


def _custom_endpoint(text: str) -> str:
    NetworkOptions(custom_endpoint_address=text)  # raises NetworkOptionError
    return text


def _flag(text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise ValueError(f"is {text!r}, not true or false")
    return text.lower() == "true"


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"is {text!r}, not a whole number") from None
        if value < least:
            raise ValueError(f"is {value}; the least is {least}")
        return value

    return read


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"is {text!r}, not a number of seconds") from None
    if not 0 < value <= 86_400:
        raise ValueError(f"is {text}; it has to be above 0 and at most 86400 seconds")
    return value


def _position(text: str) -> int | None:
    if text.lower() == _LATEST:
        return None
    return 0 if text.lower() == _FIRST else _whole(0)(text)


_OPTIONS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "connectionString": ("connection_string", _text),
    "connectionStringEnv": ("connection_string_env", _text),
    "fullyQualifiedNamespace": ("fully_qualified_namespace", _host),
    "credential": ("credential", check_credential_name),
    "entity": ("entity", _text),
    "subscription": ("subscription", _text),
    "deadLetter": ("dead_letter", _flag),
    "caFile": ("ca_file", _text),
    "transportType": ("transport_type", _transport_type),
    "httpProxy": ("http_proxy", _proxy),
    "httpProxyCredentialsEnv": ("http_proxy_credentials_env", _text),
    "customEndpointAddress": ("custom_endpoint_address", _custom_endpoint),
    "timeout": ("timeout", _seconds),
    "fromSequenceNumber": ("from_sequence_number", _whole(0)),
    "toSequenceNumber": ("to_sequence_number", _whole(0)),
    "partitions": ("partitions", _whole(1)),
    "includeRaw": ("include_raw", _flag),
    "maxMessagesPerTrigger": ("max_messages_per_trigger", _whole(1)),
    "startingPosition": ("starting_position", _position),
    "pollInterval": ("poll_interval", _seconds),
    "completeCommitted": ("complete_committed", _flag),
    "sessions": ("sessions", _flag),
    "maxSessions": ("max_sessions", _whole(1)),
}
OPTION_NAMES: Final = tuple(_OPTIONS)
# Options of Spark itself, which Spark also passes to a writer.
_SPARK_OPTIONS: Final = frozenset({"checkpointlocation", "queryname"})
_BY_LOWER_NAME: Final = {name.lower(): (name, *found) for name, found in _OPTIONS.items()}
