"""What link addresses mean."""

import pytest

from twinbus.namespace.front.addresses import Address, Node, parse_address

CASES = {
    "$cbs": Address(Node.CBS),
    "amqps://localhost:5672/$cbs": Address(Node.CBS),
    "orders": Address(Node.ENTITY, "orders"),
    "/orders/": Address(Node.ENTITY, "orders"),
    "amqps://localhost:5672/orders": Address(Node.ENTITY, "orders"),
    "sb://localhost:5672/a/b/c": Address(Node.ENTITY, "a/b/c"),
    "Orders/$DeadLetterQueue": Address(Node.ENTITY, "Orders", dead_letter=True),
    "orders/$deadletterqueue/$management": Address(Node.MANAGEMENT, "orders", dead_letter=True),
    "orders/$Transfer/$DeadLetterQueue": Address(Node.ENTITY, "orders", transfer=True),
    "orders/$management": Address(Node.MANAGEMENT, "orders"),
    "$management": Address(Node.MANAGEMENT),
    "news/Subscriptions/all": Address(Node.ENTITY, "news/Subscriptions/all"),
    "news/subscriptions/all/$DeadLetterQueue": Address(Node.ENTITY, "news/subscriptions/all", dead_letter=True),
    "sb://localhost/a%2Fb": Address(Node.ENTITY, "a/b"),
    "contoso/x-servicebus-transfer/0": Address(Node.ENTITY, "contoso/x-servicebus-transfer/0"),
}


@pytest.mark.parametrize(("text", "address"), CASES.items())
def test_an_address_names_an_entity_a_sub_queue_or_a_node(text: str, address: Address) -> None:
    assert parse_address(text) == address
