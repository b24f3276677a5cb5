"""SQL actions: what SET and REMOVE change in a copy. Everything else stays as it was."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from twinbus.amqp import Header, Properties, build_message, split_sections
from twinbus.namespace.engine.rules.actions import compile_action
from twinbus.namespace.engine.rules.errors import RuleEvaluationError
from twinbus.namespace.engine.rules.values import Duration
from twinbus.values import Byte, Described, Float32, Int, Long, Symbol, Timestamp

from .messages import GUID, NOW, RAW, USER, view

GONE = object()

PROPERTIES: list[tuple[str, dict[str, Any]]] = [
    ("SET color = 'red'", {"Color": "red"}),
    ("SET COLOR = 'red'", {"Color": "red"}),
    ("set user.color = 'red';", {"Color": "red"}),
    ("SET fresh = 1", {"fresh": 1}),
    ("SET Fresh = 'x'; SET fresh = 'y'", {"Fresh": "y"}),
    ("SET [with space] = TRUE", {"with space": True}),
    ("SET fresh = 1.5", {"fresh": 1.5}),
    ("SET fresh = NULL", {"fresh": None}),
    ("SET fresh = missing", {"fresh": None}),
    ("SET fresh = missing + 1", {"fresh": None}),
    ("SET color = NULL", {"Color": None}),
    ("SET quantity = quantity / 2", {"quantity": Int(5)}),
    ("SET quantity = quantity * 0.5", {"quantity": Int(5)}),
    ("SET quantity = quantity + 0.5", {"quantity": 10.5}),
    ("SET quantity = 3000000000", {"quantity": 3_000_000_000}),
    ("SET quantity = 'ten'", {"quantity": "ten"}),
    ("SET minus = minus - 1", {"minus": Byte(-8)}),
    ("SET price = 3", {"price": 3.0}),
    ("SET single = 1", {"single": Float32(1.0)}),
    ("SET nothing = 'something'", {"nothing": "something"}),
    ("SET color = color + '-' + quantity", {"Color": "blue-10"}),
    ("SET color = sys.Label", {"Color": "Red"}),
    ("SET color = p('shape')", {"Color": "100%_round"}),
    ("SET fresh = newid()", {"fresh": UUID("00010203-0405-4607-8809-0a0b0c0d0e0f")}),
    ("SET fresh = when + span", {"fresh": Timestamp(NOW + 60_000)}),
    ("SET fresh = span", {"fresh": Described(Symbol("com.microsoft:timespan"), 600_000_000)}),
    ("REMOVE color", {"Color": GONE}),
    ("REMOVE user.[Property With Space]", {"Property With Space": GONE}),
    ("REMOVE missing", {}),
    ("REMOVE color; SET color = 'new'", {"Color": GONE, "color": "new"}),
    ("SET color = 'a'; REMOVE color", {"Color": GONE}),
    ("SET a = 1; SET b = a + 1; SET c = b * 2", {"a": 1, "b": 2, "c": 4}),
    ("SET a = 1 SET b = 2 REMOVE a", {"b": 2}),
    ("SET a = quantity; SET quantity = 1; SET b = quantity", {"a": Int(10), "quantity": Int(1), "b": Int(1)}),
    ("SET a = 'x;y'; ; SET b = 2;;", {"a": "x;y", "b": 2}),
]

SYSTEM: list[tuple[str, dict[str, Any]]] = [
    ("SET sys.Label = 'Green'", {"subject": "Green"}),
    ("SET sys.Subject = color", {"subject": "blue"}),
    ("SET [sys].[To] = sys.To + '!'", {"to": "Store5!"}),
    ("SET sys.MessageId = 'm'", {"message_id": "m"}),
    ("SET sys.MessageId = newid()", {"message_id": "00010203-0405-4607-8809-0a0b0c0d0e0f"}),
    ("SET sys.CorrelationId = quantity", {"correlation_id": "10"}),
    ("SET sys.SessionId = 's2'", {"group_id": "s2"}),
    ("SET sys.ReplyTo = 'r'; SET sys.ReplyToSessionId = 'rs'", {"reply_to": "r", "reply_to_group_id": "rs"}),
    ("SET sys.ContentType = 'text/html'", {"content_type": "text/html"}),
    ("SET sys.Label = missing", {"subject": None}),
    ("REMOVE sys.Label", {"subject": None}),
    ("REMOVE sys.ReplyTo", {}),
]


@pytest.mark.parametrize(("action", "changes"), PROPERTIES)
def test_an_action_changes_properties_of_the_user(action: str, changes: dict[str, Any]) -> None:
    made = split_sections(compile_action(action, {})(view()).encoded())
    expected = {name: value for name, value in {**USER, **changes}.items() if value is not GONE}
    assert made.application_properties == expected
    for name, value in changes.items():
        if value is not GONE:
            assert type(made.application_properties[name]) is (Long if type(value) is int else type(value))
    assert made.properties == split_sections(RAW).properties


@pytest.mark.parametrize(("action", "changes"), SYSTEM)
def test_an_action_changes_properties_of_the_system(action: str, changes: dict[str, Any]) -> None:
    made = split_sections(compile_action(action, {})(view()).encoded()).properties
    before = split_sections(RAW).properties
    assert {field: getattr(made, field) for field in Properties.__dataclass_fields__} == {
        **{field: getattr(before, field) for field in Properties.__dataclass_fields__},
        **changes,
    }


def test_sections_that_an_action_does_not_name_stay_byte_for_byte() -> None:
    raw = build_message(
        header=Header(durable=True, priority=7, ttl=5),
        delivery_annotations={"d": 1},
        message_annotations={"x-opt-mine": "m"},
        properties=Properties(message_id=GUID, user_id=b"u", creation_time=1),
        application_properties={"a": 1},
        sequence=[[1, 2], [3]],
        footer={"f": 1},
    )
    made, was = split_sections(compile_action("SET a = 2", {})(view(raw)).encoded()), split_sections(raw)
    assert made.application_properties == {"a": 2}
    for code, (start, _, end) in was.spans.items():
        if code != 0x74:
            begun, _, ended = made.spans[code]
            assert made.raw[begun:ended] == raw[start:end]
    assert made.raw[made.body_start :] == raw[was.body_start :]


def test_a_message_without_properties_is_given_some() -> None:
    made = split_sections(
        compile_action("SET a = 1; SET sys.Label = 'l'", {})(view(build_message(data=b"x"))).encoded()
    )
    assert (made.application_properties, made.properties.subject, made.data) == ({"a": 1}, "l", [b"x"])


def test_a_time_to_live_is_set_in_the_header() -> None:
    draft = compile_action("SET sys.TimeToLive = @ttl", {"@ttl": Duration(5_000)})(view())
    assert (draft.ttl, split_sections(draft.encoded()).header.ttl) == (5_000, 5_000)


def test_annotations_are_set_and_removed() -> None:
    action = "SET sys.PartitionKey = 'p2'; SET sys.ScheduledEnqueueTimeUtc = @at"
    made = split_sections(compile_action(action, {"at": Timestamp(NOW)})(view()).encoded())
    assert made.message_annotations == {"x-opt-partition-key": "p2", "x-opt-scheduled-enqueue-time": NOW}
    made = split_sections(compile_action("REMOVE sys.PartitionKey; SET gone = sys.PartitionKey", {})(view()).encoded())
    assert made.message_annotations == {}
    assert made.application_properties["gone"] is None


def test_the_session_of_the_copy_is_the_one_that_was_set() -> None:
    assert compile_action("SET sys.SessionId = 's2'", {})(view()).session == "s2"
    assert compile_action("SET a = 1", {})(view()).session == "s1"


def test_the_message_itself_stays_as_it_was() -> None:
    original = view()
    compile_action("SET color = 'red'; SET sys.Label = 'x'; REMOVE sys.PartitionKey", {})(original).encoded()
    assert original.read_user()["color"] == "blue"
    assert original.properties.subject == "Red"
    assert original.annotation("x-opt-partition-key") == "p1"


@pytest.mark.parametrize(
    ("action", "told"),
    [
        ("SET sys.MessageId = missing", "cannot be null"),
        ("SET sys.TimeToLive = 5", "a time to live is a duration, not an integer"),
        ("SET sys.ScheduledEnqueueTimeUtc = 'soon'", "cannot be a string"),
        ("SET sys.Label = when", "cannot become a string"),
        ("SET a = quantity / 0 + missing", "divided by zero"),
        ("SET a = p('sys.nope')", "there is no system property 'nope'"),
    ],
)
def test_an_action_that_fails_explains_why(action: str, told: str) -> None:
    act = compile_action(action, {})
    with pytest.raises(RuleEvaluationError, match=told):
        act(view())


def test_an_action_that_doubles_a_text_over_and_over_is_stopped() -> None:
    act = compile_action("SET color = color + color;" * 32, {})
    with pytest.raises(RuleEvaluationError, match="fits no message"):
        act(view())


@pytest.mark.parametrize(
    "action",
    [
        "SET a = sys.TimeToLive + sys.TimeToLive",
        "SET a = sys.TimeToLive;" + "SET a = a + a;" * 20 + "SET b = when + a; REMOVE a",
        "SET single = 1e300",
    ],
)
def test_a_value_that_no_message_can_carry_is_an_error_of_evaluation(action: str) -> None:
    with pytest.raises(RuleEvaluationError, match="no message can carry"):
        compile_action(action, {})(view(ttl=None)).encoded()
