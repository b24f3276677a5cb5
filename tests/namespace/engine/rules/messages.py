"""The message on which the tables of expressions are evaluated: properties of every type, null and missing ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from twinbus.amqp import Header, Properties, build_message
from twinbus.namespace.engine.rules.message_view import MessageView
from twinbus.values import Byte, Described, Float32, Int, Short, Symbol, Timestamp, UByte, UInt, ULong

NOW = 1_700_000_000_000
SEQ = 42
TOKEN = bytes(range(16))
GUID = UUID("12345678-1234-5678-1234-567812345678")

USER: Mapping[str, Any] = {
    "Color": "blue",
    "shape": "100%_round",
    "empty": "",
    "quantity": Int(10),
    "large": 9_007_199_254_740_993,
    "minus": Byte(-7),
    "tiny": Short(2),
    "unsigned": ULong(2**64 - 1),
    "octet": UByte(200),
    "count": UInt(3),
    "price": 2.5,
    "single": Float32(0.5),
    "yes": True,
    "no": False,
    "nothing": None,
    "when": Timestamp(NOW),
    "id": GUID,
    "blob": b"\x01\x02",
    "span": Described(Symbol("com.microsoft:timespan"), 600_000_000),
    "moment": Described(Symbol("com.microsoft:datetime-offset"), 621_355_968_000_000_000 + NOW * 10_000),
    "place": Described(Symbol("com.microsoft:uri"), "http://example.org/"),
    "Property With Space": 1,
    "HR-EmployeeID": "E7",
    'say "hi"': "quoted",
    "a]b": "bracket",
    "größe": 7,
    "digits": "10",
    "lines": "a\nb",
    "list": [1, 2],
    "odd": Described(Symbol("com.example:odd"), 1),
}

RAW = build_message(
    header=Header(ttl=60_000),
    message_annotations={"x-opt-partition-key": "p1"},
    properties=Properties(
        message_id=GUID, subject="Red", to="Store5", content_type="text/plain", correlation_id="c-1", group_id="s1"
    ),
    application_properties=USER,
    data=b"no rule reads this",
)


def view(raw: bytes = RAW, ttl: int | None = 60_000) -> MessageView:
    return MessageView(raw, now=NOW, seq=SEQ, ttl=ttl, new_token=lambda: TOKEN)
