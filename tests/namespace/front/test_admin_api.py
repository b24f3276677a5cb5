"""Routes of the management API: which resource a path means, as each client writes it."""

import pytest

from twinbus.namespace.front.admin_api import AdminRoute, ResourceKind, find_route
from twinbus.namespace.front.http_messages import BadTargetError, parse_target


@pytest.mark.parametrize(
    ("target", "route"),
    [
        ("/?api-version=1", AdminRoute(ResourceKind.ROOT, "")),
        ("/q", AdminRoute(ResourceKind.ENTITY, "q", "q")),
        ("/q/", AdminRoute(ResourceKind.ENTITY, "q", "q")),
        ("/a%2Fb", AdminRoute(ResourceKind.ENTITY, "a/b", "a/b")),
        ("/a/b", AdminRoute(ResourceKind.ENTITY, "a/b", "a/b")),
        ("/a%20b%C3%A9", AdminRoute(ResourceKind.ENTITY, "a bé", "a bé")),
        ("http://localhost:5672/q?x", AdminRoute(ResourceKind.ENTITY, "q", "q")),
        ("/$Resources/queues", AdminRoute(ResourceKind.QUEUES, "$Resources/queues")),
        ("/%24resources/Topics", AdminRoute(ResourceKind.TOPICS, "$resources/Topics")),
        ("/$Resources/relays", AdminRoute(ResourceKind.UNKNOWN, "$Resources/relays")),
        ("/$namespaceinfo", AdminRoute(ResourceKind.NAMESPACE, "$namespaceinfo")),
        ("/$else", AdminRoute(ResourceKind.UNKNOWN, "$else")),
        ("/t/subscriptions", AdminRoute(ResourceKind.SUBSCRIPTIONS, "t/subscriptions", "t")),
        ("/t/Subscriptions/", AdminRoute(ResourceKind.SUBSCRIPTIONS, "t/Subscriptions", "t")),
        ("/a%2Ft/subscriptions/s", AdminRoute(ResourceKind.SUBSCRIPTION, "a/t/subscriptions/s", "a/t", "s")),
        ("/a/t/Subscriptions/s", AdminRoute(ResourceKind.SUBSCRIPTION, "a/t/Subscriptions/s", "a/t", "s")),
        (
            "/t/subscriptions/subscriptions",
            AdminRoute(ResourceKind.SUBSCRIPTION, "t/subscriptions/subscriptions", "t", "subscriptions"),
        ),
        ("/t/subscriptions/s/rules", AdminRoute(ResourceKind.RULES, "t/subscriptions/s/rules", "t", "s")),
        ("/t/Subscriptions/s/Rules/", AdminRoute(ResourceKind.RULES, "t/Subscriptions/s/Rules", "t", "s")),
        (
            "/t/subscriptions/s/rules/%24Default",
            AdminRoute(ResourceKind.RULE, "t/subscriptions/s/rules/$Default", "t", "s", "$Default"),
        ),
        # Not a route of the API: no topic before the fixed word.
        ("/subscriptions", AdminRoute(ResourceKind.ENTITY, "subscriptions", "subscriptions")),
        ("/subscriptions/s", AdminRoute(ResourceKind.ENTITY, "subscriptions/s", "subscriptions/s")),
    ],
)
def test_a_path_means_a_resource(target: str, route: AdminRoute) -> None:
    assert find_route(parse_target(target)[1]) == route


def test_the_path_of_a_subscription_is_the_one_it_is_found_under() -> None:
    assert find_route(("t", "subscriptions", "s")).path == "t/Subscriptions/s"
    assert find_route(("t", "subscriptions", "s", "rules", "r")).path == "t/Subscriptions/s"
    assert find_route(("q",)).path == "q"


@pytest.mark.parametrize(
    "target", ["*", "host:443", "q", "ftp://host/q", "/%FF", "/a%C3", "http://[::1/q", "/q?" + "a=1&" * 200]
)
def test_a_target_that_is_no_path_is_refused(target: str) -> None:
    with pytest.raises(BadTargetError):
        parse_target(target)


def test_a_query_is_decoded() -> None:
    assert parse_target("/q?%24skip=5&$top=7&enrich&x=a%20b+c")[2] == {
        "$skip": "5",
        "$top": "7",
        "enrich": "",
        "x": "a b c",
    }
