"""Queues for the tests of the pipeline, made by the official administration client."""

from __future__ import annotations

from typing import Any

from azure.servicebus.management import ServiceBusAdministrationClient

from twinbus.testing import LocalNamespace


def new_queue(namespace: LocalNamespace, name: str, **settings: Any) -> str:
    with ServiceBusAdministrationClient.from_connection_string(
        namespace.connection_string, connection_verify=str(namespace.ca)
    ) as admin:
        admin.create_queue(name, **settings)
    return name
