"""Queues, topics and subscriptions as ATOM documents of the management API: reads entries, writes entries and feeds.

The engine's table of entity properties maps each XML element to a field of a description, and gives their order.
This module adds the elements that only the service sets, such as counts and timestamps.

A reader ignores unknown elements, as the service does. For a value that cannot be read, it raises an AtomError that
names the element.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

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
    path_of_address,
)
from twinbus.namespace.engine.entity_properties import EntityProperty, PropertyType, properties_of
from twinbus.namespace.front.atom_rules import read_rule, write_rule
from twinbus.namespace.front.atom_xml import (
    ATOM,
    COUNTS,
    INSTANCE,
    SERVICE_BUS,
    AtomError,
    children,
    element,
    escaped,
    is_nil,
    local_name,
    parse_xml,
    text_of,
)
from twinbus.namespace.iso8601 import parse_duration, render_duration, render_instant

STANDARD_MESSAGE_KILOBYTES: Final = 256
"""The size of the largest message in a namespace of the standard tier, in kilobytes."""

_MAX_INTEGER_DIGITS: Final = 18
_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}
_KINDS: Final[tuple[type[Description], ...]] = (QueueDescription, TopicDescription, SubscriptionDescription)
_KINDS_BY_NAME: Final = {kind.__name__: kind for kind in _KINDS}
_PROPERTIES: Final = {kind: {row.atom_name: row for row in properties_of(kind)} for kind in _KINDS}
_DECLARATION: Final = '<?xml version="1.0" encoding="utf-8"?>'
_NAMESPACES: Final = f'xmlns="{SERVICE_BUS}" xmlns:i="{INSTANCE}"'


# --- reading -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EntityEntry:
    """The entry of an entity in a request: only the fields that the client set."""

    kind: type[Description]
    title: str | None
    fields: dict[str, Any] = field(default_factory=dict)
    default_rule: RuleDescription | None = None
    max_message_kilobytes: int | None = None


def read_entry(body: bytes, *, new_key: Callable[[], str]) -> EntityEntry | RuleDescription:
    """Return the entity or rule that a request body describes. Raises AtomError.

    `new_key` makes the keys of authorization rules for which the client sent no key.
    """
    root = parse_xml(body)
    if root.tag != f"{{{ATOM}}}entry":
        raise AtomError("the body is not an ATOM entry")
    content = root.find(f"{{{ATOM}}}content")
    inner = next(iter(content), None) if content is not None else None
    if inner is None:
        raise AtomError("the entry has no content")
    name = local_name(inner)
    if name == RuleDescription.__name__:
        return read_rule(inner)
    if name not in _KINDS_BY_NAME:
        raise AtomError(
            f"the content of the entry is {inner.tag!r}, not a description of a queue, topic, subscription or rule"
        )
    kind = _KINDS_BY_NAME[name]
    reader = _DescriptionReader(_PROPERTIES[kind], new_key)
    for child in inner:
        reader.read(child)
    title = text_of(root.find(f"{{{ATOM}}}title")).strip() or None
    return EntityEntry(kind, title, reader.fields, reader.default_rule, reader.max_message_kilobytes)


class _DescriptionReader:
    """Collects the elements of one description."""

    def __init__(self, properties: dict[str, EntityProperty], new_key: Callable[[], str]) -> None:
        self._properties = properties
        self._new_key = new_key
        self._seen: set[str] = set()
        self.fields: dict[str, Any] = {}
        self.default_rule: RuleDescription | None = None
        self.max_message_kilobytes: int | None = None

    def read(self, node: ET.Element) -> None:
        name = local_name(node)
        if name is None or is_nil(node):
            return
        if name in self._seen:
            raise AtomError(f"{name} is there twice")
        self._seen.add(name)
        if name == "DefaultRuleDescription":
            self.default_rule = read_rule(node)
        elif name == "MaxMessageSizeInKilobytes":
            self.max_message_kilobytes = _read_integer(name, node)
        elif (row := self._properties.get(name)) is not None:
            self.fields[row.field] = self._value(row, node)

    def _value(self, row: EntityProperty, node: ET.Element) -> Any:
        match row.type:
            case PropertyType.DURATION | PropertyType.DURATION_OR_NEVER:
                return _read_duration(row, node)
            case PropertyType.BOOLEAN:
                return _read_boolean(row.atom_name, node)
            case PropertyType.INTEGER:
                return _read_integer(row.atom_name, node)
            case PropertyType.STATUS:
                return _read_status(row.atom_name, node)
            case PropertyType.ENTITY_ADDRESS:
                return text_of(node).strip() or None
            case PropertyType.TEXT:
                return text_of(node)
            case PropertyType.AUTHORIZATION_RULES:
                rules = [child for child in node if local_name(child) == "AuthorizationRule"]
                return tuple(_read_authorization_rule(rule, self._new_key) for rule in rules)


def _read_duration(row: EntityProperty, node: ET.Element) -> int | None:
    try:
        duration = parse_duration(text_of(node))
    except ValueError as error:
        raise AtomError(f"{row.atom_name}: {error}") from None
    if duration is None and row.type is PropertyType.DURATION:
        raise AtomError(f"{row.atom_name} cannot be unlimited")
    return duration


def _read_boolean(name: str, node: ET.Element) -> bool:
    text = text_of(node).strip().lower()
    if text not in _BOOLEANS:
        raise AtomError(f"{name}: {text[:50]!r} is neither true nor false")
    return _BOOLEANS[text]


def _read_integer(name: str, node: ET.Element) -> int:
    text = text_of(node).strip()
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(text) <= _MAX_INTEGER_DIGITS):
        raise AtomError(f"{name}: {text[:50]!r} is not a whole number")
    return int(text)


def _read_status(name: str, node: ET.Element) -> EntityStatus:
    text = text_of(node).strip()
    for status in EntityStatus:
        if status.value.lower() == text.lower():
            return status
    raise AtomError(f"{name}: {text[:50]!r} is none of {', '.join(EntityStatus)}")


def _read_authorization_rule(node: ET.Element, new_key: Callable[[], str]) -> AuthorizationRule:
    parts = children(node)
    name = text_of(parts.get("KeyName")).strip()
    if not name:
        raise AtomError("AuthorizationRule lacks its KeyName")
    claims = frozenset(_read_claim(child) for child in parts.get("Rights", ()) if local_name(child) == "AccessRights")
    if not claims:
        raise AtomError(f"AuthorizationRule {name!r} has no AccessRights")
    primary, secondary = text_of(parts.get("PrimaryKey")), text_of(parts.get("SecondaryKey"))
    return AuthorizationRule(name, primary or new_key(), secondary or new_key(), claims)


def _read_claim(node: ET.Element) -> Claim:
    try:
        return Claim(text_of(node).strip())
    except ValueError:
        raise AtomError(f"AccessRights: {text_of(node)[:50]!r} is none of {', '.join(Claim)}") from None


# --- writing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EntryUrls:
    """Builds the URLs in ids and links of entries."""

    root: str
    api_version: str
    author: str
    """The name of the namespace, which every entry names as its author."""

    def url(self, path: str, *query: str) -> str:
        """Return the URL of a path. Escapes only the characters that would end the path, because the JavaScript client
        does not decode the names that it reads from ids.
        """
        escaped_path = re.sub("[%?#]", lambda found: quote(found[0]), path)
        return f"{self.root}/{escaped_path}?" + "&".join([*query, f"api-version={quote(self.api_version)}"])

    def address(self, address: str) -> str:
        """Return the address of an entity under the name of the namespace that the request used.

        The host in a stored address may be out of date: a local namespace may have got another port. A client signs the
        token for the target of a forward with this address.
        """
        return f"sb://{self.root.partition('://')[2]}/{path_of_address(address)}"


@dataclass(frozen=True, slots=True)
class FeedPage:
    """One page of a list: starts after `skip` entries, has at most `top` entries. `more` is True if a page follows."""

    path: str
    title: str
    skip: int
    top: int
    more: bool


def render_entity(info: EntityInfo, urls: EntryUrls) -> bytes:
    """Return the entry of an entity."""
    return _document(_entity_entry(info, urls))


def render_entities(infos: Sequence[EntityInfo], page: FeedPage, urls: EntryUrls) -> bytes:
    """Return a feed of entities."""
    return _feed([_entity_entry(info, urls) for info in infos], infos, page, urls)


def render_rule(rule: RuleDescription, info: EntityInfo, urls: EntryUrls) -> bytes:
    """Return the entry of a rule. `info` describes the subscription of the rule."""
    return _document(_rule_entry(rule, info, urls))


def render_rules(rules: Sequence[RuleDescription], info: EntityInfo, page: FeedPage, urls: EntryUrls) -> bytes:
    """Return a feed of rules. `info` describes the subscription of the rules."""
    return _feed([_rule_entry(rule, info, urls) for rule in rules], [info], page, urls)


def render_namespace(name: str, created: int, urls: EntryUrls) -> bytes:
    """Return the entry that describes the namespace itself."""
    instant = render_instant(created)
    content = (
        f"<NamespaceInfo {_NAMESPACES}>"
        + element("CreatedTime", instant)
        + element("MessagingSKU", "Standard")
        + element("ModifiedTime", instant)
        + element("Name", name)
        + element("NamespaceType", "Messaging")
        + "</NamespaceInfo>"
    )
    return _document(_entry(urls.url("$namespaceinfo"), name, created, created, content, urls))


def _entity_entry(info: EntityInfo, urls: EntryUrls) -> str:
    description = info.description
    name = type(description).__name__
    properties = "".join(
        _property_element(row, getattr(description, row.field), info, urls) for row in properties_of(type(description))
    )
    title = description.name if isinstance(description, SubscriptionDescription) else description.path
    content = f"<{name} {_NAMESPACES}>{properties}{_read_only_elements(info)}</{name}>"
    return _entry(urls.url(description.path), title, info.created, info.updated, content, urls)


def _property_element(row: EntityProperty, value: Any, info: EntityInfo, urls: EntryUrls) -> str:
    match row.type:
        case PropertyType.DURATION | PropertyType.DURATION_OR_NEVER:
            return element(row.atom_name, render_duration(value))
        case PropertyType.BOOLEAN:
            return element(row.atom_name, "true" if value else "false")
        case PropertyType.AUTHORIZATION_RULES:
            rules = "".join(_authorization_rule_element(rule, info) for rule in value)
            return f"<{row.atom_name}>{rules}</{row.atom_name}>" if rules else f"<{row.atom_name}/>"
        case PropertyType.ENTITY_ADDRESS:
            return "" if value is None else element(row.atom_name, urls.address(value))
        case PropertyType.INTEGER | PropertyType.TEXT | PropertyType.STATUS:
            return "" if value is None else element(row.atom_name, str(value))


def _read_only_elements(info: EntityInfo) -> str:
    """Return the elements that clients cannot set."""
    counts = info.counts
    texts = {
        "CreatedAt": render_instant(info.created),
        "UpdatedAt": render_instant(info.updated),
        "AccessedAt": render_instant(info.accessed),
        "EntityAvailabilityStatus": "Available",
    }
    match info.description:
        case QueueDescription():
            texts |= _size_texts(counts) | {"MessageCount": str(_total(counts)), "SupportOrdering": "true"}
        case SubscriptionDescription():
            texts |= {"MessageCount": str(_total(counts))}
        case TopicDescription():
            texts |= _size_texts(counts) | {
                "SubscriptionCount": str(info.subscriptions),
                "SqlFilterCount": str(info.sql_filters),
                "CorrelationFilterCount": str(info.correlation_filters),
                "EnableSubscriptionPartitioning": "false",
            }
    return "".join(element(name, text) for name, text in texts.items()) + _count_details(counts)


def _size_texts(counts: EntityMessageCounts) -> dict[str, str]:
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
        # The service counts deferred messages as active, because they are in the entity itself and not in a sub-queue.
        ("ActiveMessageCount", counts.active + counts.deferred),
        ("DeadLetterMessageCount", counts.dead_letter),
        ("ScheduledMessageCount", counts.scheduled),
        ("TransferDeadLetterMessageCount", counts.transfer_dead_letter),
        ("TransferMessageCount", counts.transfer),
    )
    # The JavaScript client expects exactly one `xmlns:` attribute here.
    inner = "".join(element(f"d2p1:{name}", str(figure)) for name, figure in figures)
    return f'<CountDetails xmlns:d2p1="{COUNTS}">{inner}</CountDetails>'


def _authorization_rule_element(rule: AuthorizationRule, info: EntityInfo) -> str:
    rights = "".join(element("AccessRights", claim) for claim in sorted(rule.claims))
    return (
        '<AuthorizationRule i:type="SharedAccessAuthorizationRule">'
        + element("ClaimType", "SharedAccessKey")
        + element("ClaimValue", "None")
        + f"<Rights>{rights}</Rights>"
        + element("CreatedTime", render_instant(info.created))
        + element("ModifiedTime", render_instant(info.updated))
        + element("KeyName", rule.name)
        + element("PrimaryKey", rule.primary_key)
        + element("SecondaryKey", rule.secondary_key)
        + "</AuthorizationRule>"
    )


def _rule_entry(rule: RuleDescription, info: EntityInfo, urls: EntryUrls) -> str:
    created = rule.created or info.created  # rules that old versions stored have no creation time
    content = f"<RuleDescription {_NAMESPACES}>{write_rule(rule, created)}</RuleDescription>"
    url = urls.url(f"{info.description.path}/Rules/{rule.name}")
    return _entry(url, rule.name, created, created, content, urls)


def _entry(url: str, title: str, published: int, updated: int, content: str, urls: EntryUrls) -> str:
    return (
        f'<entry xmlns="{ATOM}">{element("id", url)}<title type="text">{escaped(title)}</title>'
        + element("published", render_instant(published))
        + element("updated", render_instant(updated))
        + f"<author>{element('name', urls.author)}</author>"
        + f'<link rel="self" href={quoteattr(url)}/>'
        + f'<content type="application/xml">{content}</content></entry>'
    )


def _feed(entries: Sequence[str], infos: Sequence[EntityInfo], page: FeedPage, urls: EntryUrls) -> bytes:
    url = urls.url(page.path, f"$skip={page.skip}", f"$top={page.top}")
    links = f'<link rel="self" href={quoteattr(url)}/>'
    if page.more:  # clients read any second link as the link to the next page
        following = urls.url(page.path, f"$skip={page.skip + len(entries)}", f"$top={page.top}")
        links += f'<link rel="next" href={quoteattr(following)}/>'
    return _document(
        f'<feed xmlns="{ATOM}">{element("id", url)}<title type="text">{escaped(page.title)}</title>'
        + element("updated", render_instant(max((info.updated for info in infos), default=0)))
        + f"{links}{''.join(entries)}</feed>"
    )


def _document(content: str) -> bytes:
    return (_DECLARATION + content).encode()
