"""A pair and what it hands out have the interface of the SDK: names, signatures, `isinstance`, and types (P1, S1)."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import azure.servicebus as sdk
import azure.servicebus.aio as aio_sdk
import pytest

import twinbus.aio
import twinbus.pairing as ours
from twinbus import SendAvailabilityOptions
from twinbus.pairing.call_arguments import IdentifiedBatch

TYPED = Path(__file__).with_name("typed_program.py")
STAND_INS: list[tuple[type, type]] = [
    (ours.Pair, sdk.ServiceBusClient),
    (ours.AioPair, aio_sdk.ServiceBusClient),
    (ours.PairedSender, sdk.ServiceBusSender),
    (ours.AioPairedSender, aio_sdk.ServiceBusSender),
    (ours.QuietReceiver, sdk.ServiceBusReceiver),
    (ours.AioQuietReceiver, aio_sdk.ServiceBusReceiver),
    (IdentifiedBatch, sdk.ServiceBusMessageBatch),
]
both = pytest.mark.parametrize(("own", "theirs"), STAND_INS, ids=lambda one: f"{one.__module__}.{one.__name__}")
CONTEXTS = ("__enter__", "__exit__", "__aenter__", "__aexit__", "__iter__", "__next__", "__aiter__", "__anext__")


def members(cls: type) -> dict[str, Any]:
    """Return the members that programs use: public names, and those of `with` and `for`."""
    names = [name for name in dir(cls) if not name.startswith("_") or name in CONTEXTS]
    return {name: inspect.getattr_static(cls, name) for name in names}


def delegates(own: type) -> bool:
    """Return whether the class hands everything that it does not define to an object of the SDK."""
    return "__getattr__" in vars(own)


@both
def test_p1_every_member_of_the_sdk_is_there_with_the_same_signature(own: type, theirs: type) -> None:
    differences = []
    for name, their_member in members(theirs).items():
        member = inspect.getattr_static(own, name, None)
        if member is None:
            if not delegates(own):
                differences.append(f"{name} is missing")
            continue
        if isinstance(their_member, property):
            if not isinstance(member, property):
                differences.append(f"{name} is a property")
            continue
        called, theirs_called = (getattr(one, "__func__", one) for one in (member, their_member))
        if inspect.iscoroutinefunction(called) != inspect.iscoroutinefunction(theirs_called):
            differences.append(f"{name} is awaited")
        differences += _parameter_differences(name, inspect.signature(called), inspect.signature(theirs_called))
    assert differences == []


def _parameter_differences(name: str, own: inspect.Signature, theirs: inspect.Signature) -> list[str]:
    """Compare names, kinds, defaults and positions. Ours may have more keywords."""
    if name in ("from_connection_string", *CONTEXTS):  # a pair has two strings; Python itself calls the others
        return []
    found = []
    for parameter in theirs.parameters.values():
        mine = own.parameters.get(parameter.name)
        if mine is None or (mine.kind, mine.default) != (parameter.kind, parameter.default):
            found.append(f"{name}: {parameter} is {mine}")
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    orders = [[one.name for one in sig.parameters.values() if one.kind in by_position] for sig in (own, theirs)]
    if orders[0] != orders[1]:
        found.append(f"{name}: the positions are {orders[0]}, not {orders[1]}")
    return found


def attributes(made: object) -> set[str]:
    return {name for name in vars(made) if not name.startswith("_")}


NAMESPACES = [f"Endpoint=sb://{name}/;SharedAccessKeyName=a;SharedAccessKey=b" for name in ("signatures", "secondary")]
OPTIONS = SendAvailabilityOptions(provision="assume")


def test_p1_objects_have_the_public_attributes_of_the_sdks_objects() -> None:
    client = sdk.ServiceBusClient.from_connection_string(NAMESPACES[0])
    with client, twinbus.pair_connection_strings(*NAMESPACES, options=OPTIONS) as pair:
        sender, theirs = pair.get_queue_sender("orders"), client.get_queue_sender("orders")
        assert attributes(client)
        assert attributes(client) <= attributes(pair)
        assert attributes(theirs) == attributes(sender)
        assert type(pair.get_queue_receiver("orders")) is type(client.get_queue_receiver("orders"))


async def test_p1_objects_for_asyncio_have_the_public_attributes_of_the_sdks_objects() -> None:
    client = aio_sdk.ServiceBusClient.from_connection_string(NAMESPACES[0])
    async with client, twinbus.aio.pair_connection_strings(*NAMESPACES, options=OPTIONS) as pair:
        sender, theirs = pair.get_queue_sender("orders"), client.get_queue_sender("orders")
        assert attributes(client)
        assert attributes(client) <= attributes(pair)
        assert attributes(theirs) == attributes(sender)
        assert type(pair.get_queue_receiver("orders")) is type(client.get_queue_receiver("orders"))


@both
def test_p1_isinstance_takes_it_for_the_class_of_the_sdk(own: type, theirs: type) -> None:
    made: Any = object.__new__(own)
    if delegates(own):
        made._receiver = object.__new__(theirs)
    assert isinstance(made, theirs)
    assert isinstance(made, own)
    assert type(made) is own
    made.__dict__["_closed"] = True  # nothing to close


def test_p1_a_pair_is_not_made_from_one_connection_string() -> None:
    for pair in (ours.Pair, ours.AioPair):
        with pytest.raises(TypeError, match=r"pair_connection_strings\(primary, secondary\)"):
            pair.from_connection_string("Endpoint=sb://contoso/")


# A pair refuses `custom_endpoint_address`. It has `try_timeout` as an option, and is not tested with uamqp.
NOT_NAMED = {"custom_endpoint_address", "try_timeout", "uamqp_transport"}
FLAVOURS = pytest.mark.parametrize(
    ("paired", "client"),
    [
        (twinbus.pair_connection_strings, sdk.ServiceBusClient),
        (twinbus.aio.pair_connection_strings, aio_sdk.ServiceBusClient),
    ],
    ids=["sync", "aio"],
)


@FLAVOURS
def test_p1_pairing_names_the_keywords_that_the_sdk_documents(paired: Any, client: Any) -> None:
    documented = set(re.findall(r":keyword (?:.*? )?(\w+):", client.from_connection_string.__doc__))
    assert "http_proxy" in documented
    assert documented - NOT_NAMED - set(inspect.signature(paired).parameters) == set()


@FLAVOURS
async def test_p1_both_clients_of_a_pair_get_the_keywords(
    paired: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = client.from_connection_string, []

    def recorded(text: str, **keywords: Any) -> Any:
        made.append((text, keywords))
        return make(text, **keywords)

    monkeypatch.setattr(client, "from_connection_string", recorded)
    pair = paired(*NAMESPACES, options=OPTIONS, connection_verify="/etc/ca.pem", user_agent="till")
    closed = pair.close()
    if inspect.isawaitable(closed):
        await closed
    assert [text for text, _ in made] == NAMESPACES
    for _, keywords in made:
        assert (keywords["connection_verify"], keywords["user_agent"]) == ("/etc/ca.pem", "till")
        assert "ssl_context" not in keywords


@pytest.mark.thorough
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_p1_a_program_with_the_types_of_the_sdk_passes_the_type_checkers(checker: str) -> None:
    command = {
        "mypy": [sys.executable, "-m", "mypy", "--strict", str(TYPED)],
        "pyright": [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(TYPED)],
    }[checker]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
