"""ATOM entries of the management API, read by XML namespace, never by prefix. Bodies are hostile until shown otherwise.

Unknown elements are passed over, as the service does; a value that makes no sense is an AtomError that names it.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

from defusedxml import DefusedXmlException  # type: ignore[import-untyped]  # it ships no types
from defusedxml.ElementTree import DefusedXMLParser  # type: ignore[import-untyped]  # it ships no types

from twinbus.namespace.engine.descriptions import (
    AuthorizationRule,
    Claim,
    Description,
    EntityInfo,
    EntityMessageCounts,
    EntityStatus,
    QueueDescription,
    RuleDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.front.atom_rules import read_rule, write_rule
from twinbus.namespace.front.atom_xml import (
    ATOM,
    COUNTS,
    ILLEGAL,
    INSTANCE,
    KINDS,
    SERVICE_BUS,
    STANDARD_MESSAGE_KILOBYTES,
    AtomElement,
    AtomError,
    ElementType,
)
from twinbus.namespace.iso8601 import parse_duration, render_duration, render_instant

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
class EntityEntry:
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


def read_entry(body: bytes, *, new_key: Callable[[], str]) -> EntityEntry | RuleDescription:
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
    return EntityEntry(
        kind,
        (title.text or "").strip() or None if title is not None else None,
        read.fields,
        read.default_rule,
        read.max_message_kilobytes,
    )


class _Description:
    """The elements of one description, one after the other."""

    def __init__(self, table: dict[str, AtomElement], new_key: Callable[[], str]) -> None:
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
            self.max_message_kilobytes = _read_integer(name, node)
        elif name in self._table:
            self._set(self._table[name], node)

    def _set(self, element: AtomElement, node: ET.Element) -> None:
        if element.value is ElementType.RULES:
            self.fields[element.field] = tuple(
                _read_authorization_rule(child, self._new_key) for child in node if _local(child) == "AuthorizationRule"
            )
        else:
            self.fields[element.field] = _read_value(element, node)


def _read_value(element: AtomElement, node: ET.Element) -> Any:
    match element.value:
        case ElementType.DURATION | ElementType.DURATION_OR_NEVER:
            return _read_duration(element, node)
        case ElementType.BOOLEAN:
            return _read_boolean(element.name, node)
        case ElementType.INTEGER:
            return _read_integer(element.name, node)
        case ElementType.STATUS:
            return _read_status(element.name, node)
        case ElementType.ADDRESS:
            return _text(node).strip() or None
        case ElementType.TEXT | ElementType.RULES:
            return _text(node)


def _read_duration(element: AtomElement, node: ET.Element) -> int | None:
    try:
        duration = parse_duration(_text(node))
    except ValueError as error:
        raise AtomError(f"{element.name}: {error}") from None
    if duration is None and element.value is ElementType.DURATION:
        raise AtomError(f"{element.name} cannot be unlimited")
    return duration


def _read_boolean(name: str, node: ET.Element) -> bool:
    text = _text(node).strip().lower()
    if text not in _BOOLEANS:
        raise AtomError(f"{name}: {text[:50]!r} is neither true nor false")
    return _BOOLEANS[text]


def _read_integer(name: str, node: ET.Element) -> int:
    text = _text(node).strip()
    if not (text.removeprefix("-").isascii() and text.removeprefix("-").isdigit() and len(text) <= _INTEGER_DIGITS):
        raise AtomError(f"{name}: {text[:50]!r} is not a whole number")
    return int(text)


def _read_status(name: str, node: ET.Element) -> EntityStatus:
    text = _text(node).strip()
    for status in EntityStatus:
        if status.value.lower() == text.lower():
            return status
    raise AtomError(f"{name}: {text[:50]!r} is none of {', '.join(EntityStatus)}")


def _read_authorization_rule(node: ET.Element, new_key: Callable[[], str]) -> AuthorizationRule:
    parts = {name: child for child in node if (name := _local(child)) is not None}
    name = _text(parts["KeyName"]).strip() if "KeyName" in parts else ""
    if not name:
        raise AtomError("AuthorizationRule lacks its KeyName")
    claims = frozenset(_read_claim(child) for child in parts.get("Rights", ()) if _local(child) == "AccessRights")
    if not claims:
        raise AtomError(f"AuthorizationRule {name!r} has no AccessRights")
    keys = [_text(parts[key]) if key in parts else "" for key in ("PrimaryKey", "SecondaryKey")]
    return AuthorizationRule(name, keys[0] or new_key(), keys[1] or new_key(), claims)


def _read_claim(node: ET.Element) -> Claim:
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


_DECLARATION: Final = '<?xml version="1.0" encoding="utf-8"?>'
_NAMESPACES: Final = f'xmlns="{SERVICE_BUS}" xmlns:i="{INSTANCE}"'


@dataclass(frozen=True, slots=True)
class EntryUrls:
    """Where entries are: what their ids and links begin and end with."""

    root: str
    api_version: str
    author: str

    def url(self, path: str, *query: str) -> str:
        """The JavaScript client takes names from ids as they stand there: only what would end the path is escaped."""
        escaped = re.sub("[%?#]", lambda found: quote(found[0]), path)
        return f"{self.root}/{escaped}?" + "&".join([*query, f"api-version={quote(self.api_version)}"])


@dataclass(frozen=True, slots=True)
class FeedPage:
    """One page of a list: `skip` entries passed over, at most `top` shown, `more` if others follow."""

    path: str
    title: str
    skip: int
    top: int
    more: bool


def render_entity(info: EntityInfo, place: EntryUrls) -> bytes:
    return _document(_entity_entry(info, place))


def render_entities(infos: Sequence[EntityInfo], page: FeedPage, place: EntryUrls) -> bytes:
    return _feed([_entity_entry(info, place) for info in infos], infos, page, place)


def render_rule(rule: RuleDescription, info: EntityInfo, place: EntryUrls) -> bytes:
    """A rule of the subscription that `info` tells about."""
    return _document(_rule_entry(rule, info, place))


def render_rules(rules: Sequence[RuleDescription], info: EntityInfo, page: FeedPage, place: EntryUrls) -> bytes:
    return _feed([_rule_entry(rule, info, place) for rule in rules], [info], page, place)


def render_namespace(name: str, created: int, place: EntryUrls) -> bytes:
    instant = render_instant(created)
    content = (
        f"<NamespaceInfo {_NAMESPACES}>"
        + _element("CreatedTime", instant)
        + _element("MessagingSKU", "Standard")
        + _element("ModifiedTime", instant)
        + _element("Name", name)
        + _element("NamespaceType", "Messaging")
        + "</NamespaceInfo>"
    )
    return _document(_entry(place.url("$namespaceinfo"), name, created, created, content, place))


def render_error(status: int, detail: str) -> bytes:
    return f"<Error>{_element('Code', str(status))}{_element('Detail', detail)}</Error>".encode()


def _entity_entry(info: EntityInfo, place: EntryUrls) -> str:
    description = info.description
    name, table = KINDS[type(description)]
    inner = "".join(_settable(element, getattr(description, element.field), info) for element in table)
    title = description.name if isinstance(description, SubscriptionDescription) else description.path
    content = f"<{name} {_NAMESPACES}>{inner}{_filled_in(info)}</{name}>"
    return _entry(place.url(description.path), title, info.created, info.updated, content, place)


def _settable(element: AtomElement, value: Any, info: EntityInfo) -> str:
    match element.value:
        case ElementType.DURATION | ElementType.DURATION_OR_NEVER:
            return _element(element.name, render_duration(value))
        case ElementType.BOOLEAN:
            return _boolean_element(element.name, value)
        case ElementType.RULES:
            inner = "".join(_authorization_rule_element(rule, info) for rule in value)
            return f"<{element.name}>{inner}</{element.name}>" if inner else f"<{element.name}/>"
        case ElementType.INTEGER | ElementType.TEXT | ElementType.ADDRESS | ElementType.STATUS:
            return "" if value is None else _element(element.name, str(value))


def _filled_in(info: EntityInfo) -> str:
    """What the service says of an entity that nobody can set."""
    counts = info.counts
    texts = {
        "CreatedAt": render_instant(info.created),
        "UpdatedAt": render_instant(info.updated),
        "AccessedAt": render_instant(info.accessed),
        "EntityAvailabilityStatus": "Available",
    }
    match info.description:
        case QueueDescription():
            texts |= _sized(counts) | {"MessageCount": str(_total(counts)), "SupportOrdering": "true"}
        case SubscriptionDescription():
            texts |= {"MessageCount": str(_total(counts))}
        case TopicDescription():
            texts |= _sized(counts) | {
                "SubscriptionCount": str(info.subscriptions),
                "SqlFilterCount": str(info.sql_filters),
                "CorrelationFilterCount": str(info.correlation_filters),
                "EnableSubscriptionPartitioning": "false",
            }
    return "".join(_element(name, text) for name, text in texts.items()) + _count_details(counts)


def _sized(counts: EntityMessageCounts) -> dict[str, str]:
    return {
        "SizeInBytes": str(counts.size_bytes),
        "IsAnonymousAccessible": "false",
        "MaxMessageSizeInKilobytes": str(STANDARD_MESSAGE_KILOBYTES),
    }


def _total(counts: EntityMessageCounts) -> int:
    return (
        counts.active
        + counts.deferred
        + counts.scheduled
        + counts.dead_letter
        + counts.transfer
        + counts.transfer_dead_letter
    )


def _count_details(counts: EntityMessageCounts) -> str:
    figures = (
        # The service counts deferred messages among the active ones: both wait in the entity itself.
        ("ActiveMessageCount", counts.active + counts.deferred),
        ("DeadLetterMessageCount", counts.dead_letter),
        ("ScheduledMessageCount", counts.scheduled),
        ("TransferDeadLetterMessageCount", counts.transfer_dead_letter),
        ("TransferMessageCount", counts.transfer),
    )
    inner = "".join(_element(f"d2p1:{name}", str(figure)) for name, figure in figures)
    return f'<CountDetails xmlns:d2p1="{COUNTS}">{inner}</CountDetails>'


def _authorization_rule_element(rule: AuthorizationRule, info: EntityInfo) -> str:
    rights = "".join(_element("AccessRights", claim) for claim in sorted(rule.claims))
    return (
        '<AuthorizationRule i:type="SharedAccessAuthorizationRule">'
        + _element("ClaimType", "SharedAccessKey")
        + _element("ClaimValue", "None")
        + f"<Rights>{rights}</Rights>"
        + _element("CreatedTime", render_instant(info.created))
        + _element("ModifiedTime", render_instant(info.updated))
        + _element("KeyName", rule.name)
        + _element("PrimaryKey", rule.primary_key)
        + _element("SecondaryKey", rule.secondary_key)
        + "</AuthorizationRule>"
    )


def _rule_entry(rule: RuleDescription, info: EntityInfo, place: EntryUrls) -> str:
    created = rule.created or info.created  # one from before rules were kept has no instant of its own
    content = f"<RuleDescription {_NAMESPACES}>{write_rule(rule, created)}</RuleDescription>"
    url = place.url(f"{info.description.path}/Rules/{rule.name}")
    return _entry(url, rule.name, created, created, content, place)


def _entry(url: str, title: str, published: int, updated: int, content: str, place: EntryUrls) -> str:
    return (
        f'<entry xmlns="{ATOM}">{_element("id", url)}<title type="text">{_escaped(title)}</title>'
        + _element("published", render_instant(published))
        + _element("updated", render_instant(updated))
        + f"<author>{_element('name', place.author)}</author>"
        + f'<link rel="self" href={quoteattr(url)}/>'
        + f'<content type="application/xml">{content}</content></entry>'
    )


def _feed(entries: Sequence[str], infos: Sequence[EntityInfo], page: FeedPage, place: EntryUrls) -> bytes:
    url = place.url(page.path, f"$skip={page.skip}", f"$top={page.top}")
    # Clients take a second link for the next page: there is none on the last.
    links = f'<link rel="self" href={quoteattr(url)}/>'
    if page.more:
        following = place.url(page.path, f"$skip={page.skip + len(entries)}", f"$top={page.top}")
        links += f'<link rel="next" href={quoteattr(following)}/>'
    return _document(
        f'<feed xmlns="{ATOM}">{_element("id", url)}<title type="text">{_escaped(page.title)}</title>'
        + _element("updated", render_instant(max((info.updated for info in infos), default=0)))
        + f"{links}{''.join(entries)}</feed>"
    )


def _document(inner: str) -> bytes:
    return (_DECLARATION + inner).encode()


def _element(name: str, text: str) -> str:
    return f"<{name}>{_escaped(text)}</{name}>"


def _boolean_element(name: str, value: bool) -> str:
    return _element(name, "true" if value else "false")


def _escaped(text: str) -> str:
    return escape(ILLEGAL.sub("\ufffd", text), {"\r": "&#13;"})
