"""Reads and writes rules of subscriptions in the XML of the management API: filters, actions and typed values."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

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
from twinbus.namespace.engine.rules.values import Duration, ZonelessTime
from twinbus.namespace.front.atom_xml import INSTANCE, AtomError, children, element, escaped, is_nil, text_of
from twinbus.namespace.iso8601 import parse_duration, render_duration, render_instant
from twinbus.values import Byte, Float32, Int, Long, Short, Timestamp, UByte, UInt, ULong, UShort

_SCHEMA: Final = "http://www.w3.org/2001/XMLSchema"
_SERIALIZATION: Final = "http://schemas.microsoft.com/2003/10/Serialization/"
_COMPATIBILITY_LEVEL: Final = "<CompatibilityLevel>20</CompatibilityLevel>"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_FIRST_INSTANT: Final = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MILLISECOND
_LAST_INSTANT: Final = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MILLISECOND
# The most characters of a value. No property of a message may have as many.
_MAX_TEXT: Final = 40_000

_CORRELATION_FIELDS: Final = (
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
    """Return the rule in a RuleDescription or DefaultRuleDescription element. Raises AtomError."""
    parts = children(node)
    name = text_of(parts.get("Name")).strip()
    return RuleDescription(name or DEFAULT_RULE, _read_filter(parts.get("Filter")), _read_action(parts.get("Action")))


def _read_filter(node: ET.Element | None) -> RuleFilter:
    if node is None or is_nil(node):
        return TrueFilter()  # as the service and its clients do
    parts = children(node)
    match kind := _xml_type(node):
        case "TrueFilter":
            return TrueFilter()
        case "FalseFilter":
            return FalseFilter()
        case "SqlFilter":
            return SqlFilter(_read_expression("SqlFilter", parts), _read_values(parts.get("Parameters")))
        case "CorrelationFilter":
            texts = {field: text_of(parts[name]) for name, field in _CORRELATION_FIELDS if name in parts}
            given: dict[str, Any] = {field: text for field, text in texts.items() if text}
            return CorrelationFilter(**given, properties=_read_values(parts.get("Properties")))
        case _:
            raise AtomError(f"Filter: {kind[:50]!r} is none of TrueFilter, FalseFilter, SqlFilter, CorrelationFilter")


def _read_action(node: ET.Element | None) -> SqlAction | None:
    if node is None or is_nil(node):
        return None
    match kind := _xml_type(node):
        case "EmptyRuleAction":
            return None
        case "SqlRuleAction":
            parts = children(node)
            return SqlAction(_read_expression("SqlRuleAction", parts), _read_values(parts.get("Parameters")))
        case _:
            raise AtomError(f"Action: {kind[:50]!r} is neither EmptyRuleAction nor SqlRuleAction")


def _read_expression(owner: str, parts: Mapping[str, ET.Element]) -> str:
    if "SqlExpression" not in parts:
        raise AtomError(f"{owner} lacks its SqlExpression")
    return text_of(parts["SqlExpression"])


def _read_values(node: ET.Element | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for child in node if node is not None else ():
        parts = children(child)
        key = text_of(parts.get("Key"))
        if not key or "Value" not in parts:
            raise AtomError("a parameter or property lacks its Key or its Value")
        if key in found:
            raise AtomError(f"the parameter or property {key[:50]!r} is there twice")
        found[key] = _read_value(key, parts["Value"])
    return found


def _read_value(key: str, node: ET.Element) -> Any:
    text, kind = text_of(node), _xml_type(node)
    if is_nil(node):
        return None
    if kind not in _READERS:
        raise AtomError(f"the value of {key[:50]!r} has the type {kind[:50]!r}, which is not known")
    try:
        if len(text) > _MAX_TEXT:
            raise ValueError(f"it has {len(text)} characters")
        return _READERS[kind](text)
    except (ValueError, OverflowError) as error:
        raise AtomError(f"the value of {key[:50]!r} is no {kind}: {error}") from None


def _integer_reader(kind: type[int], bits: int, *, signed: bool = True) -> Callable[[str], int]:
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)

    def read(text: str) -> int:
        value = int(text) if len(text) < 30 else most + 1
        if not least <= value <= most:
            raise ValueError(f"it is not between {least} and {most}")
        return kind(value)

    return read


def _read_boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "false", "1", "0"):
        raise ValueError(f"{text[:50]!r} is neither true nor false")
    return word in ("true", "1")


def _read_instant(text: str) -> Timestamp:
    instant = datetime.fromisoformat(text.strip())
    kind = Timestamp if instant.tzinfo is not None else ZonelessTime
    aware = instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)
    return kind(round((aware - _EPOCH) / _MILLISECOND))


def _read_duration(text: str) -> Duration:
    milliseconds = parse_duration(text)
    return Duration((2**63 - 1) // 10_000 if milliseconds is None else milliseconds)


_READERS: Final[dict[str, Callable[[str], Any]]] = {
    "string": str,
    "anyURI": str,
    "char": str,
    "boolean": _read_boolean,
    "byte": _integer_reader(Byte, 8),
    "short": _integer_reader(Short, 16),
    "int": _integer_reader(Int, 32),
    "long": _integer_reader(Long, 64),
    "unsignedByte": _integer_reader(UByte, 8, signed=False),
    "unsignedShort": _integer_reader(UShort, 16, signed=False),
    "unsignedInt": _integer_reader(UInt, 32, signed=False),
    "unsignedLong": _integer_reader(ULong, 64, signed=False),
    "float": Float32,
    "double": float,
    "decimal": float,
    "dateTime": _read_instant,
    "duration": _read_duration,
    "guid": UUID,
}
_XML_TYPES: Final[dict[type, str]] = {
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
    ZonelessTime: "dateTime",
    Duration: "duration",
    UUID: "guid",
}


def _xml_type(node: ET.Element) -> str:
    """Return the type that an element declares, without its prefix."""
    return node.get(f"{{{INSTANCE}}}type", "").rpartition(":")[2]


# --- writing -----------------------------------------------------------------------------------------------------


def write_rule(rule: RuleDescription, created: int) -> str:
    """Return the elements inside a RuleDescription."""
    return (
        _write_filter(rule.filter)
        + _write_action(rule.action)
        + element("CreatedAt", render_instant(created))
        + element("Name", rule.name)
    )


def _write_action(action: SqlAction | None) -> str:
    if action is None:
        return '<Action i:type="EmptyRuleAction"/>'
    return f'<Action i:type="SqlRuleAction">{_sql_elements(action.expression, action.parameters)}</Action>'


def _write_filter(rule_filter: RuleFilter) -> str:
    match rule_filter:
        case TrueFilter():
            return f'<Filter i:type="TrueFilter">{_sql_elements(TRUE_EXPRESSION, {})}</Filter>'
        case FalseFilter():
            return f'<Filter i:type="FalseFilter">{_sql_elements(FALSE_EXPRESSION, {})}</Filter>'
        case SqlFilter():
            return (
                f'<Filter i:type="SqlFilter">{_sql_elements(rule_filter.expression, rule_filter.parameters)}</Filter>'
            )
        case CorrelationFilter():
            texts = "".join(
                element(name, value)
                for name, field in _CORRELATION_FIELDS
                if (value := getattr(rule_filter, field)) is not None
            )
            properties = _pair_elements("Properties", rule_filter.properties)
            return f'<Filter i:type="CorrelationFilter">{texts}{properties}</Filter>'


def _sql_elements(expression: str, parameters: Mapping[str, Any]) -> str:
    return f"{element('SqlExpression', expression)}{_COMPATIBILITY_LEVEL}{_pair_elements('Parameters', parameters)}"


def _pair_elements(name: str, values: Mapping[str, Any]) -> str:
    """Return the element `name` with keys and values. Returns '' without values: the JavaScript client fails on an
    empty element.
    """
    pairs = "".join(
        f"<KeyValueOfstringanyType>{element('Key', key)}{_write_value(value)}</KeyValueOfstringanyType>"
        for key, value in values.items()
    )
    return f"<{name}>{pairs}</{name}>" if pairs else ""


def _write_value(value: Any) -> str:
    if value is None:
        return '<Value i:nil="true"/>'
    kind = _XML_TYPES.get(type(value), "string")
    # The prefix must have four letters: the Python and the JavaScript client cut off four letters.
    schema = _SERIALIZATION if kind == "guid" else _SCHEMA
    return f'<Value i:type="d6p1:{kind}" xmlns:d6p1="{schema}">{escaped(_value_text(value))}</Value>'


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Timestamp):
        # An AMQP client may set an instant outside of the calendar.
        within = min(max(int(value), _FIRST_INSTANT), _LAST_INSTANT)
        text = (_EPOCH + within * _MILLISECOND).isoformat(timespec="milliseconds").removesuffix("+00:00")
        return text if isinstance(value, ZonelessTime) else f"{text}Z"
    return render_duration(int(value)) if isinstance(value, Duration) else str(value)
