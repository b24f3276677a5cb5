"""What users may import into their tests: namespaces to connect to, to break and to kill."""

from twinbus.testing.local import LocalEndpoint, LocalNamespace, LocalNamespaces
from twinbus.testing.process import LocalNamespaceError

__all__ = ["LocalEndpoint", "LocalNamespace", "LocalNamespaceError", "LocalNamespaces"]
