"""Every private part of azure-servicebus that `twinbus.sdk` uses exists in the installed version.

A failure names the part and the code that depends on it. The behaviour behind the parts is tested with real namespaces
in tests/pairing/drivers and tests/syphon/transports.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import azure.servicebus
import pytest
from azure.servicebus import ServiceBusMessage, ServiceBusMessageBatch
from azure.servicebus._pyamqp.aio._sender_async import PendingDelivery as AioPendingDelivery
from azure.servicebus._pyamqp.sender import PendingDelivery
from azure.servicebus.exceptions import ServiceBusError

from tests.architecture.measure import private_sdk_names
from tests.architecture.source import PACKAGE, sources
from tests.sdk.installed import is_since
from twinbus.testing import LocalNamespace

BOTH, SYNC, AIO = ("sync", "aio"), ("sync",), ("aio",)
READ_FROM: Final = "7.15.0"
"""The version whose source the table was read from."""


class Part(NamedTuple):
    """A part of an object of the SDK: an attribute, or a method with these parameters."""

    owner: str
    name: str
    used_by: str
    parameters: str | None = None
    flavours: tuple[str, ...] = BOTH
    since: str = "7.13"
    """The first version that has the part. The code in `used_by` does without it before."""


PARTS: Final = (
    Part("client", "_config", "clients"),
    Part("client", "_credential", "clients.admin_credential, clients.connection_settings"),
    Part("client", "_entity_name", "clients.client_entity"),
    Part("config", "connection_port", "clients.client_endpoint, clients.connection_settings"),
    Part("config", "connection_verify", "clients.connection_settings, clients.administration_options"),
    Part("config", "custom_endpoint_address", "concurrent_sends.allow_concurrent_sends"),
    Part("config", "custom_endpoint_hostname", "clients.client_endpoint, clients.connection_settings"),
    Part("config", "http_proxy", "clients.connection_settings, clients.administration_options"),
    Part("config", "retry_backoff_factor", "clients.retry_settings"),
    Part("config", "retry_backoff_max", "clients.retry_settings"),
    Part("config", "retry_mode", "clients.retry_settings"),
    Part("config", "retry_total", "clients.retry_settings, handlers.disable_retries"),
    Part("config", "transport_type", "clients.connection_settings, concurrent_sends"),
    Part("config", "use_tls", "clients.client_endpoint, clients.connection_settings", since="7.14"),
    Part("sender", "_amqp_transport", "handlers.link_limits, concurrent_sends"),
    Part("sender", "_config", "handlers.disable_retries, concurrent_sends"),
    Part("sender", "_create_handler", "handlers.speed_up_opening", "auth"),
    Part("sender", "_credential", "handlers.interrupt, sender_credentials"),
    Part("sender", "_do_retryable_operation", "handlers.open_…_link, encoded_messages", "operation timeout kwargs"),
    Part("sender", "_error_policy", "handlers.disable_retries"),
    Part("sender", "_handle_exception", "concurrent_sends.allow_concurrent_sends", "exception"),
    Part("sender", "_handler", "handlers, concurrent_sends"),
    Part("sender", "_max_batch_size_on_link", "handlers.link_limits"),
    Part("sender", "_max_message_size_on_link", "handlers.link_limits"),
    Part("sender", "_open", "handlers.open_…_link", "timeout", since="7.15"),
    Part("sender", "_running", "handlers.is_open"),
    Part("sender", "_send", "encoded_messages.send_message", "message timeout last_exception"),
    Part("sender", "_shutdown", "handlers.is_closed, handlers.refuse_calls"),
    Part("error policy", "total_retries", "handlers.disable_retries"),
    Part("receiver", "_amqp_transport", "encoded_messages.EncodedReceiver"),
    Part("receiver", "_build_received_message", "encoded_messages.EncodedReceiver", "received", AIO),
    Part("receiver", "_close_handler", "handlers.call_before_close", ""),
    Part("receiver", "_iter_next", "handlers.RECEIVE_METHODS", "wait_time"),
    Part("receiver", "_receive", "handlers.RECEIVE_METHODS", "max_message_count timeout"),
    Part("receiver", "_handle_exception", "encoded_messages.EncodedReceiver.open", "exception", AIO),
    Part("receiver", "_handler", "handlers.has_credit, encoded_messages.EncodedReceiver"),
    Part(
        "receiver",
        "_mgmt_request_response_with_retry",
        "encoded_messages.EncodedReceiver",
        "mgmt_operation message callback timeout kwargs",
        AIO,
    ),
    Part("receiver", "_open", "encoded_messages.EncodedReceiver", "timeout", AIO, since="7.15"),
    Part("receiver", "_receive_mode", "encoded_messages.EncodedReceiver"),
    Part("receiver", "_renew_locks", "encoded_messages.EncodedReceiver.renew_locks", "lock_tokens timeout", AIO),
    Part("receiver", "_running", "handlers.has_credit, encoded_messages.EncodedReceiver"),
    Part("transport class", "create_servicebus_exception", "concurrent_sends.allow_concurrent_sends"),
    Part("transport class", "drain_and_release_messages_async", "encoded_messages", "handler", AIO, since="7.15"),
    Part("transport class", "set_batch_envelope_properties", "encoded_messages.encoded_batch", since="7.15"),
    Part("transport class", "to_outgoing_amqp_message", "messages.outgoing_message, messages.encoded_size"),
    Part("AMQP client", "_cbs_authenticator", "concurrent_sends"),
    Part("AMQP client", "_connection", "handlers, concurrent_sends"),
    Part("AMQP client", "_keep_alive_async", "handlers.speed_up_opening", "", AIO),
    Part("AMQP client", "_keep_alive_interval", "handlers.speed_up_opening"),
    Part("AMQP client", "_link", "handlers, concurrent_sends, encoded_messages"),
    Part("AMQP client", "_on_send_complete_async", "concurrent_sends", "message_delivery reason state", AIO),
    Part("AMQP client", "_shutdown", "handlers.KeepAliveThread"),
    Part("AMQP client", "_socket_timeout", "handlers.KeepAliveThread, concurrent_sends"),
    Part("AMQP client", "_transfer_message_async", "concurrent_sends", "message_delivery timeout", AIO),
    Part("AMQP client", "client_ready", "handlers.speed_up_opening", "", SYNC),
    Part("AMQP client", "client_ready_async", "handlers.speed_up_opening, concurrent_sends", "", AIO),
    Part("AMQP client", "do_work_async", "concurrent_sends", "kwargs", AIO),
    Part("AMQP client", "send_message_async", "concurrent_sends", "message timeout kwargs", AIO),
    Part("connection", "_remote_properties", "handlers.hides_pings"),
    Part(
        "connection",
        "_transport",
        "handlers.interrupt, close_sync_handler, abort_connection; concurrent_sends",
    ),
    Part("connection", "listen", "handlers.KeepAliveThread, concurrent_sends", "wait batch kwargs"),
    Part("socket transport", "close", "handlers.close_sync_handler", "", SYNC),
    Part("socket transport", "sock", "handlers.interrupt", None, SYNC),
    Part("socket transport", "write", "concurrent_sends", "s", AIO),
    Part("socket transport", "writer", "handlers.abort_connection, concurrent_sends", None, AIO),
    Part("sender link", "_error", "handlers, concurrent_sends: the cause of a lost send"),
    Part("sender link", "_outgoing_transfer", "concurrent_sends", "delivery", AIO),
    Part("sender link", "_pending_deliveries", "handlers, concurrent_sends"),
    Part("sender link", "_remove_pending_deliveries", "handlers.speed_up_opening", "", SYNC),
    Part("sender link", "current_link_credit", "concurrent_sends", None, AIO),
    Part("sender link", "update_pending_deliveries", "concurrent_sends", "", AIO),
    Part("receiver link", "_first_frame", "encoded_messages.EncodedReceiver", None, AIO),
    Part("receiver link", "_incoming_transfer", "encoded_messages.EncodedReceiver", "frame", AIO),
    Part("receiver link", "_process_incoming_message", "encoded_messages.EncodedReceiver", "frame message", AIO),
    Part("receiver link", "_received_delivery_tags", "encoded_messages.EncodedReceiver", None, AIO),
    Part("receiver link", "_received_payload", "encoded_messages.EncodedReceiver", None, AIO),
    Part("receiver link", "current_link_credit", "handlers.has_credit, encoded_messages.EncodedReceiver"),
    Part("receiver link", "delivery_count", "encoded_messages.EncodedReceiver", None, AIO),
    Part("token authenticator", "_token_put_time", "concurrent_sends: one renewal at a time", None, AIO),
    Part("token authenticator", "auth_state", "concurrent_sends: one renewal at a time", None, AIO),
    Part("token authenticator", "update_token", "concurrent_sends: one renewal at a time", "", AIO),
    Part("pending delivery", "on_delivery_settled", "handlers, concurrent_sends"),
    Part("pending delivery", "sent", "concurrent_sends", None, AIO),
    Part("pending delivery", "settled", "concurrent_sends", None, AIO),
    Part("raw message", "_annotations", "messages.message_size"),
    Part("raw message", "_application_properties", "messages.message_size"),
    Part("raw message", "_body_type", "messages.set_data_body"),
    Part("raw message", "_data_body", "messages"),
    Part("raw message", "_properties", "messages.message_size"),
    Part("raw message", "_sequence_body", "messages.encoded_body, messages.set_data_body"),
    Part("raw message", "_value_body", "messages.encoded_body, messages.set_data_body"),
    Part("batch", "_add", "messages.TransformingBatch", "add_message"),
    Part("batch", "_amqp_transport", "messages.TransformingBatch"),
    Part("batch", "_count", "encoded_messages.encoded_batch"),
    Part("batch", "_from_list", "messages.TransformingBatch", "messages"),
    Part("batch", "_message", "encoded_messages.encoded_batch"),
    Part("batch", "_messages", "messages.amqp_messages, messages.batch_messages"),
    Part("batch", "_tracing_attributes", "messages.TransformingBatch"),
    Part("received message", "_expiry", "encoded_messages.EncodedReceiver.renew_locks"),
    Part("error", "_retryable", "handlers.is_retryable, concurrent_sends"),
    Part("error", "_shutdown_handler", "concurrent_sends.allow_concurrent_sends"),
    Part("error", "_condition", "twinbus.backlog.failures.evidence_of"),
    Part("error", "_status_code", "twinbus.backlog.failures.evidence_of"),
    Part("error", "inner_exception", "twinbus.backlog.failures.evidence_of"),
)

Objects = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def objects() -> Iterator[Objects]:
    """The objects of both flavours by the name of the table's column `owner`, with open links."""
    config = {"namespaces": [{"name": "parts", "queues": [{"name": "q"}]}]}
    with LocalNamespace("parts", memory=True, config=config) as local, asyncio.Runner() as runner:
        sync_client = azure.servicebus.ServiceBusClient.from_connection_string(local.connection_string)
        aio_client = runner.run(aio_opened(local.connection_string))
        with sync_client, sync_client.get_queue_sender("q") as sender, sync_client.get_queue_receiver("q") as receiver:
            sender.send_messages(ServiceBusMessage("x"))
            [received] = receiver.receive_messages()
            found = {"sync": parts_of(sync_client, sender, receiver, received), "aio": parts_of(*aio_client)}
            yield found
        runner.run(aio_client[0].close())


async def aio_opened(connection_string: str) -> tuple[Any, Any, Any, Any]:
    from azure.servicebus.aio import ServiceBusClient  # noqa: PLC0415 - its name is the sync flavour's

    client = ServiceBusClient.from_connection_string(connection_string)
    sender, receiver = client.get_queue_sender("q"), client.get_queue_receiver("q")
    await sender.send_messages(ServiceBusMessage("x"))
    [received] = await receiver.receive_messages()
    return client, sender, receiver, received


def parts_of(client: Any, sender: Any, receiver: Any, received: Any) -> dict[str, Any]:
    aio = inspect.iscoroutinefunction(client.close)
    message = ServiceBusMessage("x")
    return {
        "client": client,
        "config": client._config,
        "sender": sender,
        "error policy": sender._error_policy,
        "receiver": receiver,
        "transport class": sender._amqp_transport,
        "AMQP client": sender._handler,
        "connection": sender._handler._connection,
        "socket transport": sender._handler._connection._transport,
        "sender link": sender._handler._link,
        "receiver link": receiver._handler._link,
        "token authenticator": sender._handler._cbs_authenticator,
        "pending delivery": (AioPendingDelivery if aio else PendingDelivery)(),
        "raw message": message.raw_amqp_message,
        "batch": ServiceBusMessageBatch(max_size_in_bytes=1000),
        "received message": received,
        "error": ServiceBusError("x"),
    }


@pytest.mark.parametrize(
    ("part", "flavour"),
    [(part, flavour) for part in PARTS if is_since(part.since) for flavour in part.flavours],
    ids=lambda value: f"{value.owner}.{value.name}" if isinstance(value, Part) else value,
)
def test_the_installed_sdk_has_the_private_part(part: Part, flavour: str, objects: Objects) -> None:
    owner = objects[flavour][part.owner]
    problem = (
        f"azure-servicebus {azure.servicebus.__version__} ({flavour}): {part.name} of a {part.owner} "
        f"({type(owner).__name__}) is not as in {READ_FROM}. twinbus.sdk.{part.used_by} depends on it."
    )
    assert hasattr(owner, part.name), problem
    if part.parameters is not None:
        assert " ".join(inspect.signature(getattr(owner, part.name)).parameters) == part.parameters, problem


def test_the_table_names_every_private_part_that_the_room_uses() -> None:
    private = private_sdk_names()
    used = {
        node.attr
        for source in sources(PACKAGE / "sdk")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr in private and not is_self(node.value)
    }
    # A named tuple's own.
    assert used - {part.name for part in PARTS} == {"_fields"}


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
