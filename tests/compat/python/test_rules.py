"""Rules made through the administration client, and the messages that subscriptions receive because of them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from azure.core.exceptions import HttpResponseError, ResourceExistsError, ResourceNotFoundError
from azure.servicebus import ServiceBusMessage, ServiceBusReceivedMessage, ServiceBusSubQueue
from azure.servicebus.management import (
    CorrelationRuleFilter,
    FalseRuleFilter,
    SqlRuleAction,
    SqlRuleFilter,
    TrueRuleFilter,
)

from tests.compat.python.bus import Bus, both_flavours, peek_all, texts

VALUES: dict[str, Any] = {
    "@text": "x & <y>",
    "@int": 7,
    "@long": 3_000_000_000,
    "@double": 2.5,
    "@flag": True,
    "@moment": datetime(2020, 7, 5, 11, 12, 13, tzinfo=UTC),
    "@zoneless": datetime(2020, 7, 5, 11, 12, 13),  # noqa: DTZ001 - it comes back without a zone
    "@early": datetime(1066, 10, 14, 9, tzinfo=UTC),
    "@span": timedelta(days=1, hours=2, seconds=3),
}
FIELDS = {
    "correlation_id": "1",
    "message_id": "2",
    "to": "3",
    "reply_to": "4",
    "label": "5",
    "session_id": "6",
    "reply_to_session_id": "7",
    "content_type": "8",
}
MESSAGES = [
    ServiceBusMessage("red 5", subject="order", application_properties={"color": "red", "size": 5}),
    ServiceBusMessage("blue 5", subject="order", application_properties={"color": "blue", "size": 5}),
    ServiceBusMessage("red 7.5", subject="bill", application_properties={"color": "red", "size": 7.5}),
    ServiceBusMessage("none", subject="bill", correlation_id="c", to="nowhere"),
]


async def names_of(bus: Bus, topic: str) -> list[str]:
    return [rule.name async for rule in bus.admin.list_rules(topic, "s")]


async def received(bus: Bus, topic: str, **options: Any) -> list[ServiceBusReceivedMessage]:
    receiver = bus.client.get_subscription_receiver(topic, "s", **options)
    await bus.open(receiver)
    return await peek_all(receiver)


async def send(bus: Bus, topic: str, *messages: ServiceBusMessage) -> None:
    sender = bus.client.get_topic_sender(topic)
    await bus.open(sender)
    await sender.send_messages(list(messages or MESSAGES))


@both_flavours
async def test_rules_are_made_read_listed_changed_and_deleted(bus: Bus) -> None:
    topic = await bus.make_topic("s")
    made = await bus.admin.create_rule(
        topic, "s", "sql", filter=SqlRuleFilter("a = @int", VALUES), action=SqlRuleAction("SET b = @text", VALUES)
    )
    await bus.admin.create_rule(topic, "s", "plain")
    await bus.admin.create_rule(topic, "s", "never", filter=FalseRuleFilter())
    everything = CorrelationRuleFilter(**FIELDS, properties={name[1:]: value for name, value in VALUES.items()})
    await bus.admin.create_rule(topic, "s", "correlation", filter=everything)
    assert await names_of(bus, topic) == ["$Default", "sql", "plain", "never", "correlation"]

    for rule in (made, await bus.admin.get_rule(topic, "s", "sql")):
        assert isinstance(rule.filter, SqlRuleFilter)
        assert isinstance(rule.action, SqlRuleAction)
        assert (rule.name, rule.filter.sql_expression, rule.filter.parameters) == ("sql", "a = @int", VALUES)
        assert (rule.action.sql_expression, rule.action.parameters) == ("SET b = @text", VALUES)
        assert rule.created_at_utc is not None
        assert abs((rule.created_at_utc - datetime.now(UTC)).total_seconds()) < 60
    plain = await bus.admin.get_rule(topic, "s", "plain")
    assert (type(plain.filter), plain.action) == (TrueRuleFilter, None)
    assert isinstance((await bus.admin.get_rule(topic, "s", "never")).filter, FalseRuleFilter)
    correlation = (await bus.admin.get_rule(topic, "s", "correlation")).filter
    assert isinstance(correlation, CorrelationRuleFilter)
    assert {name: getattr(correlation, name) for name in FIELDS} == FIELDS
    assert correlation.properties == everything.properties

    plain.filter, plain.action = SqlRuleFilter("1 = 0"), SqlRuleAction("REMOVE a")
    await bus.admin.update_rule(topic, "s", plain)
    changed = await bus.admin.get_rule(topic, "s", "plain")
    assert isinstance(changed.filter, SqlRuleFilter)
    assert isinstance(changed.action, SqlRuleAction)
    assert (changed.filter.sql_expression, changed.action.sql_expression) == ("1 = 0", "REMOVE a")
    for name in ("$Default", "sql", "plain", "never", "correlation"):
        await bus.admin.delete_rule(topic, "s", name)
    assert await names_of(bus, topic) == []


@both_flavours
async def test_a_subscription_receives_what_its_rules_choose(bus: Bus) -> None:
    expected: dict[str, tuple[Any, list[str]]] = {
        "s": (SqlRuleFilter("color = 'red' AND size > 5"), ["red 7.5"]),
        "like": (SqlRuleFilter("sys.Label LIKE 'ord%' OR color IS NULL"), ["red 5", "blue 5", "none"]),
        "parameters": (
            SqlRuleFilter("color IN (@a, @b) AND size = @c", {"@a": "blue", "@b": "x", "@c": 5}),
            ["blue 5"],
        ),
        "label": (CorrelationRuleFilter(label="bill"), ["red 7.5", "none"]),
        "both": (CorrelationRuleFilter(label="bill", properties={"color": "red"}), ["red 7.5"]),
        "numbers": (CorrelationRuleFilter(properties={"size": 5}), ["red 5", "blue 5"]),
        "system": (CorrelationRuleFilter(correlation_id="c", to="nowhere"), ["none"]),
        "true": (TrueRuleFilter(), ["red 5", "blue 5", "red 7.5", "none"]),
        "false": (FalseRuleFilter(), []),
    }
    topic = await bus.make_topic(*expected)
    for name, (chosen, _) in expected.items():
        await bus.admin.create_rule(topic, name, "chosen", filter=chosen)
        await bus.admin.delete_rule(topic, name, "$Default")
    await send(bus, topic)
    for name, (_, bodies) in expected.items():
        receiver = bus.client.get_subscription_receiver(topic, name)
        await bus.open(receiver)
        assert texts(await peek_all(receiver)) == bodies, name


@both_flavours
async def test_actions_change_copies_of_their_own(bus: Bus) -> None:
    topic = await bus.make_topic("s")
    act = SqlRuleAction("SET size = size * @factor; SET sys.Label = 'changed'; REMOVE color", {"@factor": 2})
    await bus.admin.create_rule(topic, "s", "twice", filter=SqlRuleFilter("size = 5 AND color = 'red'"), action=act)
    await send(bus, topic, MESSAGES[0])
    as_it_was, changed = await received(bus, topic)
    assert (as_it_was.subject, as_it_was.application_properties) == ("order", {b"color": b"red", b"size": 5})
    assert (changed.subject, changed.application_properties) == ("changed", {b"size": 10, b"RuleName": b"twice"})
    assert texts([as_it_was, changed]) == ["red 5", "red 5"]
    assert as_it_was.message_id == changed.message_id
    assert as_it_was.sequence_number != changed.sequence_number


@both_flavours
async def test_what_a_filter_fails_on_is_dead_lettered_unless_chosen_otherwise(bus: Bus) -> None:
    topic = await bus.make_topic("s")
    await bus.admin.create_subscription(topic, "lenient", dead_lettering_on_filter_evaluation_exceptions=False)
    for name in ("s", "lenient"):
        await bus.admin.create_rule(topic, name, "number", filter=SqlRuleFilter("color > 5"))
        await bus.admin.delete_rule(topic, name, "$Default")
    await send(bus, topic, MESSAGES[0])
    [dead] = await received(bus, topic, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    assert dead.dead_letter_reason == "FilterException"
    assert "a string cannot be compared (>) with an integer" in str(dead.dead_letter_error_description)
    figures = await bus.admin.get_subscription_runtime_properties(topic, "lenient")
    assert figures.total_message_count == 0


@both_flavours
async def test_n1_a_rule_that_can_never_be_evaluated_is_accepted_and_dead_letters_each_message(bus: Bus) -> None:
    topic = await bus.make_topic("s", dead_lettering_on_filter_evaluation_exceptions=True)
    await bus.admin.delete_rule(topic, "s", "$Default")
    for name, chosen in (("system", "sys.Nonsense = 1"), ("parameter", "color = @p"), ("types", "'a' = 1")):
        await bus.admin.create_rule(topic, "s", name, filter=SqlRuleFilter(chosen))
    await send(bus, topic, ServiceBusMessage("x"))
    [dead] = await received(bus, topic, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
    assert "there is no system property 'Nonsense'" in (dead.dead_letter_error_description or "")


@both_flavours
async def test_a_rule_that_cannot_be_is_refused_with_the_reason(bus: Bus) -> None:
    topic = await bus.make_topic("s")
    for name, chosen, told in (
        ("r", SqlRuleFilter("color ="), "At column 8: a value is expected, not the end"),
        ("r" * 51, SqlRuleFilter("1=1"), "longer than 50"),
    ):
        with pytest.raises(HttpResponseError, match=r"rule 'r+'") as refused:
            await bus.admin.create_rule(topic, "s", name, filter=chosen)
        assert told in str(refused.value)
    with pytest.raises(HttpResponseError, match="The action of rule"):
        await bus.admin.create_rule(topic, "s", "r", action=SqlRuleAction("SET sys.SequenceNumber = 1"))
    with pytest.raises(ResourceExistsError):
        await bus.admin.create_rule(topic, "s", "$Default")
    with pytest.raises(ResourceNotFoundError):
        await bus.admin.get_rule(topic, "s", "r")
    with pytest.raises(ResourceNotFoundError):
        await bus.admin.delete_rule(topic, "s", "r")
    with pytest.raises(ResourceNotFoundError):
        await bus.admin.create_rule(topic, "missing", "r")
    default = await bus.admin.get_rule(topic, "s", "$Default")
    default.name = "missing"
    with pytest.raises(HttpResponseError):
        await bus.admin.update_rule(topic, "s", default)
    assert await names_of(bus, topic) == ["$Default"]


@both_flavours
async def test_an_update_of_the_subscription_leaves_its_rules(bus: Bus) -> None:
    topic = await bus.make_topic("s")
    await bus.admin.create_rule(topic, "s", "mine", filter=SqlRuleFilter("color = 'red'"))
    await bus.admin.delete_rule(topic, "s", "$Default")
    subscription = await bus.admin.get_subscription(topic, "s")
    subscription.max_delivery_count = 3
    await bus.admin.update_subscription(topic, subscription)
    assert await names_of(bus, topic) == ["mine"]
    await send(bus, topic)
    assert texts(await received(bus, topic)) == ["red 5", "red 7.5"]
