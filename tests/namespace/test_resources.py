"""Limits of all connections together (X1): which connection is closed when a pool is exhausted, with which error."""

import logging

import pytest

from twinbus.amqp import MIB, LimitExceededError
from twinbus.errors import OperatorError
from twinbus.namespace.resources import ConnectionAccount, ResourceLimits, Resources

LIMITS = ResourceLimits(
    max_connections=3,
    memory=1000,
    unauthenticated_memory=300,
    connection_memory=600,
    unauthenticated_connection_memory=200,
)


class Connections:
    """Accounts by name, and which of them were closed for which limit."""

    def __init__(self, limits: ResourceLimits = LIMITS) -> None:
        self.resources = Resources(limits)
        self.evicted: list[tuple[str, str, str]] = []

    def open(self, name: str, *, authenticated: bool = False) -> ConnectionAccount:
        account = self.resources.open(
            lambda exceeded: self.evicted.append((name, exceeded.limit, exceeded.description))
        )
        if authenticated:
            account.authenticate()
        return account


def test_x1_what_is_held_is_counted_by_kind_and_returns_to_zero() -> None:
    connections = Connections()
    one, other = connections.open("one"), connections.open("other", authenticated=True)
    one.hold("a", 50)
    one.hold("b", 30)
    one.hold("a", 10)
    other.hold("a", 100)
    resources = connections.resources
    assert (resources.held, resources.unauthenticated_held, one.held) == (140, 40, 40)
    one.authenticate()
    assert (resources.held, resources.unauthenticated_held) == (140, 0)
    one.close()
    one.close()
    one.hold("a", 70)
    other.close()
    assert (resources.held, resources.unauthenticated_held, resources.connections) == (0, 0, 0)
    assert connections.evicted == []


def test_x1_a_connection_that_holds_too_much_is_closed_by_name_and_value() -> None:
    connections = Connections()
    one = connections.open("one")
    one.hold("unsent bytes", 150)
    one.hold("tokens", 60)
    [(name, limit, text)] = connections.evicted
    assert (name, limit) == ("one", "connection-memory")
    assert text.startswith(
        "A connection may make the server hold 200 bytes until a token was accepted; this one made it hold 210, most "
        "of them as unsent bytes. Read what the server sends, or grant less credit."
    )
    assert connections.resources.held == 0
    authenticated = connections.open("two", authenticated=True)
    authenticated.hold("unsent bytes", 550)
    assert len(connections.evicted) == 1


def test_x1_the_connection_that_holds_most_makes_room_for_the_others() -> None:
    connections = Connections()
    small, large, newcomer = (connections.open(name) for name in ("small", "large", "newcomer"))
    small.hold("a", 50)
    large.hold("a", 190)
    newcomer.hold("a", 100)
    [(name, limit, text)] = connections.evicted
    assert (name, limit) == ("large", "unauthenticated-memory")
    assert "may hold 300 bytes together; this one held most of them, 190" in text
    assert connections.resources.unauthenticated_held == 150


def test_x1_authenticated_connections_do_not_pay_for_the_others() -> None:
    connections = Connections()
    connections.open("trusted", authenticated=True).hold("a", 500)
    for number in range(10):
        connections.open(f"hostile-{number}").hold("a", 190)
    assert {name for name, *_ in connections.evicted} == {f"hostile-{number}" for number in range(9)}
    assert connections.resources.held == 690


def test_x1_the_largest_of_all_is_closed_when_the_process_holds_too_much() -> None:
    connections = Connections()
    connections.open("one", authenticated=True).hold("a", 450)
    connections.open("two", authenticated=True).hold("a", 460)
    connections.open("three").hold("a", 100)
    assert [(name, limit) for name, limit, _ in connections.evicted] == [("two", "memory")]


def test_x1_the_oldest_connection_without_a_token_makes_room_for_a_new_one() -> None:
    connections = Connections()
    connections.open("trusted", authenticated=True)
    connections.open("older")
    connections.open("newer")
    assert connections.resources.make_room() is None
    [(name, limit, text)] = connections.evicted
    assert (name, limit) == ("older", "connections")
    assert "takes 3 connections at a time" in text


def test_x1_a_new_connection_is_refused_when_all_others_have_authenticated() -> None:
    connections = Connections()
    for number in range(3):
        connections.open(str(number), authenticated=True)
    refusal = connections.resources.make_room()
    assert refusal is not None
    assert refusal.description == (
        "This server takes 3 connections at a time. Close connections that are not needed, or raise --max-connections."
    )
    assert connections.evicted == []


def test_x1_refusals_are_counted_each_and_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    resources = Resources(LIMITS, lambda: now)
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            resources.refuse(LimitExceededError("links", f"text {number}"), "primary")
        resources.refuse(LimitExceededError("sessions", "other"), "primary")
        now += 10.0
        resources.refuse(LimitExceededError("links", "later"), "primary")
    assert resources.refused == {"links": 6, "sessions": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "limit exceeded: text 0",
        "limit exceeded: other",
        "limit exceeded: later",
    ]
    assert caplog.records[-1].__dict__["not_logged"] == 4


def test_the_limits_of_serve_are_shares_of_its_memory() -> None:
    assert ResourceLimits.of(max_connections=10_000, megabytes=512) == ResourceLimits()
    small = ResourceLimits.of(max_connections=7, megabytes=64)
    assert (small.max_connections, small.memory, small.unauthenticated_memory) == (7, 64 * MIB, 2 * MIB)
    for connections, megabytes, option in ((0, 512, "--max-connections 0"), (1, 63, "--connection-memory 63")):
        with pytest.raises(OperatorError, match=option):
            ResourceLimits.of(max_connections=connections, megabytes=megabytes)
