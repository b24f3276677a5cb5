"""Configuration files, read: our own TOML or JSON, and the Config.json of Microsoft's emulator.

Text and environment come in, namespaces with rules and entities go out; every mistake is told with its exact place.
Nothing here opens a file or starts anything.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from twinbus.errors import OperatorError
from twinbus.namespace.config_properties import (
    QUEUE,
    SUBSCRIPTION,
    TOPIC,
    Node,
    Properties,
    emulator_name,
    own_name,
    read_properties,
)
from twinbus.namespace.config_rules import emulator_rules, own_rules
from twinbus.namespace.engine import limits
from twinbus.namespace.engine.descriptions import (
    AuthorizationRule,
    Claim,
    Description,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.own_names import parse_authority

_LOGGING: Final = ("File", "Console", "File,Console", "Console,File")


class ConfigError(OperatorError):
    """A file that cannot be taken; each problem begins with its place in the file."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceConfig:
    """What a file says about one namespace. No port: the caller chooses. No rules: the default rule.

    `host_names` are further names that clients may use, each `NAME` or `NAME:PORT` (X3). `requested_by` has the option
    that asked for an entity, by the entity's path in lower case.
    """

    name: str
    port: int | None = None
    rules: tuple[AuthorizationRule, ...] = ()
    entities: tuple[Description, ...] = ()
    ledger: str | None = None
    host_names: tuple[str, ...] = ()
    requested_by: Mapping[str, str] = field(default_factory=dict)


def parse_config(text: str, *, toml: bool, environment: Mapping[str, str]) -> tuple[NamespaceConfig, ...]:
    """The namespaces of a file, in its order; raises ConfigError with all that is wrong."""
    try:
        value = tomllib.loads(text) if toml else json.loads(text)
    except ValueError as error:
        raise ConfigError([f"not {'TOML' if toml else 'JSON'}: {error}"]) from None
    problems: list[str] = []
    root = Node(value, "", problems)
    emulator = isinstance(value, dict) and "UserConfig" in value
    namespaces = _emulator(root) if emulator else _own(root, environment)
    if not namespaces and not problems:
        problems.append(f"{'UserConfig.Namespaces' if emulator else 'namespaces'}: there is none")
    _refuse_same_names(namespaces, problems)
    if problems:
        raise ConfigError(problems)
    return namespaces


def _own(root: Node, environment: Mapping[str, str]) -> tuple[NamespaceConfig, ...]:
    root.takes("namespaces")
    return tuple(_own_namespace(node, environment) for node in root.objects("namespaces"))


def _own_namespace(node: Node, environment: Mapping[str, str]) -> NamespaceConfig:
    node.takes("name", "port", "ledger", "host_names", "authorization_rules", "queues", "topics")
    entities: list[Description] = []
    for queue in node.objects("queues"):
        rules = _rules(queue, environment)
        settings = read_properties(queue, QUEUE, own_name, "name", "authorization_rules")
        entities.append(QueueDescription(path=_path(queue, "name"), authorization_rules=rules, **settings))
    for topic in node.objects("topics"):
        rules = _rules(topic, environment)
        settings = read_properties(topic, TOPIC, own_name, "name", "authorization_rules", "subscriptions")
        path = _path(topic, "name")
        entities.append(TopicDescription(path=path, authorization_rules=rules, **settings))
        for subscription in topic.objects("subscriptions"):
            settings = read_properties(subscription, SUBSCRIPTION, own_name, "name", "rules")
            name = _subscription_name(subscription, "name")
            filters = own_rules(subscription)
            entities.append(SubscriptionDescription(topic=path, name=name, rules=filters, **settings))
    return NamespaceConfig(
        name=_namespace_name(node, "name"),
        port=_port(node),
        rules=_rules(node, environment),
        entities=tuple(entities),
        ledger=node.text("ledger") if node.has("ledger") else None,
        host_names=_host_names(node.get("host_names")),
    )


def _emulator(root: Node) -> tuple[NamespaceConfig, ...]:
    root.takes("UserConfig")
    user = root.object("UserConfig")
    user.takes("Namespaces", "Logging")
    if user.has("Logging"):
        logging = user.object("Logging")
        logging.takes("Type")
        kind = logging.get("Type")
        if kind.value not in _LOGGING:
            kind.bad(f"{kind.value!r} is none of {', '.join(map(repr, _LOGGING))}")
    return tuple(_emulator_namespace(node) for node in user.objects("Namespaces"))


def _emulator_namespace(node: Node) -> NamespaceConfig:
    node.takes("Name", "Queues", "Topics")
    name = _namespace_name(node, "Name")
    entities: list[Description] = []
    for queue in node.objects("Queues"):
        queue.takes("Name", "Properties")
        entities.append(QueueDescription(path=_path(queue, "Name"), **_emulator_properties(queue, QUEUE)))
    for topic in node.objects("Topics"):
        topic.takes("Name", "Properties", "Subscriptions")
        path = _path(topic, "Name")
        entities.append(TopicDescription(path=path, **_emulator_properties(topic, TOPIC)))
        for subscription in topic.objects("Subscriptions"):
            subscription.takes("Name", "Properties", "Rules")
            called = _subscription_name(subscription, "Name")
            settings = _emulator_properties(subscription, SUBSCRIPTION)
            rules = emulator_rules(subscription)
            entities.append(SubscriptionDescription(topic=path, name=called, rules=rules, **settings))
    return NamespaceConfig(name=name, entities=tuple(entities))


def _emulator_properties(node: Node, properties: Properties) -> dict[str, Any]:
    return read_properties(node.object("Properties"), properties, emulator_name)


def _rules(node: Node, environment: Mapping[str, str]) -> tuple[AuthorizationRule, ...]:
    found: list[AuthorizationRule] = []
    for rule in node.objects("authorization_rules"):
        rule.takes("name", "claims", "primary_key", "secondary_key")
        claims = rule.get("claims")
        names = [claim.value for claim in Claim]
        given = claims.value if isinstance(claims.value, list) else []
        if not given or not all(isinstance(name, str) and name in names for name in given):
            claims.bad(f"give a list of {', '.join(names)}")
            given = []
        primary = _key(rule.get("primary_key"), environment)
        if not primary:
            rule.get("primary_key").bad('a key is needed: a text, or { environment = "NAME" }')
        secondary = _key(rule.get("secondary_key"), environment)
        found.append(AuthorizationRule(rule.text("name"), primary, secondary, frozenset(map(Claim, given))))
    names = [rule.name for rule in found]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        node.get("authorization_rules").bad(f"{name!r} is there twice")
    return tuple(found)


def _key(node: Node, environment: Mapping[str, str]) -> str:
    """A key's text, also from the environment so that it need not stand in the file. No message ever shows it."""
    match node.value:
        case None:
            return ""
        case str() as key:
            return key
        case {"environment": str() as name, **rest} if not rest:
            if not environment.get(name):
                node.bad(f"the environment variable {name} is not set")
            return environment.get(name) or "?"
        case _:
            node.bad('neither a text nor { environment = "NAME" }')
            return "?"


def _host_names(node: Node) -> tuple[str, ...]:
    given = [] if node.value is None else node.value
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        node.bad('give a list of names, as in ["bus.example", "localhost:15672"]')
        return ()
    for name in given:
        try:
            parse_authority(name)
        except ValueError as wrong:
            node.bad(str(wrong))
    return tuple(given)


def _port(node: Node) -> int | None:
    port = node.get("port")
    if port.value is None:
        return None
    if isinstance(port.value, bool) or not isinstance(port.value, int) or not 0 <= port.value <= 65535:
        port.bad(f"{port.value!r} is not a port (0 to 65535; 0 takes a free one)")
        return None
    return port.value


def _namespace_name(node: Node, key: str) -> str:
    name = node.text(key)
    if fault := namespace_name_fault(name):
        node.get(key).bad(fault)
    return name


def namespace_name_fault(name: str) -> str | None:
    """Why a namespace cannot be called so; its name is also that of its file."""
    if (
        name
        and name.isascii()
        and all(character.isalnum() or character == "-" for character in name)
        and len(name) <= 50
    ):
        return None
    return f"{name!r} is not a name of a namespace: up to 50 letters, digits and hyphens"


def _path(node: Node, key: str) -> str:
    path = node.text(key).strip("/")
    if len(path) > limits.MAX_PATH_CHARACTERS:
        node.get(key).bad(f"longer than {limits.MAX_PATH_CHARACTERS} characters")
    return path


def _subscription_name(node: Node, key: str) -> str:
    name = node.text(key)
    if len(name) > limits.MAX_SUBSCRIPTION_NAME_CHARACTERS:
        node.get(key).bad(f"longer than {limits.MAX_SUBSCRIPTION_NAME_CHARACTERS} characters")
    return name


def _refuse_same_names(namespaces: tuple[NamespaceConfig, ...], problems: list[str]) -> None:
    seen: set[str] = set()
    for namespace in namespaces:
        paths = [namespace.name, *(f"{namespace.name}/{entity.path}" for entity in namespace.entities)]
        for path in paths:
            if path.lower() in seen:
                problems.append(f"{path}: is there twice; names of queues and topics are not told apart by case")
            seen.add(path.lower())
