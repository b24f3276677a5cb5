"""ATOM entries, feeds and errors of the management API, written.

Prefixes are part of the contract: the JavaScript client looks for `i:type` by that very name and wants the counts
under exactly one `xmlns:` attribute. Built as text for that reason.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

from twinbus.namespace.engine.descriptions import (
    AuthorizationRule,
    Counts,
    EntityInfo,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.rules.descriptions import RuleDescription
from twinbus.namespace.front.atom import (
    ATOM,
    COUNTS,
    ILLEGAL,
    INSTANCE,
    KINDS,
    SERVICE_BUS,
    STANDARD_MESSAGE_KILOBYTES,
    Element,
    Value,
)
from twinbus.namespace.front.atom_rules import write_rule
from twinbus.namespace.front.durations import render_duration, render_instant

_DECLARATION: Final = '<?xml version="1.0" encoding="utf-8"?>'
_NAMESPACES: Final = f'xmlns="{SERVICE_BUS}" xmlns:i="{INSTANCE}"'


@dataclass(frozen=True, slots=True)
class Place:
    """Where entries are: what their ids and links begin and end with."""

    root: str
    api_version: str
    author: str

    def url(self, path: str, *query: str) -> str:
        """The JavaScript client takes names from ids as they stand there: only what would end the path is escaped."""
        escaped = re.sub("[%?#]", lambda found: quote(found[0]), path)
        return f"{self.root}/{escaped}?" + "&".join([*query, f"api-version={quote(self.api_version)}"])


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list: `skip` entries passed over, at most `top` shown, `more` if others follow."""

    path: str
    title: str
    skip: int
    top: int
    more: bool


def render_entity(info: EntityInfo, place: Place) -> bytes:
    return _document(_entity(info, place))


def render_entities(infos: Sequence[EntityInfo], page: Page, place: Place) -> bytes:
    return _feed([_entity(info, place) for info in infos], infos, page, place)


def render_rule(rule: RuleDescription, info: EntityInfo, place: Place) -> bytes:
    """A rule of the subscription that `info` tells about."""
    return _document(_rule(rule, info, place))


def render_rules(rules: Sequence[RuleDescription], info: EntityInfo, page: Page, place: Place) -> bytes:
    return _feed([_rule(rule, info, place) for rule in rules], [info], page, place)


def render_namespace(name: str, created: int, place: Place) -> bytes:
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


def _entity(info: EntityInfo, place: Place) -> str:
    description = info.description
    name, table = KINDS[type(description)]
    inner = "".join(_settable(element, getattr(description, element.field), info) for element in table)
    title = description.name if isinstance(description, SubscriptionDescription) else description.path
    content = f"<{name} {_NAMESPACES}>{inner}{_filled_in(info)}</{name}>"
    return _entry(place.url(description.path), title, info.created, info.updated, content, place)


def _settable(element: Element, value: Any, info: EntityInfo) -> str:
    match element.value:
        case Value.DURATION | Value.DURATION_OR_NEVER:
            return _element(element.name, render_duration(value))
        case Value.BOOLEAN:
            return _boolean(element.name, value)
        case Value.RULES:
            inner = "".join(_authorization_rule(rule, info) for rule in value)
            return f"<{element.name}>{inner}</{element.name}>" if inner else f"<{element.name}/>"
        case Value.INTEGER | Value.TEXT | Value.ADDRESS | Value.STATUS:
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


def _sized(counts: Counts) -> dict[str, str]:
    return {
        "SizeInBytes": str(counts.size_bytes),
        "IsAnonymousAccessible": "false",
        "MaxMessageSizeInKilobytes": str(STANDARD_MESSAGE_KILOBYTES),
    }


def _total(counts: Counts) -> int:
    return (
        counts.active
        + counts.deferred
        + counts.scheduled
        + counts.dead_letter
        + counts.transfer
        + counts.transfer_dead_letter
    )


def _count_details(counts: Counts) -> str:
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


def _authorization_rule(rule: AuthorizationRule, info: EntityInfo) -> str:
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


def _rule(rule: RuleDescription, info: EntityInfo, place: Place) -> str:
    created = rule.created or info.created  # one from before rules were kept has no instant of its own
    content = f"<RuleDescription {_NAMESPACES}>{write_rule(rule, created)}</RuleDescription>"
    url = place.url(f"{info.description.path}/Rules/{rule.name}")
    return _entry(url, rule.name, created, created, content, place)


def _entry(url: str, title: str, published: int, updated: int, content: str, place: Place) -> str:
    return (
        f'<entry xmlns="{ATOM}">{_element("id", url)}<title type="text">{_escaped(title)}</title>'
        + _element("published", render_instant(published))
        + _element("updated", render_instant(updated))
        + f"<author>{_element('name', place.author)}</author>"
        + f'<link rel="self" href={quoteattr(url)}/>'
        + f'<content type="application/xml">{content}</content></entry>'
    )


def _feed(entries: Sequence[str], infos: Sequence[EntityInfo], page: Page, place: Place) -> bytes:
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


def _boolean(name: str, value: bool) -> str:
    return _element(name, "true" if value else "false")


def _escaped(text: str) -> str:
    return escape(ILLEGAL.sub("\ufffd", text), {"\r": "&#13;"})
