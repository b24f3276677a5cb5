"""Configuration files: what both formats mean, and the place of every mistake."""

import json
from typing import Any

import pytest

from twinbus.namespace.config import ConfigError, NamespaceConfig, parse_config
from twinbus.namespace.engine.descriptions import (
    AuthorizationRule,
    Claim,
    CorrelationFilter,
    EntityStatus,
    QueueDescription,
    RuleDescription,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
)

OWN = """
[[namespaces]]
name = "primary"
port = 6001

[[namespaces.authorization_rules]]
name = "app"
claims = ["Send", "Listen"]
primary_key = { environment = "APP_KEY" }
secondary_key = "written-down"

[[namespaces.queues]]
name = "orders"
lock_duration = "PT30S"
requires_session = true
max_delivery_count = 3
default_message_time_to_live = 3600
status = "SendDisabled"

[[namespaces.topics]]
name = "events"
requires_duplicate_detection = true
duplicate_detection_history_time_window = "PT20S"

[[namespaces.topics.subscriptions]]
name = "audit"
dead_lettering_on_message_expiration = true

[[namespaces]]
name = "secondary"
"""

# Like the file that the emulator is delivered with.
EMULATOR: dict[str, Any] = {
    "UserConfig": {
        "Namespaces": [
            {
                "Name": "sbemulatorns",
                "Queues": [
                    {
                        "Name": "queue.1",
                        "Properties": {
                            "DeadLetteringOnMessageExpiration": False,
                            "DefaultMessageTimeToLive": "PT1H",
                            "DuplicateDetectionHistoryTimeWindow": "PT20S",
                            "ForwardDeadLetteredMessagesTo": "",
                            "ForwardTo": "",
                            "LockDuration": "PT1M",
                            "MaxDeliveryCount": 3,
                            "RequiresDuplicateDetection": False,
                            "RequiresSession": False,
                        },
                    }
                ],
                "Topics": [
                    {
                        "Name": "topic.1",
                        "Properties": {
                            "DefaultMessageTimeToLive": "PT1H",
                            "DuplicateDetectionHistoryTimeWindow": "PT20S",
                            "RequiresDuplicateDetection": False,
                        },
                        "Subscriptions": [
                            {
                                "Name": "subscription.1",
                                "Properties": {"LockDuration": "PT1M", "MaxDeliveryCount": 3, "ForwardTo": ""},
                                "Rules": [
                                    {
                                        "Name": "everything",
                                        "Properties": {"FilterType": "Sql", "SqlFilter": {"SqlExpression": "1 = 1"}},
                                    }
                                ],
                            }
                        ],
                    }
                ],
            }
        ],
        "Logging": {"Type": "File"},
    }
}


def emulator(**replaced: Any) -> dict[str, Any]:
    """Return the emulator's file with members replaced by path, as in `Queues__0__Name`. None removes a member."""
    file: dict[str, Any] = json.loads(json.dumps(EMULATOR))
    for path, value in replaced.items():
        target: Any = file["UserConfig"]["Namespaces"][0]
        *way, last = path.split("__")
        for step in way:
            target = target[int(step) if step.isdigit() else step]
        target[last] = value
    return file


def parse(value: Any) -> tuple[NamespaceConfig, ...]:
    return parse_config(json.dumps(value), toml=False, environment={})


def problems(value: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        parse(value)
    return list(refused.value.problems)


def test_our_own_file_gives_namespaces_with_ports_rules_and_entities() -> None:
    primary, secondary = parse_config(OWN, toml=True, environment={"APP_KEY": "from-outside"})
    assert (primary.name, primary.port) == ("primary", 6001)
    assert primary.rules == (
        AuthorizationRule("app", "from-outside", "written-down", frozenset({Claim.SEND, Claim.LISTEN})),
    )
    assert primary.entities == (
        QueueDescription(
            path="orders",
            lock_duration=30_000,
            requires_session=True,
            max_delivery_count=3,
            default_time_to_live=3_600_000,
            status=EntityStatus.SEND_DISABLED,
        ),
        TopicDescription(path="events", requires_duplicate_detection=True, duplicate_window=20_000),
        SubscriptionDescription(topic="events", name="audit", dead_lettering_on_expiration=True),
    )
    assert secondary == NamespaceConfig(name="secondary")


def test_json_says_the_same_as_toml() -> None:
    value = {"namespaces": [{"name": "primary", "queues": [{"name": "orders", "lock_duration": 5}]}]}
    (primary,) = parse(value)
    assert primary.entities == (QueueDescription(path="orders", lock_duration=5000),)


def test_the_emulators_file_is_read_unchanged() -> None:
    (namespace,) = parse(EMULATOR)
    assert (namespace.name, namespace.port, namespace.rules) == ("sbemulatorns", None, ())
    assert namespace.entities == (
        QueueDescription(path="queue.1", default_time_to_live=3_600_000, duplicate_window=20_000, max_delivery_count=3),
        TopicDescription(path="topic.1", default_time_to_live=3_600_000, duplicate_window=20_000),
        SubscriptionDescription(
            topic="topic.1",
            name="subscription.1",
            max_delivery_count=3,
            rules=(RuleDescription("everything", SqlFilter("1 = 1")),),
        ),
    )


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        (
            {"FilterType": "Correlation", "CorrelationFilter": {"Label": "x", "Properties": {"a": "b", "n": 1}}},
            RuleDescription("r", CorrelationFilter(label="x", properties={"a": "b", "n": 1})),
        ),
        (
            {
                "FilterType": "Correlation",
                "CorrelationFilter": {
                    "ContentType": "1",
                    "CorrelationId": "2",
                    "MessageId": "3",
                    "ReplyTo": "4",
                    "ReplyToSessionId": "5",
                    "SessionId": "6",
                    "To": "7",
                },
            },
            RuleDescription(
                "r",
                CorrelationFilter(
                    content_type="1",
                    correlation_id="2",
                    message_id="3",
                    reply_to="4",
                    reply_to_session_id="5",
                    session_id="6",
                    to="7",
                ),
            ),
        ),
        (
            {
                "FilterType": "Sql",
                "SqlFilter": {"SqlExpression": "color = 'red'"},
                "Action": {"SqlExpression": "SET a = 1"},
            },
            RuleDescription("r", SqlFilter("color = 'red'"), SqlAction("SET a = 1")),
        ),
    ],
)
def test_rules_of_the_emulators_file_are_read(properties: dict[str, Any], expected: RuleDescription) -> None:
    (namespace,) = parse(emulator(Topics__0__Subscriptions__0__Rules=[{"Name": "r", "Properties": properties}]))
    (subscription,) = (each for each in namespace.entities if isinstance(each, SubscriptionDescription))
    assert subscription.rules == (expected,)


def test_a_subscription_without_rules_in_the_file_has_the_default_rule() -> None:
    (namespace,) = parse(emulator(Topics__0__Subscriptions__0__Rules=[]))
    (subscription,) = (each for each in namespace.entities if isinstance(each, SubscriptionDescription))
    assert subscription.rules == (RuleDescription("$Default"),)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"Name": "r", "Properties": {}}, ".Properties.FilterType: None is neither 'Sql' nor 'Correlation'"),
        ({"Name": "r", "Properties": {"FilterType": "Regex"}}, ".Properties.FilterType: 'Regex' is neither"),
        (
            {"Name": "r", "Properties": {"FilterType": "Sql", "SqlFilter": {"SqlExpression": "color ="}}},
            ": The filter of rule 'r' cannot be understood. At column 8: a value is expected, not the end.",
        ),
        (
            {"Name": "a/b", "Properties": {"FilterType": "Sql", "SqlFilter": {"SqlExpression": "1=1"}}},
            ": The name of rule 'a/b' has one of",
        ),
        (
            {
                "Name": "r",
                "Properties": {
                    "FilterType": "Correlation",
                    "CorrelationFilter": {"Properties": {"a": [1], "b": 2**63}},
                },
            },
            ".Properties.CorrelationFilter.Properties.a: [1] is neither a text, a number",
        ),
        (
            {"Name": "r", "Properties": {"FilterType": "Correlation", "CorrelationFilter": {"Subject": "x"}}},
            ".Properties.CorrelationFilter",
        ),
    ],
)
def test_an_invalid_rule_is_reported_with_its_place(rule: dict[str, Any], said: str) -> None:
    problem, *_ = problems(emulator(Topics__0__Subscriptions__0__Rules=[rule]))
    assert problem.startswith(f"UserConfig.Namespaces[0].Topics[0].Subscriptions[0].Rules[0]{said}")


def test_two_rules_of_one_name_are_refused() -> None:
    rule = {"Name": "r", "Properties": {"FilterType": "Sql", "SqlFilter": {"SqlExpression": "1=1"}}}
    (problem,) = problems(emulator(Topics__0__Subscriptions__0__Rules=[rule, {**rule, "Name": "R"}]))
    assert problem == "UserConfig.Namespaces[0].Topics[0].Subscriptions[0].Rules: 'r' is there twice"


def own_subscription(*rules: dict[str, Any]) -> dict[str, Any]:
    subscription = {"name": "s", "rules": list(rules)}
    return {"namespaces": [{"name": "a", "topics": [{"name": "t", "subscriptions": [subscription]}]}]}


def test_rules_of_our_own_file_are_read() -> None:
    (namespace,) = parse(
        own_subscription(
            {"name": "red", "sql": "color = @c", "parameters": {"@c": "red"}, "action": "SET n = 1"},
            {"name": "labelled", "correlation": {"label": "x", "properties": {"flag": True}}},
            {"name": "all"},
        )
    )
    (subscription,) = (each for each in namespace.entities if isinstance(each, SubscriptionDescription))
    assert subscription.rules == (
        RuleDescription("red", SqlFilter("color = @c", {"@c": "red"}), SqlAction("SET n = 1", {"@c": "red"})),
        RuleDescription("labelled", CorrelationFilter(label="x", properties={"flag": True})),
        RuleDescription("all"),
    )


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"name": "r", "sql": "1=1", "correlation": {}}, ": has both sql and correlation"),
        ({"name": "r", "sql": "a ="}, ": The filter of rule 'r' cannot be understood. At column 4: a value"),
        ({"name": "r", "action": "SET"}, ": The action of rule 'r' cannot be understood."),
        ({"name": "r", "sql": "a = @b", "parameters": {"b": None}}, ".parameters.b: None is neither"),
    ],
)
def test_an_invalid_rule_of_our_own_file_is_reported_with_its_place(rule: dict[str, Any], said: str) -> None:
    problem, *_ = problems(own_subscription(rule))
    assert problem.startswith(f"namespaces[0].topics[0].subscriptions[0].rules[0]{said}")


@pytest.mark.parametrize(
    ("replaced", "said"),
    [
        ({"Queues__0__Properties__LockDuration": "PT6M"}, "Queues[0].Properties.LockDuration: 'PT6M' is out of range"),
        (
            {"Queues__0__Properties__LockDuration": "soon"},
            "Queues[0].Properties.LockDuration: 'soon' is not an ISO 8601 duration",
        ),
        ({"Queues__0__Properties__MaxDeliveryCount": 0}, "Queues[0].Properties.MaxDeliveryCount: 0 is not a whole"),
        ({"Queues__0__Properties__RequiresSession": "no"}, "Queues[0].Properties.RequiresSession: 'no' is neither"),
        ({"Queues__0__Properties__ForwardTo": 7}, "Queues[0].Properties.ForwardTo: 7 is not the name of a queue"),
        ({"Queues__0__Properties__Colour": "red"}, "Queues[0].Properties.Colour: is not known here; known are"),
        ({"Queues__0__Name": ""}, "Queues[0].Name: a name is needed"),
        ({"Queues__0__Properties": []}, "Queues[0].Properties: is not an object"),
        ({"Queues": {"Name": "x"}}, "Queues: is not a list"),
        ({"Queues": ["x"]}, "Queues[0]: is not an object"),
        ({"Properties": {"MaxAllowedConnections": 5}}, "Properties: is not known here"),
        ({"Name": "../etc"}, "Name: '../etc' is not a name of a namespace"),
    ],
)
def test_a_mistake_is_reported_with_its_exact_place(replaced: dict[str, Any], said: str) -> None:
    (problem,) = problems(emulator(**replaced))
    assert problem.startswith(f"UserConfig.Namespaces[0].{said}")


def test_all_mistakes_are_reported_together() -> None:
    file = emulator(Queues__0__Properties__LockDuration="x", Topics__0__Properties__DefaultMessageTimeToLive=False)
    assert [problem.split(": ")[0] for problem in problems(file)] == [
        "UserConfig.Namespaces[0].Queues[0].Properties.LockDuration",
        "UserConfig.Namespaces[0].Topics[0].Properties.DefaultMessageTimeToLive",
    ]


def test_names_that_differ_only_in_case_are_the_same_name() -> None:
    entities = {"queues": [{"name": "Orders"}], "topics": [{"name": "orders"}]}
    (problem,) = problems({"namespaces": [{"name": "a", **entities}]})
    assert problem.startswith("a/orders: is there twice")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"name": "r", "claims": ["Send"]}, "primary_key: a key is needed"),
        ({"name": "r", "claims": ["Write"], "primary_key": "k"}, "claims: give a list of Send, Listen, Manage"),
        ({"name": "r", "claims": [["Send"]], "primary_key": "k"}, "claims: give a list of Send, Listen, Manage"),
        (
            {"name": "r", "claims": ["Send"], "primary_key": {"environment": "NOT_SET"}},
            "primary_key: the environment variable NOT_SET is not set",
        ),
        ({"name": "r", "claims": ["Send"], "primary_key": 5}, "primary_key: neither a text nor"),
    ],
)
def test_a_rule_without_a_usable_key_or_claim_is_refused(rule: dict[str, Any], said: str) -> None:
    (problem,) = problems({"namespaces": [{"name": "a", "authorization_rules": [rule]}]})
    assert problem.startswith(f"namespaces[0].authorization_rules[0].{said}")


def test_no_message_shows_a_key() -> None:
    rule = {
        "name": "r",
        "claims": [],
        "primary_key": "top-secret",
        "colour": "top-secret",
        "secondary_key": ["top-secret"],
    }
    told = problems({"namespaces": [{"name": "a", "authorization_rules": [rule]}]})
    assert len(told) == 3
    assert "top-secret" not in "\n".join(told)


@pytest.mark.parametrize(
    ("text", "toml", "said"),
    [
        ("{", False, "not JSON: "),
        ("[", True, "not TOML: "),
        ("{}", False, "namespaces: there is none"),
        ("[]", False, "is not an object"),
        ('{"UserConfig": {}}', False, "UserConfig.Namespaces: there is none"),
        ('{"UserConfig": 5}', False, "UserConfig: is not an object"),
        ('{"namespace": []}', False, "namespace: is not known here; known are namespaces"),
        ('{"namespaces": [{"name": "a", "port": 70000}]}', False, "namespaces[0].port: 70000 is not a port"),
    ],
)
def test_a_file_of_another_shape_is_refused(text: str, toml: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=r".") as refused:
        parse_config(text, toml=toml, environment={})
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("value", "meant"), [("PT1M", 60_000), ("P1D", 86_400_000), ("P1DT2H3M4.5S", 93_784_500), (30, 30_000), (1.5, 1500)]
)
def test_a_duration_is_iso_8601_or_seconds(value: Any, meant: int) -> None:
    queue = {"name": "q", "default_message_time_to_live": value}
    (namespace,) = parse({"namespaces": [{"name": "a", "queues": [queue]}]})
    assert namespace.entities == (QueueDescription(path="q", default_time_to_live=meant),)


@pytest.mark.parametrize("value", ["P", "PT", "1:00", True, -1, float("nan"), 0.5, [], "-PT1M"])
def test_an_invalid_or_too_short_duration_is_refused(value: Any) -> None:
    queue = {"name": "q", "default_message_time_to_live": value}
    (problem,) = problems({"namespaces": [{"name": "a", "queues": [queue]}]})
    assert problem.startswith("namespaces[0].queues[0].default_message_time_to_live: ")


def test_the_longest_duration_of_the_service_means_never() -> None:
    queue = {"name": "q", "default_message_time_to_live": "P10675199DT2H48M5.4775807S"}
    (namespace,) = parse({"namespaces": [{"name": "a", "queues": [queue]}]})
    assert namespace.entities == (QueueDescription(path="q", default_time_to_live=None),)


@pytest.mark.parametrize(
    ("value", "says"),
    [("bus", "give a list"), ([1], "give a list"), (["http://bus"], "'http://bus' is not a host name"), ([""], "''")],
)
def test_x3_invalid_host_names_are_reported_with_their_place(value: object, says: str) -> None:
    text = json.dumps({"namespaces": [{"name": "one", "host_names": value}]})
    with pytest.raises(ConfigError) as refused:
        parse_config(text, toml=False, environment={})
    (problem,) = refused.value.problems
    assert problem.startswith("namespaces[0].host_names: ")
    assert says in problem
