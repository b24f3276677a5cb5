"""Backlog messages that earlier versions wrote: the syphon turns each into the message that its sender meant (Y3)."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest
from azure.servicebus._pyamqp._decode import decode_payload

from tests.formats.sets import expected, sets_with
from twinbus.backlog import COMPRESSION_PROPERTY, RESERVED_PROPERTIES
from twinbus.syphon.translation import destination_of, translate

NOW = 1_800_000_000_000
_DUE = b"x-opt-scheduled-enqueue-time"
_LARGE = 10_000
_ABOUT_IT = ("by", "raw", "path")
DRIVERS = ("sync", "aio", "dotnet")

MESSAGES = [
    pytest.param(said, id=f"{found.id}: {said['id']}")
    for found in sets_with("backlog.json")
    for said in expected(found.values[0] / "backlog.json")
]


@pytest.mark.parametrize("said", MESSAGES)
def test_y3_an_older_backlog_message_comes_home_as_its_sender_meant_it(said: dict[str, Any]) -> None:
    raw = base64.b64decode(said["raw"])
    assert destination_of(raw) == said["path"]
    path, translated, _ = translate(raw, NOW)
    assert path == said["path"]
    assert shown(translated) == {key: value for key, value in said.items() if key not in _ABOUT_IT}


@pytest.mark.parametrize("found", sets_with("backlog.json"))
def test_s7_s9_an_older_backlog_has_every_alias_of_both_drivers_and_of_dotnet(found: Any) -> None:
    messages = expected(found / "backlog.json")
    by = dict.fromkeys(DRIVERS, b"")
    for one in messages:
        by[one["by"]] += base64.b64decode(one["raw"])
    assert {name for name in RESERVED_PROPERTIES if name.encode() in by["sync"]} == set(RESERVED_PROPERTIES)
    assert {name for name in RESERVED_PROPERTIES if name.encode() in by["aio"]} == set(RESERVED_PROPERTIES)
    assert {name for name in RESERVED_PROPERTIES if name.encode() in by["dotnet"]} == set(RESERVED_PROPERTIES) - {
        COMPRESSION_PROPERTY
    }
    assert b"com.microsoft:timespan" in by["dotnet"]


def shown(raw: bytes) -> dict[str, Any]:
    """Return the fields of a message that are set, as the SDK decodes them."""
    message: Any = decode_payload(memoryview(raw))
    header, properties = message.header, message.properties
    annotations = message.message_annotations or {}
    said: dict[str, Any] = {
        "id": _text(properties.message_id),
        "session": _text(properties.group_id),
        "ttl": header.ttl if header else None,
        "due": annotations.get(_DUE),
        "priority": header.priority if header else None,
        "user_id": _text(properties.user_id),
        "subject": _text(properties.subject),
        "content_type": _text(properties.content_type),
        "correlation_id": _text(properties.correlation_id),
        "to": _text(properties.to),
        "reply_to": _text(properties.reply_to),
        "reply_to_session": _text(properties.reply_to_group_id),
        "partition_key": _text(annotations.get(b"x-opt-partition-key")),
        "mine": _text(annotations.get(b"x-opt-mine")),
        "properties": _plain(message.application_properties) or None,
    }
    if message.data is not None:
        said |= {"kind": "data", "body": _data(message.data)}
    elif message.sequence is not None:
        said |= {"kind": "sequence", "body": _plain(message.sequence)}
    else:
        said |= {"kind": "value", "body": _plain(message.value)}
    return {name: value for name, value in said.items() if value is not None}


def _data(parts: list[bytes]) -> Any:
    whole = b"".join(bytes(part) for part in parts)
    if len(whole) > _LARGE:
        return {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    return [bytes(part).decode("latin-1") for part in parts]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_text(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else _text(value)


def _text(value: Any) -> Any:
    return bytes(value).decode() if isinstance(value, bytes | memoryview) else value
