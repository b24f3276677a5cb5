"""The private names of azure-servicebus that pairs and syphons import: all from here.

A version that lacks one of them is told by its number (SdkVersionError); one that has them all, when it is used
(`sdk.check_version`).
"""

from __future__ import annotations

from typing import Final

import azure.servicebus

from twinbus.errors import OperatorError

TESTED_VERSIONS: Final = "7.15"
_REQUIREMENT: Final = "azure-servicebus>=7.15,<7.16"


class SdkVersionError(OperatorError):
    """Senders of another version may lose messages in silence: none is made."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"azure-servicebus {found} is installed; pairs are written for {_REQUIREMENT}",
            f'Run: pip install "{_REQUIREMENT}"',
        )
        self.found = found


try:
    from azure.servicebus._base_handler import ServiceBusSASTokenCredential, ServiceBusSharedKeyCredential
    from azure.servicebus._common import mgmt_handlers
    from azure.servicebus._common.constants import (
        REQUEST_RESPONSE_PEEK_OPERATION,
        REQUEST_RESPONSE_RECEIVE_BY_SEQUENCE_NUMBER,
    )
    from azure.servicebus._pyamqp._encode import encode_payload
    from azure.servicebus._pyamqp.constants import (
        MESSAGE_DELIVERY_DONE_STATES,
        LinkDeliverySettleReason,
        MessageDeliveryState,
    )
    from azure.servicebus._pyamqp.error import AMQPConnectionError, ErrorCondition
    from azure.servicebus._pyamqp.message import Header, Message, Properties
    from azure.servicebus._pyamqp.message import _MessageDelivery as MessageDelivery
    from azure.servicebus._pyamqp.types import TYPE, VALUE, AMQPTypes
    from azure.servicebus._transport._pyamqp_transport import PyamqpTransport
    from azure.servicebus.aio._base_handler_async import ServiceBusSharedKeyCredential as AioSharedKeyCredential
except ImportError as error:
    raise SdkVersionError(azure.servicebus.__version__) from error

__all__ = [
    "MESSAGE_DELIVERY_DONE_STATES",
    "REQUEST_RESPONSE_PEEK_OPERATION",
    "REQUEST_RESPONSE_RECEIVE_BY_SEQUENCE_NUMBER",
    "TYPE",
    "VALUE",
    "AMQPConnectionError",
    "AMQPTypes",
    "AioSharedKeyCredential",
    "ErrorCondition",
    "Header",
    "LinkDeliverySettleReason",
    "Message",
    "MessageDelivery",
    "MessageDeliveryState",
    "Properties",
    "PyamqpTransport",
    "SdkVersionError",
    "ServiceBusSASTokenCredential",
    "ServiceBusSharedKeyCredential",
    "check_version",
    "encode_payload",
    "mgmt_handlers",
]


def check_version() -> None:
    """Before a pair touches anything."""
    found = azure.servicebus.__version__
    if not found.startswith(f"{TESTED_VERSIONS}."):
        raise SdkVersionError(found)
