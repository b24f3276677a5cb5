"""Twinbus: paired Service Bus namespaces, and a local namespace that the official SDKs use unchanged."""
