"""Local namespaces for the tests of users: real servers that a test can start, disturb with faults, and kill."""

from twinbus.testing.local_namespaces import LocalEndpoint, LocalNamespace, LocalNamespaces
from twinbus.testing.server_process import LocalNamespaceError

__all__ = ["LocalEndpoint", "LocalNamespace", "LocalNamespaceError", "LocalNamespaces"]
