"""The fixtures by name: where the package is not installed, pytest does not find them by itself."""

from twinbus.testing.fixtures import twinbus_namespace, twinbus_namespace_pair

__all__ = ["twinbus_namespace", "twinbus_namespace_pair"]
