"""ATOM entries of the management API, read by XML namespace, never by prefix. Bodies are hostile until shown otherwise.

Unknown elements are passed over, as the service does; a value that makes no sense is an AtomError that names it.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from defusedxml import DefusedXmlException  # type: ignore[import-untyped]  # it ships no types
from defusedxml.ElementTree import DefusedXMLParser  # type: ignore[import-untyped]  # it ships no types

from twinbus.namespace.engine.descriptions import AuthorizationRule, Claim, Description, EntityStatus
from twinbus.namespace.engine.rules.descriptions import RuleDescription
from twinbus.namespace.front.atom import (
    ATOM,
    INSTANCE,
    KINDS,
    SERVICE_BUS,
    AtomError,
    Element,
    Value,
)
from twinbus.namespace.front.atom_rules import read_rule
from twinbus.namespace.front.durations import parse_duration

_DEEPEST: Final = 32
_MOST_ELEMENTS: Final = 10_000
# The parser writes the URI of a namespace out in every name of a tag or attribute that has its prefix. These bounds
# keep that work in proportion to the body: most bytes from one `<` to the next, and most characters of a name. The
# parser raises an error of the builder only at the end of a chunk, so a chunk is no larger than one tag.
_LONGEST_PIECE: Final = 16 * 1024
_LONGEST_NAME: Final = 1024
_CHUNK: Final = 16 * 1024
_DECLARED_ENCODING: Final = re.compile(r"<\?xml[^>]{0,100}?\bencoding\s{0,9}=\s{0,9}[\"']([A-Za-z0-9._-]+)")
_ENCODINGS: Final = ("utf-8", "us-ascii", "ascii")
_INTEGER_DIGITS: Final = 18
_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}
_BY_NAME: Final = {name: (kind, {element.name: element for element in table}) for kind, (name, table) in KINDS.items()}
_RULE: Final = "RuleDescription"


@dataclass(frozen=True, slots=True)
class Entry:
    """What a client said about an entity: the fields it named, and nothing it left out."""

    kind: type[Description]
    title: str | None
    fields: dict[str, Any] = field(default_factory=dict)
    default_rule: RuleDescription | None = None
    max_message_kilobytes: int | None = None


class _BoundedBuilder(ET.TreeBuilder):
    """Stops a document that is made to exhaust whoever reads it."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._count = 0

    def start(self, tag: str, attrs: dict[str, str], /) -> ET.Element:
        self._depth += 1
        self._count += 1
        if self._depth > _DEEPEST or self._count > _MOST_ELEMENTS:
            raise AtomError("the XML of the request is nested too deep or has too many elements")
        if max(map(len, (tag, *attrs))) > _LONGEST_NAME:
            raise AtomError(f"a name in the XML of the request has more than {_LONGEST_NAME} characters")
        return super().start(tag, attrs)

    def end(self, tag: str, /) -> ET.Element:
        self._depth -= 1
        return super().end(tag)


def read_entry(body: bytes, *, new_key: Callable[[], str]) -> Entry | RuleDescription:
    """An entity's entry, or a rule's. `new_key` makes the keys that a client leaves to the service."""
    root = _parse(body)
    if root.tag != f"{{{ATOM}}}entry":
        raise AtomError("the body is not an ATOM entry")
    content = root.find(f"{{{ATOM}}}content")
    inner = next(iter(content), None) if content is not None else None
    if inner is None:
        raise AtomError("the entry has no content")
    name = _local(inner)
    if name == _RULE:
        return read_rule(inner)
    if name not in _BY_NAME:
        raise AtomError(
            f"the content of the entry is {inner.tag!r}, not a description of a queue, topic, subscription or rule"
        )
    kind, table = _BY_NAME[name]
    title = root.find(f"{{{ATOM}}}title")
    read = _Description(table, new_key)
    for child in inner:
        read.take(child)
    return Entry(
        kind,
        (title.text or "").strip() or None if title is not None else None,
        read.fields,
        read.default_rule,
        read.max_message_kilobytes,
    )


class _Description:
    """The elements of one description, one after the other."""

    def __init__(self, table: dict[str, Element], new_key: Callable[[], str]) -> None:
        self._table = table
        self._new_key = new_key
        self._seen: set[str] = set()
        self.fields: dict[str, Any] = {}
        self.default_rule: RuleDescription | None = None
        self.max_message_kilobytes: int | None = None

    def take(self, node: ET.Element) -> None:
        name = _local(node)
        if name is None or node.get(f"{{{INSTANCE}}}nil") == "true":
            return
        if name in self._seen:
            raise AtomError(f"{name} is there twice")
        self._seen.add(name)
        if name == "DefaultRuleDescription":
            self.default_rule = read_rule(node)
        elif name == "MaxMessageSizeInKilobytes":
            self.max_message_kilobytes = _integer(name, node)
        elif name in self._table:
            self._set(self._table[name], node)

    def _set(self, element: Element, node: ET.Element) -> None:
        if element.value is Value.RULES:
            self.fields[element.field] = tuple(
                _authorization_rule(child, self._new_key) for child in node if _local(child) == "AuthorizationRule"
            )
        else:
            self.fields[element.field] = _value(element, node)


def _value(element: Element, node: ET.Element) -> Any:
    match element.value:
        case Value.DURATION | Value.DURATION_OR_NEVER:
            return _duration(element, node)
        case Value.BOOLEAN:
            return _boolean(element.name, node)
        case Value.INTEGER:
            return _integer(element.name, node)
        case Value.STATUS:
            return _status(element.name, node)
        case Value.ADDRESS:
            return _text(node).strip() or None
        case Value.TEXT | Value.RULES:
            return _text(node)


def _duration(element: Element, node: ET.Element) -> int | None:
    try:
        duration = parse_duration(_text(node))
    except ValueError as error:
        raise AtomError(f"{element.name}: {error}") from None
    if duration is None and element.value is Value.DURATION:
        raise AtomError(f"{element.name} cannot be unlimited")
    return duration


def _boolean(name: str, node: ET.Element) -> bool:
    text = _text(node).strip().lower()
    if text not in _BOOLEANS:
        raise AtomError(f"{name}: {text[:50]!r} is neither true nor false")
    return _BOOLEANS[text]


def _integer(name: str, node: ET.Element) -> int:
    text = _text(node).strip()
    if not (text.removeprefix("-").isascii() and text.removeprefix("-").isdigit() and len(text) <= _INTEGER_DIGITS):
        raise AtomError(f"{name}: {text[:50]!r} is not a whole number")
    return int(text)


def _status(name: str, node: ET.Element) -> EntityStatus:
    text = _text(node).strip()
    for status in EntityStatus:
        if status.value.lower() == text.lower():
            return status
    raise AtomError(f"{name}: {text[:50]!r} is none of {', '.join(EntityStatus)}")


def _authorization_rule(node: ET.Element, new_key: Callable[[], str]) -> AuthorizationRule:
    parts = {name: child for child in node if (name := _local(child)) is not None}
    name = _text(parts["KeyName"]).strip() if "KeyName" in parts else ""
    if not name:
        raise AtomError("AuthorizationRule lacks its KeyName")
    claims = frozenset(_claim(child) for child in parts.get("Rights", ()) if _local(child) == "AccessRights")
    if not claims:
        raise AtomError(f"AuthorizationRule {name!r} has no AccessRights")
    keys = [_text(parts[key]) if key in parts else "" for key in ("PrimaryKey", "SecondaryKey")]
    return AuthorizationRule(name, keys[0] or new_key(), keys[1] or new_key(), claims)


def _claim(node: ET.Element) -> Claim:
    try:
        return Claim(_text(node).strip())
    except ValueError:
        raise AtomError(f"AccessRights: {_text(node)[:50]!r} is none of {', '.join(Claim)}") from None


def _text(node: ET.Element) -> str:
    return node.text or ""


def _local(node: ET.Element) -> str | None:
    namespace, _, name = node.tag.rpartition("}")
    return name if namespace == "{" + SERVICE_BUS else None


def _parse(body: bytes) -> ET.Element:
    if max(map(len, body.split(b"<"))) > _LONGEST_PIECE:
        raise AtomError(f"a tag or text in the XML of the request has more than {_LONGEST_PIECE} bytes")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise AtomError("the body is not XML in UTF-8") from None
    declared = _DECLARED_ENCODING.match(text)
    if declared is not None and declared[1].lower() not in _ENCODINGS:
        raise AtomError(f"the XML of the request declares the encoding {declared[1][:50]!r}; send UTF-8")
    parser = DefusedXMLParser(target=_BoundedBuilder(), forbid_dtd=True)
    try:
        # Text, not bytes: the parser then ignores the encoding that the document declares. In another encoding the
        # bytes of `<` would mean something else, and the check above would miss a long tag.
        for start in range(0, len(text), _CHUNK):
            parser.feed(text[start : start + _CHUNK])
        root: ET.Element = parser.close()
    except AtomError:
        raise
    except DefusedXmlException:
        raise AtomError("the XML of the request may not define entities or a document type") from None
    except (ET.ParseError, ValueError) as error:
        raise AtomError(f"the body is not well-formed XML: {error}") from None
    return root
