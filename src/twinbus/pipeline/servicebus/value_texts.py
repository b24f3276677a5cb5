"""AMQP values as text, for columns of text and for bodies that are neither data nor text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any
from uuid import UUID

from twinbus.values import Described


def text_of(value: Any) -> str | None:
    """Returns an AMQP value as text: bytes and decimals in hexadecimal, a compound value as JSON."""
    match value:
        case None:
            return None
        case bool():
            return "true" if value else "false"
        case bytes() | bytearray() | memoryview():
            return bytes(value).hex()
        case int():
            return str(int(value))
        case UUID() | str() | float():
            return str(value)
        case _:
            return json_of(value)


def json_of(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    """Returns any AMQP value as a value of the types that JSON has.

    Bytes and decimals are hexadecimal text, UUIDs are text, timestamps are milliseconds, NaN and the infinities are
    text, arrays are lists, and a described value is an object of `descriptor` and `value`.
    """
    match value:
        case None | bool():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if isfinite(value) else str(float(value))
        case str():
            return str(value)
        case bytes() | bytearray() | memoryview():
            return bytes(value).hex()
        case Described():
            return {"descriptor": _plain(value.descriptor), "value": _plain(value.value)}
        case Mapping():
            return _plain_map(value)
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return str(value)


def _plain_map(entries: Mapping[Any, Any]) -> dict[str, Any] | list[list[Any]]:
    """Returns a map as an object with text keys; as a list of [key, value] if two keys would have the same text."""
    texts = [key_text(key) for key in entries]
    if len(set(texts)) < len(texts):
        return [[_plain(key), _plain(item)] for key, item in entries.items()]
    return {text: _plain(item) for text, item in zip(texts, entries.values(), strict=True)}


def key_text(key: Any) -> str:
    text = text_of(key)
    return "null" if text is None else text


def property_texts(properties: Mapping[Any, Any]) -> dict[str, str | None]:
    """Returns application properties as texts. Raises ValueError if two keys have the same text."""
    found: dict[str, str | None] = {}
    for key, value in properties.items():
        name = key_text(key)
        if name in found:
            raise ValueError(f"two keys are both written as {name!r}")
        found[name] = text_of(value)
    return found
