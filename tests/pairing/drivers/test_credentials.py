"""Credentials of any kind, and refused ones: P1, S2, G4, C1."""

import asyncio
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.core.credentials import AccessToken
from azure.servicebus import ServiceBusClient, ServiceBusMessage, TransportType
from azure.servicebus.aio import ServiceBusClient as AioServiceBusClient
from azure.servicebus.exceptions import ServiceBusError

from tests.sdk.installed import marks_since
from twinbus import (
    BacklogUnavailableError,
    PairFaultedError,
    PrimaryUnusableError,
    SendAvailabilityOptions,
    aio,
    pair_namespaces,
)
from twinbus.backlog import CREDENTIAL_REFUSED, FailureKind, failure_kind
from twinbus.connect import make_sas_token
from twinbus.ledger import UNKNOWN, Outcome, balance, read_ledger
from twinbus.pairing.pair_sides import CredentialRefusedError
from twinbus.testing import LocalNamespace

from .conftest import ALL, KEY, World, state_of

LONG = timedelta(minutes=1)


class Tokens:
    """A TokenCredential whose tokens are SAS tokens: a local namespace can verify no other tokens."""

    def __init__(self, namespace: LocalNamespace, seconds: int = 3600) -> None:
        self.key = KEY
        self.seconds = seconds
        self.until: int | None = None  # one end for all tokens, whatever lifetime was requested
        self.given = 0
        self._namespace = namespace

    def get_token(self, *_scopes: str, **_: Any) -> AccessToken:
        self.given += 1
        until = self.until or int(time.time()) + self.seconds
        return AccessToken(make_sas_token(f"sb://localhost:{self._namespace.port}/", ALL, self.key, until), until)


class AioTokens(Tokens):
    async def get_token(self, *scopes: str, **keywords: Any) -> AccessToken:  # type: ignore[override]  # as the SDK's
        return super().get_token(*scopes, **keywords)

    async def close(self) -> None: ...


def client(world: World, namespace: LocalNamespace, tokens: Tokens, **keywords: Any) -> Any:
    made: Any = AioServiceBusClient if world.driver == "aio" else ServiceBusClient
    return made(f"localhost:{namespace.port}", tokens, **{"use_tls": False, "retry_total": 0, **keywords})


def in_tls(namespace: LocalNamespace) -> dict[str, Any]:
    """Make clients use TLS on the namespace's own port. Without these options the SDK would use port 5671."""
    address = f"sb://localhost:{namespace.port}"
    trust = {"use_tls": True, "connection_verify": str(namespace.ca)}
    return {"custom_endpoint_address": address, "transport_type": TransportType.Amqp, **trust}


def tokens(world: World, namespace: LocalNamespace, seconds: int = 3600) -> Tokens:
    return (AioTokens if world.driver == "aio" else Tokens)(namespace, seconds)


async def paired(world: World, clients: list[Any], **options: Any) -> Any:
    """Pair with backlog queues that exist already: the management API of a local namespace accepts only keys."""
    name = f"tokens-{world.driver}"
    await world.do((await world.pair(primary_name=name)).close)
    short = {"failover_interval": timedelta(0), "backlog_queue_count": 2, "primary_name": name, **options}
    make = aio.pair_namespaces if world.driver == "aio" else pair_namespaces
    pair = await world.do(make, *clients, options=SendAvailabilityOptions(provision="assume", **short))
    for one in clients:
        world.stack.push_async_callback(world.do, one.close)
    world.stack.push_async_callback(world.do, pair.close)
    return pair


@pytest.mark.parametrize(
    "tls", [False, pytest.param(True, marks=marks_since("7.15", "cannot use TLS on loopback"))], ids=["plain", "tls"]
)
async def test_p1_a_token_credential_serves_the_primary_and_the_backlog(world: World, queue: str, tls: bool) -> None:
    given = [tokens(world, world.primary), tokens(world, world.secondary)]
    clients = [
        client(world, namespace, token, **(in_tls(namespace) if tls else {}))
        for namespace, token in zip((world.primary, world.secondary), given, strict=True)
    ]
    pair = await paired(world, clients)
    sender = await world.sender(pair, queue)
    await world.send(sender, ServiceBusMessage("x", message_id="direct"))
    await world.do(pair.force_failover, queue)
    name = f"diverted by a token {world.driver} {tls}"
    await world.send(sender, ServiceBusMessage("x", message_id=name))
    assert [one.message_id for one in await world.held(queue)] == ["direct"]
    assert name in [one.message_id for one in await world.backlog(pair)]
    assert all(one.given for one in given)


async def test_s2_a_key_revoked_under_an_open_link_reaches_the_caller_and_never_fails_over(
    world: World, queue: str
) -> None:
    # One try, with more time than a busy machine needs, so that only the credential can fail.
    short = tokens(world, world.primary, seconds=2)
    clients = [client(world, world.primary, short), client(world, world.secondary, tokens(world, world.secondary))]
    pair = await paired(world, clients, failover_interval=LONG, try_timeout=LONG)
    sender = await world.sender(pair, queue)
    kinds: list[FailureKind] = []

    async def sent() -> bool:
        try:
            await world.send(sender, ServiceBusMessage("while it lasts"))
        except ServiceBusError as error:
            kinds.append(failure_kind(error))
            return False
        return True

    async with asyncio.timeout(100):
        while not await sent():
            assert set(kinds) <= CREDENTIAL_REFUSED, "a busy machine: the token ended before its link was open"
        # From now on its signatures are refused. Older signatures expire, and the server then detaches the link.
        short.key = "revoked"
        kinds.clear()
        while len(kinds) < 3:
            await sent()
    assert set(kinds) <= CREDENTIAL_REFUSED, kinds
    assert state_of(pair, queue) == "healthy"


async def test_m1_a_send_under_way_when_its_link_is_taken_away_may_have_happened(
    world: World, queue: str, tmp_path: Path
) -> None:
    short = tokens(world, world.primary)
    clients = [client(world, world.primary, short), client(world, world.secondary, tokens(world, world.secondary))]
    pair = await paired(world, clients, failover_interval=LONG, try_timeout=LONG, ledger=tmp_path)
    sender = await world.sender(pair, queue)
    world.primary.faults.set("drop-ack", entity=queue, points=["send"], count=1)
    while await asyncio.to_thread(world.primary.faults.list):  # the token may expire before its link is open
        short.until = int(time.time()) + 3
        with pytest.raises(ServiceBusError):
            await world.send(sender, ServiceBusMessage("x", message_id="stored"))
    assert [one.message_id for one in await world.held(queue)] == ["stored"]
    await world.do(pair.close)
    [outcome] = [entry for entry in read_ledger(tmp_path) if isinstance(entry, Outcome)]
    assert outcome.result == UNKNOWN
    assert outcome.cause in CREDENTIAL_REFUSED
    assert [message.id for message in balance(read_ledger(tmp_path)).unconfirmed] == ["stored"]


async def test_s2_a_send_under_way_when_its_token_ends_is_told_so_and_fails_nothing_over(
    world: World, queue: str
) -> None:
    short = tokens(world, world.primary, seconds=3)
    clients = [client(world, world.primary, short), client(world, world.secondary, tokens(world, world.secondary))]
    pair = await paired(world, clients, failover_interval=LONG, try_timeout=LONG)
    sender = await world.sender(pair, queue)
    await world.do(sender.create_message_batch)
    # The server detaches the link before it answers.
    world.primary.faults.set("black-hole", entity=queue, points=["send"])
    with pytest.raises(ServiceBusError) as raised:
        await world.send(sender, ServiceBusMessage("x"))
    assert failure_kind(raised.value) in CREDENTIAL_REFUSED
    assert state_of(pair, queue) == "healthy"


async def test_s2_a_token_that_ends_under_an_open_link_is_renewed_by_a_second_try(world: World, queue: str) -> None:
    brief = tokens(world, world.primary, seconds=2)
    again = {"retry_total": 3, "retry_backoff_factor": 0.01}
    clients = [client(world, world.primary, brief, **again)]
    clients.append(client(world, world.secondary, tokens(world, world.secondary)))
    pair = await paired(world, clients)
    sender = await world.sender(pair, queue)
    async with asyncio.timeout(20):
        while brief.given < 2:
            await world.send(sender, ServiceBusMessage("x"))
    assert state_of(pair, queue) == "healthy"


@pytest.mark.parametrize("on_unusable", ["divert", "raise"])
async def test_g4_a_ping_whose_credential_is_refused_makes_it_unusable_and_one_that_is_taken_restores(
    world: World, queue: str, on_unusable: str
) -> None:
    given = tokens(world, world.primary)
    clients = [client(world, world.primary, given), client(world, world.secondary, tokens(world, world.secondary))]
    pair = await paired(world, clients, on_unusable=on_unusable, ping_interval=timedelta(seconds=1), ping_jitter=0.0)
    heard: list[Any] = []
    pair.on("primary_unusable", heard.append)
    sender = await world.sender(pair, queue)
    given.key = "revoked"
    await world.do(pair.force_failover, queue)
    await world.state(pair, queue, "unusable")
    assert next(one.cause for one in pair.entities()) in CREDENTIAL_REFUSED
    await world.until(lambda: bool(heard))
    name = f"kept {world.driver} {on_unusable}"
    if on_unusable == "divert":
        await world.send(sender, ServiceBusMessage("x", message_id=name))
        assert name in [one.message_id for one in await world.backlog(pair)]
    else:
        with pytest.raises(PrimaryUnusableError, match=queue):
            await world.send(sender, ServiceBusMessage("x", message_id=name))
    given.key = KEY
    await world.state(pair, queue, "on_trial")
    await world.send(sender, ServiceBusMessage("x", message_id="after"))
    assert [one.message_id for one in await world.held(queue)] == ["after"]


async def test_c1_a_credential_that_every_backlog_queue_refuses_for_good_faults_the_secondary_alone(
    world: World, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinbus.pairing.pair_sides.REFUSED_FOR_GOOD_SECONDS", 0.5)
    strings = world.primary.connection_string, world.secondary.connection_string.replace(KEY, "revoked")
    pair = await world.pair(provision="assume", keywords={"strings": strings, "retry_total": 0})
    diverting, beside = await world.sender(pair, queue), await world.sender(pair, "beside-it")
    await world.do(pair.force_failover, queue)
    with pytest.raises(BacklogUnavailableError):
        await world.send(diverting, ServiceBusMessage("refused"))
    assert pair.secondary.state == "open"
    await world.until(lambda: len(pair.backlog_queues) == 2)
    with pytest.raises(PairFaultedError, match="the secondary of this pair faulted") as raised:
        await world.send(diverting, ServiceBusMessage("refused for good"))
    assert isinstance(raised.value.cause, CredentialRefusedError)
    assert (pair.primary.state, pair.secondary.state) == ("open", "faulted")
    await world.send(beside, ServiceBusMessage("healthy", message_id=f"beside-{world.driver}"))
    assert f"beside-{world.driver}" in [one.message_id for one in await world.held("beside-it")]


async def test_c1_a_primary_that_refuses_its_credential_never_faults_and_its_entity_still_diverts(
    world: World, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinbus.pairing.pair_sides.REFUSED_FOR_GOOD_SECONDS", 0.0)
    strings = world.primary.connection_string.replace(KEY, "revoked"), world.secondary.connection_string
    pair = await world.pair(ping_interval=timedelta(seconds=1), keywords={"strings": strings, "retry_total": 0})
    sender = await world.sender(pair, queue)
    for _ in range(3):
        with pytest.raises(ServiceBusError):
            await world.send(sender, ServiceBusMessage("refused"))
    await world.do(pair.force_failover, queue)
    await world.state(pair, queue, "unusable")
    await world.send(sender, ServiceBusMessage("kept"))
    assert (pair.primary.state, pair.secondary.state) == ("open", "open")
    assert len(await world.backlog(pair)) == 1
