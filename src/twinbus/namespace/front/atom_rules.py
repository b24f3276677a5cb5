"""Rules in the XML of the management API, read and written: filters, actions, and values with their types."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID
from xml.sax.saxutils import escape

from twinbus.namespace.engine.descriptions import (
    DEFAULT_RULE,
    FALSE_EXPRESSION,
    TRUE_EXPRESSION,
    CorrelationFilter,
    FalseFilter,
    RuleDescription,
    RuleFilter,
    SqlAction,
    SqlFilter,
    TrueFilter,
)
from twinbus.namespace.engine.rules.values import Duration
from twinbus.namespace.front.atom_xml import ILLEGAL, INSTANCE, SERVICE_BUS, AtomError
from twinbus.namespace.iso8601 import parse_duration, render_duration, render_instant
from twinbus.values import Byte, Float32, Int, Long, Short, Timestamp, UByte, UInt, ULong, UShort

_SCHEMA: Final = "http://www.w3.org/2001/XMLSchema"
_SERIALIZATION: Final = "http://schemas.microsoft.com/2003/10/Serialization/"
_LEVEL: Final = "<CompatibilityLevel>20</CompatibilityLevel>"
_LONGEST_TEXT: Final = 40_000
"""Of a value: more than any property of a message may have."""

_CORRELATION: Final = (
    ("CorrelationId", "correlation_id"),
    ("MessageId", "message_id"),
    ("To", "to"),
    ("ReplyTo", "reply_to"),
    ("Label", "label"),
    ("SessionId", "session_id"),
    ("ReplyToSessionId", "reply_to_session_id"),
    ("ContentType", "content_type"),
)


# --- reading -----------------------------------------------------------------------------------------------------


def read_rule(node: ET.Element) -> RuleDescription:
    """A RuleDescription or DefaultRuleDescription. Raises AtomError."""
    parts = _parts(node)
    name = _text(parts.get("Name")).strip()
    return RuleDescription(name or DEFAULT_RULE, _filter(parts.get("Filter")), _action(parts.get("Action")))


def _filter(node: ET.Element | None) -> RuleFilter:
    if node is None or _is_nil(node):
        return TrueFilter()  # in the service as in its clients
    parts = _parts(node)
    match kind := _type(node):
        case "TrueFilter":
            return TrueFilter()
        case "FalseFilter":
            return FalseFilter()
        case "SqlFilter":
            return SqlFilter(_expression("SqlFilter", parts), _values(parts.get("Parameters")))
        case "CorrelationFilter":
            texts = {field: _text(parts[name]) for name, field in _CORRELATION if name in parts}
            given: dict[str, Any] = {field: text for field, text in texts.items() if text}
            return CorrelationFilter(**given, properties=_values(parts.get("Properties")))
        case _:
            raise AtomError(f"Filter: {kind[:50]!r} is none of TrueFilter, FalseFilter, SqlFilter, CorrelationFilter")


def _action(node: ET.Element | None) -> SqlAction | None:
    if node is None or _is_nil(node):
        return None
    match kind := _type(node):
        case "EmptyRuleAction":
            return None
        case "SqlRuleAction":
            parts = _parts(node)
            return SqlAction(_expression("SqlRuleAction", parts), _values(parts.get("Parameters")))
        case _:
            raise AtomError(f"Action: {kind[:50]!r} is neither EmptyRuleAction nor SqlRuleAction")


def _expression(owner: str, parts: Mapping[str, ET.Element]) -> str:
    if "SqlExpression" not in parts:
        raise AtomError(f"{owner} lacks its SqlExpression")
    return _text(parts["SqlExpression"])


def _values(node: ET.Element | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for child in node if node is not None else ():
        parts = _parts(child)
        key = _text(parts.get("Key"))
        if not key or "Value" not in parts:
            raise AtomError("a parameter or property lacks its Key or its Value")
        if key in found:
            raise AtomError(f"the parameter or property {key[:50]!r} is there twice")
        found[key] = _value(key, parts["Value"])
    return found


def _value(key: str, node: ET.Element) -> Any:
    text, kind = _text(node), _type(node)
    if _is_nil(node):
        return None
    if kind not in _READERS:
        raise AtomError(f"the value of {key[:50]!r} has the type {kind[:50]!r}, which is not known")
    try:
        if len(text) > _LONGEST_TEXT:
            raise ValueError(f"it has {len(text)} characters")
        return _READERS[kind](text)
    except (ValueError, OverflowError) as error:
        raise AtomError(f"the value of {key[:50]!r} is no {kind}: {error}") from None


def _integer(kind: type[int], bits: int, *, signed: bool = True) -> Callable[[str], int]:
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)

    def read(text: str) -> int:
        value = int(text) if len(text) < 30 else most + 1
        if not least <= value <= most:
            raise ValueError(f"it is not between {least} and {most}")
        return kind(value)

    return read


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "false", "1", "0"):
        raise ValueError(f"{text[:50]!r} is neither true nor false")
    return word in ("true", "1")


def _instant(text: str) -> Timestamp:
    instant = datetime.fromisoformat(text.strip())
    instant = instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
    return Timestamp(round(instant.timestamp() * 1000))


def _duration(text: str) -> Duration:
    milliseconds = parse_duration(text)
    return Duration((2**63 - 1) // 10_000 if milliseconds is None else milliseconds)


_READERS: Final[dict[str, Callable[[str], Any]]] = {
    "string": str,
    "anyURI": str,
    "char": str,
    "boolean": _boolean,
    "byte": _integer(Byte, 8),
    "short": _integer(Short, 16),
    "int": _integer(Int, 32),
    "long": _integer(Long, 64),
    "unsignedByte": _integer(UByte, 8, signed=False),
    "unsignedShort": _integer(UShort, 16, signed=False),
    "unsignedInt": _integer(UInt, 32, signed=False),
    "unsignedLong": _integer(ULong, 64, signed=False),
    "float": Float32,
    "double": float,
    "decimal": float,
    "dateTime": _instant,
    "duration": _duration,
    "guid": UUID,
}
_NAMES: Final[dict[type, str]] = {
    str: "string",
    bool: "boolean",
    Byte: "byte",
    Short: "short",
    Int: "int",
    Long: "long",
    int: "long",
    UByte: "unsignedByte",
    UShort: "unsignedShort",
    UInt: "unsignedInt",
    ULong: "unsignedLong",
    Float32: "float",
    float: "double",
    Timestamp: "dateTime",
    Duration: "duration",
    UUID: "guid",
}


def _type(node: ET.Element) -> str:
    return node.get(f"{{{INSTANCE}}}type", "").rpartition(":")[2]


def _is_nil(node: ET.Element) -> bool:
    return node.get(f"{{{INSTANCE}}}nil") == "true"


def _text(node: ET.Element | None) -> str:
    return "" if node is None else node.text or ""


def _parts(node: ET.Element) -> dict[str, ET.Element]:
    return {child.tag.rpartition("}")[2]: child for child in node if child.tag.startswith("{" + SERVICE_BUS + "}")}


# --- writing -----------------------------------------------------------------------------------------------------


def write_rule(rule: RuleDescription, created: int) -> str:
    """What stands inside a RuleDescription."""
    action = rule.action
    written = (
        '<Action i:type="EmptyRuleAction"/>'
        if action is None
        else f'<Action i:type="SqlRuleAction">{_sql(action.expression, action.parameters)}</Action>'
    )
    return (
        _write_filter(rule.filter)
        + written
        + f"<CreatedAt>{render_instant(created)}</CreatedAt><Name>{_escaped(rule.name)}</Name>"
    )


def _write_filter(described: RuleFilter) -> str:
    match described:
        case TrueFilter():
            return f'<Filter i:type="TrueFilter">{_sql(TRUE_EXPRESSION, {})}</Filter>'
        case FalseFilter():
            return f'<Filter i:type="FalseFilter">{_sql(FALSE_EXPRESSION, {})}</Filter>'
        case SqlFilter():
            return f'<Filter i:type="SqlFilter">{_sql(described.expression, described.parameters)}</Filter>'
        case CorrelationFilter():
            texts = "".join(
                f"<{name}>{_escaped(value)}</{name}>"
                for name, field in _CORRELATION
                if (value := getattr(described, field)) is not None
            )
            properties = _pairs("Properties", described.properties)
            return f'<Filter i:type="CorrelationFilter">{texts}{properties}</Filter>'


def _sql(expression: str, parameters: Mapping[str, Any]) -> str:
    return f"<SqlExpression>{_escaped(expression)}</SqlExpression>{_LEVEL}{_pairs('Parameters', parameters)}"


def _pairs(name: str, values: Mapping[str, Any]) -> str:
    """An empty element would be an error to the JavaScript client."""
    pairs = "".join(
        f"<KeyValueOfstringanyType><Key>{_escaped(key)}</Key>{_write_value(value)}</KeyValueOfstringanyType>"
        for key, value in values.items()
    )
    return f"<{name}>{pairs}</{name}>" if pairs else ""


def _write_value(value: Any) -> str:
    if value is None:
        return '<Value i:nil="true"/>'
    kind = _NAMES.get(type(value), "string")
    # Both clients cut off a prefix of four letters.
    schema = _SERIALIZATION if kind == "guid" else _SCHEMA
    return f'<Value i:type="d6p1:{kind}" xmlns:d6p1="{schema}">{_escaped(_spelled(value))}</Value>'


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Timestamp):
        return render_instant(value)
    return render_duration(int(value)) if isinstance(value, Duration) else str(value)


def _escaped(text: str) -> str:
    return escape(ILLEGAL.sub("\ufffd", text), {"\r": "&#13;"})
