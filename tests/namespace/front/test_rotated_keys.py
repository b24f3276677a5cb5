"""X4: a key that is rotated, or that loses a claim, ends the links that were attached with it."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.namespace.front import recorded_requests
from tests.namespace.front.amqp_peer import Peer
from tests.namespace.front.transaction_peer import TransactionPeer
from twinbus.amqp import Link, LinkState, split_sections
from twinbus.connect import make_sas_token
from twinbus.namespace.engine.descriptions import AuthorizationRule, Claim, QueueDescription, TopicDescription
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.front.sas_verifier import DEFAULT_KEY, DEFAULT_KEY_NAME
from twinbus.namespace.server import NamespaceServer

from .conftest import KEY, RULES, rule

Dial = Callable[..., Awaitable[Peer]]
ROTATED = "amqp:unauthorized-access The key of the token was rotated"
NEW_KEY = "another-key"


async def update(server: NamespaceServer, description: QueueDescription | TopicDescription) -> int:
    """Update an entity over HTTP: it has no authorization rules afterwards. Returns the status of the response."""
    resource = f"sb://localhost:{server.port}/"
    headers = [
        ("Authorization", make_sas_token(resource, DEFAULT_KEY_NAME, DEFAULT_KEY, 4_000_000_000)),
        ("If-Match", "*"),
        ("Connection", "close"),
    ]
    body = recorded_requests.python(type(description).__name__, "")
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(recorded_requests.request("PUT", f"/{description.path}?api-version=2021-05", body, headers))
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


def with_key(name: str, key: str, *claims: Claim) -> AuthorizationRule:
    return AuthorizationRule(name, key, "", frozenset(claims))


async def ended(peer: Peer, link: Link) -> None:
    assert (await peer.refused(link)).startswith(ROTATED)


async def kept(peer: Peer, *links: Link) -> None:
    await peer.echo()
    assert [link.state for link in links] == [LinkState.ATTACHED] * len(links)


async def refused_anew(peer: Peer, link: Link) -> None:
    assert "amqp:unauthorized-access Unauthorized access." in await peer.refused(link)


def rules_without(*names: str) -> tuple[AuthorizationRule, ...]:
    return tuple(each for each in RULES if each.name not in names)


async def test_x4_a_rotated_key_of_the_namespace_ends_its_links_only(server: NamespaceServer, dial: Dial) -> None:
    old, other = await dial(), await dial()
    assert await old.put_token(name="manages", key=KEY) == 202
    assert await other.put_token(name="listens", key=KEY) == 202
    sender, receiver = await old.sender("orders"), await old.receiver("orders/$DeadLetterQueue")
    waiting = old.attach_receiver("visits", wanted=None)  # for a session: not attached yet
    staying = await other.receiver("orders")
    await old.echo()
    server.replace_rules((*rules_without("manages"), with_key("manages", NEW_KEY, Claim.MANAGE)))
    for link in (sender, receiver, waiting):
        await ended(old, link)
    await kept(other, staying)
    assert not old.lost.done(), "the peer can put another token"
    await refused_anew(old, old.attach_sender("orders"))
    asked = await old.ask("orders/$management", "com.microsoft:peek-message", {})
    assert asked["statusCode"] == 401
    assert await old.put_token(name="manages", key=KEY) == 401
    assert await old.put_token(name="manages", key=NEW_KEY) == 202
    await old.sender("orders")


async def test_x4_links_stay_while_one_of_two_keys_is_rotated(server: NamespaceServer, dial: Dial) -> None:
    server.replace_rules((*RULES, AuthorizationRule("two", "first-key", "second-key", frozenset({Claim.SEND}))))
    first, second = await dial(), await dial()
    assert await first.put_token(name="two", key="first-key") == 202
    assert await second.put_token(name="two", key="second-key") == 202
    links = await first.sender("orders"), await second.sender("orders")
    server.replace_rules((*RULES, AuthorizationRule("two", NEW_KEY, "second-key", frozenset({Claim.SEND}))))
    await ended(first, links[0])
    await kept(second, links[1])


async def test_x4_a_link_stays_if_another_token_covers_it(server: NamespaceServer, dial: Dial) -> None:
    peer = await dial()
    assert await peer.put_token("", name="sends", key=KEY) == 202
    assert await peer.put_token("orders", name="manages", key=KEY) == 202
    link = await peer.sender("orders")
    server.replace_rules(rules_without("manages"))
    await kept(peer, link)
    server.replace_rules(rules_without("manages", "sends"))
    await ended(peer, link)


async def test_x4_a_rule_that_loses_a_claim_ends_the_links_that_need_it(server: NamespaceServer, dial: Dial) -> None:
    peer = await dial()
    assert await peer.put_token(name="manages", key=KEY) == 202
    sender, receiver = await peer.sender("orders"), await peer.receiver("orders")
    server.replace_rules((*rules_without("manages"), rule("manages", Claim.LISTEN)))
    await ended(peer, sender)
    await kept(peer, receiver)


async def test_x4_a_transaction_of_a_rotated_key_is_rolled_back(server: NamespaceServer, dial: Dial) -> None:
    peer, other = await dial(), await dial()
    assert await other.put_token() == 202
    other.send(await other.sender("orders"), "received")
    await other.answers(1)
    assert await peer.put_token(name="manages", key=KEY) == 202
    transactions = await TransactionPeer.on(peer)
    sender, receiver = await peer.sender("orders"), await peer.receiver("orders")
    peer.grant(receiver, 1)
    (found,) = await peer.received(receiver, 1)
    sends, settles, keeps = [await transactions.begin() for _ in range(3)]
    await transactions.send(sender, sends, "sent")
    await transactions.settle(found, settles)
    server.replace_rules(rules_without("manages"))
    for link in (sender, receiver):
        await ended(peer, link)
    assert await transactions.commit(sends) == "amqp:transaction:rollback"
    assert await transactions.commit(settles) == "amqp:transaction:rollback"
    assert await transactions.commit(keeps) is None, "a transaction without operations needs no claim"
    peeked = await other.ask("orders/$management", "com.microsoft:peek-message", {"message-count": 10})
    (entry,) = peeked["body"]["messages"]
    assert split_sections(entry["message"]).properties.message_id == "received"


async def test_x4_a_rotated_key_that_was_sent_with_sasl_ends_its_links(server: NamespaceServer, dial: Dial) -> None:
    peer = await dial(sasl=("PLAIN", "listens", KEY))
    link = await peer.receiver("orders")
    server.replace_rules(rules_without("listens"))
    await ended(peer, link)
    await refused_anew(peer, peer.attach_receiver("orders"))


@pytest.mark.parametrize(
    ("path", "name", "changed"),
    [
        ("ruled", "of-ruled", QueueDescription(path="ruled")),
        ("events/Subscriptions/first", "of-events", TopicDescription(path="EVENTS")),
    ],
)
async def test_x4_a_rotated_key_of_an_entity_ends_its_links(
    server: NamespaceServer, dial: Dial, path: str, name: str, changed: QueueDescription | TopicDescription
) -> None:
    old, other = await dial(), await dial()
    assert await old.put_token(path, name=name, key=KEY) == 202
    assert await other.put_token() == 202
    attach = Peer.sender if name == "of-ruled" else Peer.receiver
    link, staying = await attach(old, path), await attach(other, path)
    assert await update(server, changed) == 200
    await ended(old, link)
    await kept(other, staying)
    assert await old.put_token(path, name=name, key=KEY) == 401


async def test_x4_a_token_of_a_deleted_entity_is_of_no_use_for_its_successor(
    server: NamespaceServer, dial: Dial
) -> None:
    peer = await dial()
    assert await peer.put_token("ruled", name="of-ruled", key=KEY) == 202
    assert not isinstance(await server.runtime.delete("ruled"), Refusal)
    successor = QueueDescription(path="ruled", authorization_rules=(with_key("of-ruled", NEW_KEY, Claim.SEND),))
    assert not isinstance(await server.runtime.create(successor), Refusal)
    await refused_anew(peer, peer.attach_sender("ruled"))
    assert await peer.put_token("ruled", name="of-ruled", key=NEW_KEY) == 202
    await peer.sender("ruled")


async def test_x4_an_attach_that_a_fault_holds_is_refused_if_its_key_was_rotated_meanwhile(
    server: NamespaceServer, dial: Dial
) -> None:
    peer = await dial()
    assert await peer.put_token(name="sends", key=KEY) == 202
    fault = server.faults.set({"kind": "black-hole", "points": ["attach"], "entity": "orders"})
    link = peer.attach_sender("orders")
    await peer.echo()
    server.replace_rules(rules_without("sends"))
    server.faults.clear(fault["id"])
    await refused_anew(peer, link)
