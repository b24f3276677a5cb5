"""One contract, both transports: what a pump may rely on from a backlog queue."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from azure.servicebus.aio import ServiceBusClient

from twinbus.backlog import PATH_PROPERTY, FailureKind
from twinbus.ledger import Stage
from twinbus.syphon.native_transport import NativeTransport
from twinbus.syphon.progress import ProgressCounter
from twinbus.syphon.sdk_transport import SdkTransport
from twinbus.syphon.syphon_ledger import MeteredBacklog, SyphonLedger
from twinbus.syphon.transport import (
    BacklogFailedError,
    HeldMessage,
)
from twinbus.testing import LocalNamespaces

from .conftest import SOON, TRY, World, ids_of


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
    await world.divert("2", application_properties={PATH_PROPERTY: None})
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
    call: Callable[..., Awaitable[Sequence[HeldMessage]]] = getattr(world.backlog, verb)
    assert list(await call(held, *(("Reason", "why") if verb == "dead_letter" else ()))) == [lost]
    if verb == "complete":
        assert await world.left() == []


async def test_stop_receiving_releases_messages_that_were_on_their_way(world: World) -> None:
    await world.divert("1")
    held = await world.backlog.receive(50, SOON)
    await world.backlog.stop_receiving()
    await world.divert("2")
    async with await world.secondary.receiver(world.queue) as other:
        assert ids_of(await other.receive(1, SOON)) == {"2"}
    assert list(await world.backlog.complete(held)) == []


async def test_a_backlog_queue_that_is_not_there_says_so(world: World) -> None:
    with pytest.raises(BacklogFailedError, match="no-such-queue") as raised:
        await world.transport.backlog("no-such-queue").receive(1, 1.0)
    assert raised.value.kind is FailureKind.ENTITY_NOT_FOUND


class Expired:
    """A credential whose login has expired. It raises an error of its own."""

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
    found: list[HeldMessage] = []
    async with asyncio.timeout(SOON):
        while "2" not in ids_of(found):
            with suppress(BacklogFailedError):
                found += await world.backlog.receive(2, SOON)
    await world.backlog.complete(found)
    assert await world.left() == []


async def test_y4_a_completion_whose_answer_was_lost_is_no_lost_lock(world: World, namespaces: LocalNamespaces) -> None:
    await world.divert("1", "2")
    held = await world.receive(2)
    counts = ProgressCounter(0.0)
    metered = MeteredBacklog(world.backlog, world.queue, SyphonLedger(None, "p", "s", counts), time.monotonic)
    namespaces["secondary"].faults.set("drop-ack", entity=world.queue, points=["settle"], count=1)
    if isinstance(world.transport, SdkTransport):
        with suppress(BacklogFailedError):  # the SDK tries once, so the result is unknown
            await metered.complete(held)
        return
    assert await metered.complete(held) == []
    assert counts.operations == {Stage.PEEK_BACKLOG: 1}
    assert await world.left() == []


async def test_y4_a_lock_that_was_lost_while_nobody_answered_is_told(world: World, namespaces: LocalNamespaces) -> None:
    if isinstance(world.transport, SdkTransport):
        return
    await world.divert("1")
    held = await world.receive(1)
    metered = MeteredBacklog(
        world.backlog, world.queue, SyphonLedger(None, "p", "s", ProgressCounter(0.0)), time.monotonic
    )
    # The settlement is neither carried out nor answered. Another client abandons the message before the next try.
    namespaces["secondary"].faults.set("black-hole", entity=world.queue, points=["settle"], count=1)
    completing = asyncio.create_task(metered.complete(held))
    token = held[0].message.lock_token  # type: ignore[attr-defined] # of the native transport
    await world.secondary.management(world.queue).settle([token], "abandoned", {})
    assert await completing == held
    assert await world.left() == ["1"]


async def test_a_transport_keeps_nothing_of_what_was_closed(world: World) -> None:
    async def used() -> None:
        backlog = world.transport.backlog(world.queue)
        await backlog.open()
        await backlog.close()

    for _ in range(5):
        await used()
    gc.collect()
    if isinstance(world.transport, SdkTransport):
        assert len(world.transport._members) == 1  # the fixture closes it
    else:
        assert isinstance(world.transport, NativeTransport)
        assert len(world.transport._secondary._members) <= 1
