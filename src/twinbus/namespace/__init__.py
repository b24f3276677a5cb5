"""The embedded Service Bus: a namespace that the official SDKs use unchanged.

    engine/   decides what happens to messages; pure functions and state, no input or output
    store/    stores messages in SQLite or in memory
    front/    AMQP, HTTP, TLS and WebSocket connections of clients
    runtime   runs the engine on the event loop, between front and store
    server    one namespace that listens on a port; `serve` runs the namespaces of a `ServePlan`
    faults    faults on demand; `http_client` sets them from another process

Every name is loaded when it is first used: a client that only sets faults does not load the server.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from twinbus.namespace.azure_ports import AzurePorts
    from twinbus.namespace.config import parse_config
    from twinbus.namespace.engine.descriptions import (
        AuthorizationRule,
        Claim,
        QueueDescription,
        SubscriptionDescription,
        TopicDescription,
    )
    from twinbus.namespace.free_port import find_free_port, find_free_ports
    from twinbus.namespace.front import DEFAULT_KEY
    from twinbus.namespace.http_client import FaultClient, NamespaceHttpClient, NamespaceRequestError
    from twinbus.namespace.identity import (
        DEFAULT_AUDIENCE,
        IdentityOptions,
        KeySetError,
        parse_key_set,
    )
    from twinbus.namespace.logs import LogFormat, configure_logging
    from twinbus.namespace.resources import DEFAULT_CONNECTIONS, DEFAULT_MEGABYTES, ResourceLimits
    from twinbus.namespace.runtime import NamespaceRuntime
    from twinbus.namespace.serve import print_ready_json, serve_until_stopped
    from twinbus.namespace.serve_plan import DEFAULT_DATA, DEFAULT_NAMESPACES, ServePlan, make_serve_plan
    from twinbus.namespace.server import NamespaceOptions, NamespaceServer

__all__ = [
    "DEFAULT_AUDIENCE",
    "DEFAULT_CONNECTIONS",
    "DEFAULT_DATA",
    "DEFAULT_KEY",
    "DEFAULT_MEGABYTES",
    "DEFAULT_NAMESPACES",
    "AuthorizationRule",
    "AzurePorts",
    "Claim",
    "FaultClient",
    "IdentityOptions",
    "KeySetError",
    "LogFormat",
    "NamespaceHttpClient",
    "NamespaceOptions",
    "NamespaceRequestError",
    "NamespaceRuntime",
    "NamespaceServer",
    "QueueDescription",
    "ResourceLimits",
    "ServePlan",
    "SubscriptionDescription",
    "TopicDescription",
    "configure_logging",
    "find_free_port",
    "find_free_ports",
    "make_serve_plan",
    "parse_config",
    "parse_key_set",
    "print_ready_json",
    "serve_until_stopped",
]

_NAMES_BY_MODULE: Final = {
    "azure_ports": "AzurePorts",
    "config": "parse_config",
    "engine.descriptions": "AuthorizationRule Claim QueueDescription SubscriptionDescription TopicDescription",
    "free_port": "find_free_port find_free_ports",
    "front": "DEFAULT_KEY",
    "http_client": "FaultClient NamespaceHttpClient NamespaceRequestError",
    "identity": "DEFAULT_AUDIENCE IdentityOptions KeySetError parse_key_set",
    "logs": "LogFormat configure_logging",
    "resources": "DEFAULT_CONNECTIONS DEFAULT_MEGABYTES ResourceLimits",
    "runtime": "NamespaceRuntime",
    "serve": "print_ready_json serve_until_stopped",
    "serve_plan": "DEFAULT_DATA DEFAULT_NAMESPACES ServePlan make_serve_plan",
    "server": "NamespaceOptions NamespaceServer",
}
_MODULES: Final = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
