"""A fast Service Bus client on our codec: sockets, TLS, SAS tokens, reconnecting."""

from twinbus.connect.client import ServiceBusConnection, connect
from twinbus.connect.connection_string import ConnectionString
from twinbus.connect.management import Management
from twinbus.connect.message_encoding import encode_message
from twinbus.connect.received_message import MessageState, ReceivedMessage
from twinbus.connect.receiver import NEXT_AVAILABLE, ReceiveMode, Receiver
from twinbus.connect.sender import Sender
from twinbus.connect.tokens import SasTokenSource, Token, TokenSource

PEEK_LOCK = ReceiveMode.PEEK_LOCK
RECEIVE_AND_DELETE = ReceiveMode.RECEIVE_AND_DELETE

__all__ = [
    "NEXT_AVAILABLE",
    "PEEK_LOCK",
    "RECEIVE_AND_DELETE",
    "ConnectionString",
    "Management",
    "MessageState",
    "ReceiveMode",
    "ReceivedMessage",
    "Receiver",
    "SasTokenSource",
    "Sender",
    "ServiceBusConnection",
    "Token",
    "TokenSource",
    "connect",
    "encode_message",
]
