"""The settings that Twinbus takes from a client of the SDK."""

from __future__ import annotations

import pytest
from azure.servicebus import ServiceBusClient

from twinbus.sdk import administration_options, connection_settings

CONNECTION = "Endpoint=sb://contoso.servicebus.windows.net/;SharedAccessKeyName=a;SharedAccessKey=b"


@pytest.mark.parametrize(
    ("proxy", "url"),
    [
        ({"proxy_hostname": "proxy", "proxy_port": 3128}, "http://proxy:3128"),
        ({"proxy_hostname": "http://proxy", "proxy_port": 3128}, "http://proxy:3128"),
        ({"proxy_hostname": "::1", "proxy_port": 3128}, "http://[::1]:3128"),
        ({"proxy_hostname": "[::1]", "proxy_port": 3128}, "http://[::1]:3128"),
        (
            {"proxy_hostname": "proxy", "proxy_port": 3128, "username": "twin", "password": "p@ss/word"},
            "http://twin:p%40ss%2Fword@proxy:3128",
        ),
    ],
    ids=["a name", "a URL", "an IPv6 address", "an IPv6 address in brackets", "credentials"],
)
def test_p1_the_administration_client_of_a_pair_uses_the_proxy_of_the_client(
    proxy: dict[str, object], url: str
) -> None:
    with ServiceBusClient.from_connection_string(CONNECTION, http_proxy=proxy) as client:
        assert administration_options(client) == {"proxies": {"http": url, "https": url}}


def test_p1_the_administration_client_of_a_pair_trusts_what_the_client_trusts() -> None:
    with ServiceBusClient.from_connection_string(CONNECTION, connection_verify="ca.pem") as client:
        assert administration_options(client) == {"connection_verify": "ca.pem"}


def test_a_client_without_a_proxy_needs_no_options() -> None:
    with ServiceBusClient.from_connection_string(CONNECTION) as client:
        assert administration_options(client) == {}


@pytest.mark.parametrize("host", ["gateway", "[::1]"])
def test_a_custom_endpoint_is_a_url_also_with_an_ipv6_address(host: str) -> None:
    address = f"sb://{host}:5671"
    with ServiceBusClient.from_connection_string(CONNECTION, custom_endpoint_address=address) as client:
        assert connection_settings(client).custom_endpoint == address
