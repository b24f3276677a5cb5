"""The private names of azure-servicebus that `twinbus.sdk` imports, and the tested versions of azure-servicebus.

If the installed version lacks one of the names, importing this module raises SdkVersionError with the version's number.
If the version has the names but was never tested, `check_version` raises the error when a pair is made: senders of an
untested version may lose messages without an error.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import azure.servicebus

from twinbus.errors import OperatorError

TESTED_VERSIONS: Final = ("7.13", "7.14", "7.15")
"""Versions that pass the tests (`make compat-versions`). pyproject.toml has the same range."""
CONFIRMING_VERSIONS: Final = ("7.15",)
"""Versions whose receivers wait until the service has confirmed a settlement. Earlier versions do not wait."""


class SdkVersionError(OperatorError):
    """The installed azure-servicebus is not one of the versions that were tested for this use."""

    def __init__(self, found: str, versions: tuple[str, ...] = TESTED_VERSIONS, use: str = "pairs") -> None:
        first, last = versions[0], versions[-1]
        major, _, minor = last.partition(".")
        requirement = f"azure-servicebus>={first},<{major}.{int(minor) + 1}"
        super().__init__(
            f"azure-servicebus {found} is installed; {use} are written for {requirement}",
            f'Run: pip install "{requirement}"',
        )
        self.found = found


try:
    from azure.servicebus._base_handler import (
        ServiceBusSASTokenCredential,
        ServiceBusSharedKeyCredential,
    )
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
except ImportError as error:
    raise SdkVersionError(azure.servicebus.__version__) from error

# Since version 7.15 the method that opens a link has a parameter `timeout`.
OPEN_TAKES_TIMEOUT: Final = "timeout" in inspect.signature(azure.servicebus.ServiceBusSender._open).parameters

__all__ = [
    "MESSAGE_DELIVERY_DONE_STATES",
    "OPEN_TAKES_TIMEOUT",
    "REQUEST_RESPONSE_PEEK_OPERATION",
    "REQUEST_RESPONSE_RECEIVE_BY_SEQUENCE_NUMBER",
    "TYPE",
    "VALUE",
    "AMQPConnectionError",
    "AMQPTypes",
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
    "aio_shared_key_credential",
    "check_confirms_settlement",
    "check_version",
    "encode_payload",
    "mgmt_handlers",
]


def aio_shared_key_credential() -> Any:
    """Return the SDK's class of credentials with a key, for asyncio clients.

    The asyncio part of the SDK is imported only here, because it loads aiohttp, which a sync pair does not need.
    """
    try:
        from azure.servicebus.aio._base_handler_async import (  # noqa: PLC0415
            ServiceBusSharedKeyCredential as AioSharedKeyCredential,
        )
    except ImportError as error:
        raise SdkVersionError(azure.servicebus.__version__) from error
    return AioSharedKeyCredential


def check_version() -> None:
    """Raise SdkVersionError if pairs were not tested with the installed version."""
    _check(TESTED_VERSIONS, "pairs")


def check_confirms_settlement() -> None:
    """Raise SdkVersionError if the installed version does not confirm settlements, as a syphon needs (Y3)."""
    _check(CONFIRMING_VERSIONS, "syphons over the SDK")


def _check(versions: tuple[str, ...], use: str) -> None:
    found = azure.servicebus.__version__
    if ".".join(found.split(".")[:2]) not in versions:
        raise SdkVersionError(found, versions, use)
