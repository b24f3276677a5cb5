"""One contract for both drivers: every public method of a sender and of a pair, with good and bad arguments (S1, C3).

Each case names what must happen. The cases marked `as_sdk` run against azure-servicebus itself as well: a program sees
the same result, or the same type of error, with a client and with a pair.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusMessageBatch
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient
from azure.servicebus.amqp import AmqpAnnotatedMessage

from twinbus import BacklogHandle, aio
from twinbus.pairing.sync.pair import Pair
from twinbus.pairing.sync.sender import PairedSender

from .conftest import World

TOMORROW: Final = datetime.now(UTC) + timedelta(days=1)
TOO_LONG: Final = timedelta(days=60)
BAD_MAPPING: Final = {"text": "no field of a message"}


def message() -> ServiceBusMessage:
    return ServiceBusMessage("x")


class Case(NamedTuple):
    """A call and what must happen: the name of an error, or "returns". `arguments` are made anew for every call."""

    method: str
    arguments: Callable[[], tuple[Any, ...]]
    expected: str
    keywords: Mapping[str, Any] = MappingProxyType({})
    as_sdk: bool = True
    """Whether the SDK does the same. False for checks that only a pair has."""

    def __str__(self) -> str:
        given = ", ".join(
            [*map(short, self.arguments()), *(f"{name}={value}" for name, value in self.keywords.items())]
        )
        return f"{self.method}({given}) {self.expected}"


def short(value: object) -> str:
    return type(value).__name__ if isinstance(value, ServiceBusMessage | datetime) else repr(value)[:30]


# --- senders ---------------------------------------------------------------------------------------------------------

SENDER_CASES: Final = [
    Case("send_messages", lambda: (message(),), "returns"),
    Case("send_messages", lambda: ([message(), message()],), "returns"),
    Case("send_messages", lambda: ((one for one in [message(), message()]),), "returns"),
    Case("send_messages", lambda: ({"body": "x"},), "returns"),
    Case("send_messages", lambda: (AmqpAnnotatedMessage(data_body=b"x"),), "returns"),
    Case("send_messages", lambda: (message(),), "returns", {"timeout": 30}),
    Case("send_messages", lambda: ([],), "returns"),
    Case("send_messages", lambda: ({},), "returns"),
    Case("send_messages", lambda: (message(),), "ValueError", {"timeout": 0}),
    Case("send_messages", lambda: (BAD_MAPPING,), "TypeError"),
    Case("send_messages", lambda: ([message(), BAD_MAPPING],), "TypeError"),
    Case("send_messages", lambda: (42,), "TypeError"),
    Case("send_messages", lambda: (None,), "TypeError"),
    Case("send_messages", lambda: ("text",), "TypeError"),
    # The timeout is checked before the message. Both are checked also if there is nothing to send.
    Case("send_messages", lambda: (BAD_MAPPING,), "ValueError", {"timeout": -1}),
    Case("send_messages", lambda: ([],), "ValueError", {"timeout": -1}),
    Case("send_messages", lambda: (ServiceBusMessage("x", time_to_live=TOO_LONG),), "TimeToLiveError", as_sdk=False),
    Case("schedule_messages", lambda: (message(), TOMORROW), "returns"),
    Case("schedule_messages", lambda: ([message(), message()], TOMORROW), "returns"),
    Case("schedule_messages", lambda: ([], TOMORROW), "returns"),
    Case("schedule_messages", lambda: (message(), TOMORROW), "ValueError", {"timeout": 0}),
    Case("schedule_messages", lambda: (BAD_MAPPING, TOMORROW), "TypeError"),
    Case("schedule_messages", lambda: ({}, TOMORROW), "TypeError"),
    Case("schedule_messages", lambda: (None, TOMORROW), "TypeError"),
    # Here the message is checked before the time-out.
    Case("schedule_messages", lambda: (BAD_MAPPING, TOMORROW), "TypeError", {"timeout": -1}),
    Case("schedule_messages", lambda: ([], TOMORROW), "ValueError", {"timeout": -1}),
    Case("cancel_scheduled_messages", lambda: ([],), "returns"),
    Case("cancel_scheduled_messages", lambda: ([],), "ValueError", {"timeout": 0}),
    Case("cancel_scheduled_messages", lambda: (4,), "ValueError", {"timeout": 0}),
    Case("cancel_scheduled_messages", lambda: (None,), "TypeError"),
    Case("cancel_scheduled_messages", lambda: (-5,), "ScheduledInBacklogError", as_sdk=False),
    Case("cancel_scheduled_messages", lambda: ([7, BacklogHandle(-5)],), "ScheduledInBacklogError", as_sdk=False),
    Case("cancel_scheduled_messages", lambda: (-5,), "ValueError", {"timeout": 0}),
    Case("create_message_batch", lambda: (), "returns"),
    Case("create_message_batch", lambda: (1000,), "returns"),
    Case("create_message_batch", lambda: (10**9,), "ValueError"),
    Case("close", lambda: (), "returns"),
]
CLOSED_SENDER: Final = [
    *(case._replace(expected="ValueError") for case in SENDER_CASES if case.method != "close"),
    Case("close", lambda: (), "returns"),
]
PUBLIC_SENDER: Final = {"client_identifier", "entity_name", "fully_qualified_namespace"}


async def outcome(world: World, target: Any, case: Case) -> str:
    """Return "returns", or the name of the error's type."""
    try:
        await world.do(getattr(target, case.method), *case.arguments(), **case.keywords)
    except Exception as error:
        return type(error).__name__
    return "returns"


async def deviations(world: World, target: Any, cases: list[Case]) -> list[str]:
    """Run all cases on one object. Returns those that did not end as expected."""
    found = [(case, await outcome(world, target, case)) for case in cases]
    return [f"{case}, but {got}" for case, got in found if got != case.expected]


async def entering(world: World, target: Any) -> str:
    enter = Case("__aenter__" if world.driver == "aio" else "__enter__", tuple, "")
    return await outcome(world, target, enter)


@pytest.fixture
async def sdk_sender(world: World) -> AsyncIterator[Any]:
    """A sender of azure-servicebus, of the world's flavour. All of them share a queue: there are many cases."""
    made = AioServiceBusClient if world.driver == "aio" else ServiceBusClient
    client = made.from_connection_string(world.primary.connection_string)
    yield client.get_queue_sender("beside-it")
    await world.do(client.close)


@pytest.mark.parametrize("case", [case for case in SENDER_CASES if case.as_sdk], ids=str)
async def test_s1_the_sdks_own_sender_does_what_the_contract_says(world: World, sdk_sender: Any, case: Case) -> None:
    assert await outcome(world, sdk_sender, case) == case.expected


@pytest.mark.parametrize("case", CLOSED_SENDER, ids=str)
async def test_s1_the_sdks_own_closed_sender_does_what_the_contract_says(
    world: World, sdk_sender: Any, case: Case
) -> None:
    await world.do(sdk_sender.close)
    assert await outcome(world, sdk_sender, case) == case.expected


async def test_s1_c3_a_paired_sender_keeps_the_contract_open_failed_over_and_closed(world: World, queue: str) -> None:
    """All cases run on one sender: each must leave it usable."""
    pair = await world.pair()
    sender = await world.sender(pair, queue)
    still_open = [case for case in SENDER_CASES if case.method != "close"]
    assert await deviations(world, sender, still_open) == []
    await world.do(pair.force_failover, queue)
    assert await deviations(world, sender, still_open) == []
    await world.do(pair.force_restore, queue)
    assert await entering(world, sender) == "returns"
    await world.do(sender.close)
    assert await deviations(world, sender, CLOSED_SENDER) == []
    assert await entering(world, sender) == "ValueError"


async def test_s10_only_the_primarys_numbers_can_be_cancelled_and_only_while_it_gets_calls(
    world: World, queue: str
) -> None:
    pair = await world.pair()
    sender = await world.sender(pair, queue)
    numbers = await world.do(sender.schedule_messages, [message(), message()], TOMORROW)
    await world.do(sender.cancel_scheduled_messages, numbers[0])
    await world.do(sender.cancel_scheduled_messages, numbers[1:])
    batch = await world.do(sender.create_message_batch)
    assert isinstance(batch, ServiceBusMessageBatch)
    assert await world.held(queue) == []


# --- pairs -----------------------------------------------------------------------------------------------------------

OPEN_PAIR: Final = [
    Case("get_queue_sender", lambda: ("plain-0",), "returns"),
    Case("get_topic_sender", lambda: ("topic-0",), "returns"),
    Case("get_queue_receiver", lambda: ("plain-0",), "returns"),
    Case("get_queue_receiver", lambda: ("plain-0",), "returns", {"quiet_while_down": True}),
    Case("get_subscription_receiver", lambda: ("topic-0", "all"), "returns"),
    Case("get_subscription_receiver", lambda: ("topic-0", "all"), "returns", {"quiet_while_down": True}),
    Case("list_queue_sessions", lambda: ("sessions-0",), "returns"),
    Case("list_subscription_sessions", lambda: ("topic-0", "all"), "returns"),
    Case("get_queue_sender", lambda: (), "TypeError"),
    Case("get_queue_receiver", lambda: (), "TypeError"),
    Case("entities", lambda: (), "returns"),
    Case("on", lambda: ("restored", print), "returns"),
    Case("on", lambda: ("*", print), "returns"),
    Case("on", lambda: ("unheard-of", print), "UnknownEventError"),
    Case("force_failover", lambda: ("plain-0",), "returns"),
    Case("force_restore", lambda: ("plain-0",), "returns"),
    Case("close", lambda: (), "returns"),
]
CLOSED_PAIR: Final = [
    Case("get_queue_sender", lambda: ("plain-0",), "PairClosedError"),
    Case("get_topic_sender", lambda: ("topic-0",), "PairClosedError"),
    Case("force_failover", lambda: ("plain-0",), "PairClosedError"),
    Case("force_restore", lambda: ("plain-0",), "PairClosedError"),
    Case("entities", lambda: (), "returns"),
    Case("on", lambda: ("unheard-of", print), "UnknownEventError"),
    Case("close", lambda: (), "returns"),
]
PAIR_ATTRIBUTES: Final = {
    "backlog_queues", "from_connection_string", "fully_qualified_namespace", "options", "primary", "secondary",
    "syphon",
}  # fmt: skip


async def test_c3_a_pair_keeps_the_contract_open_and_closed(world: World) -> None:
    pair = await world.pair()
    assert await deviations(world, pair, OPEN_PAIR) == []
    assert await deviations(world, pair, CLOSED_PAIR) == []
    assert await entering(world, pair) == "PairClosedError"


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(("sender", "pair"), [(PairedSender, Pair), (aio.PairedSender, aio.Pair)], ids=["sync", "aio"])
def test_s1_the_contract_names_every_public_method(sender: type, pair: type) -> None:
    called = {case.method for case in SENDER_CASES}
    assert public(sender) == called | (PUBLIC_SENDER & public(sender))
    called = {case.method for case in OPEN_PAIR}
    assert public(pair) == called | (PAIR_ATTRIBUTES & public(pair))


def test_s1_both_drivers_have_the_same_public_methods_with_the_same_parameters() -> None:
    for sync_kind, aio_kind in ((PairedSender, aio.PairedSender), (Pair, aio.Pair)):
        assert public(sync_kind) == public(aio_kind)
        for name in public(sync_kind):
            methods = getattr(sync_kind, name), getattr(aio_kind, name)
            if all(map(inspect.isfunction, methods)):
                first, second = (list(inspect.signature(method).parameters.values()) for method in methods)
                assert [(one.name, one.kind, one.default) for one in first] == [
                    (one.name, one.kind, one.default) for one in second
                ], name
