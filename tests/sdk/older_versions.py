"""Let azure-servicebus 7.13 and 7.14 use a local namespace in tests.

Two options of later versions are missing:

- 7.13 always uses TLS on port 5671, so it cannot reach a namespace on a free port. Its AMQP client can use plain AMQP
  on any port, but its `ServiceBusClient` does not pass the option on. 7.14 does, for `UseDevelopmentEmulator=true`.
- 7.13 and 7.14 ignore `connection_verify` of an administration client, and all other options of its HTTP transport. A
  program passes it with each request instead.

`tests.sdk.versions` installs this module into the environments of these versions, so every process there imports it.
In a process with the variable TWINBUS_UNMODIFIED_SDK it changes nothing.
"""

from __future__ import annotations

import os
import re
from typing import Any

import azure.servicebus
from azure.servicebus._pyamqp.aio._client_async import AMQPClientAsync
from azure.servicebus._pyamqp.client import AMQPClient
from azure.servicebus.aio.management import ServiceBusAdministrationClient as AioServiceBusAdministrationClient
from azure.servicebus.management import ServiceBusAdministrationClient

TRANSPORT_OPTIONS = ("connection_verify", "use_env_settings")


def allow_plain_amqp(amqp_client: Any) -> None:
    create = amqp_client.__init__

    def create_plain(self: Any, hostname: str, *arguments: Any, **options: Any) -> None:
        if re.search(r":\d+", hostname):
            options["use_tls"] = False
        create(self, hostname, *arguments, **options)

    amqp_client.__init__ = create_plain


def use_transport_options(admin_client: Any) -> None:
    create, build_pipeline = admin_client.__init__, admin_client._build_pipeline

    def create_with_options(self: Any, *arguments: Any, **options: Any) -> None:
        self.transport_options = {name: options[name] for name in TRANSPORT_OPTIONS if name in options}
        create(self, *arguments, **options)

    def build_with_options(self: Any, **options: Any) -> Any:
        return build_pipeline(self, **self.transport_options, **options)

    admin_client.__init__, admin_client._build_pipeline = create_with_options, build_with_options


UNMODIFIED = "TWINBUS_UNMODIFIED_SDK" in os.environ

if azure.servicebus.__version__.startswith("7.13.") and not UNMODIFIED:
    allow_plain_amqp(AMQPClient)
    allow_plain_amqp(AMQPClientAsync)
if azure.servicebus.__version__.startswith(("7.13.", "7.14.")) and not UNMODIFIED:
    use_transport_options(ServiceBusAdministrationClient)
    use_transport_options(AioServiceBusAdministrationClient)
