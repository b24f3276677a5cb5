"""If a version of azure-servicebus lacks a private part, the error names the version and is no ImportError."""

import subprocess
import sys
import tomllib

import azure.servicebus
import pytest
from azure.servicebus.aio import ServiceBusClient

from tests.architecture.source import ROOT
from twinbus.sdk.private_names import TESTED_VERSIONS, SdkVersionError
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
def test_a_version_that_lacks_a_private_name_is_refused_with_its_number(module: str, name: str, use: str) -> None:
    command = [sys.executable, "-c", LACKING, module, name, use]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "azure-servicebus 7.16.0 is installed" in told.stdout, told.stderr
    assert 'pip install "azure-servicebus>=7.13,<7.16"' in told.stdout


def test_the_requirement_of_the_project_is_the_range_of_tested_versions() -> None:
    [pinned] = [
        requirement
        for requirement in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "dependencies"
        ]
        if requirement.startswith("azure-servicebus")
    ]
    assert pinned in str(SdkVersionError("7.16.0"))
    assert azure.servicebus.__version__.startswith(TESTED_VERSIONS)


async def test_a_syphon_over_the_sdk_refuses_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ServiceBusClient.from_connection_string("Endpoint=sb://a/;SharedAccessKeyName=a;SharedAccessKey=b")
    for version in ("7.16.0", "7.14.3"):
        monkeypatch.setattr("azure.servicebus.__version__", version)
        with pytest.raises(SdkVersionError, match=rf"{version} .*azure-servicebus>=7\.15,<7\.16"):
            SdkTransport(client, client)
