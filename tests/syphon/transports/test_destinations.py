"""One contract, both transports: a message reaches the primary unchanged or not at all (Y3, Y5, Y10)."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from azure.core.credentials import AccessToken
from azure.servicebus.aio import ServiceBusClient

from twinbus.amqp import Header, Properties, build_message, split_sections
from twinbus.backlog import (
    PATH_PROPERTY,
    SCHEDULED_TIME_PROPERTY,
    SESSION_ID_PROPERTY,
    TIME_TO_LIVE_PROPERTY,
    FailureKind,
)
from twinbus.connect import MessageState, make_sas_token
from twinbus.syphon.sdk_transport import SdkTransport
from twinbus.syphon.transport import (
    CannotCarryError,
    NeverDeliverableError,
    SendFailedError,
)
from twinbus.testing import LocalNamespaces
from twinbus.values import (
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

from .conftest import NUMBERS, World, ids_of

LIMIT = 262_144  # of a link, standard tier
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
    meant = split_sections(build_message(**sent, application_properties=properties))
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
    lasting = {SESSION_ID_PROPERTY: "s", TIME_TO_LIVE_PROPERTY: Long(70_000 * 10_000)}
    await world.divert("lasting", application_properties=lasting)
    await world.divert("scheduled", application_properties={SCHEDULED_TIME_PROPERTY: Timestamp(due)})
    await world.transport.destination(world.path).send(world.restore(await world.receive(2)))
    found = {one.message_id: one for one in await world.arrived()}
    assert (found["lasting"].session_id, found["lasting"].time_to_live) == ("s", timedelta(seconds=70))
    assert found["scheduled"].state is MessageState.SCHEDULED
    assert found["scheduled"].scheduled_enqueue_time == datetime.fromtimestamp(due / 1000, UTC)
    assert [one.application_properties for one in found.values()] == [{}, {}]


async def test_y6_what_names_no_destination_is_told_with_its_reason(world: World) -> None:
    await world.divert("1", application_properties={PATH_PROPERTY: None})
    (held,) = await world.receive(1)
    with pytest.raises(NeverDeliverableError) as raised:
        world.transport.restore(held, "restart", datetime.now(UTC))
    assert raised.value.reason == "NoDestination"


async def test_y7_absolute_deducts_from_when_the_backlog_took_it(world: World) -> None:
    await world.divert("1", application_properties={TIME_TO_LIVE_PROPERTY: Long(70_000 * 10_000)})
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
    topic = f"topic-{next(NUMBERS) % 4}"
    await world.divert("1", application_properties={PATH_PROPERTY: topic})
    await world.transport.destination(topic).send(world.restore(await world.receive(1)))
    found = await world.arrived(f"{topic}/Subscriptions/all")
    assert "1" in ids_of(found)


@pytest.mark.parametrize(
    ("path", "kind"), [("no-such", FailureKind.ENTITY_NOT_FOUND), ("closed", FailureKind.ENTITY_DISABLED)]
)
async def test_y5_a_destination_that_takes_nothing_says_why_and_names_what_it_did_not_take(
    world: World, path: str, kind: FailureKind
) -> None:
    await world.divert("1", "2", application_properties={PATH_PROPERTY: path})
    outgoing = world.restore(await world.receive(2))
    with pytest.raises(SendFailedError, match=path) as raised:
        await world.transport.destination(path).send(outgoing)
    assert raised.value.kind is kind
    assert raised.value.failed == tuple(outgoing)
    assert raised.value.refused


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
    assert raised.value.refused is (kind is FailureKind.SERVER_BUSY)
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


class Ending:
    """A credential whose tokens all expire at one instant. The server then detaches their links."""

    def __init__(self, host: str) -> None:
        self.until = 0
        self._audience = f"sb://{host}/"

    async def get_token(self, *_scopes: str, **_: Any) -> AccessToken:
        token = make_sas_token(self._audience, "RootManageSharedAccessKey", "SAS_KEY_VALUE", self.until)
        return AccessToken(token, self.until)

    async def close(self) -> None: ...


async def test_m1_a_send_under_way_when_its_link_is_taken_away_was_not_refused(
    world: World, namespaces: LocalNamespaces
) -> None:
    await world.divert("1")
    outgoing = world.restore(await world.receive(1))
    primary = namespaces["primary"]
    primary.faults.set("drop-ack", entity=world.path, points=["send"], count=1)
    host = f"localhost:{primary.port}"
    ending: Any = Ending(host)
    async with ServiceBusClient(host, ending, use_tls=False) as client:
        make: Any = type(world.transport)
        transport = make(client, client, try_timeout=60.0)
        destination = transport.destination(world.path)
        failures: list[SendFailedError] = []
        while await asyncio.to_thread(primary.faults.list):  # the token may expire before its link is open
            ending.until = int(time.time()) + 3
            with pytest.raises(SendFailedError) as raised:
                await destination.send(outgoing)
            failures.append(raised.value)
        await transport.close()
    assert failures[-1].kind is not FailureKind.TIMEOUT
    assert not failures[-1].refused
    assert ids_of(await world.arrived()) == {"1"}


# --- what a transport cannot carry (Y10) -----------------------------------------------------------------------------


def filled(total: int, **given: Any) -> bytes:
    """A body that makes the restored message this large."""
    empty = build_message(data=b"", properties=Properties(message_id="1"), **given)
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
