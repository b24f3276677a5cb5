"""Rules in the XML of the management API: a rule that was written is read back; errors name what is wrong."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.namespace.engine.descriptions import (
    CorrelationFilter,
    FalseFilter,
    RuleDescription,
    SqlAction,
    SqlFilter,
    TrueFilter,
)
from twinbus.namespace.engine.rules.values import Duration, ZonelessTime
from twinbus.namespace.front.atom_rules import read_rule, write_rule
from twinbus.namespace.front.atom_xml import INSTANCE, SERVICE_BUS, AtomError
from twinbus.values import Byte, Float32, Int, Long, Short, Timestamp, UByte, UInt, ULong, UShort

texts = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn"]), min_size=1, max_size=20)
values = st.one_of(
    texts,
    st.booleans(),
    st.integers(-(2**7), 2**7 - 1).map(Byte),
    st.integers(-(2**15), 2**15 - 1).map(Short),
    st.integers(-(2**31), 2**31 - 1).map(Int),
    st.integers(-(2**63), 2**63 - 1).map(Long),
    st.integers(0, 2**8 - 1).map(UByte),
    st.integers(0, 2**16 - 1).map(UShort),
    st.integers(0, 2**32 - 1).map(UInt),
    st.integers(0, 2**64 - 1).map(ULong),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(Float32),
    st.integers(-62_135_596_800_000, 253_402_300_799_999).map(Timestamp),
    st.integers(-62_135_596_800_000, 253_402_300_799_999).map(ZonelessTime),
    st.integers(0, 10**12).map(Duration),
    st.uuids(),
    st.none(),
)
pairs = st.dictionaries(texts, values, max_size=3)
filters = st.one_of(
    st.just(TrueFilter()),
    st.just(FalseFilter()),
    st.builds(SqlFilter, texts, pairs),
    st.builds(
        CorrelationFilter,
        correlation_id=st.none() | texts,
        message_id=st.none() | texts,
        to=st.none() | texts,
        reply_to=st.none() | texts,
        label=st.none() | texts,
        session_id=st.none() | texts,
        reply_to_session_id=st.none() | texts,
        content_type=st.none() | texts,
        properties=pairs,
    ),
)
names = texts.map(str.strip).filter(bool)
rules = st.builds(RuleDescription, names, filters, st.none() | st.builds(SqlAction, texts, pairs))


def element(inner: str) -> ET.Element:
    text = f'<RuleDescription xmlns="{SERVICE_BUS}" xmlns:i="{INSTANCE}">{inner}</RuleDescription>'
    return ET.fromstring(text)  # noqa: S314  # our own


def sql(value: str) -> ET.Element:
    pair = f"<KeyValueOfstringanyType><Key>@a</Key>{value}</KeyValueOfstringanyType>"
    expression = "<SqlExpression>a = @a</SqlExpression>"
    return element(f'<Filter i:type="SqlFilter">{expression}<Parameters>{pair}</Parameters></Filter>')


@given(rules)
def test_what_was_written_is_read_with_its_types(rule: RuleDescription) -> None:
    read = read_rule(element(write_rule(rule, 1)))
    assert read == rule
    for before, after in ((rule.filter, read.filter), (rule.action, read.action)):
        for field in ("parameters", "properties"):
            given_values = getattr(before, field, {})
            assert [*map(type, getattr(after, field, {}).values())] == [*map(type, given_values.values())]


def test_a_rule_without_elements_is_the_default_rule() -> None:
    assert read_rule(element("")) == RuleDescription("$Default", TrueFilter(), None)
    nil = 'i:nil="true"'
    assert read_rule(element(f"<Filter {nil}/><Action {nil}/><Name>r</Name>")) == RuleDescription("r")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ('<Value i:type="x:int">5</Value>', Int(5)),
        ('<Value i:type="int"> 5 </Value>', Int(5)),
        ('<Value i:type="x:dateTime">2020-07-05T11:12:13Z</Value>', Timestamp(1593947533000)),
        ('<Value i:type="x:dateTime">2020-07-05T13:12:13.5+02:00</Value>', Timestamp(1593947533500)),
        ('<Value i:type="x:dateTime">2020-07-05T11:12:13</Value>', ZonelessTime(1593947533000)),
        ('<Value i:type="x:duration">P1DT2H</Value>', Duration(93_600_000)),
        ('<Value i:type="x:decimal">1.25</Value>', 1.25),
        ('<Value i:type="x:boolean">1</Value>', True),
        ('<Value i:type="x:string"></Value>', ""),
        (
            '<Value i:type="x:guid">12345678-1234-5678-1234-567812345678</Value>',
            UUID(int=0x12345678123456781234567812345678),
        ),
    ],
)
def test_values_are_read_by_their_type(value: str, expected: Any) -> None:
    read = read_rule(sql(value)).filter
    assert isinstance(read, SqlFilter)
    assert read.parameters == {"@a": expected}
    assert type(read.parameters["@a"]) is type(expected)


@pytest.mark.parametrize("instant", [-(2**63), 2**63 - 1])
def test_an_instant_outside_of_the_calendar_is_shown_as_its_end(instant: int) -> None:
    text = write_rule(RuleDescription("r", SqlFilter("a = @a", {"@a": Timestamp(instant)})), 1)
    assert ("0001-01-01T00:00:00.000Z" if instant < 0 else "9999-12-31T23:59:59.999Z") in text


@pytest.mark.parametrize(
    ("inner", "told"),
    [
        ('<Filter i:type="RegexFilter"/>', "'RegexFilter' is none of"),
        ("<Filter/>", "'' is none of"),
        ('<Filter i:type="SqlFilter"/>', "SqlFilter lacks its SqlExpression"),
        ('<Action i:type="SqlRuleAction"/>', "SqlRuleAction lacks its SqlExpression"),
        ('<Action i:type="Script"/>', "'Script' is neither"),
    ],
)
def test_an_invalid_rule_is_refused(inner: str, told: str) -> None:
    with pytest.raises(AtomError, match=told):
        read_rule(element(inner))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("", "lacks its Key or its Value"),
        ("<Value>5</Value>", "has the type ''"),
        ('<Value i:type="x:color">5</Value>', "has the type 'color'"),
        ('<Value i:type="x:int">five</Value>', "is no int"),
        ('<Value i:type="x:int">3000000000</Value>', "not between"),
        (f'<Value i:type="x:long">{"9" * 5000}</Value>', "not between"),
        ('<Value i:type="x:double">1,5</Value>', "is no double"),
        ('<Value i:type="x:boolean">maybe</Value>', "neither true nor false"),
        ('<Value i:type="x:dateTime">soon</Value>', "is no dateTime"),
        ('<Value i:type="x:duration">long</Value>', "is no duration"),
        ('<Value i:type="x:guid">1</Value>', "is no guid"),
        (f'<Value i:type="x:string">{"x" * 50_000}</Value>', "50000 characters"),
    ],
)
def test_an_invalid_value_is_refused(value: str, told: str) -> None:
    with pytest.raises(AtomError, match=told):
        read_rule(sql(value))


def test_a_repeated_parameter_is_refused() -> None:
    pair = '<KeyValueOfstringanyType><Key>a</Key><Value i:type="x:int">1</Value></KeyValueOfstringanyType>'
    with pytest.raises(AtomError, match="'a' is there twice"):
        read_rule(element(f'<Filter i:type="CorrelationFilter"><Properties>{pair}{pair}</Properties></Filter>'))
