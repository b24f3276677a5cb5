"""Requests to `$management`: refusals name the wrong field, and replies reach the peer as it takes them."""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import pytest

from tests.namespace.front.amqp_peer import Node, Peer
from twinbus.amqp import (
    MIB,
    RECEIVER,
    SND_SETTLED,
    Delivered,
    LinkAccepted,
    LinkDetached,
    Properties,
    Rejected,
    Source,
    Target,
    build_message,
    split_sections,
)
from twinbus.namespace.front import request_response
from twinbus.namespace.front.management_operations import OPERATIONS
from twinbus.namespace.server import NamespaceServer
from twinbus.values import Array, Int, Long, Timestamp, UInt, ULong

Dial = Callable[..., Awaitable[Peer]]
NODE = "orders/$management"
TOKENS = Array(UUID, [UUID(int=1)])

BAD: list[tuple[str, dict[Any, Any], str]] = [
    ("peek-message", {"from-sequence-number": "x"}, "'from-sequence-number'"),
    ("peek-message", {"from-sequence-number": ULong(2**63)}, "'from-sequence-number'"),
    ("peek-message", {"message-count": True}, "'message-count'"),
    ("peek-message", {"message-count": Int(0)}, "'message-count'"),
    ("peek-message", {"message-count": Long(2**40)}, "'message-count'"),
    ("peek-message", {"session-id": 7}, "'session-id'"),
    ("renew-lock", {}, "'lock-tokens'"),
    ("renew-lock", {"lock-tokens": []}, "'lock-tokens'"),
    ("renew-lock", {"lock-tokens": ["x"]}, "'lock-tokens'"),
    ("receive-by-sequence-number", {}, "'sequence-numbers'"),
    ("receive-by-sequence-number", {"sequence-numbers": Array(ULong, [2**64 - 1])}, "'sequence-numbers'"),
    ("receive-by-sequence-number", {"sequence-numbers": [True]}, "'sequence-numbers'"),
    ("receive-by-sequence-number", {"sequence-numbers": [Long(-1)]}, "'sequence-numbers'"),
    (
        "receive-by-sequence-number",
        {"sequence-numbers": Array(Long, [1]), "receiver-settle-mode": UInt(2)},
        "'receiver-settle-mode'",
    ),
    ("update-disposition", {"disposition-status": "completed"}, "'lock-tokens'"),
    ("update-disposition", {"lock-tokens": TOKENS}, "'disposition-status'"),
    ("update-disposition", {"lock-tokens": TOKENS, "disposition-status": "lost"}, "'disposition-status'"),
    ("update-disposition", {"lock-tokens": TOKENS, "disposition-status": 1}, "'disposition-status'"),
    (
        "update-disposition",
        {"lock-tokens": TOKENS, "disposition-status": "abandoned", "properties-to-modify": "x"},
        "'properties-to-modify'",
    ),
    (
        "update-disposition",
        {"lock-tokens": TOKENS, "disposition-status": "suspended", "deadletter-reason": 7},
        "'deadletter-reason'",
    ),
    ("schedule-message", {}, "'messages'"),
    ("schedule-message", {"messages": ["x"]}, "'messages'"),
    ("schedule-message", {"messages": [{"message": "text"}]}, "'message'"),
    ("schedule-message", {"messages": [{"message": b"\x00\x53"}]}, "malformed"),
    ("cancel-scheduled-message", {"sequence-numbers": "x"}, "'sequence-numbers'"),
    ("get-session-state", {}, "'session-id'"),
    ("set-session-state", {"session-id": "s", "session-state": "text"}, "'session-state'"),
    ("set-session-state", {"session-state": b""}, "'session-id'"),
    ("renew-session-lock", {"session-id": None}, "'session-id'"),
    ("get-message-sessions", {"skip": Int(-1)}, "'skip'"),
    ("get-message-sessions", {"top": "x"}, "'top'"),
    ("get-message-sessions", {"last-updated-time": "x"}, "'last-updated-time'"),
    ("add-rule", {}, "'rule-name'"),
    ("add-rule", {"rule-name": 7}, "'rule-name'"),
    ("add-rule", {"rule-name": "r"}, "'rule-description'"),
    ("add-rule", {"rule-name": "r", "rule-description": "x"}, "'rule-description'"),
    ("add-rule", {"rule-name": "r", "rule-description": {"sql-filter": "x"}}, "'sql-filter'"),
    ("add-rule", {"rule-name": "r", "rule-description": {"sql-filter": {"expression": 7}}}, "'expression'"),
    ("add-rule", {"rule-name": "r", "rule-description": {"correlation-filter": {"label": 7}}}, "'label'"),
    ("add-rule", {"rule-name": "r", "rule-description": {"correlation-filter": {"properties": 7}}}, "'properties'"),
    (
        "add-rule",
        {"rule-name": "r", "rule-description": {"sql-filter": {"expression": "1=1"}, "correlation-filter": {}}},
        "two filters",
    ),
    (
        "add-rule",
        {"rule-name": "r", "rule-description": {"sql-filter": {"expression": "1=1"}, "sql-rule-action": {}}},
        "'sql-rule-action'",
    ),
    ("remove-rule", {}, "'rule-name'"),
    ("enumerate-rules", {"skip": Int(-1)}, "'skip'"),
    ("enumerate-rules", {"top": "x"}, "'top'"),
    ("batch-delete-messages", {}, "'message-count'"),
    ("batch-delete-messages", {"message-count": Int(1), "enqueued-time-utc": "x"}, "'enqueued-time-utc'"),
]


async def test_the_refusal_of_a_bad_body_names_the_field(peer: Peer) -> None:
    for operation, body, field in BAD:
        reply = await peer.ask(NODE, f"com.microsoft:{operation}", body)
        assert (reply["statusCode"], reply["errorCondition"]) == (400, "com.microsoft:argument-error"), operation
        assert field in reply["statusDescription"], operation
    assert {operation for operation, _, _ in BAD} == set(OPERATIONS), "every operation is in the list"


@pytest.mark.parametrize("body", [None, "text", 7, ["list"], b"binary"])
async def test_a_body_that_is_no_map_is_refused(peer: Peer, body: Any) -> None:
    for operation in OPERATIONS:
        reply = await peer.ask(NODE, f"com.microsoft:{operation}", body)
        assert (reply["statusCode"], "has to be a map" in reply["statusDescription"]) == (400, True)


async def test_extremes_that_are_allowed_are_answered(peer: Peer) -> None:
    peer.send(await peer.sender("orders"), "a")
    largest = Timestamp(2**63 - 1)
    for operation, body, status in (
        ("peek-message", {"from-sequence-number": Long(-(2**63)), "message-count": Int(2**31 - 1)}, 200),
        ("peek-message", {"from-sequence-number": Long(2**63 - 1)}, 204),
        ("receive-by-sequence-number", {"sequence-numbers": [Long(2**63 - 1)]}, 404),
        ("cancel-scheduled-message", {"sequence-numbers": [Long(2**63 - 1)]}, 404),
        ("get-message-sessions", {"skip": Int(2**31 - 1), "top": Int(2**31 - 1), "last-updated-time": largest}, None),
        ("get-message-sessions", {"last-updated-time": Timestamp(-(2**63))}, None),
        ("batch-delete-messages", {"message-count": Int(1), "enqueued-time-utc": Timestamp(-(2**63))}, 204),
        ("batch-delete-messages", {"message-count": Int(2**31 - 1), "enqueued-time-utc": largest}, 200),
    ):
        reply = await peer.ask(NODE, f"com.microsoft:{operation}", body)
        assert reply["statusCode"] == status if status is not None else reply["statusCode"] != 500, operation


async def test_unknown_operations_and_missing_entities_are_told_apart(peer: Peer) -> None:
    unknown = await peer.ask(NODE, "com.microsoft:dance", {})
    assert (unknown["statusCode"], unknown["errorCondition"]) == (501, "amqp:not-implemented")
    missing = await peer.ask("nowhere/$management", "com.microsoft:peek-message", {})
    assert (missing["statusCode"], missing["errorCondition"]) == (404, "amqp:not-found")
    assert "The messaging entity 'nowhere' could not be found." in missing["statusDescription"]
    namespace = await peer.ask("$management", "com.microsoft:peek-message", {})
    assert namespace["statusCode"] == 404


async def test_a_malformed_request_is_rejected_and_the_link_stays(peer: Peer) -> None:
    node = Node(peer, NODE)
    await node.attached()
    node.requests.send(b"bad", b"\x00\x53\x77")
    peer.flush()
    (answer,) = await peer.answers(1)
    assert isinstance(answer.state, Rejected)
    assert (await node.ask("com.microsoft:peek-message", {}, {}))["statusCode"] == 204


async def test_replies_wait_for_credit_and_come_in_order(peer: Peer) -> None:
    node = Node(peer, NODE)
    await node.attached(credit=0)
    numbers = [node.request("com.microsoft:peek-message", {}, {}) for _ in range(3)]
    await peer.echo()
    assert not [event for event in peer.events if isinstance(event, Delivered) and event.link is node.replies]
    peer.grant(node.replies, 2)
    assert len(await peer.received(node.replies, 2)) == 2
    peer.grant(node.replies, 10)
    assert (await node.reply(numbers[2]))["statusCode"] == 204


async def test_a_peer_that_never_takes_its_replies_loses_its_reply_link(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_response, "_MAX_UNREAD", request_response._Limit(40, 16 * MIB))
    node = Node(peer, NODE)
    await node.attached(credit=0)
    for _ in range(50):
        node.request("nothing", {}, {})
    said = await peer.refused(node.replies)
    assert said == (
        "amqp:resource-limit-exceeded Too many replies are waiting to be read: 40 replies or 16777216 bytes may "
        "wait on a connection. Grant credit to the reply link and read it."
    )


async def test_a_reply_goes_to_the_link_that_is_named(peer: Peer) -> None:
    session = peer.session()
    node = Node(peer, NODE, session)
    await node.attached()
    by_name = session.attach("by-name", RECEIVER, source=Source(NODE), target=Target(None), snd_settle_mode=SND_SETTLED)
    by_target = peer.session().attach(
        "x", RECEIVER, source=Source(NODE), target=Target("by-target"), snd_settle_mode=SND_SETTLED
    )
    peer.flush()
    for link in (by_name, by_target):
        await peer.event(LinkAccepted, link)
        peer.grant(link, 10)
    for reply_to, link in ((node.reply_to, node.replies), ("by-name", by_name), ("by-target", by_target)):
        number = node.request("com.microsoft:peek-message", {}, {}, reply_to)
        assert (await node.reply(number, link))["statusCode"] == 204


async def test_the_correlation_id_is_the_message_id_whatever_its_type(peer: Peer) -> None:
    node = Node(peer, NODE)
    await node.attached()
    for number, identity in enumerate(("text", ULong(7), UUID(int=7), b"bytes", None)):
        properties = Properties(message_id=identity, reply_to=node.reply_to)
        request = build_message(
            properties=properties, application_properties={"operation": "com.microsoft:peek-message"}, value={}
        )
        node.requests.send(str(number).encode(), request, settled=True)
        peer.flush()
        (reply,) = await peer.received(node.replies, 1)
        assert split_sections(reply.payload).properties.correlation_id == identity


async def test_running_requests_are_carried_out_when_their_link_ends(peer: Peer, server: NamespaceServer) -> None:
    peer.send(await peer.sender("orders"), "a")
    await peer.answers(1)
    node = Node(peer, NODE)
    await node.attached()
    node.request("com.microsoft:batch-delete-messages", {"message-count": Int(1)}, {})
    for link in (node.requests, node.replies):
        link.detach()
    peer.flush()
    await peer.event(LinkDetached, node.replies)
    assert (await peer.ask(NODE, "com.microsoft:peek-message", {}))["statusCode"] == 204


async def test_a_request_with_odd_properties_is_answered_or_dropped_without_harm(peer: Peer) -> None:
    node = Node(peer, NODE)
    await node.attached()
    for odd in (
        build_message(value={}),
        build_message(application_properties={"operation": 7}, value={}),
        build_message(properties=Properties(message_id="x", reply_to="nobody"), value={}),
        build_message(properties=Properties(message_id="x"), application_properties={"operation": None}, data=b""),
    ):
        node.requests.send(b"odd", odd, settled=True)
    peer.flush()
    assert (await node.ask("com.microsoft:peek-message", {}, {}))["statusCode"] == 204


@pytest.mark.parametrize(
    ("operation", "body"),
    [
        ("get-session-state", {}),
        ("set-session-state", {"session-state": b"overwritten"}),
        ("renew-session-lock", {}),
        ("receive-by-sequence-number", {"sequence-numbers": Array(Long, [Long(1)])}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_session_is_for_the_connection_that_holds_it(
    peer: Peer, dial: Dial, operation: str, body: dict[str, Any]
) -> None:
    holder, other = peer, await dial()
    assert await other.put_token() == 202
    session = f"held during {operation}"
    await holder.receiver("visits", wanted=session)
    node, asked = "visits/$management", {"session-id": session, **body}
    mine = {"session-id": session, "session-state": b"kept"}
    assert (await holder.ask(node, "com.microsoft:set-session-state", mine))["statusCode"] == 200
    refused = await other.ask(node, f"com.microsoft:{operation}", asked)
    assert (refused["statusCode"], refused["errorCondition"]) == (410, "com.microsoft:session-lock-lost")
    kept = await holder.ask(node, "com.microsoft:get-session-state", {"session-id": session})
    assert kept["body"]["session-state"] == b"kept"
