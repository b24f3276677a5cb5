"""Paths of backlog queues, and the normalized spelling of an endpoint (P3, P4)."""

from __future__ import annotations

import pytest

from twinbus.backlog.queue_paths import (
    Endpoint,
    backlog_queue_index,
    backlog_queue_path,
    backlog_queue_paths,
    extra_backlog_queues,
    primary_name,
)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("contoso.servicebus.windows.net", "contoso"),
        ("Contoso.ServiceBus.Windows.Net.", "contoso"),
        ("bus", "bus"),
        ("localhost", "localhost-5672"),
        ("LOCALHOST.", "localhost-5672"),
        ("127.0.0.1", "localhost-5672"),
        ("127.1.2.3", "localhost-5672"),
        ("::1", "localhost-5672"),
        ("[::1]", "localhost-5672"),
        ("::ffff:127.0.0.1", "localhost-5672"),
        ("10.0.0.7", "10.0.0.7-5672"),
        ("::ffff:10.0.0.7", "10.0.0.7-5672"),
        ("[FE80::0:1]", "fe80--1-5672"),
        ("fe80::1%eth0", "fe80--1-5672"),
        ("localhost.example.com", "localhost"),
    ],
)
def test_p4_the_primary_is_named_by_its_first_label_or_by_host_and_port(host: str, name: str) -> None:
    assert primary_name(Endpoint.of(host, 5672)) == name


def test_p4_the_path_of_a_backlog_queue() -> None:
    assert backlog_queue_path("contoso", 0) == "contoso/x-servicebus-transfer/0"
    assert backlog_queue_paths("contoso", 2) == ("contoso/x-servicebus-transfer/0", "contoso/x-servicebus-transfer/1")


@pytest.mark.parametrize(
    ("path", "index"),
    [
        ("contoso/x-servicebus-transfer/0", 0),
        ("Contoso/X-ServiceBus-Transfer/12", 12),
        ("/contoso/x-servicebus-transfer/3", 3),
        ("contoso/x-servicebus-transfer/", None),
        ("contoso/x-servicebus-transfer/01", None),
        ("contoso/x-servicebus-transfer/-1", None),
        ("contoso/x-servicebus-transfer/1/2", None),
        ("contoso/x-servicebus-transfer/²", None),
        ("fabrikam/x-servicebus-transfer/0", None),
        ("orders", None),
    ],
)
def test_p4_the_index_of_a_backlog_queue_is_read_from_its_path(path: str, index: int | None) -> None:
    assert backlog_queue_index("contoso", path) == index


def test_p6_extra_queues_are_those_with_an_index_beyond_the_count() -> None:
    paths = [f"contoso/x-servicebus-transfer/{index}" for index in (11, 2, 0, 1, 3)]
    assert extra_backlog_queues("contoso", 2, [*paths, "orders"]) == [paths[1], paths[4], paths[0]]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("contoso.net", 5671), ("CONTOSO.net.", 5671), True),
        (("localhost", 5672), ("127.0.0.1", 5672), True),
        (("localhost", 5672), ("[::1]", 5672), True),
        (("localhost", 5672), ("localhost", 5673), False),
        (("contoso.net", 5671), ("fabrikam.net", 5671), False),
        (("10.0.0.1", 5671), ("10.0.0.2", 5671), False),
    ],
)
def test_p3_an_endpoint_is_host_and_port_in_any_spelling(
    one: tuple[str, int], other: tuple[str, int], same: bool
) -> None:
    assert (Endpoint.of(*one) == Endpoint.of(*other)) is same
