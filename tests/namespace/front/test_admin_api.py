"""Which resource a path means, in each client's spelling."""

import pytest

from twinbus.namespace.front.admin_api import Kind, Route, find_route
from twinbus.namespace.front.http_messages import BadTargetError, parse_target


@pytest.mark.parametrize(
    ("target", "route"),
    [
        ("/?api-version=1", Route(Kind.ROOT, "")),
        ("/q", Route(Kind.ENTITY, "q", "q")),
        ("/q/", Route(Kind.ENTITY, "q", "q")),
        ("/a%2Fb", Route(Kind.ENTITY, "a/b", "a/b")),
        ("/a/b", Route(Kind.ENTITY, "a/b", "a/b")),
        ("/a%20b%C3%A9", Route(Kind.ENTITY, "a bé", "a bé")),
        ("http://localhost:5672/q?x", Route(Kind.ENTITY, "q", "q")),
        ("/$Resources/queues", Route(Kind.QUEUES, "$Resources/queues")),
        ("/%24resources/Topics", Route(Kind.TOPICS, "$resources/Topics")),
        ("/$Resources/relays", Route(Kind.UNKNOWN, "$Resources/relays")),
        ("/$namespaceinfo", Route(Kind.NAMESPACE, "$namespaceinfo")),
        ("/$else", Route(Kind.UNKNOWN, "$else")),
        ("/t/subscriptions", Route(Kind.SUBSCRIPTIONS, "t/subscriptions", "t")),
        ("/t/Subscriptions/", Route(Kind.SUBSCRIPTIONS, "t/Subscriptions", "t")),
        ("/a%2Ft/subscriptions/s", Route(Kind.SUBSCRIPTION, "a/t/subscriptions/s", "a/t", "s")),
        ("/a/t/Subscriptions/s", Route(Kind.SUBSCRIPTION, "a/t/Subscriptions/s", "a/t", "s")),
        (
            "/t/subscriptions/subscriptions",
            Route(Kind.SUBSCRIPTION, "t/subscriptions/subscriptions", "t", "subscriptions"),
        ),
        ("/t/subscriptions/s/rules", Route(Kind.RULES, "t/subscriptions/s/rules", "t", "s")),
        ("/t/Subscriptions/s/Rules/", Route(Kind.RULES, "t/Subscriptions/s/Rules", "t", "s")),
        (
            "/t/subscriptions/s/rules/%24Default",
            Route(Kind.RULE, "t/subscriptions/s/rules/$Default", "t", "s", "$Default"),
        ),
        # Not a part of the API: there is no topic before the word.
        ("/subscriptions", Route(Kind.ENTITY, "subscriptions", "subscriptions")),
        ("/subscriptions/s", Route(Kind.ENTITY, "subscriptions/s", "subscriptions/s")),
    ],
)
def test_a_path_means_a_resource(target: str, route: Route) -> None:
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
