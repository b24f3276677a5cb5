"""D1: every message becomes a row that Spark accepts, for any content of the message."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
    VariantType,
)

from tests.amqp import strategies
from twinbus.amqp import Header, Properties, build_message, encode
from twinbus.connect import ReceivedMessage, encode_message
from twinbus.message import Message
from twinbus.pipeline.servicebus.fast_columns import column
from twinbus.pipeline.servicebus.fast_marks import _Layout, marks_of
from twinbus.pipeline.servicebus.fast_rows import fast_row
from twinbus.pipeline.servicebus.message_marks import plain_marks
from twinbus.pipeline.servicebus.rows import (
    READ_SCHEMA,
    ColumnError,
    RowMessages,
    any_row,
    check_read_schema,
    check_written_schema,
    record_batches,
    row_maker,
)
from twinbus.values import Array, Decimal32, Described, Float32, Symbol, Timestamp, ULong

_ARROW = to_arrow_schema(READ_SCHEMA, timezone="UTC")
_KINDS_OF_COLUMNS = (
    (st.integers(-(2**63), 2**63 - 1), pa.int64()),
    (st.integers(-(2**31), 2**31 - 1), pa.int32()),
    (st.integers(-(2**62), 2**62), pa.timestamp("us", tz="UTC")),
    (st.text(max_size=5), pa.string()),
    (st.binary(max_size=5), pa.binary()),
    (
        st.dictionaries(st.text(max_size=3), st.none() | st.text(max_size=3), max_size=3),
        _ARROW.field("application_properties").type,
    ),
)
_BROKERS = {
    Symbol("x-opt-sequence-number"): 7,
    Symbol("x-opt-enqueued-time"): Timestamp(1_700_000_000_000),
    Symbol("x-opt-message-state"): 0,
}


def _row(raw: bytes, include_raw: bool = False) -> dict[str, Any]:
    """Return the row that Spark gets."""
    message = ReceivedMessage(raw, None)
    plain = any_row(message, include_raw)
    for marks in (marks_of(message), marks_of(message), plain_marks(raw)):  # a layout that is new, known and missing
        assert marks._replace(start=None) == plain_marks(raw), "the fast marks are the plain marks"
        assert repr(row_maker(include_raw)(message, marks)) == repr(plain), "the fast row is the plain row"
    (batch,) = record_batches([plain], _ARROW)
    assert batch.schema == _ARROW, "Spark refuses it"
    row: dict[str, Any] = batch.to_pylist(maps_as_pydicts="strict")[0]
    return row


def _sent(**parts: Any) -> bytes:
    """Return the message as the broker delivers it: with a number, a time and a state."""
    return build_message(**{**parts, "message_annotations": {**parts.get("message_annotations", {}), **_BROKERS}})


def _body(value: Any) -> str:
    row = _row(_sent(value=value))
    assert row["error"] is None, row["error"]
    return bytes(row["body"]).decode()


# --- everything that AMQP has ----------------------------------------------------------------------------------------


@given(strategies.parts, strategies.bodies)
def test_d1_every_message_becomes_a_row(parts: dict[str, Any], body: dict[str, Any]) -> None:
    row = _row(_sent(**parts, **body))
    assert row["sequence_number"] == 7
    assert row["state"] == "active"
    assert (row["raw"] is None) == (row["error"] is None)
    if row["error"] is None:
        assert row["body"] is not None
        assert row["body_type"] in {"data", "value", "sequence"}
    if "sequence" in body or not isinstance(body.get("value", ""), str | bytes):
        json.loads(bytes(row["body"]))


def test_d1_usual_messages_take_the_fast_path_and_others_do_not() -> None:
    usual: dict[str, Any] = {
        "header": Header(ttl=5000, delivery_count=2),
        "properties": Properties(message_id=UUID(int=7), content_type="text/plain", group_id="s"),
        "application_properties": {"DeadLetterReason": "late", "count": 3},
    }
    for raw, is_usual in (
        (_sent(data=b"x" * 300, **usual), True),
        (_sent(value="x", **usual), False),
        (build_message(data=b"x", **usual), False),  # no broker has delivered it
    ):
        marks = marks_of(ReceivedMessage(raw, None))
        assert (fast_row(raw, False, marks) is not None) == is_usual
        assert (fast_row(raw, False, plain_marks(raw)) is not None) == is_usual


def test_d1_messages_that_start_alike_are_read_by_one_layout() -> None:
    first, second = (
        _sent(header=Header(delivery_count=count), data=b"x", message_annotations={Symbol("x-opt-enqueued-time"): time})
        for count, time in ((7, Timestamp(1)), (8, Timestamp(2)))
    )
    layout = _Layout(first)
    assert layout.marks(first) == marks_of(ReceivedMessage(first, None))
    assert layout.marks(second) == marks_of(ReceivedMessage(second, None))
    for place in range(len(first)):
        for changed in (bytes([first[place] ^ 1]), b""):
            other = first[:place] + changed + first[place + 1 :]
            found = layout.marks(other)
            assert found is None or found._replace(start=None) == plain_marks(other)


@given(st.data())
def test_d1_a_column_of_arrow_is_the_one_that_arrow_makes(data: st.DataObject) -> None:
    values, kind = data.draw(st.sampled_from(_KINDS_OF_COLUMNS))
    some = data.draw(st.lists(st.none() | values, min_size=1, max_size=20))
    made = column(some, kind)
    made.validate(full=True)
    arrows = pa.array([list(one.items()) if isinstance(one, dict) else one for one in some], kind)
    assert made.equals(arrows)
    assert made.type == kind


def test_d1_a_worker_of_spark_does_not_load_pandas_to_make_a_batch() -> None:
    raw = _sent(properties=Properties(message_id="1"), application_properties={"a": "b"}, data=b"x")
    program = f"""if True:
        import sys
        from pyspark.sql.pandas.types import to_arrow_schema
        from twinbus.connect import ReceivedMessage
        from twinbus.pipeline.servicebus import rows
        from twinbus.pipeline.servicebus.fast_marks import marks_of
        message = ReceivedMessage({raw!r}, None)
        row = rows.row_maker(False)(message, marks_of(message))
        (batch,) = rows.record_batches([row], to_arrow_schema(rows.READ_SCHEMA, timezone="UTC"))
        assert batch.num_rows == 1
        assert "pandas" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", program], check=True)


@given(st.binary(max_size=300))
def test_d1_bytes_that_are_no_message_become_a_row_with_the_reason(raw: bytes) -> None:
    row = _row(raw)
    assert row["error"]
    assert row["raw"] == raw


@given(strategies.parts, strategies.bodies, st.data())
def test_d1_a_damaged_message_becomes_a_row(parts: dict[str, Any], body: dict[str, Any], data: st.DataObject) -> None:
    raw = bytearray(_sent(**parts, **body))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] = data.draw(st.integers(0, 255))
    row = _row(bytes(raw[: data.draw(st.integers(place, len(raw)))]))
    assert (row["raw"] is None) == (row["error"] is None)


def test_d1_values_that_json_does_not_have_are_written_as_text() -> None:
    uuid = UUID(int=5)
    assert json.loads(_body([b"\x00\xff", uuid, float("nan"), float("-inf"), Float32(1.5), Timestamp(2**63 - 1)])) == [
        "00ff",
        str(uuid),
        "nan",
        "-inf",
        1.5,
        2**63 - 1,
    ]
    assert json.loads(_body([None, True, Symbol("s"), Decimal32(b"\x01\x02\x03\x04"), Array(ULong, [ULong(1)])])) == [
        None,
        True,
        "s",
        "01020304",
        [1],
    ]
    assert json.loads(_body(Described(Symbol("d"), [Described(ULong(1), b"\x01")]))) == {
        "descriptor": "d",
        "value": [{"descriptor": 1, "value": "01"}],
    }
    assert _body(None) == "null"
    assert _body(float("inf")) == '"inf"'
    assert _body("text") == "text"


def test_d1_a_map_with_keys_of_any_kind_is_an_object() -> None:
    assert _body({1: 2, b"k": 3}) == '{"1": 2, "6b": 3}'
    assert json.loads(_body({UUID(int=1): 1, None: 2, Timestamp(5): 3, False: 4, 1.5: 5})) == {
        str(UUID(int=1)): 1,
        "null": 2,
        "5": 3,
        "false": 4,
        "1.5": 5,
    }


def test_d1_a_map_whose_keys_have_the_same_text_loses_none() -> None:
    assert json.loads(_body({1: "number", "1": "text"})) == [[1, "number"], ["1", "text"]]


# --- what has no place in a row --------------------------------------------------------------------------------------


def test_d1_a_body_that_cannot_be_decoded_is_null_with_raw_and_the_reason() -> None:
    raw = _sent(properties=None, value="x")[:-3] + b"\xa1\x01\xff"  # text that is not UTF-8
    row = _row(raw)
    assert row["body"] is None
    assert row["raw"] == raw
    assert row["error"] == "body: amqp:decode-error: a string is not valid UTF-8"
    assert (row["sequence_number"], row["body_type"], row["message_id"]) == (7, "value", None)


def test_d1_a_map_with_a_list_as_a_key_is_null_with_the_reason() -> None:
    key, value = encode([1]), encode(2)
    body = bytes([0xC1, len(key) + len(value) + 1, 2]) + key + value
    row = _row(_sent(value=None).removesuffix(b"\x40") + body)
    assert row["body"] is None
    assert row["error"].startswith("body: ")
    assert "a list is not supported as a map key" in row["error"]


def test_d1_what_only_one_column_cannot_hold_leaves_the_others() -> None:
    annotations = {Symbol("x-opt-scheduled-enqueue-time"): Timestamp(2**62), Symbol("x-opt-partition-key"): 9}
    row = _row(_sent(header=Header(delivery_count=2**32 - 1, ttl=2**32 - 1), message_annotations=annotations))
    assert row["scheduled_enqueue_time"] is None
    assert row["delivery_count"] is None
    assert row["error"] == (
        "scheduled_enqueue_time: 4611686018427387904 ms since 1970 is not within the years 1 to 9999; "
        "delivery_count: 4294967295 is out of the range of the column"
    )
    assert (row["time_to_live"], row["partition_key"]) == (2**32 - 1, "9")
    assert row["enqueued_time"] == datetime.fromtimestamp(1_700_000_000, UTC)


@pytest.mark.parametrize("millis", [-(2**63), 2**63 - 1, -62_135_596_800_001, 253_402_300_800_000])
def test_d1_an_instant_out_of_the_years_of_a_timestamp_is_null(millis: int) -> None:
    row = _row(_sent(message_annotations={Symbol("x-opt-scheduled-enqueue-time"): Timestamp(millis)}))
    assert row["scheduled_enqueue_time"] is None
    assert "is not within the years 1 to 9999" in row["error"]


@pytest.mark.parametrize("millis", [-1, -62_135_596_800_000, 253_402_300_799_999])
def test_d1_an_instant_at_the_edge_of_a_timestamp_is_shown(millis: int) -> None:
    row = _row(_sent(message_annotations={Symbol("x-opt-scheduled-enqueue-time"): Timestamp(millis)}))
    assert row["scheduled_enqueue_time"].timestamp() * 1000 == millis
    assert row["error"] is None


def test_d1_a_time_to_live_below_nothing_is_shown_as_it_is() -> None:
    row = _row(b"\x00\x53\x70" + encode([None, None, -5, None, None]) + _sent(data=b""))
    assert (row["time_to_live"], row["error"]) == (-5, None)


def test_d1_application_properties_of_any_kind_are_text() -> None:
    row = _row(_sent(application_properties={"a": None, "b": b"\x01", "c": [1, b"\x02"], "d": float("nan"), "e": True}))
    assert row["application_properties"] == {"a": None, "b": "01", "c": '[1, "02"]', "d": "nan", "e": "true"}


def test_d1_an_annotation_that_cannot_be_decoded_does_not_hide_the_sequence_number() -> None:
    raw = _sent(message_annotations={Symbol("user"): "xy"}, data=b"body")
    broken = raw.replace(b"\xa1\x02xy", b"\xa1\x02\xff\xff")
    assert broken != raw
    assert marks_of(ReceivedMessage(broken, None)).number == 7
    assert marks_of(ReceivedMessage(broken, None)).enqueued == 1_700_000_000_000
    row = _row(broken)
    assert (row["sequence_number"], row["body"], row["error"]) == (7, b"body", None)


def test_d1_raw_is_shown_when_it_is_asked_for_or_something_is_wrong() -> None:
    raw = _sent(data=b"x")
    assert _row(raw)["raw"] is None
    assert _row(raw, include_raw=True)["raw"] == raw


# --- rows to messages ------------------------------------------------------------------------------------------------


def _messages(*rows: dict[str, Any]) -> list[Message]:
    return [message for _, message in RowMessages("seed", "q").messages([pa.RecordBatch.from_pylist(list(rows))])]


def test_d1_a_row_that_could_not_be_decoded_is_not_sent_without_its_body() -> None:
    raw = _sent(properties=Properties(message_id="m"), value="x")[:-3] + b"\xa1\x01\xff"
    good, bad = _row(_sent(properties=Properties(message_id="n"), data=b"x")), _row(raw)
    assert [(message.message_id, message.body) for message in _messages(good)] == [("n", b"x")]
    told = r"row of message_id 'm', sequence_number 7 has parts .* \(body: .*not valid UTF-8\).*WHERE error IS NULL"
    with pytest.raises(ColumnError, match=told):
        _messages(good, bad)
    filled = {name: value for name, value in bad.items() if name != "error"} | {"body": raw}
    assert [message.body for message in _messages(filled)] == [raw]


def test_d1_a_row_gets_the_same_id_with_and_without_the_column_error() -> None:
    first, second = _messages({"body": b"x"}), _messages({"body": b"x", "error": None})
    assert first[0].message_id == second[0].message_id


@pytest.mark.parametrize("millis", [0, -5, 2**63 - 1, -(2**63), 300_000_000_000_000])
def test_d1_a_time_to_live_that_no_message_has_is_refused_by_name(millis: int) -> None:
    with pytest.raises(ColumnError, match=rf"row of message_id 'm' has the time_to_live {millis}: .*Null stands for"):
        _messages({"message_id": "m", "body": b"x", "time_to_live": millis})


def test_d1_a_time_to_live_of_centuries_can_be_sent() -> None:
    (message,) = _messages({"body": b"x", "time_to_live": 100 * 365 * 86_400_000})
    assert len(encode_message(message, 1_700_000_000_000)) > 0


_MAP = (
    "map<string,T> with T of string or boolean or tinyint or smallint or int or bigint or float or double or binary or "
    "timestamp or void"
)


@pytest.mark.parametrize(
    ("name", "kind", "takes"),
    [
        ("scheduled_enqueue_time", TimestampNTZType(), "timestamp"),
        ("time_to_live", DayTimeIntervalType(), "bigint or int"),
        ("time_to_live", ShortType(), "bigint or int"),
        ("body", VariantType(), "binary or string"),
        ("application_properties", MapType(StringType(), StructType([StructField("a", LongType())])), _MAP),
        ("application_properties", MapType(StringType(), MapType(StringType(), StringType())), _MAP),
        ("application_properties", MapType(IntegerType(), StringType()), _MAP),
        ("application_properties", MapType(StringType(), DecimalType(9, 2)), _MAP),
        ("application_properties", StringType(), _MAP),
    ],
)
def test_d1_a_column_whose_type_only_looks_like_one_that_can_be_sent_is_refused(
    name: str, kind: DataType, takes: str
) -> None:
    told = f"the column '{name}' is of type {kind.simpleString()}; servicebus takes {takes}"
    with pytest.raises(ColumnError, match=f"^{re.escape(told)}$"):
        check_written_schema(StructType([StructField(name, kind)]), True)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (StringType(), "x"),
        (BooleanType(), True),
        (ByteType(), 1),
        (ShortType(), 2),
        (IntegerType(), 3),
        (LongType(), 4),
        (FloatType(), 0.5),
        (DoubleType(), 0.25),
        (BinaryType(), b"x"),
        (TimestampType(), datetime(2027, 1, 1, tzinfo=UTC)),
        (NullType(), None),
    ],
)
def test_d1_properties_of_these_types_can_be_sent(kind: DataType, value: object) -> None:
    schema = StructType([StructField("application_properties", MapType(StringType(), kind))])
    check_written_schema(schema, True)
    batch = pa.RecordBatch.from_pylist(
        [{"application_properties": [("a", value)]}], to_arrow_schema(schema, timezone="UTC")
    )
    ((_, message),) = RowMessages("seed", "q").messages([batch])
    assert message.application_properties == {"a": value}
    assert len(encode_message(message, 0)) > 0


def test_d1_a_column_in_another_case_is_refused_with_the_names_that_there_are() -> None:
    schema = StructType([StructField("Body", BinaryType())])
    with pytest.raises(ColumnError, match=r"no column 'Body'; it has .*, body,"):
        check_read_schema(schema)
    with pytest.raises(ColumnError, match=r"cannot write the column 'Body'; it takes .*, body\."):
        check_written_schema(schema, True)
