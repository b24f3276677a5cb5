"""Tokens on `$cbs`: what they grant, and for how long."""

import time
from collections.abc import Awaitable, Callable

import pytest

from tests.namespace.front.amqp_peer import Peer
from twinbus.amqp import Connection, ConnectionClosed, Link, LinkAccepted, LinkDetached, LinkState
from twinbus.connect import make_sas_token
from twinbus.namespace.engine.descriptions import Claim, QueueDescription
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.front.cbs import GrantedClaims
from twinbus.namespace.front.sas_verifier import DEFAULT_KEY, DEFAULT_KEY_NAME, SasVerifier, default_rule
from twinbus.namespace.own_names import OwnNames
from twinbus.namespace.server import NamespaceServer
from twinbus.values import Condition

from .conftest import KEY

Dial = Callable[..., Awaitable[Peer]]
DEAD = "/$DeadLetterQueue"


async def is_open(peer: Peer, link: Link) -> bool:
    """Return whether the link was attached. Otherwise it must have been refused for a missing claim."""
    await peer.until(
        lambda: any(isinstance(event, LinkAccepted | LinkDetached) and event.link is link for event in peer.events)
    )
    if link.state is LinkState.ATTACHED:
        return True
    assert "amqp:unauthorized-access Unauthorized access." in await peer.refused(link)
    return False


@pytest.mark.parametrize(
    ("name", "sends", "listens"),
    [("sends", True, False), ("listens", False, True), ("manages", True, True)],
)
async def test_a_rule_of_the_namespace_allows_what_its_claims_say(
    dial: Dial, name: str, sends: bool, listens: bool
) -> None:
    peer = await dial()
    assert await peer.put_token(name=name, key=KEY) == 202
    assert await is_open(peer, peer.attach_sender("orders")) is sends
    assert await is_open(peer, peer.attach_receiver("orders")) is listens
    assert await is_open(peer, peer.attach_receiver("orders" + DEAD)) is listens
    peeked = await peer.ask("orders/$management", "com.microsoft:peek-message", {})
    assert (peeked["statusCode"] == 204) is listens
    scheduled = await peer.ask(
        "orders/$management", "com.microsoft:cancel-scheduled-message", {"sequence-numbers": [1]}
    )
    assert (scheduled["statusCode"] == 401) is not sends


async def test_without_a_token_every_attach_is_refused(dial: Dial) -> None:
    peer = await dial()
    assert not await is_open(peer, peer.attach_sender("orders"))
    refused = await peer.ask("orders/$management", "com.microsoft:peek-message", {})
    assert (refused["statusCode"], refused["errorCondition"]) == (401, "amqp:unauthorized-access")
    assert "'Listen' claim(s) are required" in refused["statusDescription"]


@pytest.mark.parametrize("token_for", [None, "bills"])
async def test_without_a_token_a_peer_does_not_learn_which_entities_exist(dial: Dial, token_for: str | None) -> None:
    peer = await dial()
    if token_for is not None:
        assert await peer.put_token(token_for) == 202

    async def told(name: str) -> list[str]:
        links = [peer.attach_sender(name), peer.attach_receiver(name), peer.attach_receiver(name + DEAD)]
        refused = await peer.ask(f"{name}/$management", "com.microsoft:peek-message", {})
        reply = f"{refused['statusCode']} {refused['statusDescription']}"
        return [(await peer.refused(link)).replace(name, "") for link in links] + [reply.replace(name, "")]

    there, missing = await told("ORDERS"), await told("NOWHERE")
    assert there == missing
    assert all("Unauthorized access" in text for text in there)


async def test_with_a_token_of_the_namespace_a_missing_entity_is_reported(peer: Peer) -> None:
    for link in (peer.attach_sender("nowhere"), peer.attach_receiver("nowhere")):
        assert (await peer.refused(link)).startswith("amqp:not-found")
    refused = await peer.ask("nowhere/$management", "com.microsoft:peek-message", {})
    assert (refused["statusCode"], refused["errorCondition"]) == (404, "amqp:not-found")


@pytest.mark.parametrize(
    ("audience", "opens", "leaves_shut"),
    [
        ("orders", ["orders", "orders" + DEAD], ["bills", "visits"]),
        ("orders" + DEAD, ["orders" + DEAD], ["orders"]),
        ("orders/$management", [], ["orders", "bills"]),
        ("events/Subscriptions/first", ["events/subscriptions/FIRST"], ["orders"]),
        ("", ["orders", "bills", "ruled/below"], []),
    ],
)
async def test_a_token_is_valid_for_its_audience_and_below(
    dial: Dial, audience: str, opens: list[str], leaves_shut: list[str]
) -> None:
    peer = await dial()
    assert await peer.put_token(audience) == 202
    assert [await is_open(peer, peer.attach_receiver(path)) for path in opens] == [True] * len(opens)
    assert [await is_open(peer, peer.attach_receiver(path)) for path in leaves_shut] == [False] * len(leaves_shut)


async def test_a_token_is_refused_for_an_audience_it_was_not_signed_for(dial: Dial) -> None:
    peer = await dial()
    assert await peer.put_token("orders", audience="bills") == 401
    assert await peer.put_token("orders" + DEAD, audience="orders") == 401
    assert await peer.put_token("orders", audience="orders" + DEAD) == 202
    assert not await is_open(peer, peer.attach_receiver("bills"))


async def test_a_rule_of_an_entity_allows_that_entity_only(dial: Dial) -> None:
    peer = await dial()
    assert await peer.put_token("ruled", name="of-ruled", key=KEY) == 202
    assert await is_open(peer, peer.attach_sender("ruled"))
    assert not await is_open(peer, peer.attach_receiver("ruled"))
    assert not await is_open(peer, peer.attach_sender("ruled/below"))
    assert await peer.put_token("orders", name="of-ruled", key=KEY) == 401
    assert await peer.put_token("", name="of-ruled", key=KEY) == 401


async def test_a_rule_of_a_topic_allows_its_subscriptions(dial: Dial) -> None:
    peer = await dial()
    assert await peer.put_token("events/Subscriptions/first", name="of-events", key=KEY) == 202
    assert await is_open(peer, peer.attach_receiver("events/Subscriptions/first"))
    assert not await is_open(peer, peer.attach_sender("events"))


@pytest.mark.parametrize(
    ("name", "key", "expires_at"),
    [
        (DEFAULT_KEY_NAME, "wrong", 4_000_000_000),
        ("nobody", DEFAULT_KEY, 4_000_000_000),
        (DEFAULT_KEY_NAME, DEFAULT_KEY, 1),
    ],
)
async def test_a_bad_token_is_refused_with_the_reason_and_grants_nothing(
    dial: Dial, name: str, key: str, expires_at: int
) -> None:
    peer = await dial()
    assert await peer.put_token(name=name, key=key, expires_at=expires_at) == 401
    assert not await is_open(peer, peer.attach_receiver("orders"))


async def test_a_put_token_request_without_a_token_is_refused_with_what_is_missing(dial: Dial) -> None:
    peer = await dial()
    for body, properties in ((None, {"name": "x"}), ("token", {}), (["x"], {"name": 7})):
        told = await peer.ask("$cbs", "put-token", body, properties)
        assert told["statusCode"] == 400
        assert "needs the property 'name'" in told["statusDescription"]
    jwt = await peer.ask("$cbs", "put-token", "eyJ0", {"name": "sb://localhost/orders"})
    assert (jwt["statusCode"], "takes SAS tokens only" in jwt["statusDescription"]) == (401, True)


async def test_a_token_for_a_missing_entity_gets_not_found(dial: Dial) -> None:
    peer = await dial()
    assert await peer.put_token("nowhere") == 404
    assert await peer.put_token("events/Subscriptions/second") == 404


async def test_a_token_for_a_missing_entity_is_not_kept(server: NamespaceServer, dial: Dial) -> None:
    peer = await dial()
    assert await peer.put_token("later") == 404
    await server.runtime.create(QueueDescription(path="later"))
    assert not await is_open(peer, peer.attach_sender("later"))
    assert await peer.put_token("later") == 202
    assert await is_open(peer, peer.attach_sender("later"))


async def test_a_connection_keeps_a_limited_number_of_tokens(server: NamespaceServer) -> None:
    verifier = SasVerifier((default_rule(),), OwnNames(server.port))
    claims = GrantedClaims(verifier, server.runtime.namespace, peer_is_loopback=True, max_grants=2)

    def put(path: str, now: int) -> Refusal | None:
        resource = f"sb://localhost:{server.port}/{path}"
        return claims.put(resource, make_sas_token(resource, DEFAULT_KEY_NAME, DEFAULT_KEY, now // 1000 + 60), now)

    now = 1_700_000_000_000
    assert [put("orders", now), put("bills", now + 30_000)] == [None, None]
    refusal = put("visits", now + 30_000)
    assert refusal is not None
    assert refusal.condition is Condition.RESOURCE_LIMIT_EXCEEDED
    assert "tokens for 2 audiences" in refusal.description
    assert put("bills", now + 30_000) is None, "renewing takes no more room"
    assert not claims.allow(Claim.SEND, "visits", now + 30_000)
    assert put("visits", now + 60_000) is None, "what has expired makes room"
    assert [claims.allow(Claim.SEND, path, now + 60_000) for path in ("orders", "bills", "visits")] == [
        False,
        True,
        True,
    ]


async def test_an_expired_token_detaches_its_links_and_a_renewed_one_keeps_them(dial: Dial) -> None:
    ends, renewed = await dial(), await dial()
    soon = int(time.time()) + 2
    for peer in (ends, renewed):
        assert await peer.put_token("orders", expires_at=soon) == 202
        assert await peer.put_token("bills") == 202
    lost, other = await ends.sender("orders"), await ends.sender("bills")
    kept = await renewed.sender("orders")
    assert await renewed.put_token("orders", expires_at=soon + 60) == 202
    assert await ends.refused(lost) == "amqp:unauthorized-access The token has expired; put a new one on $cbs."
    await ends.echo()
    await renewed.echo()
    assert other.state is LinkState.ATTACHED
    assert kept.state is LinkState.ATTACHED
    assert not await is_open(ends, ends.attach_sender("orders"))


async def test_sasl_plain_with_a_rule_and_its_key_needs_no_token(dial: Dial) -> None:
    peer = await dial(sasl=("PLAIN", "listens", KEY))
    assert await is_open(peer, peer.attach_receiver("orders"))
    assert not await is_open(peer, peer.attach_sender("orders"))


@pytest.mark.parametrize(("name", "key"), [("listens", "wrong"), ("nobody", KEY), ("listens", ""), ("", "")])
async def test_sasl_plain_with_a_wrong_key_ends_the_connection(dial: Dial, name: str, key: str) -> None:
    peer = await dial(sasl=("PLAIN", name, key))
    closed = await peer.event(ConnectionClosed)
    assert closed.error is not None
    assert closed.error.condition == "amqp:unauthorized-access"
    await peer.lost


async def test_a_peer_without_sasl_is_served_and_needs_tokens(server: NamespaceServer, dial: Dial) -> None:
    peer = await dial(sasl=None)
    assert not await is_open(peer, peer.attach_receiver("orders"))
    assert await peer.put_token("orders") == 202
    assert await is_open(peer, peer.attach_receiver("orders"))
    assert isinstance(peer.core, Connection)
