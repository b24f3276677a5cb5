"""A version of azure-servicebus that lacks a private part is told by its number, and not as an ImportError."""

import subprocess
import sys

import pytest
from azure.servicebus.aio import ServiceBusClient

from twinbus.sdk.private_names import SdkVersionError
from twinbus.syphon import SdkTransport

LACKING = """
import sys
from importlib import import_module
import azure.servicebus.aio.management, azure.servicebus.management

module, name, use = sys.argv[1:]
delattr(import_module(module), name)
azure.servicebus.__version__ = "7.16.0"
from twinbus.errors import OperatorError
try:
    exec(use)
except OperatorError as error:
    print(error)
"""
PAIRING = "import twinbus; twinbus.pair_connection_strings('Endpoint=sb://a/', 'Endpoint=sb://b/')"
SYPHON = "import twinbus.syphon.sdk_transport"


@pytest.mark.parametrize(
    ("module", "name", "use"),
    [
        ("azure.servicebus._pyamqp._encode", "encode_payload", PAIRING),
        ("azure.servicebus._pyamqp.types", "AMQPTypes", SYPHON),
    ],
)
def test_another_version_of_the_sdk_is_told_by_its_number(module: str, name: str, use: str) -> None:
    command = [sys.executable, "-c", LACKING, module, name, use]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "azure-servicebus 7.16.0 is installed" in told.stdout, told.stderr
    assert 'pip install "azure-servicebus>=7.15,<7.16"' in told.stdout


async def test_a_syphon_over_the_sdk_refuses_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ServiceBusClient.from_connection_string("Endpoint=sb://a/;SharedAccessKeyName=a;SharedAccessKey=b")
    monkeypatch.setattr("azure.servicebus.__version__", "7.16.0")
    with pytest.raises(SdkVersionError, match=r"7\.16\.0"):
        SdkTransport(client, client)
