"""Local namespaces for the tests of users: real servers that a test can start, kill, and make fail with faults."""

from twinbus.testing.local_namespaces import LocalEndpoint, LocalNamespace, LocalNamespaces
from twinbus.testing.server_process import LocalNamespaceError

__all__ = ["LocalEndpoint", "LocalNamespace", "LocalNamespaceError", "LocalNamespaces"]
