"""X1: the work that a peer causes is linear in the bytes it sends, whatever they are."""

import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from uuid import UUID

from azure.servicebus import ServiceBusClient, ServiceBusMessage

from tests.fuzz import hostile_maps
from tests.namespace.front.amqp_peer import Peer
from twinbus.amqp import RECEIVER, Connection, Link, Session
from twinbus.amqp.frames import AMQP_HEADER, encode_frame
from twinbus.connect import ServiceBusConnection, make_sas_token
from twinbus.message import BodyType, Message
from twinbus.namespace.engine.descriptions import Claim
from twinbus.namespace.engine.storage_protocol import distinct
from twinbus.namespace.front.addresses import LinkAddress, parse_address
from twinbus.namespace.front.cbs import GrantedClaims
from twinbus.namespace.front.request_response import NodeReplyLink, NodeReplyLinks
from twinbus.namespace.front.sas_verifier import DEFAULT_KEY, DEFAULT_KEY_NAME, SasVerifier, default_rule
from twinbus.namespace.front.unsettled import LockedDeliveries
from twinbus.namespace.own_names import OwnNames
from twinbus.namespace.server import NamespaceServer
from twinbus.testing import LocalNamespace
from twinbus.values import Array, Long, NumberKeyedMap

Dial = Callable[..., Awaitable[Peer]]
NODE = "orders/$management"


@contextmanager
def counted(code: CodeType | None = None) -> Iterator[list[int]]:
    """Count the calls of the function with this code; without one, the calls of all Python and C functions."""
    found = [0]

    def profile(frame: FrameType, event: str, _: object) -> None:
        if (event == "call" and (code is None or frame.f_code is code)) or (event == "c_call" and code is None):
            found[0] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(before)


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the smallest of three measurements."""
    found = []
    for _ in range(3):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


# --- tokens and addresses


async def test_x1_a_path_of_many_segments_is_not_looked_up_prefix_by_prefix(server: NamespaceServer) -> None:
    verifier = SasVerifier((default_rule(),), OwnNames(5672))
    claims = GrantedClaims(verifier, server.runtime.namespace, peer_is_loopback=True)
    path = "/".join(["a"] * 50_000)
    with counted() as calls:
        assert not claims.allow(Claim.SEND, path, 0)
    assert calls[0] < 50
    token = make_sas_token("sb://localhost/orders", DEFAULT_KEY_NAME, DEFAULT_KEY, 4_000_000_000)
    assert claims.put("orders", token, 0) is None
    with counted() as calls:
        assert claims.allow(Claim.SEND, f"orders/{path}", 0), "a token is for what lies below its audience"
        assert not claims.allow(Claim.SEND, f"orders2/{path}", 0)
        assert not claims.allow(Claim.SEND, f"order/{path}", 0)
    assert calls[0] < 50


async def test_a_token_for_an_entity_is_valid_below_it_at_any_depth(dial: Dial) -> None:
    peer = await dial()
    assert await peer.put_token("orders") == 202
    for address in ("orders", "orders/$DeadLetterQueue", "ORDERS"):
        await peer.receiver(address)
    for address in ("orders2", "order", "ordersx/$DeadLetterQueue"):
        assert "unauthorized" in await peer.refused(peer.attach_receiver(address))


async def test_x1_an_address_longer_than_any_entity_needs_is_refused_with_a_short_text(dial: Dial) -> None:
    peer = await dial()
    assert await peer.put_token() == 202
    for address in ("a/" * 2500, "a/" * 2500 + "$management"):
        refused = await peer.refused(peer.attach_sender(address))
        assert refused.startswith("amqp:invalid-field The address of the link has 50")
        assert len(refused) < 200


# --- requests and replies


async def test_x1_a_text_that_quotes_a_request_is_cut(dial: Dial) -> None:
    peer = await dial()
    assert await peer.put_token() == 202
    tokens = Array(bytes, [b"x" * 200_000])
    for operation, body in (
        ("com.microsoft:" + "x" * 200_000, {}),
        ("com.microsoft:update-disposition", {"lock-tokens": tokens, "disposition-status": "x" * 200_000}),
        ("com.microsoft:peek-message", {"from-sequence-number": "x" * 200_000}),
        ("com.microsoft:receive-by-sequence-number", {"sequence-numbers": Array(Long, map(Long, range(50_000)))}),
    ):
        answer = await peer.ask(NODE, operation, body)
        assert answer["statusCode"] >= 400
        assert 20 < len(answer["statusDescription"]) <= 1000


async def test_the_text_names_the_first_messages_that_are_missing_and_counts_the_rest(dial: Dial) -> None:
    peer = await dial()
    assert await peer.put_token() == 202
    numbers = Array(Long, map(Long, [*range(1, 31), *range(1, 31)]))
    answer = await peer.ask(NODE, "com.microsoft:receive-by-sequence-number", {"sequence-numbers": numbers})
    assert answer["statusDescription"].endswith("18, 19, 20 and 10 more.")


async def test_x1_colliding_keys_in_a_request_are_refused_without_comparing_them(dial: Dial) -> None:
    peer = await dial()
    assert await peer.put_token() == 202
    body = hostile_maps.KEYS["uuid"](600)
    with counted(UUID.__eq__.__code__) as comparisons:
        answer = await peer.ask(NODE, "com.microsoft:peek-message", NumberKeyedMap((key, None) for key in body))
    assert answer["statusCode"] == 400
    assert comparisons[0] < 600


def test_x1_repeated_sequence_numbers_are_found_in_linear_time() -> None:
    hostile, ordinary = hostile_maps.chained(10_922), tuple(range(10_922))
    assert distinct(hostile + hostile) == hostile
    ratio = cpu_seconds(lambda: distinct(hostile)) / cpu_seconds(lambda: distinct(ordinary))
    # A dict of these numbers takes more than a hundred times as long as one of ordinary numbers.
    assert ratio < 10


def reply_links(number: int) -> tuple[NodeReplyLinks, list[tuple[Link, NodeReplyLink]], Session, Session, LinkAddress]:
    core = Connection.client("c", "host", sasl=None)
    first, second = core.begin(), core.begin()
    address = parse_address("$cbs")
    links, made = NodeReplyLinks(), []
    for index in range(number):
        link = (first if index % 2 else second).attach(f"reply-{index}", RECEIVER)
        reply_link = NodeReplyLink(link, address, None, None)  # type: ignore[arg-type]  # nothing is sent here
        links.add(link, reply_link)
        made.append((link, reply_link))
    return links, made, first, second, address


def test_a_reply_takes_the_link_it_names_then_one_of_its_session_then_any() -> None:
    links, made, first, second, address = reply_links(6)
    assert links.find(first, address, "reply-4") == made[4], "by name, in another session"
    assert links.find(first, address, "unknown") == made[1], "the first of its session"
    assert links.find(second, address, None) == made[0]
    assert links.find(first, parse_address("orders/$management"), "reply-4") is None
    for link, reply_link in made:
        if link.session is first:
            links.remove(link, reply_link)
    assert links.find(first, address, None) == made[0], "of the other session"
    for link, reply_link in made:
        links.remove(link, reply_link)
    assert links.find(first, address, None) is None


def test_x1_a_reply_link_is_found_without_a_search_through_all() -> None:
    found = []
    for number in (4, 2000):
        links, _, first, _, address = reply_links(number)
        with counted() as calls:
            links.find(first, address, "reply-2")
            links.find(first, address, "unknown")
        found.append(calls[0])
    assert found[0] == found[1]


async def test_a_body_that_maps_many_numbers_arrives_as_it_was_sent(bus: ServiceBusConnection) -> None:
    body = {number: str(number) for number in range(1000)}
    sender, receiver = await bus.sender("orders"), await bus.receiver("orders")
    await sender.send([Message(body, body_type=BodyType.VALUE)])
    [message] = await receiver.receive(1, 10)
    assert message.body == body
    assert (message.body[5], message.body.get(-1)) == ("5", None)
    await sender.send([Message(message.body, body_type=BodyType.VALUE)])
    [again] = await receiver.receive(1, 10)
    assert again.body == body


# --- links that end together


async def test_x1_links_that_end_together_take_one_pass_over_unsettled_deliveries(dial: Dial) -> None:
    peer = await dial()
    assert await peer.put_token() == 202
    sender = await peer.sender("orders")
    peer.send(sender, *(str(number) for number in range(20)))
    await peer.answers(20)
    session = peer.session()
    for _ in range(20):
        link = await peer.receiver("orders", session)
        peer.grant(link, 1)
        await peer.received(link, 1)
    with counted(LockedDeliveries.forget_links.__code__) as looks:
        session.end()
        peer.flush()
        await peer.echo()
    assert looks[0] == 1


# --- a whole server


def test_x1_opens_made_to_freeze_the_server_do_not_delay_others() -> None:
    """Runs a server process. Before keys were compared as text, the second frame took it more than a minute."""
    opens = [
        AMQP_HEADER
        + encode_frame(0, hostile_maps.PERFORMATIVES["open properties"](hostile_maps.map_of_size("uuid", size)))
        for size in (144_000, 288_000)
    ]
    config = {"namespaces": [{"name": "primary", "queues": [{"name": "orders"}]}]}
    with LocalNamespace(config=config, memory=True) as namespace:
        peers = [socket.create_connection(("127.0.0.1", namespace.port), timeout=30) for _ in range(4)]
        try:
            for peer, raw in zip(peers, opens * 2, strict=True):
                peer.sendall(raw)
            with (
                ServiceBusClient.from_connection_string(namespace.connection_string, retry_total=0) as client,
                client.get_queue_sender("orders", socket_timeout=10) as sender,
                client.get_queue_receiver("orders", max_wait_time=10) as receiver,
            ):
                sender.send_messages([ServiceBusMessage(f"{number}") for number in range(50)])
                found: list[str] = []
                while len(found) < 50:
                    batch = receiver.receive_messages(50 - len(found), max_wait_time=10)
                    assert batch, "the messages are there, and the server answers"
                    found += [str(message) for message in batch]
                    for message in batch:
                        receiver.complete_message(message)
                assert sorted(found, key=int) == [str(number) for number in range(50)]
            for peer in peers:
                while peer.recv(65536):  # the server's header and close, then its end
                    pass
        finally:
            for peer in peers:
                peer.close()
        assert namespace.stop() == 0
