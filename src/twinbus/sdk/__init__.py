"""The only code that touches private parts of azure-servicebus.

Pairs and syphons need some functions that the SDK does not offer: the limits of a link, an end to a call that hangs,
sends of several tasks on one link, messages as bytes. The modules of this package use private attributes of the SDK for
these functions, and give the functions public, typed names. `tests/sdk/test_private_parts.py` lists the private
attributes and fails when a new version of the SDK changes one of them.

The first use of a name imports the module of that name. So pairs do not load the AMQP codec: only `encoded_messages`
needs the codec.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from twinbus.sdk.clients import (
        ConnectionSettings,
        RetrySettings,
        admin_credential,
        administration_options,
        client_endpoint,
        client_entity,
        connection_settings,
        given_keywords,
        retry_settings,
        sync_admin_credential,
        unopened_sender,
    )
    from twinbus.sdk.concurrent_sends import allow_concurrent_sends, supports_concurrent_sends
    from twinbus.sdk.encoded_messages import EncodedReceiver, encoded_batch, lossless_message, send_message
    from twinbus.sdk.handlers import (
        CANCELLED_AT_DEADLINE,
        RECEIVE_METHODS,
        LinkLimits,
        abort_connection,
        call_before_close,
        close_sync_handler,
        disable_retries,
        drop_aio_connection,
        drop_connection,
        empty_batch,
        has_credit,
        hides_pings,
        interrupt,
        interrupt_at_deadline,
        is_closed,
        is_open,
        is_retryable,
        keep_alive_of,
        link_limits,
        open_aio_link,
        open_sync_link,
        refuse_calls,
        speed_up_opening,
        was_interrupted_at_deadline,
    )
    from twinbus.sdk.messages import (
        TransformingBatch,
        amqp_messages,
        batch_messages,
        encoded_body,
        encoded_size,
        id_and_size,
        message_size,
        new_batch,
        outgoing_message,
        sdk_value,
        set_data_body,
    )
    from twinbus.sdk.private_names import SdkVersionError, check_confirms_settlement, check_version
    from twinbus.sdk.sender_credentials import (
        TokenIssuers,
        TokenTimeoutError,
        TokenUnavailableError,
        attach_aio_credential,
        timeout_error,
        waits_for_token,
    )

__all__ = [
    "CANCELLED_AT_DEADLINE",
    "RECEIVE_METHODS",
    "ConnectionSettings",
    "EncodedReceiver",
    "LinkLimits",
    "RetrySettings",
    "SdkVersionError",
    "TokenIssuers",
    "TokenTimeoutError",
    "TokenUnavailableError",
    "TransformingBatch",
    "abort_connection",
    "admin_credential",
    "administration_options",
    "allow_concurrent_sends",
    "amqp_messages",
    "attach_aio_credential",
    "batch_messages",
    "call_before_close",
    "check_confirms_settlement",
    "check_version",
    "client_endpoint",
    "client_entity",
    "close_sync_handler",
    "connection_settings",
    "disable_retries",
    "drop_aio_connection",
    "drop_connection",
    "empty_batch",
    "encoded_batch",
    "encoded_body",
    "encoded_size",
    "given_keywords",
    "has_credit",
    "hides_pings",
    "id_and_size",
    "interrupt",
    "interrupt_at_deadline",
    "is_closed",
    "is_open",
    "is_retryable",
    "keep_alive_of",
    "link_limits",
    "lossless_message",
    "message_size",
    "new_batch",
    "open_aio_link",
    "open_sync_link",
    "outgoing_message",
    "refuse_calls",
    "retry_settings",
    "sdk_value",
    "send_message",
    "set_data_body",
    "speed_up_opening",
    "supports_concurrent_sends",
    "sync_admin_credential",
    "timeout_error",
    "unopened_sender",
    "waits_for_token",
    "was_interrupted_at_deadline",
]

_NAMES_BY_MODULE: Final = {
    "clients": (
        "ConnectionSettings RetrySettings admin_credential administration_options client_endpoint client_entity "
        "connection_settings given_keywords retry_settings sync_admin_credential unopened_sender"
    ),
    "concurrent_sends": "allow_concurrent_sends supports_concurrent_sends",
    "encoded_messages": "EncodedReceiver encoded_batch lossless_message send_message",
    "handlers": (
        "CANCELLED_AT_DEADLINE LinkLimits RECEIVE_METHODS abort_connection call_before_close close_sync_handler "
        "disable_retries drop_aio_connection drop_connection empty_batch has_credit hides_pings interrupt "
        "interrupt_at_deadline is_closed "
        "is_open is_retryable keep_alive_of link_limits open_aio_link open_sync_link refuse_calls speed_up_opening "
        "was_interrupted_at_deadline"
    ),
    "messages": (
        "TransformingBatch amqp_messages batch_messages encoded_body encoded_size id_and_size "
        "message_size new_batch outgoing_message sdk_value set_data_body"
    ),
    "private_names": "SdkVersionError check_confirms_settlement check_version",
    "sender_credentials": (
        "TokenIssuers TokenTimeoutError TokenUnavailableError attach_aio_credential timeout_error waits_for_token"
    ),
}
_MODULES: Final = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
