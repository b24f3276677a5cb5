"""The network side of a namespace: AMQP and HTTP on one port, plain or in TLS, recognised by the first bytes.

`Listener` accepts connections for one `NamespaceContext`. The other modules turn bytes into engine events, and engine
effects into bytes. The engine decides what happens to messages.
"""

from twinbus.namespace.front.certificates import azure_ca_path, ca_path, constrained_context, server_context
from twinbus.namespace.front.context import NamespaceContext, SharedPort
from twinbus.namespace.front.fault_effects import crash
from twinbus.namespace.front.http_handler import HttpHandler
from twinbus.namespace.front.listener import Listener
from twinbus.namespace.front.sas_verifier import DEFAULT_KEY, SasVerifier, default_rule

__all__ = [
    "DEFAULT_KEY",
    "HttpHandler",
    "Listener",
    "NamespaceContext",
    "SasVerifier",
    "SharedPort",
    "azure_ca_path",
    "ca_path",
    "constrained_context",
    "crash",
    "default_rule",
    "server_context",
]
