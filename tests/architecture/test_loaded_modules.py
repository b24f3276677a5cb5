"""What an import loads: an application that only pairs loads neither the server, the codec, Spark nor the commands."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    "aiohttp",
    "apsw",
    "azure.servicebus",
    "azure.servicebus.aio",
    "pyspark",
    "twinbus.amqp",
    "twinbus.cli",
    "twinbus.connect",
    "twinbus.namespace",
    "twinbus.pairing",
    "twinbus.pipeline",
    "twinbus.sdk",
    "twinbus.syphon",
    "typer",
)
PRINT_LOADED = """
import sys
print(*(name for name in sys.argv[1:] if any((module + ".").startswith(name + ".") for module in sys.modules)))
"""
PAIRING = {"azure.servicebus", "twinbus.pairing", "twinbus.sdk"}
SDK = {"azure.servicebus", "azure.servicebus.aio", "twinbus.sdk"}
AIO = {"azure.servicebus.aio"}
ACCESS = "Endpoint=sb://a/;SharedAccessKeyName=a;SharedAccessKey=b"
SYPHON = {"twinbus.amqp", "twinbus.connect", "twinbus.syphon"}


def loaded(program: str) -> set[str]:
    """Return which of HEAVY a new process has loaded after this program."""
    command = [sys.executable, "-c", program + PRINT_LOADED, *HEAVY]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import twinbus", set()),
        ("from twinbus import SendAvailabilityOptions, OptionError, AliasInUseError", {"twinbus.pairing"}),
        ("from twinbus import Pair, pair_connection_strings, pair_namespaces", PAIRING),
        ("import twinbus.aio", PAIRING | AIO),
        ("import twinbus.backlog", set()),
        ("import twinbus.sdk", {"twinbus.sdk"}),
        ("import twinbus.syphon", {"twinbus.syphon"}),
        ("from twinbus.syphon import NativeTransport, Syphon, NamespaceAccess, DeadLetters", SYPHON),
        (f"from twinbus.syphon import NativeTransport; NativeTransport({ACCESS!r}, {ACCESS!r})", SYPHON),
        (
            "from twinbus.syphon import SdkTransport",
            SYPHON | {"azure.servicebus", "azure.servicebus.aio", "twinbus.sdk"},
        ),
        ("import twinbus.pipeline", {"twinbus.pipeline"}),
        ("import twinbus.ledger, twinbus.money, twinbus.report", set()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_import_loads_only_what_it_needs(program: str, expected: set[str]) -> None:
    assert loaded(program) == expected
