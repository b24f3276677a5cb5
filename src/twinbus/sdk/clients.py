"""The settings of a client of azure-servicebus: its namespace, credential, transport and retry settings.

The SDK has no public attributes for these settings. Sync and asyncio clients have the same private attributes.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential
from azure.servicebus import TransportType

from twinbus.backlog import Endpoint
from twinbus.sdk.private_names import (
    ServiceBusSASTokenCredential,
    ServiceBusSharedKeyCredential,
    aio_shared_key_credential,
)

_TLS_PORT: Final = 5671
_PLAIN_PORT: Final = 5672
_WEBSOCKET_PORT: Final = 443
_UNUSED_ENTITY: Final = "twinbus-canary"


def given_keywords(**keywords: Any) -> dict[str, Any]:
    """Return the keywords that are not None. Older versions of the SDK lack some of the others."""
    return {name: value for name, value in keywords.items() if value is not None}


def client_endpoint(client: Any) -> Endpoint:
    """Return host and port of the client's namespace."""
    config = client._config
    host, _, port = str(client.fully_qualified_namespace).rpartition(":")
    if host and port.isdigit() and not host.endswith(":"):
        return Endpoint.of(host, int(port))
    host = client.fully_qualified_namespace
    if config.custom_endpoint_hostname == host:
        # With TLS the SDK removes the port from the host name. Only the custom endpoint still contains the port.
        return Endpoint.of(host, config.connection_port)
    return Endpoint.of(host, _TLS_PORT if _uses_tls(config) else _PLAIN_PORT)


def client_entity(client: Any) -> str | None:
    """Return the only entity that the client may use (EntityPath in its connection string), or None."""
    return client._entity_name or None


def unopened_sender(client: Any) -> Any:
    """Return a sender that is never opened. `is_closed` of this sender is true after `client.close()` (C1)."""
    return client.get_queue_sender(client_entity(client) or _UNUSED_ENTITY)


class ConnectionSettings(NamedTuple):
    """The settings that another AMQP client needs to connect to the same namespace."""

    namespace: str
    """Host name, with `:port` if the client has a port."""
    use_tls: bool
    authority_file: str | None
    """Path of a file with trusted certificates (`connection_verify`)."""
    credential: Any
    uses_websocket: bool
    http_proxy: Mapping[str, Any] | None
    """The option `http_proxy` of the client."""
    custom_endpoint: str | None
    """`sb://host:port`, if the client has the option `custom_endpoint_address`."""


def connection_settings(client: Any) -> ConnectionSettings:
    config = client._config
    namespace, host = str(client.fully_qualified_namespace), config.custom_endpoint_hostname
    if host == namespace and config.connection_port not in (_TLS_PORT, _WEBSOCKET_PORT):
        # A namespace at a port of its own. With TLS the SDK removes the port from the host name (`client_endpoint`).
        namespace, host = f"{host}:{config.connection_port}", None
    return ConnectionSettings(
        namespace,
        _uses_tls(config),
        getattr(config, "connection_verify", None),
        client._credential,
        config.transport_type is TransportType.AmqpOverWebsocket,
        config.http_proxy or None,
        f"sb://{_bracketed(host)}:{config.connection_port}" if host else None,
    )


def administration_options(client: Any) -> dict[str, Any]:
    """Return keyword arguments with which an administration client uses the client's proxy and trusted certificates."""
    authority, proxy = getattr(client._config, "connection_verify", None), client._config.http_proxy
    options: dict[str, Any] = {"connection_verify": authority} if authority else {}
    if not proxy:
        return options
    host = _bracketed(str(proxy["proxy_hostname"]).removeprefix("http://"))
    user, password = (quote(str(proxy.get(name) or ""), safe="") for name in ("username", "password"))
    url = f"http://{f'{user}:{password}@' if user or password else ''}{host}:{proxy['proxy_port']}"
    return {**options, "proxies": {"http": url, "https": url}}


def _bracketed(host: str) -> str:
    """Return a host as a URL needs it: an IPv6 address is in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _uses_tls(config: Any) -> bool:
    return bool(getattr(config, "use_tls", True))  # version 7.13 always uses TLS


def admin_credential(client: Any) -> Any | None:
    """Return the client's credential in the form that an administration client needs.

    Returns None for a shared access signature: the signature is for messaging, and the management service refuses it.
    """
    credential = client._credential
    if isinstance(credential, AzureNamedKeyCredential):
        is_aio = inspect.iscoroutinefunction(client.close)
        made = aio_shared_key_credential() if is_aio else ServiceBusSharedKeyCredential
        return made(*credential.named_key)
    if isinstance(credential, AzureSasCredential | ServiceBusSASTokenCredential):
        return None
    return credential


def sync_admin_credential(credential: Any) -> Any:
    """Return what `admin_credential` returned for an asyncio client, as the sync administration client needs it.

    A key becomes a sync credential with the same key. Any other credential is returned as it is.
    """
    if isinstance(credential, aio_shared_key_credential()):
        return ServiceBusSharedKeyCredential(credential.policy, credential.key)
    return credential


class RetrySettings(NamedTuple):
    """The number of retries of a client, and the pauses between two tries."""

    total: int
    backoff_factor: float
    backoff_max: float
    fixed: bool

    def pause(self, tried: int) -> float:
        """Return the pause in seconds after `tried` failed tries, computed as the SDK computes it."""
        if self.fixed:
            return min(self.backoff_factor, self.backoff_max)
        return min(self.backoff_factor * 2.0**tried * random.uniform(0.8, 1.2), self.backoff_max)


def retry_settings(client: Any) -> RetrySettings:
    config = client._config
    fixed = str(getattr(config.retry_mode, "value", config.retry_mode)).lower() == "fixed"
    return RetrySettings(config.retry_total, config.retry_backoff_factor, config.retry_backoff_max, fixed)
