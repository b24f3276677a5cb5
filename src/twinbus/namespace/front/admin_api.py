"""The management API: creates, updates, deletes and lists entities and rules, as ATOM documents over HTTP.

`HttpHandler` checks the token of a request before it calls this module. This module has the tokens checked that a
request carries for the targets of forwards.

An update replaces the whole description, as in the service: properties that the request leaves out return to their
defaults. Properties that cannot change after creation keep their values.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeVar

from twinbus.namespace.engine.descriptions import (
    DEFAULT_RULE,
    AuthorizationRule,
    Description,
    EntityInfo,
    QueueDescription,
    RuleDescription,
    SubscriptionDescription,
    TopicDescription,
    path_of_address,
)
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.engine.entity_properties import FIXED_FIELDS, PROPERTY_BY_FIELD
from twinbus.namespace.engine.events import Event, RuleAdded, RuleChanged, RuleRemoved
from twinbus.namespace.front.atom_entities import (
    STANDARD_MESSAGE_KILOBYTES,
    EntityEntry,
    EntryUrls,
    FeedPage,
    read_entry,
    render_entities,
    render_entity,
    render_namespace,
    render_rule,
    render_rules,
)
from twinbus.namespace.front.atom_xml import AtomError
from twinbus.namespace.front.http_messages import HttpRequest, HttpResponse, error_response, method_not_allowed
from twinbus.values import Condition

T = TypeVar("T")

ENTRY_TYPE: Final = "application/atom+xml;type=entry;charset=utf-8"
FEED_TYPE: Final = "application/atom+xml;type=feed;charset=utf-8"

_API_VERSION: Final = "2021-05"
# The fields that name another entity, and the headers with the token for that entity.
_FORWARD_HEADERS: Final = {
    "forward_to": "ServiceBusSupplementaryAuthorization",
    "forward_dead_letters_to": "ServiceBusDlqSupplementaryAuthorization",
}
_MAX_PAGE: Final = 100
_MAX_DIGITS: Final = 9
_KEY_BYTES: Final = 32
_STATUS: Final = {
    Condition.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Condition.ENTITY_ALREADY_EXISTS: HTTPStatus.CONFLICT,
    Condition.ARGUMENT_ERROR: HTTPStatus.BAD_REQUEST,
    Condition.ARGUMENT_OUT_OF_RANGE: HTTPStatus.BAD_REQUEST,
    Condition.NOT_ALLOWED: HTTPStatus.BAD_REQUEST,
    Condition.NOT_IMPLEMENTED: HTTPStatus.BAD_REQUEST,
    Condition.UNAUTHORIZED_ACCESS: HTTPStatus.UNAUTHORIZED,
    Condition.RESOURCE_LIMIT_EXCEEDED: HTTPStatus.FORBIDDEN,
    Condition.PRECONDITION_FAILED: HTTPStatus.PRECONDITION_FAILED,
    Condition.SERVER_BUSY: HTTPStatus.SERVICE_UNAVAILABLE,
    Condition.TIMEOUT: HTTPStatus.SERVICE_UNAVAILABLE,
}


# --- routes ---------------------------------------------------------------------------------------------------------


class ResourceKind(Enum):
    """Kinds of resources that the management API has."""

    ROOT = "root"
    NAMESPACE = "$namespaceinfo"
    QUEUES = "queues"
    TOPICS = "topics"
    ENTITY = "entity"
    SUBSCRIPTIONS = "subscriptions"
    SUBSCRIPTION = "subscription"
    RULES = "rules"
    RULE = "rule"
    UNKNOWN = "unknown"


_CHANGEABLE: Final = (ResourceKind.ENTITY, ResourceKind.SUBSCRIPTION, ResourceKind.RULE)
_NAMESPACE_RESOURCES: Final = {
    ("$namespaceinfo",): ResourceKind.NAMESPACE,
    ("$resources", "queues"): ResourceKind.QUEUES,
    ("$resources", "topics"): ResourceKind.TOPICS,
}


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """The resource that a path means.

    `entity` is the queue or topic whose authorization rules apply; '' for resources of the namespace.
    """

    kind: ResourceKind
    resource: str
    entity: str = ""
    subscription: str = ""
    rule: str = ""

    @property
    def path(self) -> str:
        """The path of the entity or subscription in the engine."""
        return f"{self.entity}/Subscriptions/{self.subscription}" if self.subscription else self.entity


def find_route(segments: tuple[str, ...]) -> AdminRoute:
    """Return the resource that the segments of a path mean. The resource need not exist.

    Names of queues and topics may contain slashes, names of subscriptions and rules may not. The fixed words of a path
    may have any case.
    """
    resource = "/".join(segments)
    if not segments:
        return AdminRoute(ResourceKind.ROOT, resource)
    words = tuple(segment.lower() for segment in segments)
    if words[0].startswith("$"):
        return AdminRoute(_NAMESPACE_RESOURCES.get(words, ResourceKind.UNKNOWN), resource)
    match words:
        case (_, *_, "subscriptions", _, "rules", _):
            return AdminRoute(ResourceKind.RULE, resource, "/".join(segments[:-4]), segments[-3], segments[-1])
        case (_, *_, "subscriptions", _, "rules"):
            return AdminRoute(ResourceKind.RULES, resource, "/".join(segments[:-3]), segments[-2])
        case (_, *_, "subscriptions", _):
            return AdminRoute(ResourceKind.SUBSCRIPTION, resource, "/".join(segments[:-2]), segments[-1])
        case (_, *_, "subscriptions"):
            return AdminRoute(ResourceKind.SUBSCRIPTIONS, resource, "/".join(segments[:-1]))
        case _:
            return AdminRoute(ResourceKind.ENTITY, resource, resource)


# --- the API --------------------------------------------------------------------------------------------------------


class EntityDirectory(Protocol):
    """The entities of a namespace."""

    def info(self, path: str) -> EntityInfo | None: ...
    def queues(self) -> Sequence[EntityInfo]: ...
    def topics(self) -> Sequence[EntityInfo]: ...
    def subscriptions(self, topic: str) -> Sequence[EntityInfo]: ...


class NamespaceAdministration(Protocol):
    """A running namespace. Its methods return once a change is on disk."""

    @property
    def namespace(self) -> EntityDirectory: ...
    async def create(self, description: Description) -> EntityInfo | Refusal: ...
    async def update(self, description: Description) -> EntityInfo | Refusal: ...
    async def delete(self, path: str) -> EntityInfo | Refusal: ...
    async def ask(self, path: str, event: Callable[[Callable[[Any], None]], Event]) -> Any: ...
    def now(self) -> int: ...


class TokenCheck(Protocol):
    """Returns why the token in a header does not let the caller manage a resource, or None if it does.

    `rules` are the authorization rules of the entity that owns the resource.
    """

    def __call__(
        self, request: HttpRequest, resource: str, rules: tuple[AuthorizationRule, ...], header: str
    ) -> str | None: ...


class _RefusedError(Exception):
    """Ends a request with an error response."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.response = error_response(status, detail)


class AdminApi:
    """The management API of one namespace."""

    def __init__(self, name: str, administration: NamespaceAdministration, check_token: TokenCheck) -> None:
        self._name = name
        self._administration = administration
        self._check_token = check_token
        self._created = administration.now()

    @property
    def _entities(self) -> EntityDirectory:
        return self._administration.namespace

    def rules(self, route: AdminRoute) -> tuple[AuthorizationRule, ...]:
        """Return the authorization rules of the entity of a route, without the rules of the namespace."""
        return self._rules_of(route.entity)

    def _rules_of(self, entity: str) -> tuple[AuthorizationRule, ...]:
        info = self._entities.info(entity) if entity else None
        if info is None or isinstance(info.description, SubscriptionDescription):
            return ()
        return info.description.authorization_rules

    def descriptions(self) -> list[Description]:
        """Return the descriptions of all entities, a topic before its subscriptions."""
        found = [*self._entities.queues()]
        for topic in self._entities.topics():
            found += [topic, *self._entities.subscriptions(topic.description.path)]
        return [info.description for info in found]

    async def answer(self, request: HttpRequest, route: AdminRoute) -> HttpResponse:
        """Return the response to a request."""
        if route.kind is ResourceKind.UNKNOWN:
            return error_response(HTTPStatus.NOT_FOUND, f"there is no resource {route.resource!r}")
        if route.kind is ResourceKind.ROOT:
            return error_response(HTTPStatus.BAD_REQUEST, "the name of the entity is empty")
        if request.method == "GET":
            handle = self._get
        elif request.method == "PUT" and route.kind in _CHANGEABLE:
            handle = self._put
        elif request.method == "DELETE" and route.kind in _CHANGEABLE:
            handle = self._delete
        else:
            return method_not_allowed(request.method, "GET, PUT, DELETE" if route.kind in _CHANGEABLE else "GET")
        try:
            _check_names(route)
            return await handle(request, route)
        except _RefusedError as refused:
            return refused.response

    async def _get(self, request: HttpRequest, route: AdminRoute) -> HttpResponse:
        urls = self._urls(request)
        match route.kind:
            case ResourceKind.NAMESPACE:
                return HttpResponse(HTTPStatus.OK, render_namespace(self._name, self._created, urls), ENTRY_TYPE)
            case ResourceKind.QUEUES:
                return _entities_feed(self._entities.queues(), request, route, urls)
            case ResourceKind.TOPICS:
                return _entities_feed(self._entities.topics(), request, route, urls)
            case ResourceKind.SUBSCRIPTIONS:
                self._require_topic(route)
                return _entities_feed(self._entities.subscriptions(route.entity), request, route, urls)
            case ResourceKind.RULES:
                return _rules_feed(self._subscription(route), request, route, urls)
            case ResourceKind.RULE:
                return self._rule_response(HTTPStatus.OK, route, urls)
            case _:
                return HttpResponse(HTTPStatus.OK, render_entity(self._find(route), urls), ENTRY_TYPE)

    async def _put(self, request: HttpRequest, route: AdminRoute) -> HttpResponse:
        is_new = _is_new(request)
        status = HTTPStatus.CREATED if is_new else HTTPStatus.OK
        if route.kind is ResourceKind.RULE:
            rule_event, rule = RuleAdded if is_new else RuleChanged, _read_rule(request, route)
            _unless_refused(await self._administration.ask(route.path, lambda reply: rule_event(reply, rule)))
            return self._rule_response(status, route, self._urls(request))
        entry = _read_entity(request, route)
        self._check_forward_targets(entry, request)
        if is_new:
            done = await self._administration.create(_new_description(entry, route))
        else:
            done = await self._administration.update(_updated_description(entry, self._find(route).description))
        return HttpResponse(status, render_entity(_unless_refused(done), self._urls(request)), ENTRY_TYPE)

    def _check_forward_targets(self, entry: EntityEntry, request: HttpRequest) -> None:
        """Check that the caller may manage the entities to which the described entity forwards (X4).

        As in the service, each target needs a token of its own, in every request that names the target. The check comes
        before the target is looked up, so that callers without the claim do not learn which entities exist.
        """
        for field, header in _FORWARD_HEADERS.items():
            address = entry.fields.get(field)
            if not address:
                continue
            path = path_of_address(address)
            refused = self._check_token(request, path, self._rules_of(path), header)
            if refused is not None:
                name = PROPERTY_BY_FIELD[field].atom_name
                raise _RefusedError(HTTPStatus.UNAUTHORIZED, f"{name} {path!r}: {refused}")

    async def _delete(self, request: HttpRequest, route: AdminRoute) -> HttpResponse:
        if route.kind is ResourceKind.RULE:
            _unless_refused(await self._administration.ask(route.path, lambda reply: RuleRemoved(reply, route.rule)))
        else:
            _unless_refused(await self._administration.delete(route.path))
        return HttpResponse(HTTPStatus.OK)

    def _rule_response(self, status: HTTPStatus, route: AdminRoute, urls: EntryUrls) -> HttpResponse:
        info, rules = self._subscription(route)
        for rule in rules:
            if rule.name.lower() == route.rule.lower():
                return HttpResponse(status, render_rule(rule, info, urls), ENTRY_TYPE)
        raise _RefusedError(HTTPStatus.NOT_FOUND, f"the subscription {route.path!r} has no rule {route.rule!r}")

    def _subscription(self, route: AdminRoute) -> tuple[EntityInfo, tuple[RuleDescription, ...]]:
        """Return the subscription of a route, and its rules."""
        info = self._find(route)
        assert isinstance(info.description, SubscriptionDescription), "no other entity has such a path"
        return info, info.description.rules

    def _find(self, route: AdminRoute) -> EntityInfo:
        info = self._entities.info(route.path)
        if info is None:
            raise _RefusedError(HTTPStatus.NOT_FOUND, f"the messaging entity {route.path!r} could not be found")
        return info

    def _require_topic(self, route: AdminRoute) -> None:
        if not isinstance(self._find(route).description, TopicDescription):
            raise _RefusedError(HTTPStatus.NOT_FOUND, f"{route.entity!r} is not a topic")

    def _urls(self, request: HttpRequest) -> EntryUrls:
        return EntryUrls(f"https://{request.authority}", request.query.get("api-version") or _API_VERSION, self._name)


def _check_names(route: AdminRoute) -> None:
    for name in (route.resource, route.entity, route.subscription, route.rule):
        if any(not character.isprintable() for character in name):
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"{name!r} holds characters that a name cannot have")


def _is_new(request: HttpRequest) -> bool:
    """Return whether a PUT creates a resource. A PUT with `If-Match: *` updates a resource."""
    condition = request.headers.get("if-match")
    if condition is not None and condition.strip() != "*":
        raise _RefusedError(HTTPStatus.PRECONDITION_FAILED, f"If-Match: {condition} is not understood: only * is")
    return condition is None


def _read_body(request: HttpRequest) -> EntityEntry | RuleDescription:
    if not request.body:
        raise _RefusedError(HTTPStatus.BAD_REQUEST, "the request has no body")
    try:
        return read_entry(request.body, new_key=_new_key)
    except AtomError as wrong:
        raise _RefusedError(HTTPStatus.BAD_REQUEST, str(wrong)) from None


def _read_rule(request: HttpRequest, route: AdminRoute) -> RuleDescription:
    """Return the rule in the body. The rule gets the name in the URL; the body may leave the name out."""
    rule = _read_body(request)
    if not isinstance(rule, RuleDescription):
        raise _RefusedError(HTTPStatus.BAD_REQUEST, f"the description in the body does not fit {route.resource!r}")
    if rule.name.lower() not in (route.rule.lower(), DEFAULT_RULE.lower()):
        raise _RefusedError(HTTPStatus.BAD_REQUEST, f"the rule is named {rule.name!r}, but the URL says {route.rule!r}")
    return replace(rule, name=route.rule)


def _read_entity(request: HttpRequest, route: AdminRoute) -> EntityEntry:
    """Return the entry in the body, checked against the URL and against the limits of a standard namespace."""
    entry = _read_body(request)
    is_subscription = route.kind is ResourceKind.SUBSCRIPTION
    if isinstance(entry, RuleDescription) or (entry.kind is SubscriptionDescription) is not is_subscription:
        raise _RefusedError(HTTPStatus.BAD_REQUEST, f"the description in the body does not fit {route.resource!r}")
    name = route.subscription if is_subscription else route.entity
    if entry.title is not None and entry.title.lower() != name.lower():
        raise _RefusedError(HTTPStatus.BAD_REQUEST, f"the entry is titled {entry.title!r}, but the URL says {name!r}")
    if entry.max_message_kilobytes not in (None, STANDARD_MESSAGE_KILOBYTES):
        raise _RefusedError(
            HTTPStatus.BAD_REQUEST,
            "MaxMessageSizeInKilobytes can be set in a premium namespace only; this is a standard one",
        )
    return entry


def _new_description(entry: EntityEntry, route: AdminRoute) -> Description:
    if entry.kind is SubscriptionDescription:
        described = SubscriptionDescription(topic=route.entity, name=route.subscription, **entry.fields)
        return described if entry.default_rule is None else replace(described, rules=(entry.default_rule,))
    return (
        TopicDescription(path=route.entity, **entry.fields)
        if entry.kind is TopicDescription
        else QueueDescription(path=route.entity, **entry.fields)
    )


def _updated_description(entry: EntityEntry, before: Description) -> Description:
    if entry.kind is not type(before):
        raise _RefusedError(HTTPStatus.BAD_REQUEST, f"{before.path!r} is of another kind than the body describes")
    kept = {name: getattr(before, name) for name in FIXED_FIELDS if hasattr(before, name)}
    fields: dict[str, Any] = kept | entry.fields
    if isinstance(before, SubscriptionDescription):
        return SubscriptionDescription(topic=before.topic, name=before.name, **fields)
    return replace(type(before)(path=before.path), **fields)


def _entities_feed(
    infos: Sequence[EntityInfo], request: HttpRequest, route: AdminRoute, urls: EntryUrls
) -> HttpResponse:
    shown, page = _page(infos, request, route)
    return HttpResponse(HTTPStatus.OK, render_entities(shown, page, urls), FEED_TYPE)


def _rules_feed(
    found: tuple[EntityInfo, Sequence[RuleDescription]], request: HttpRequest, route: AdminRoute, urls: EntryUrls
) -> HttpResponse:
    info, rules = found
    shown, page = _page(rules, request, route)
    return HttpResponse(HTTPStatus.OK, render_rules(shown, info, page, urls), FEED_TYPE)


def _page(items: Sequence[T], request: HttpRequest, route: AdminRoute) -> tuple[Sequence[T], FeedPage]:
    skip = _read_number(request, "$skip", 0)
    top = _read_number(request, "$top", _MAX_PAGE)
    if top == 0:
        raise _RefusedError(HTTPStatus.BAD_REQUEST, "$top is 0: a page has at least one entry")
    shown = items[skip : skip + min(top, _MAX_PAGE)]
    return shown, FeedPage(route.resource, route.kind.value.capitalize(), skip, top, skip + len(shown) < len(items))


def _read_number(request: HttpRequest, name: str, default: int) -> int:
    text = request.query.get(name, "") or str(default)
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise _RefusedError(HTTPStatus.BAD_REQUEST, f"{name}: {text[:50]!r} is not a whole number from 0")
    return int(text)


def _unless_refused(done: T | Refusal) -> T:
    if isinstance(done, Refusal):
        raise _RefusedError(_STATUS.get(done.condition, HTTPStatus.INTERNAL_SERVER_ERROR), done.description)
    return done


def _new_key() -> str:
    return base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()
