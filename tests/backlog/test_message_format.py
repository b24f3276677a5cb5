"""Properties of a diverted message become aliases, and back (S7, Y3, Y6)."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import hypothesis.strategies as st
import pytest
from hypothesis import given

from twinbus.amqp import decode, encode
from twinbus.backlog import message_format
from twinbus.backlog.message_format import (
    RESERVED_PROPERTIES,
    AliasError,
    AliasInUseError,
    MessageFields,
    RestoredMessage,
    divert,
    restore,
)
from twinbus.values import Char, Described, Int, Long, Symbol, Timestamp, UInt, ULong

PLAIN = MessageFields(application_properties={"colour": "red"})
MAX_UINT = 2**32 - 1

names = st.text(max_size=8) | st.binary(max_size=8)
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.uuids()
fields_of_messages = st.builds(
    MessageFields,
    session_id=st.none() | st.text(max_size=128),
    time_to_live=st.none() | st.integers(0, MAX_UINT),
    scheduled_enqueue_time=st.none() | st.integers(-(2**62), 2**62),
    absolute_expiry_time=st.none() | st.integers(0, 2**62),
    application_properties=st.dictionaries(names, values, max_size=5),
)
paths = st.text(min_size=1, max_size=260)


@given(fields_of_messages, paths, st.none() | st.just("deflate"))
def test_s7_a_diverted_message_is_restored_as_it_was(
    message: MessageFields, path: str, compression: str | None
) -> None:
    back = restore(divert(message, path, compression))
    kept = message.absolute_expiry_time if message.time_to_live is None else None
    assert (back.path, back.compression) == (path, compression)
    assert back.message == MessageFields(
        session_id=message.session_id,
        time_to_live=message.time_to_live,
        scheduled_enqueue_time=message.scheduled_enqueue_time,
        absolute_expiry_time=kept,
        application_properties=message.application_properties,
    )


@given(fields_of_messages, paths)
def test_s7_diverting_changes_a_copy_and_nothing_but_what_it_must(message: MessageFields, path: str) -> None:
    before = dict(message.application_properties)
    copy = divert(message, path)
    assert dict(message.application_properties) == before
    assert copy.application_properties is not message.application_properties
    assert (copy.session_id, copy.time_to_live, copy.scheduled_enqueue_time) == (None, None, None)
    added = {name: value for name, value in copy.application_properties.items() if name not in before}
    assert {name: copy.application_properties[name] for name in before} == before
    assert set(added) == {message_format.PATH_PROPERTY} | {
        alias
        for alias, value in (
            (message_format.SESSION_ID_PROPERTY, message.session_id),
            (message_format.TIME_TO_LIVE_PROPERTY, message.time_to_live),
            (message_format.SCHEDULED_TIME_PROPERTY, message.scheduled_enqueue_time),
        )
        if value is not None
    }


@given(fields_of_messages, paths)
def test_s7_the_aliases_survive_the_wire(message: MessageFields, path: str) -> None:
    copy = divert(message, path)
    carried = {
        name: decode(encode(copy.application_properties[name]), 0)[0]
        for name in RESERVED_PROPERTIES
        if name in copy.application_properties
    }
    properties: dict[str | bytes, object] = {**copy.application_properties}
    properties.update(carried)
    assert restore(MessageFields(application_properties=properties)).message.time_to_live == message.time_to_live
    assert restore(MessageFields(application_properties=properties)).message.session_id == message.session_id


def test_s7_the_aliases_have_the_names_units_and_types_of_the_old_client() -> None:
    message = MessageFields(session_id="s", time_to_live=1500, scheduled_enqueue_time=1_700_000_000_123)
    properties = divert(message, "orders").application_properties
    assert properties == {
        "x-ms-path": "orders",
        "x-ms-sessionid": "s",
        "x-ms-timetolive": 15_000_000,
        "x-ms-scheduledenqueuetimeutc": 1_700_000_000_123,
    }
    assert type(properties["x-ms-timetolive"]) is Long
    assert type(properties["x-ms-scheduledenqueuetimeutc"]) is Timestamp


def test_s7_an_alias_is_there_only_where_the_property_was_set_and_the_path_always() -> None:
    assert divert(PLAIN, "orders") == MessageFields(application_properties={"colour": "red", "x-ms-path": "orders"})


def test_s7_an_empty_or_zero_property_counts_as_set() -> None:
    message = MessageFields(session_id="", time_to_live=0, scheduled_enqueue_time=0)
    assert restore(divert(message, "orders")).message == message


def test_s7_absolute_expiry_time_is_cleared_with_the_time_to_live_and_stays_without_one() -> None:
    assert divert(MessageFields(time_to_live=1, absolute_expiry_time=9), "orders").absolute_expiry_time is None
    assert divert(MessageFields(absolute_expiry_time=9), "orders").absolute_expiry_time == 9


def test_s9_the_algorithm_of_a_compressed_body_is_an_alias() -> None:
    copy = divert(PLAIN, "orders", "deflate")
    assert copy.application_properties["x-twinbus-packed"] == "deflate"
    assert restore(copy) == RestoredMessage("orders", PLAIN, "deflate")


@pytest.mark.parametrize("name", RESERVED_PROPERTIES)
@pytest.mark.parametrize("spelling", [str, str.encode])
def test_s7_a_message_that_uses_one_of_the_names_is_refused_by_name(name: str, spelling: Any) -> None:
    with pytest.raises(AliasInUseError) as caught:
        divert(MessageFields(application_properties={spelling(name): 1}), "orders")
    assert caught.value.names == (name,)
    assert name in str(caught.value)


def test_s7_every_name_in_use_is_named() -> None:
    with pytest.raises(AliasInUseError, match="x-ms-path, x-ms-timetolive"):
        divert(MessageFields(application_properties={"x-ms-timetolive": 1, "x-ms-path": "a"}), "orders")


def test_s7_similar_names_belong_to_the_caller() -> None:
    message = MessageFields(application_properties={"x-ms-via": "a", "X-MS-PATH": "b", b"\xff": 1})
    assert restore(divert(message, "orders")).message == message


# --- reading ---------------------------------------------------------------------------------------------------------


def backlog(**given: object) -> MessageFields:
    names = {"path": "x-ms-path", "session": "x-ms-sessionid", "ttl": "x-ms-timetolive"}
    names |= {"scheduled": "x-ms-scheduledenqueuetimeutc", "packed": "x-twinbus-packed"}
    return MessageFields(
        application_properties={names[key]: value for key, value in ({"path": "orders"} | given).items()}
    )


@pytest.mark.parametrize(
    ("ttl", "milliseconds"),
    [
        (15_000_000, 1500),
        (Long(15_000_000), 1500),
        (Described(Symbol("com.microsoft:timespan"), 15_000_000), 1500),
        (Described(Symbol("com.microsoft:timespan"), Long(15_000_000)), 1500),
        (0, 0),
        (1, 1),
        (10_000, 1),
        (10_001, 2),
        (2**63 - 1, 922_337_203_685_478),
    ],
)
def test_s7_a_time_to_live_is_read_as_a_long_or_as_the_old_clients_timespan(ttl: object, milliseconds: int) -> None:
    found = restore(backlog(ttl=ttl)).message.time_to_live
    assert found == milliseconds
    assert type(found) is int


def exactly(text: str) -> str:
    """Return a pattern for the whole error text, with its hint."""
    return re.escape(f"{text}. Mend the message and resubmit it.") + "$"


WRONG = [None, True, 1.5, "1", b"1", Int(1), UInt(1), ULong(1), -1, Long(-1), Timestamp(1), timedelta(1)]


@pytest.mark.parametrize(
    "ttl",
    [*WRONG, *(Described(Symbol("com.microsoft:timespan"), w) for w in WRONG), Described("x", 1), Described(1, 1)],
)
def test_y6_a_time_to_live_of_another_type_is_an_error(ttl: object) -> None:
    text = f"x-ms-timetolive is {ttl!r}, not a span in ticks: a long, or com.microsoft:timespan"
    with pytest.raises(AliasError, match=exactly(text)) as caught:
        restore(backlog(ttl=ttl))
    assert caught.value.name == "x-ms-timetolive"


@pytest.mark.parametrize(
    "when",
    [
        Timestamp(1_700_000_000_123),
        datetime(2023, 11, 14, 22, 13, 20, 123_999, tzinfo=UTC),
        datetime(2023, 11, 15, 0, 13, 20, 123_000, tzinfo=timezone(timedelta(hours=2))),
    ],
)
def test_s7_a_scheduled_time_is_read_as_a_timestamp(when: object) -> None:
    found = restore(backlog(scheduled=when)).message.scheduled_enqueue_time
    assert found == 1_700_000_000_123
    assert type(found) is int


@pytest.mark.parametrize("when", [None, 1, Long(1), "2023-11-14", datetime(2023, 11, 14), 1.0])  # noqa: DTZ001
def test_y6_a_scheduled_time_of_another_type_is_an_error(when: object) -> None:
    with pytest.raises(AliasError, match=exactly(f"x-ms-scheduledenqueuetimeutc is {when!r}, not a timestamp")):
        restore(backlog(scheduled=when))


@pytest.mark.parametrize("wrong", [None, 1, b"red", Symbol("red"), Char("r"), UUID(int=1)])
@pytest.mark.parametrize(
    ("alias", "name"), [("session", "x-ms-sessionid"), ("path", "x-ms-path"), ("packed", "x-twinbus-packed")]
)
def test_y6_a_string_alias_of_another_type_is_an_error(alias: str, name: str, wrong: object) -> None:
    with pytest.raises(AliasError, match=exactly(f"{name} is {wrong!r}, not a string")) as caught:
        restore(backlog(**{alias: wrong}))
    assert caught.value.name == name


def test_y6_a_message_without_a_path_is_an_error() -> None:
    with pytest.raises(AliasError, match=exactly("x-ms-path is missing")):
        restore(PLAIN)
    with pytest.raises(AliasError, match=exactly("x-ms-path is empty")):
        restore(backlog(path=""))


def test_y3_alias_names_may_be_bytes() -> None:
    message = MessageFields(application_properties={b"x-ms-path": "orders", b"x-ms-sessionid": "s", b"colour": "red"})
    found = restore(message)
    assert found == RestoredMessage(
        "orders", MessageFields(session_id="s", application_properties={b"colour": "red"}), None
    )


def test_y3_a_property_without_an_alias_stays_as_it_is_in_the_backlog() -> None:
    message = MessageFields(
        session_id="s",
        time_to_live=1,
        scheduled_enqueue_time=2,
        absolute_expiry_time=3,
        application_properties={"x-ms-path": "orders"},
    )
    assert restore(message).message == MessageFields(
        session_id="s", time_to_live=1, scheduled_enqueue_time=2, absolute_expiry_time=3
    )


def test_s7_the_error_of_a_reserved_name_says_what_to_do() -> None:
    error = AliasInUseError(["x-ms-path"])
    assert error.names == ("x-ms-path",)
    assert str(error).endswith("x-ms-path; rename them")
