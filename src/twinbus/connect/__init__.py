"""Asyncio client for Service Bus, with the codec of `twinbus.amqp`: sockets, TLS, WebSocket, proxies, tokens.

    async with connect(connection_string) as bus:
        sender = await bus.sender("orders")
        await sender.send([Message(b"hello")])

The first use of a name imports the module of that name. So code that needs only a connection string or an error class
does not load the codec.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from twinbus.connect.bisection import bisect_refused
    from twinbus.connect.client import ServiceBusConnection, connect
    from twinbus.connect.connection_string import PLAIN_PORT, TLS_PORT, ConnectionString, ConnectionStringError
    from twinbus.connect.errors import (
        MessageLockLostError,
        MessageNotFoundError,
        OperationTimeoutError,
        ServiceBusArgumentError,
        ServiceBusCommunicationError,
        ServiceBusConnectionError,
        ServiceBusError,
        ServiceBusHandshakeError,
        SessionCannotBeLockedError,
        SessionLockLostError,
    )
    from twinbus.connect.management import Management
    from twinbus.connect.message_encoding import encode_message, to_datetime, to_millis
    from twinbus.connect.named_credentials import (
        AioCredential,
        CredentialNameError,
        check_credential_name,
        named_credential,
    )
    from twinbus.connect.network import TRANSPORT_NAMES, HttpProxy, NetworkOptionError, NetworkOptions, TransportType
    from twinbus.connect.received_message import MessageState, ReceivedMessage
    from twinbus.connect.receiver import (
        NEXT_AVAILABLE,
        PEEK_LOCK,
        RECEIVE_AND_DELETE,
        ReceiveMode,
        Receiver,
        SessionChoice,
    )
    from twinbus.connect.sender import Sender
    from twinbus.connect.settlement import (
        COMPLETE,
        RELEASE,
        SettlementOutcome,
        abandon_outcome,
        dead_letter_outcome,
        defer_outcome,
    )
    from twinbus.connect.timeouts import deadline
    from twinbus.connect.tokens import (
        ENTRA_SCOPE,
        JWT_TYPE,
        SAS_SCHEME,
        SAS_TYPE,
        AzureTokenSource,
        SasTokenSource,
        Token,
        TokenSource,
        credential_failure,
        make_sas_token,
        sas_signature,
    )
    from twinbus.connect.websocket import WEBSOCKET_PATH, WebSocketLayer, WebSocketRefusedError, accept_websocket

_NAMES_BY_MODULE: Final = {
    "bisection": "bisect_refused",
    "client": "ServiceBusConnection connect",
    "connection_string": "ConnectionString ConnectionStringError PLAIN_PORT TLS_PORT",
    "errors": (
        "MessageLockLostError MessageNotFoundError OperationTimeoutError ServiceBusArgumentError "
        "ServiceBusCommunicationError ServiceBusConnectionError ServiceBusError "
        "ServiceBusHandshakeError SessionCannotBeLockedError SessionLockLostError"
    ),
    "management": "Management",
    "message_encoding": "encode_message to_datetime to_millis",
    "named_credentials": "AioCredential CredentialNameError check_credential_name named_credential",
    "network": "HttpProxy NetworkOptionError NetworkOptions TRANSPORT_NAMES TransportType",
    "received_message": "MessageState ReceivedMessage",
    "receiver": "NEXT_AVAILABLE PEEK_LOCK RECEIVE_AND_DELETE ReceiveMode Receiver SessionChoice",
    "sender": "Sender",
    "settlement": "COMPLETE RELEASE SettlementOutcome abandon_outcome dead_letter_outcome defer_outcome",
    "timeouts": "deadline",
    "tokens": (
        "AzureTokenSource ENTRA_SCOPE JWT_TYPE SAS_SCHEME SAS_TYPE SasTokenSource Token TokenSource credential_failure "
        "make_sas_token sas_signature"
    ),
    "websocket": "WEBSOCKET_PATH WebSocketLayer WebSocketRefusedError accept_websocket",
}
_MODULES: Final = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}

__all__ = [
    "COMPLETE",
    "ENTRA_SCOPE",
    "JWT_TYPE",
    "NEXT_AVAILABLE",
    "PEEK_LOCK",
    "PLAIN_PORT",
    "RECEIVE_AND_DELETE",
    "RELEASE",
    "SAS_SCHEME",
    "SAS_TYPE",
    "TLS_PORT",
    "TRANSPORT_NAMES",
    "WEBSOCKET_PATH",
    "AioCredential",
    "AzureTokenSource",
    "ConnectionString",
    "ConnectionStringError",
    "CredentialNameError",
    "HttpProxy",
    "Management",
    "MessageLockLostError",
    "MessageNotFoundError",
    "MessageState",
    "NetworkOptionError",
    "NetworkOptions",
    "OperationTimeoutError",
    "ReceiveMode",
    "ReceivedMessage",
    "Receiver",
    "SasTokenSource",
    "Sender",
    "ServiceBusArgumentError",
    "ServiceBusCommunicationError",
    "ServiceBusConnection",
    "ServiceBusConnectionError",
    "ServiceBusError",
    "ServiceBusHandshakeError",
    "SessionCannotBeLockedError",
    "SessionChoice",
    "SessionLockLostError",
    "SettlementOutcome",
    "Token",
    "TokenSource",
    "TransportType",
    "WebSocketLayer",
    "WebSocketRefusedError",
    "abandon_outcome",
    "accept_websocket",
    "bisect_refused",
    "check_credential_name",
    "connect",
    "credential_failure",
    "dead_letter_outcome",
    "deadline",
    "defer_outcome",
    "encode_message",
    "make_sas_token",
    "named_credential",
    "sas_signature",
    "to_datetime",
    "to_millis",
]


if not TYPE_CHECKING:  # hidden from mypy, which would otherwise accept any name

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
