"""What link addresses mean."""

import pytest

from twinbus.namespace.front.addresses import Address, Node, parse_address

CBS = Address(Node.CBS, "$cbs")
DEAD = "/$deadletterqueue"
CASES = {
    "$cbs": CBS,
    "amqps://localhost:5672/$cbs": CBS,
    "orders": Address(Node.ENTITY, "orders", "orders"),
    "/orders/": Address(Node.ENTITY, "orders", "orders"),
    "amqps://localhost:5672/orders": Address(Node.ENTITY, "orders", "orders"),
    "sb://localhost:5672/a/b/c": Address(Node.ENTITY, "a/b/c", "a/b/c"),
    "sb://localhost/a%2Fb": Address(Node.ENTITY, "a/b", "a/b"),
    "Orders/$DeadLetterQueue": Address(Node.ENTITY, "orders" + DEAD, "Orders", dead_letter=True),
    "q/$deadletterqueue/$management": Address(Node.MANAGEMENT, f"q{DEAD}/$management", "q", dead_letter=True),
    "q/$Transfer/$DeadLetterQueue": Address(Node.ENTITY, f"q/$transfer{DEAD}", "q", transfer=True),
    "orders/$management": Address(Node.MANAGEMENT, "orders/$management", "orders"),
    "$management": Address(Node.MANAGEMENT, "$management"),
    "t/Subscriptions/s": Address(Node.ENTITY, "t/subscriptions/s", "t/Subscriptions/s"),
    "t/Subscriptions/s/$DeadLetterQueue": Address(
        Node.ENTITY, "t/subscriptions/s" + DEAD, "t/Subscriptions/s", dead_letter=True
    ),
    "contoso/x-servicebus-transfer/0": Address(
        Node.ENTITY, "contoso/x-servicebus-transfer/0", "contoso/x-servicebus-transfer/0"
    ),
}


@pytest.mark.parametrize(("text", "address"), CASES.items())
def test_an_address_names_an_entity_a_sub_queue_or_a_node(text: str, address: Address) -> None:
    assert parse_address(text) == address
