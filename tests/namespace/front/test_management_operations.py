"""Rules over `$management`: added, listed with each kind of filter, removed; and what is refused."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.namespace.front.amqp_peer import Peer
from twinbus.values import Described, Int, Timestamp

from .conftest import KEY

Dial = Callable[..., Awaitable[Peer]]

NODE = "events/Subscriptions/first/$management"
FILTERS: list[tuple[str, dict[str, Any], int, list[Any]]] = [
    ("sql", {"sql-filter": {"expression": "a = 1"}}, 0x1370000006, ["a = 1", 20]),
    ("true", {"true-filter": {}}, 0x1370000007, ["1=1", 20]),
    ("false", {"false-filter": {}}, 0x1370000008, ["1=0", 20]),
    (
        "correlation",
        {"correlation-filter": {"correlation-id": "c", "label": "l", "properties": {"p": Int(1)}}},
        0x1370000009,
        ["c", None, None, None, "l", None, None, None, {"p": 1}],
    ),
]


async def ask(peer: Peer, operation: str, body: dict[Any, Any]) -> dict[str, Any]:
    return await peer.ask(NODE, f"com.microsoft:{operation}", body)


async def test_rules_are_added_listed_in_the_format_of_the_service_and_removed(peer: Peer) -> None:
    for name, described, _, _ in FILTERS:
        action = {"sql-rule-action": {"expression": "SET b = 1"}} if name == "sql" else {}
        reply = await ask(peer, "add-rule", {"rule-name": name, "rule-description": described | action})
        assert reply["statusCode"] == 200, reply
    assert (await ask(peer, "remove-rule", {"rule-name": "$Default"}))["statusCode"] == 200
    reply = await ask(peer, "enumerate-rules", {"skip": Int(0), "top": Int(100)})
    told = [entry["rule-description"] for entry in reply["body"]["rules"]]
    assert [rule.descriptor for rule in told] == [0x13700000004] * 4
    for rule, (name, _, code, expected) in zip(told, FILTERS, strict=True):
        condition, action, rule_name, created = rule.value
        assert (rule_name, condition) == (name, Described(code, expected))
        assert action == (
            Described(0x13700000006, ["SET b = 1", 20]) if name == "sql" else Described(0x13700000005, [])
        )
        assert isinstance(created, Timestamp)
    page = await ask(peer, "enumerate-rules", {"skip": Int(1), "top": Int(2)})
    assert [entry["rule-description"].value[2] for entry in page["body"]["rules"]] == ["true", "false"]
    assert (await ask(peer, "enumerate-rules", {"skip": Int(4), "top": Int(2)}))["statusCode"] == 204


async def test_an_invalid_rule_request_is_refused_with_the_reason(peer: Peer) -> None:
    wrong = {"rule-name": "r", "rule-description": {"sql-filter": {"expression": "a ="}}}
    reply = await ask(peer, "add-rule", wrong)
    assert (reply["statusCode"], reply["errorCondition"]) == (400, "com.microsoft:argument-error")
    assert "At column 4: a value is expected" in reply["statusDescription"]
    twice = {"rule-name": "$default", "rule-description": {"true-filter": {}}}
    assert (await ask(peer, "add-rule", twice))["statusCode"] == 409
    reply = await ask(peer, "remove-rule", {"rule-name": "missing"})
    assert (reply["statusCode"], reply["errorCondition"]) == (404, "amqp:not-found")
    for node in ("orders/$management", "events/$management"):
        reply = await peer.ask(node, "com.microsoft:enumerate-rules", {})
        assert (reply["statusCode"], reply["errorCondition"]) == (400, "amqp:not-allowed")


@pytest.mark.parametrize(("name", "status"), [("listens", 204), ("sends", 401)])
async def test_the_listen_claim_is_enough_to_manage_rules_and_send_is_not(dial: Dial, name: str, status: int) -> None:
    peer = await dial()
    assert await peer.put_token(name=name, key=KEY) == 202
    reply = await ask(peer, "enumerate-rules", {"skip": Int(5)})
    assert reply["statusCode"] == status
