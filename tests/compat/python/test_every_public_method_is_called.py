"""Every public method of the SDK is called by a compat test. A method without a call fails here.

The public methods come from introspection, the calls from the source of the compat tests. The decorator or the fixtures
of a test show which flavour it uses. The last word of a name shows what the name holds: `dead_receiver` is a receiver,
`bus.admin` an administration client.
"""

import ast
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import azure.servicebus as sync_sdk
import azure.servicebus.aio as aio_sdk
import azure.servicebus.aio.management as aio_management
import azure.servicebus.management as sync_management
import pytest

Member = tuple[type, str]

# The last word of a name → the classes it may hold, by flavour.
HOLDS: dict[str, dict[str, type]] = {
    "client": {"sync": sync_sdk.ServiceBusClient, "aio": aio_sdk.ServiceBusClient},
    "sender": {"sync": sync_sdk.ServiceBusSender, "aio": aio_sdk.ServiceBusSender},
    "receiver": {"sync": sync_sdk.ServiceBusReceiver, "aio": aio_sdk.ServiceBusReceiver},
    "session": {"sync": sync_sdk.ServiceBusSession, "aio": aio_sdk.ServiceBusSession},
    "renewer": {"sync": sync_sdk.AutoLockRenewer, "aio": aio_sdk.AutoLockRenewer},
    "admin": {
        "sync": sync_management.ServiceBusAdministrationClient,
        "aio": aio_management.ServiceBusAdministrationClient,
    },
    "batch": {"both": sync_sdk.ServiceBusMessageBatch},
    "message": {"both": sync_sdk.ServiceBusMessage},
    "received": {"both": sync_sdk.ServiceBusReceivedMessage},
}
SURFACE = [held for holding in HOLDS.values() for held in holding.values()]
BY_PATH = {
    **{f"azure.servicebus.{name}": getattr(sync_sdk, name) for name in sync_sdk.__all__},
    **{f"azure.servicebus.aio.{name}": getattr(aio_sdk, name) for name in aio_sdk.__all__},
    "azure.servicebus.management.ServiceBusAdministrationClient": sync_management.ServiceBusAdministrationClient,
    "azure.servicebus.aio.management.ServiceBusAdministrationClient": aio_management.ServiceBusAdministrationClient,
}
FLAVOUR_OF_FIXTURE = {"client": "sync", "admin": "sync", "aio_client": "aio"}


def public(surface: Iterable[type]) -> set[Member]:
    return {(owner, name) for owner in surface for name in dir(owner) if not name.startswith("_")}


def imported(tree: ast.Module) -> dict[str, str]:
    """Name in the file → dotted path of what it stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
    return found


def path_of(node: ast.expr, names: dict[str, str]) -> str | None:
    match node:
        case ast.Name():
            return names.get(node.id)
        case ast.Attribute() if path := path_of(node.value, names):
            return f"{path}.{node.attr}"
        case _:
            return None


def last_word(node: ast.expr) -> str:
    match node:
        case ast.Name():
            name = node.id
        case ast.Attribute():
            name = node.attr
        case _:
            return ""
    return name.rsplit("_", 1)[-1]


def flavours_of(function: ast.FunctionDef | ast.AsyncFunctionDef, names: dict[str, str]) -> set[str]:
    decorated = {node.id for node in function.decorator_list if isinstance(node, ast.Name)}
    arguments = {argument.arg for argument in function.args.args}
    if "both_flavours" in decorated or any(
        isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Bus" for argument in function.args.args
    ):
        return {"sync", "aio"}
    flavours = {flavour for fixture, flavour in FLAVOUR_OF_FIXTURE.items() if fixture in arguments}
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and (path := path_of(node, names)) in BY_PATH:
            flavours.add("aio" if ".aio." in str(path) else "sync")
        elif isinstance(node, ast.Name) and names.get(node.id) in BY_PATH and BY_PATH[names[node.id]] in SURFACE:
            flavours.add("aio" if ".aio." in names[node.id] else "sync")
    return flavours


def members_used(source: str) -> Iterator[Member]:
    tree = ast.parse(source)
    names = imported(tree)
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        flavours = flavours_of(function, names) | {"both"}
        for node in ast.walk(function):
            if not isinstance(node, ast.Attribute):
                continue
            if owner := BY_PATH.get(path_of(node.value, names) or ""):
                yield owner, node.attr
            for flavour, owner in HOLDS.get(last_word(node.value), {}).items():
                if flavour in flavours:
                    yield owner, node.attr


def never_used(sources: Iterable[str], surface: Iterable[type]) -> list[str]:
    used = {member for source in sources for member in members_used(source)}
    missing = public(surface) - used
    return sorted(f"{owner.__module__}.{owner.__name__}.{name}" for owner, name in missing)


def compat_tests() -> list[str]:
    return [path.read_text() for path in sorted(Path(__file__).parent.glob("test_*.py")) if path != Path(__file__)]


def test_every_public_method_and_property_of_the_sdk_is_used_by_a_compat_test() -> None:
    assert never_used(compat_tests(), SURFACE) == []


@pytest.mark.parametrize(
    ("body", "missing"),
    [
        ("@both_flavours\nasync def test(bus):\n await sender.send_messages(1)", set()),
        ("def test(client):\n sender.send_messages(1)", {"aio"}),
        ("async def test(aio_client):\n await my_sender.send_messages(1)", {"sync"}),
        ("@both_flavours\nasync def test(bus):\n await receiver.send_messages(1)", {"aio", "sync"}),
        ("@both_flavours\nasync def test(bus):\n send_messages(sender)", {"aio", "sync"}),
    ],
    ids=["both", "sync only", "aio only", "of another kind", "not called"],
)
def test_a_method_without_a_call_of_the_right_kind_and_flavour_is_named(body: str, missing: set[str]) -> None:
    senders = (sync_sdk.ServiceBusSender, aio_sdk.ServiceBusSender)
    found = [name for name in never_used([textwrap.dedent(body)], senders) if name.endswith(".send_messages")]
    assert {"aio" if ".aio." in name else "sync" for name in found} == missing
