"""Credentials whose issuer does not answer or cannot be reached: S2, S6, S12. This is no outage of a namespace."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from azure.core.credentials import AccessToken
from azure.servicebus import ServiceBusMessage
from azure.servicebus.exceptions import OperationTimeoutError, ServiceBusError

from twinbus.backlog import FailureKind, failure_kind
from twinbus.testing import LocalNamespace

from .conftest import World, state_of
from .test_credentials import Tokens, client, paired, tokens

# Much shorter than the issuer waits. If the call may divert, half of it is for the primary.
BRIEF = 3.0


class Issuer(Tokens):
    """An issuer that can be set to give no answer, or to refuse connections."""

    def __init__(self, namespace: LocalNamespace) -> None:
        super().__init__(namespace)
        self.answers = threading.Event()
        self.answers.set()
        self.away = False
        self.asked = 0

    def get_token(self, *scopes: str, **keywords: Any) -> AccessToken:
        self._ask()
        self.answers.wait(60)
        return super().get_token(*scopes, **keywords)

    def _ask(self) -> None:
        self.asked += 1
        if self.away:
            raise ConnectionRefusedError("nobody listens there")


class AioIssuer(Issuer):
    async def get_token(self, *scopes: str, **keywords: Any) -> AccessToken:  # type: ignore[override]  # as the SDK's
        self._ask()
        while not self.answers.is_set():  # noqa: ASYNC110 - set from outside the loop too
            await asyncio.sleep(0.02)
        return super(Issuer, self).get_token(*scopes, **keywords)

    async def close(self) -> None: ...


Made = Callable[[World, LocalNamespace], Issuer]


@pytest.fixture
def issuer() -> Iterator[Made]:
    made: list[Issuer] = []

    def make(world: World, namespace: LocalNamespace) -> Issuer:
        made.append((AioIssuer if world.driver == "aio" else Issuer)(namespace))
        return made[-1]

    yield make
    for one in made:
        one.answers.set()


async def begun(world: World, queue: str, primary: Any, secondary: Any) -> tuple[Any, Any]:
    """Return a pair with these credentials, and a sender."""
    clients = [client(world, world.primary, primary), client(world, world.secondary, secondary)]
    pair = await paired(world, clients)
    return pair, await world.sender(pair, queue)


def link_of(sender: Any) -> Any:
    return sender._link.sender if hasattr(sender, "_link") else sender._sender


async def test_s2_an_issuer_that_hangs_while_a_link_opens_reaches_the_caller_and_never_fails_over(
    world: World, queue: str, issuer: Made
) -> None:
    given = issuer(world, world.primary)
    pair, sender = await begun(world, queue, given, tokens(world, world.secondary))
    given.answers.clear()
    for _ in range(2):
        with pytest.raises(OperationTimeoutError, match="issuer") as raised:
            await world.send(sender, ServiceBusMessage("x"), timeout=BRIEF)
        assert failure_kind(raised.value) is FailureKind.TOKEN_UNAVAILABLE
    if world.driver == "sync":
        # One thread, which cannot be ended, waits for the issuer: one for all calls.
        assert given.asked == 1
    assert state_of(pair, queue) == "healthy"
    given.answers.set()
    await world.send(sender, ServiceBusMessage("x", message_id="after"))
    assert [one.message_id for one in await world.held(queue)] == ["after"]


async def test_s2_s12_an_issuer_that_hangs_when_a_token_is_renewed_ends_the_call_in_time_and_never_fails_over(
    world: World, queue: str, issuer: Made
) -> None:
    given = issuer(world, world.primary)
    pair, sender = await begun(world, queue, given, tokens(world, world.secondary))
    await world.send(sender, ServiceBusMessage("x", message_id="before"))
    # As if a tenth of the token's lifetime were left: the SDK renews it in the next call, on the open link.
    link_of(sender)._handler._cbs_authenticator._refresh_window = 3600
    given.answers.clear()
    async with asyncio.timeout(30):
        with pytest.raises(OperationTimeoutError, match="issuer") as raised:
            await world.send(sender, ServiceBusMessage("x"), timeout=BRIEF)
    assert failure_kind(raised.value) is FailureKind.TOKEN_UNAVAILABLE
    assert state_of(pair, queue) == "healthy"
    given.answers.set()
    await world.send(sender, ServiceBusMessage("x", message_id="after"))
    assert [one.message_id for one in await world.held(queue)] == ["before", "after"]


async def test_s6_an_issuer_that_hangs_evicts_no_backlog_queue(world: World, queue: str, issuer: Made) -> None:
    given = issuer(world, world.secondary)
    pair, sender = await begun(world, queue, tokens(world, world.primary), given)
    await world.do(pair.force_failover, queue)
    given.answers.clear()
    with pytest.raises(OperationTimeoutError, match="issuer"):
        await world.send(sender, ServiceBusMessage("x"), timeout=BRIEF / 2)
    assert len(pair.backlog_queues) == 2
    given.answers.set()
    await world.send(sender, ServiceBusMessage("x", message_id=f"after {world.driver}"))
    assert f"after {world.driver}" in [one.message_id for one in await world.backlog(pair)]


async def test_s2_an_issuer_that_cannot_be_reached_is_no_connection_that_the_primary_lost(
    world: World, queue: str, issuer: Made
) -> None:
    given = issuer(world, world.primary)
    pair, sender = await begun(world, queue, given, tokens(world, world.secondary))
    given.away = True
    with pytest.raises(ServiceBusError, match="issuer") as raised:
        await world.send(sender, ServiceBusMessage("x"))
    assert failure_kind(raised.value) is FailureKind.TOKEN_UNAVAILABLE
    assert state_of(pair, queue) == "healthy"
