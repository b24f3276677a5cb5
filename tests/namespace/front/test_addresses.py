"""Parsing of link addresses."""

import pytest

from twinbus.namespace.front.addresses import LinkAddress, NodeKind, parse_address

CBS = LinkAddress(NodeKind.CBS, "$cbs")
DEAD = "/$deadletterqueue"
CASES = {
    "$cbs": CBS,
    "amqps://localhost:5672/$cbs": CBS,
    "orders": LinkAddress(NodeKind.ENTITY, "orders", "orders"),
    "/orders/": LinkAddress(NodeKind.ENTITY, "orders", "orders"),
    "amqps://localhost:5672/orders": LinkAddress(NodeKind.ENTITY, "orders", "orders"),
    "sb://localhost:5672/a/b/c": LinkAddress(NodeKind.ENTITY, "a/b/c", "a/b/c"),
    "sb://localhost/a%2Fb": LinkAddress(NodeKind.ENTITY, "a/b", "a/b"),
    "Orders/$DeadLetterQueue": LinkAddress(NodeKind.ENTITY, "orders" + DEAD, "Orders", dead_letter=True),
    "q/$deadletterqueue/$management": LinkAddress(NodeKind.MANAGEMENT, f"q{DEAD}/$management", "q", dead_letter=True),
    "q/$Transfer/$DeadLetterQueue": LinkAddress(NodeKind.ENTITY, f"q/$transfer{DEAD}", "q", transfer=True),
    "orders/$management": LinkAddress(NodeKind.MANAGEMENT, "orders/$management", "orders"),
    "$management": LinkAddress(NodeKind.MANAGEMENT, "$management"),
    "t/Subscriptions/s": LinkAddress(NodeKind.ENTITY, "t/subscriptions/s", "t/Subscriptions/s"),
    "t/Subscriptions/s/$DeadLetterQueue": LinkAddress(
        NodeKind.ENTITY, "t/subscriptions/s" + DEAD, "t/Subscriptions/s", dead_letter=True
    ),
    "contoso/x-servicebus-transfer/0": LinkAddress(
        NodeKind.ENTITY, "contoso/x-servicebus-transfer/0", "contoso/x-servicebus-transfer/0"
    ),
}


@pytest.mark.parametrize(("text", "address"), CASES.items())
def test_an_address_names_an_entity_a_sub_queue_or_a_node(text: str, address: LinkAddress) -> None:
    assert parse_address(text) == address
