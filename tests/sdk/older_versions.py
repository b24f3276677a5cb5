"""Let azure-servicebus 7.13 and 7.14 use a local namespace in tests.

Two options of later versions are missing:

- 7.13 always uses TLS on port 5671, so it cannot reach a namespace on a free port. Its AMQP client can use plain AMQP
  on any port, but its `ServiceBusClient` does not pass the option on. 7.14 does, for `UseDevelopmentEmulator=true`.
- 7.13 and 7.14 ignore `connection_verify` of an administration client. A program passes it with each request instead.

`tests.sdk.versions` installs this module into the environments of these versions, so every process there imports it.
"""

from __future__ import annotations

import re
from typing import Any

import azure.servicebus
from azure.servicebus._pyamqp.aio._client_async import AMQPClientAsync
from azure.servicebus._pyamqp.client import AMQPClient
from azure.servicebus.aio.management import ServiceBusAdministrationClient as AioServiceBusAdministrationClient
from azure.servicebus.management import ServiceBusAdministrationClient


def allow_plain_amqp(amqp_client: Any) -> None:
    create = amqp_client.__init__

    def create_plain(self: Any, hostname: str, *arguments: Any, **options: Any) -> None:
        if re.search(r":\d+", hostname):
            options["use_tls"] = False
        create(self, hostname, *arguments, **options)

    amqp_client.__init__ = create_plain


def use_connection_verify(admin_client: Any) -> None:
    create, build_pipeline = admin_client.__init__, admin_client._build_pipeline

    def create_trusting(self: Any, *arguments: Any, **options: Any) -> None:
        self.trust = {name: options[name] for name in ("connection_verify",) if name in options}
        create(self, *arguments, **options)

    def build_trusting(self: Any, **options: Any) -> Any:
        return build_pipeline(self, **self.trust, **options)

    admin_client.__init__, admin_client._build_pipeline = create_trusting, build_trusting


if azure.servicebus.__version__.startswith("7.13."):
    allow_plain_amqp(AMQPClient)
    allow_plain_amqp(AMQPClientAsync)
if azure.servicebus.__version__.startswith(("7.13.", "7.14.")):
    use_connection_verify(ServiceBusAdministrationClient)
    use_connection_verify(AioServiceBusAdministrationClient)
