"""One contract, both transports, on real servers: what a pump may rely on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from azure.servicebus.aio import ServiceBusClient

from twinbus.amqp.sections import Header, Properties, message, split
from twinbus.amqp.values import (
    Array,
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    Described,
    Float32,
    Int,
    Long,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
)
from twinbus.connect import MessageState, ReceivedMessage, ServiceBusConnection, connect
from twinbus.pairing import aliases
from twinbus.pairing.failures import FailureKind
from twinbus.syphon.native import NativeTransport
from twinbus.syphon.sdk import SdkTransport
from twinbus.syphon.transport import (
    Backlog,
    BacklogFailedError,
    CannotCarryError,
    Held,
    NeverDeliverableError,
    Outgoing,
    SendFailedError,
    Transport,
)
from twinbus.testing import LocalNamespaces

ENOUGH = 60
SOON = 10.0
TRY = 2.0
LIMIT = 262_144  # of a link, standard tier
_numbers = itertools.count()

EVERY_TYPE: dict[str, object] = {
    "true": True,
    "ubyte": UByte(5),
    "uint": UInt(5),
    "ulong": ULong(2**64 - 1),
    "byte": Byte(-5),
    "int": Int(-5),
    "long": Long(5),
    "float": Float32(0.5),
    "double": 0.1,
    "decimal32": Decimal32(b"\x22\x50\x00\x05"),
    "decimal64": Decimal64(b"\x31\xc0\x00\x00\x00\x00\x00\x05"),
    "decimal128": Decimal128(b"\x30\x40" + bytes(13) + b"\x05"),
    "char": Char("ü"),
    "timestamp": Timestamp(-1),
    "uuid": UUID(int=5),
    "binary": b"\x00\xff",
    "symbol": Symbol("a-symbol"),
    "described": Described(Symbol("com.example:thing"), Long(5)),
    "null": None,
}


@pytest.fixture(scope="module")
def namespaces() -> Iterator[LocalNamespaces]:
    queues = [{"name": f"{kind}-{number}"} for kind in ("backlog", "orders") for number in range(ENOUGH)]
    topics = [{"name": f"topic-{number}", "subscriptions": [{"name": "all"}]} for number in range(4)]
    closed = {"name": "closed", "status": "SendDisabled"}
    primary = {"name": "primary", "queues": [*queues, closed], "topics": topics}
    config = {"namespaces": [primary, {"name": "secondary", "queues": queues}]}
    with LocalNamespaces("primary", "secondary", memory=True, config=config) as found:
        yield found
        assert "Traceback" not in found.log.read_text()


class World:
    """A transport, a backlog queue and a destination of its own, and sharp eyes on both sides."""

    def __init__(self, transport: Transport, primary: ServiceBusConnection, secondary: ServiceBusConnection) -> None:
        number = next(_numbers) % ENOUGH
        self.queue, self.path = f"backlog-{number}", f"orders-{number}"
        self.transport = transport
        self.primary = primary
        self.secondary = secondary
        self.backlog: Backlog = transport.backlog(self.queue)

    async def divert(self, *ids: str, **given: Any) -> None:
        """Messages of these ids into the backlog queue."""
        properties = {aliases.PATH: self.path, **given.pop("application_properties", {})}
        raws = [
            message(
                **{"data": b"body", **given},
                properties=Properties(message_id=one),
                application_properties={name: value for name, value in properties.items() if value is not None},
            )
            for one in ids
        ]
        async with await self.secondary.sender(self.queue) as sender:
            await sender.send(raws)

    async def receive(self, count: int) -> list[Held]:
        found: list[Held] = []
        async with asyncio.timeout(SOON):
            while len(found) < count:
                found += await self.backlog.receive(count - len(found), SOON)
        return found

    def restore(self, held: Sequence[Held]) -> list[Outgoing]:
        return [self.transport.restore(one, "restart", datetime.now(UTC)) for one in held]

    async def arrived(self, path: str | None = None, count: int = 500) -> list[ReceivedMessage]:
        return await self.primary.management(path or self.path).peek(0, count)

    async def left(self) -> list[Any]:
        return [one.message_id for one in await self.backlog.peek(0, 100)]

    async def stolen(self, held: Held) -> None:
        """Somebody else had the message meanwhile, as after a lock that expired."""
        token = held.message.lock_token  # type: ignore[attr-defined] # of either transport
        await self.secondary.management(self.queue).settle([token], "completed", {})


@pytest.fixture(params=["native", "sdk"])
async def world(request: pytest.FixtureRequest, namespaces: LocalNamespaces) -> AsyncIterator[World]:
    primary, secondary = (namespaces[name].connection_string for name in ("primary", "secondary"))
    async with AsyncExitStack() as stack:
        made: Transport
        if request.param == "native":
            made = NativeTransport(primary, secondary, try_timeout=TRY)
        else:
            clients = [
                await stack.enter_async_context(ServiceBusClient.from_connection_string(text, retry_total=0))
                for text in (primary, secondary)
            ]
            made = SdkTransport(*clients, try_timeout=TRY)
        stack.push_async_callback(made.close)
        buses = [await stack.enter_async_context(connect(text, timeout=10)) for text in (primary, secondary)]
        yield World(made, *buses)
        for name in ("primary", "secondary"):
            namespaces[name].faults.clear()


def ids_of(messages: Sequence[Any]) -> set[Any]:
    return {one.message_id for one in messages}


# --- the backlog queue -----------------------------------------------------------------------------------------------


async def test_a_receive_gives_what_is_there_under_lock(world: World) -> None:
    await world.divert("1", "2", "3")
    held = await world.receive(3)
    assert ids_of(held) == {"1", "2", "3"}
    for one in held:
        assert one.size > len(b"body")
        assert one.locked_until > datetime.now(UTC) + timedelta(seconds=30)
        assert abs(one.enqueued_time - datetime.now(UTC)) < timedelta(seconds=30)
    assert len({one.sequence_number for one in held}) == 3


async def test_a_receive_ends_empty_when_its_wait_is_over(world: World) -> None:
    assert list(await world.backlog.receive(5, 0.2)) == []


async def test_a_receive_ends_with_the_first_message_that_comes(world: World) -> None:
    waiting = asyncio.create_task(world.receive(1))
    await asyncio.sleep(0)
    await world.divert("1")
    assert ids_of(await waiting) == {"1"}


async def test_y3_what_is_completed_is_gone_and_what_is_abandoned_comes_again(world: World) -> None:
    await world.divert("1", "2")
    held = await world.receive(2)
    assert list(await world.backlog.complete([one for one in held if one.message_id == "1"])) == []
    assert list(await world.backlog.abandon([one for one in held if one.message_id == "2"])) == []
    again = await world.receive(1)
    assert ids_of(again) == {"2"}
    await world.backlog.complete(again)
    assert await world.left() == []


async def test_settling_goes_on_while_a_long_poll_waits(world: World) -> None:
    await world.divert("1")
    held = await world.receive(1)
    waiting = asyncio.create_task(world.backlog.receive(1, 60.0))
    await asyncio.sleep(0)
    assert list(await world.backlog.renew(held)) == []
    assert list(await world.backlog.complete(held)) == []
    assert not waiting.done()
    await world.divert("2")
    async with asyncio.timeout(SOON):
        assert ids_of(await waiting) == {"2"}


async def test_y5_deferred_messages_are_had_again_by_their_numbers_and_missing_ones_left_out(world: World) -> None:
    await world.divert("1", "2", "3")
    held = sorted(await world.receive(3), key=lambda one: one.sequence_number)
    assert list(await world.backlog.defer(held)) == []
    numbers = [one.sequence_number for one in held]
    others = await world.backlog.receive_deferred([numbers[1]])
    assert ids_of(others) == {held[1].message_id}
    found = await world.backlog.receive_deferred([1, *numbers, 10**9])
    assert ids_of(found) == {held[0].message_id, held[2].message_id}
    assert list(await world.backlog.complete([*found, *others])) == []
    assert await world.left() == []


async def test_a_peek_tells_numbers_states_and_destinations_and_locks_nothing(world: World) -> None:
    await world.divert("1")
    await world.divert("2", application_properties={aliases.PATH: None})
    held = await world.receive(2)
    await world.backlog.defer([one for one in held if one.message_id == "1"])
    await world.backlog.abandon([one for one in held if one.message_id == "2"])
    found = {one.message_id: one for one in await world.backlog.peek(0, 10)}
    assert (found["1"].deferred, found["1"].path) == (True, world.path)
    assert (found["2"].deferred, found["2"].path) == (False, None)
    first = min(one.sequence_number for one in found.values())
    assert ids_of(await world.backlog.peek(first + 1, 10)) < ids_of(list(found.values()))


async def test_y6_a_dead_letter_carries_reason_and_description(world: World) -> None:
    await world.divert("1")
    held = await world.receive(1)
    assert list(await world.backlog.dead_letter(held, "NoDestination", "x-ms-path is missing")) == []
    async with await world.secondary.receiver(world.queue, dead_letter=True) as receiver:
        (dead,) = await receiver.peek(0, 10)
    assert dead.dead_letter_reason == "NoDestination"
    assert dead.dead_letter_error_description == "x-ms-path is missing"


async def test_y4_a_renewal_moves_the_end_of_the_lock(world: World) -> None:
    await world.divert("1", "2")
    held = await world.receive(2)
    before = [one.locked_until for one in held]
    assert list(await world.backlog.renew(held)) == []
    assert all(one.locked_until > then for one, then in zip(held, before, strict=True))
    assert list(await world.backlog.complete(held)) == []


@pytest.mark.parametrize("verb", ["complete", "defer", "abandon", "renew", "dead_letter"])
async def test_y4_a_lost_lock_is_told_and_the_rest_is_done(world: World, verb: str) -> None:
    await world.divert("1", "2", "3")
    held = await world.receive(3)
    lost = next(one for one in held if one.message_id == "2")
    await world.stolen(lost)
    call: Callable[..., Awaitable[Sequence[Held]]] = getattr(world.backlog, verb)
    assert list(await call(held, *(("Reason", "why") if verb == "dead_letter" else ()))) == [lost]
    if verb == "complete":
        assert await world.left() == []


async def test_a_rest_gives_back_what_was_on_its_way(world: World) -> None:
    await world.divert("1")
    held = await world.backlog.receive(50, SOON)
    await world.backlog.rest()
    await world.divert("2")
    async with await world.secondary.receiver(world.queue) as other:
        assert ids_of(await other.receive(1, SOON)) == {"2"}
    assert list(await world.backlog.complete(held)) == []


async def test_a_backlog_queue_that_is_not_there_says_so(world: World) -> None:
    with pytest.raises(BacklogFailedError, match="no-such-queue") as raised:
        await world.transport.backlog("no-such-queue").receive(1, 1.0)
    assert raised.value.kind is FailureKind.ENTITY_NOT_FOUND


class Expired:
    """A credential whose login is over; it raises what it likes."""

    async def get_token(self, *_scopes: str, **_: Any) -> Any:
        raise LookupError("the login expired")

    async def close(self) -> None: ...


async def test_a_credential_that_raises_is_a_settlement_that_failed(world: World, namespaces: LocalNamespaces) -> None:
    await world.divert("1")
    held = await world.receive(1)
    host = f"localhost:{namespaces['secondary'].port}"
    expired: Any = Expired()
    async with ServiceBusClient(host, expired, use_tls=False, retry_total=0) as client:
        make: Any = type(world.transport)
        transport = make(client, client, try_timeout=TRY)
        with pytest.raises(BacklogFailedError):
            await transport.backlog(world.queue).complete(held)
        await transport.close()
    assert await world.left() == ["1"]


async def test_a_link_that_broke_is_made_again_by_the_next_call(world: World, namespaces: LocalNamespaces) -> None:
    await world.divert("1")
    held = await world.receive(1)
    namespaces["secondary"].faults.set("detach", entity=world.queue, points=["settle"], count=1)
    with suppress(BacklogFailedError):
        await world.backlog.complete(held)
    await world.divert("2")
    found: list[Held] = []
    async with asyncio.timeout(SOON):
        while "2" not in ids_of(found):
            with suppress(BacklogFailedError):
                found += await world.backlog.receive(2, SOON)
    await world.backlog.complete(found)
    assert await world.left() == []


# --- there and back --------------------------------------------------------------------------------------------------


async def test_y3_values_of_every_amqp_type_reach_the_primary_as_they_were(world: World) -> None:
    sent: dict[str, Any] = {
        "value": [EVERY_TYPE, Array(UInt, [UInt(1)]), Described(ULong(7), [Symbol("x")])],
        "header": Header(durable=True, priority=7),
        "message_annotations": {f"x-{name}": value for name, value in EVERY_TYPE.items()},
        "delivery_annotations": {"mine": Symbol("here")},
        "footer": {"check": b"sum"},
    }
    properties = {name: value for name, value in EVERY_TYPE.items() if value is not None}
    await world.divert("1", **sent, data=None, application_properties=properties)
    held = await world.receive(1)
    await world.transport.destination(world.path).send(world.restore(held))
    (found,) = await world.arrived()
    meant = split(message(**sent, application_properties=properties))
    body = slice(found.sections.body_start, found.sections.body_end)
    assert found.raw[body] == meant.raw[meant.body_start : meant.body_end]
    assert typed(found.application_properties) == typed(properties)
    carried = {name: value for name, value in found.annotations.items() if not name.startswith("x-opt-")}
    assert typed(carried) == typed(sent["message_annotations"])
    assert typed(found.delivery_annotations) == typed(sent["delivery_annotations"])
    assert typed(found.footer) == typed(sent["footer"])
    assert (found.header.durable, found.header.priority, found.message_id) == (True, 7, "1")


def typed(values: dict[Any, Any]) -> dict[str, tuple[type, Any]]:
    return {str(name): (type(value), value) for name, value in values.items()}


async def test_y3_s10_aliases_come_back_as_the_properties_they_were(world: World) -> None:
    due = int((datetime.now(UTC) + timedelta(hours=1)).timestamp() * 1000)
    lasting = {aliases.SESSION_ID: "s", aliases.TIME_TO_LIVE: Long(70_000 * 10_000)}
    await world.divert("lasting", application_properties=lasting)
    await world.divert("scheduled", application_properties={aliases.SCHEDULED_ENQUEUE_TIME: Timestamp(due)})
    await world.transport.destination(world.path).send(world.restore(await world.receive(2)))
    found = {one.message_id: one for one in await world.arrived()}
    assert (found["lasting"].session_id, found["lasting"].time_to_live) == ("s", timedelta(seconds=70))
    assert found["scheduled"].state is MessageState.SCHEDULED
    assert found["scheduled"].scheduled_enqueue_time == datetime.fromtimestamp(due / 1000, UTC)
    assert [one.application_properties for one in found.values()] == [{}, {}]


async def test_y6_what_names_no_destination_is_told_with_its_reason(world: World) -> None:
    await world.divert("1", application_properties={aliases.PATH: None})
    (held,) = await world.receive(1)
    with pytest.raises(NeverDeliverableError) as raised:
        world.transport.restore(held, "restart", datetime.now(UTC))
    assert raised.value.reason == "NoDestination"


async def test_y7_absolute_deducts_from_when_the_backlog_took_it(world: World) -> None:
    await world.divert("1", application_properties={aliases.TIME_TO_LIVE: Long(70_000 * 10_000)})
    (held,) = await world.receive(1)
    later = held.enqueued_time + timedelta(seconds=30)
    await world.transport.destination(world.path).send([world.transport.restore(held, "absolute", later)])
    (found,) = await world.arrived()
    assert found.time_to_live == timedelta(seconds=40)
    with pytest.raises(NeverDeliverableError):
        world.transport.restore(held, "absolute", held.enqueued_time + timedelta(seconds=70))


async def test_more_than_one_transfer_takes_arrives_whole(world: World) -> None:
    many = [str(number) for number in range(150)]
    await world.divert(*many, data=b"x" * 4000)
    await world.transport.destination(world.path).send(world.restore(await world.receive(len(many))))
    found: set[Any] = set()
    numbers = [0]
    while page := await world.primary.management(world.path).peek(max(numbers) + 1, 100):
        found |= ids_of(page)
        numbers += [one.sequence_number or 0 for one in page]
    assert found == set(many)


async def test_a_topic_takes_messages_like_a_queue(world: World) -> None:
    topic = f"topic-{next(_numbers) % 4}"
    await world.divert("1", application_properties={aliases.PATH: topic})
    await world.transport.destination(topic).send(world.restore(await world.receive(1)))
    found = await world.arrived(f"{topic}/Subscriptions/all")
    assert "1" in ids_of(found)


@pytest.mark.parametrize(
    ("path", "kind"), [("no-such", FailureKind.ENTITY_NOT_FOUND), ("closed", FailureKind.ENTITY_DISABLED)]
)
async def test_y5_a_destination_that_takes_nothing_says_why_and_names_what_it_did_not_take(
    world: World, path: str, kind: FailureKind
) -> None:
    await world.divert("1", "2", application_properties={aliases.PATH: path})
    outgoing = world.restore(await world.receive(2))
    with pytest.raises(SendFailedError, match=path) as raised:
        await world.transport.destination(path).send(outgoing)
    assert raised.value.kind is kind
    assert raised.value.failed == tuple(outgoing)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("server-busy", FailureKind.SERVER_BUSY), ("internal-error", FailureKind.INTERNAL)],
)
async def test_y5_a_destination_recovers_with_the_next_send(
    world: World, namespaces: LocalNamespaces, fault: str, kind: FailureKind
) -> None:
    await world.divert("1")
    outgoing = world.restore(await world.receive(1))
    namespaces["primary"].faults.set(fault, entity=world.path, points=["send"], count=1)
    destination = world.transport.destination(world.path)
    with pytest.raises(SendFailedError) as raised:
        await destination.send(outgoing)
    assert raised.value.kind is kind
    await destination.send(outgoing)
    assert ids_of(await world.arrived()) == {"1"}


async def test_a_lost_acknowledgement_is_a_failure_though_the_message_arrived(
    world: World, namespaces: LocalNamespaces
) -> None:
    await world.divert("1")
    outgoing = world.restore(await world.receive(1))
    namespaces["primary"].faults.set("drop-ack", entity=world.path, points=["send"], count=1)
    with pytest.raises(SendFailedError) as raised:
        await world.transport.destination(world.path).send(outgoing)
    assert raised.value.kind is FailureKind.TIMEOUT
    assert ids_of(await world.arrived()) == {"1"}


# --- what a transport cannot carry (Y10) -----------------------------------------------------------------------------


def filled(total: int, **given: Any) -> bytes:
    """A body that makes the restored message this large."""
    empty = message(data=b"", properties=Properties(message_id="1"), **given)
    return b"x" * (total - len(empty) - 3)  # a long body's length takes three bytes more


async def test_a_message_as_large_as_the_link_takes_is_carried(world: World) -> None:
    await world.divert("1", data=filled(LIMIT - 300))
    (outgoing,) = world.restore(await world.receive(1))
    await world.transport.destination(world.path).send([outgoing])
    assert ids_of(await world.arrived()) == {"1"}


async def test_y10_a_large_message_that_the_sdk_would_change_is_carried_natively_or_not_at_all(world: World) -> None:
    odd = {"message_annotations": {"x-mine": Char("ü")}}
    await world.divert("1", data=filled(LIMIT - 300, **odd), **odd)
    held = await world.receive(1)
    if isinstance(world.transport, SdkTransport):
        with pytest.raises(CannotCarryError, match="'1'"):
            world.restore(held)
        assert await world.arrived() == []
    else:
        await world.transport.destination(world.path).send(world.restore(held))
        (found,) = await world.arrived()
        assert type(found.annotations["x-mine"]) is Char
