"""Configuration files: reads our own format and the Config.json of Microsoft's emulator, and writes a Config.json.

Our own format is TOML or JSON. Both formats hold namespaces with queues, topics and subscriptions. The properties of
these entities come from the table `engine.entity_properties`: our own format has the names of azure-servicebus
(`lock_duration`), the emulator's format has the same words with capital initials (`LockDuration`).

`parse_config` gets the text of a file and returns the namespaces in that text. It collects all problems of the file,
each problem with its place (`namespaces[0].queues[2].lock_duration: …`), and raises one ConfigError with all problems.
`emulator_config` returns the entities of a namespace as a Config.json, and a list of what that format cannot express.
This module does not open files.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from twinbus.errors import OperatorError
from twinbus.namespace.engine import limits
from twinbus.namespace.engine.descriptions import (
    DEFAULT_RULE,
    FALSE_EXPRESSION,
    TRUE_EXPRESSION,
    AuthorizationRule,
    Claim,
    CorrelationFilter,
    Description,
    EntityStatus,
    FalseFilter,
    QueueDescription,
    RuleDescription,
    RuleFilter,
    SqlAction,
    SqlFilter,
    SubscriptionDescription,
    TopicDescription,
    TrueFilter,
)
from twinbus.namespace.engine.entity_properties import EntityProperty, PropertyType, properties_of
from twinbus.namespace.engine.validation import rule_refusal
from twinbus.namespace.iso8601 import parse_duration, render_duration
from twinbus.namespace.own_names import parse_authority

_LOGGING: Final = ("File", "Console", "File,Console", "Console,File")
_LONGEST_SECONDS: Final = 10_675_199 * 24 * 3600
_INVALID: Final = object()
"""A marker that functions return instead of a value that they reported as a problem."""
_DEFAULT_RULES: Final = (RuleDescription(DEFAULT_RULE),)
_CORRELATION_FIELDS: Final = {
    "ContentType": "content_type",
    "CorrelationId": "correlation_id",
    "Label": "label",
    "MessageId": "message_id",
    "ReplyTo": "reply_to",
    "ReplyToSessionId": "reply_to_session_id",
    "SessionId": "session_id",
    "To": "to",
}
"""Fields of a correlation filter: the name in the emulator's format, and the name in Twinbus."""
# Properties that the emulator's own files always contain. Other properties are written only if they differ from the
# default.
_ALWAYS_WRITTEN: Final = frozenset(
    {
        "DeadLetteringOnMessageExpiration",
        "DefaultMessageTimeToLive",
        "DuplicateDetectionHistoryTimeWindow",
        "ForwardDeadLetteredMessagesTo",
        "ForwardTo",
        "LockDuration",
        "MaxDeliveryCount",
        "RequiresDuplicateDetection",
        "RequiresSession",
    }
)

Rules = tuple[RuleDescription, ...]


class ConfigError(OperatorError):
    """A configuration file has problems. Each problem starts with its place in the file."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceConfig:
    """The configuration of one namespace in a file.

    If `port` is None, the caller chooses a port. If there are no `rules`, the namespace gets the default rule.
    `host_names` are further names that clients may use, each `NAME` or `NAME:PORT` (X3). `requested_by` maps the path
    of an entity, in lower case, to the command-line option that asked for the entity.
    """

    name: str
    port: int | None = None
    rules: tuple[AuthorizationRule, ...] = ()
    entities: tuple[Description, ...] = ()
    ledger: str | None = None
    host_names: tuple[str, ...] = ()
    requested_by: Mapping[str, str] = field(default_factory=dict)


def parse_config(text: str, *, toml: bool, environment: Mapping[str, str]) -> tuple[NamespaceConfig, ...]:
    """Return the namespaces of a file, in the order of the file. Raises ConfigError with all problems of the file.

    `environment` has the environment variables from which the file may take keys.
    """
    try:
        value = tomllib.loads(text) if toml else json.loads(text)
    except ValueError as error:
        raise ConfigError([f"not {'TOML' if toml else 'JSON'}: {error}"]) from None
    problems: list[str] = []
    root = ConfigValue(value, "", problems)
    is_emulator = isinstance(value, dict) and "UserConfig" in value
    namespaces = _emulator_namespaces(root) if is_emulator else _own_namespaces(root, environment)
    if not namespaces and not problems:
        problems.append(f"{'UserConfig.Namespaces' if is_emulator else 'namespaces'}: there is none")
    _report_duplicates(namespaces, problems)
    if problems:
        raise ConfigError(problems)
    return namespaces


@dataclass(frozen=True, slots=True)
class ConfigValue:
    """One value of the file, its place, and the list of problems of the file."""

    value: Any
    place: str
    problems: list[str]

    def report(self, problem: str) -> None:
        self.problems.append(f"{self.place}: {problem}" if self.place else problem)

    def has(self, name: str) -> bool:
        return isinstance(self.value, dict) and self.value.get(name) is not None

    def get(self, name: str) -> ConfigValue:
        """Return the member with this name. If the member is missing, the value of the result is None."""
        value = self.value.get(name) if isinstance(self.value, dict) else None
        return ConfigValue(value, f"{self.place}.{name}" if self.place else name, self.problems)

    def object(self, name: str) -> ConfigValue:
        """Return a member that is an object, or an empty object if the member is missing."""
        member = self.get(name)
        if member.value is not None and not isinstance(member.value, dict):
            member.report("is not an object")
        return member if isinstance(member.value, dict) else ConfigValue({}, member.place, self.problems)

    def objects(self, name: str) -> list[ConfigValue]:
        """Return the members of a list of objects. The result is empty if the list is missing."""
        found = self.get(name)
        if found.value is None:
            return []
        if not isinstance(found.value, list):
            found.report("is not a list")
            return []
        members = [
            ConfigValue(value, f"{found.place}[{index}]", self.problems) for index, value in enumerate(found.value)
        ]
        for member in members:
            if not isinstance(member.value, dict):
                member.report("is not an object")
        return [member for member in members if isinstance(member.value, dict)]

    def text(self, name: str) -> str:
        """Return a member that is a non-empty text."""
        member = self.get(name)
        if not isinstance(member.value, str) or not member.value.strip():
            member.report("a name is needed")
            return "?"
        return member.value

    def allow_only(self, *names: str) -> None:
        """Report every member with another name."""
        if not isinstance(self.value, dict):
            self.report("is not an object")
            return
        for name in self.value:
            if name not in names:
                self.get(name).report(f"is not known here; known are {', '.join(names)}")


# --- our own format --------------------------------------------------------------------------------------------------


def _own_namespaces(root: ConfigValue, environment: Mapping[str, str]) -> tuple[NamespaceConfig, ...]:
    root.allow_only("namespaces")
    return tuple(_own_namespace(namespace, environment) for namespace in root.objects("namespaces"))


def _own_namespace(namespace: ConfigValue, environment: Mapping[str, str]) -> NamespaceConfig:
    namespace.allow_only("name", "port", "ledger", "host_names", "authorization_rules", "queues", "topics")
    entities: list[Description] = []
    for queue in namespace.objects("queues"):
        rules = _authorization_rules(queue, environment)
        settings = _own_properties(queue, QueueDescription, "name", "authorization_rules")
        entities.append(QueueDescription(path=_path(queue, "name"), authorization_rules=rules, **settings))
    for topic in namespace.objects("topics"):
        rules = _authorization_rules(topic, environment)
        settings = _own_properties(topic, TopicDescription, "name", "authorization_rules", "subscriptions")
        path = _path(topic, "name")
        entities.append(TopicDescription(path=path, authorization_rules=rules, **settings))
        for subscription in topic.objects("subscriptions"):
            settings = _own_properties(subscription, SubscriptionDescription, "name", "rules")
            name = _subscription_name(subscription, "name")
            filters = _own_rules(subscription)
            entities.append(SubscriptionDescription(topic=path, name=name, rules=filters, **settings))
    return NamespaceConfig(
        name=_namespace_name(namespace, "name"),
        port=_port(namespace),
        rules=_authorization_rules(namespace, environment),
        entities=tuple(entities),
        ledger=namespace.text("ledger") if namespace.has("ledger") else None,
        host_names=_host_names(namespace.get("host_names")),
    )


def _own_properties(entity: ConfigValue, kind: type[Description], *others: str) -> dict[str, Any]:
    return _properties(entity, {row.config_name: row for row in properties_of(kind) if row.config_name}, *others)


def _own_rules(subscription: ConfigValue) -> Rules:
    """Return the `rules` of a subscription.

    A rule has `sql` or `correlation`, and may have `action` and `parameters`. A rule with neither selects all messages.
    """
    found = []
    for rule in subscription.objects("rules"):
        rule.allow_only("name", "sql", "correlation", "action", "parameters")
        parameters = _plain_values(rule.object("parameters"))
        chosen: RuleFilter = TrueFilter()
        if rule.has("sql") and rule.has("correlation"):
            rule.report("has both sql and correlation: a rule has one filter")
        elif rule.has("sql"):
            chosen = SqlFilter(rule.text("sql"), parameters)
        elif rule.has("correlation"):
            correlation = rule.object("correlation")
            correlation.allow_only(*_CORRELATION_FIELDS.values(), "properties")
            chosen = _correlation(correlation, {name: name for name in _CORRELATION_FIELDS.values()}, "properties")
        action = SqlAction(rule.text("action"), parameters) if rule.has("action") else None
        found.append((rule, RuleDescription(rule.text("name"), chosen, action)))
    return _checked_rules(found, subscription.get("rules"))


def _authorization_rules(owner: ConfigValue, environment: Mapping[str, str]) -> tuple[AuthorizationRule, ...]:
    found: list[AuthorizationRule] = []
    for rule in owner.objects("authorization_rules"):
        rule.allow_only("name", "claims", "primary_key", "secondary_key")
        claims = rule.get("claims")
        names = [claim.value for claim in Claim]
        given = claims.value if isinstance(claims.value, list) else []
        if not given or not all(isinstance(name, str) and name in names for name in given):
            claims.report(f"give a list of {', '.join(names)}")
            given = []
        primary = _key(rule.get("primary_key"), environment)
        if not primary:
            rule.get("primary_key").report('a key is needed: a text, or { environment = "NAME" }')
        secondary = _key(rule.get("secondary_key"), environment)
        found.append(AuthorizationRule(rule.text("name"), primary, secondary, frozenset(map(Claim, given))))
    for name in _repeated(rule.name for rule in found):
        owner.get("authorization_rules").report(f"{name!r} is there twice")
    return tuple(found)


def _key(key: ConfigValue, environment: Mapping[str, str]) -> str:
    """Return a key from the file or from an environment variable. The text of a problem never contains the key."""
    match key.value:
        case None:
            return ""
        case str() as text:
            return text
        case {"environment": str() as name, **rest} if not rest:
            if not environment.get(name):
                key.report(f"the environment variable {name} is not set")
            return environment.get(name) or "?"
        case _:
            key.report('neither a text nor { environment = "NAME" }')
            return "?"


def _host_names(names: ConfigValue) -> tuple[str, ...]:
    given = [] if names.value is None else names.value
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        names.report('give a list of names, as in ["bus.example", "localhost:15672"]')
        return ()
    for name in given:
        try:
            parse_authority(name)
        except ValueError as error:
            names.report(str(error))
    return tuple(given)


def _port(namespace: ConfigValue) -> int | None:
    port = namespace.get("port")
    if port.value is None:
        return None
    if isinstance(port.value, bool) or not isinstance(port.value, int) or not 0 <= port.value <= 65535:
        port.report(f"{port.value!r} is not a port (0 to 65535; 0 takes a free one)")
        return None
    return port.value


# --- the emulator's format -------------------------------------------------------------------------------------------


def _emulator_namespaces(root: ConfigValue) -> tuple[NamespaceConfig, ...]:
    root.allow_only("UserConfig")
    user = root.object("UserConfig")
    user.allow_only("Namespaces", "Logging")
    if user.has("Logging"):
        logging = user.object("Logging")
        logging.allow_only("Type")
        kind = logging.get("Type")
        if kind.value not in _LOGGING:
            kind.report(f"{kind.value!r} is none of {', '.join(map(repr, _LOGGING))}")
    return tuple(_emulator_namespace(namespace) for namespace in user.objects("Namespaces"))


def _emulator_namespace(namespace: ConfigValue) -> NamespaceConfig:
    namespace.allow_only("Name", "Queues", "Topics")
    namespace_name = _namespace_name(namespace, "Name")
    entities: list[Description] = []
    for queue in namespace.objects("Queues"):
        queue.allow_only("Name", "Properties")
        settings = _emulator_properties(queue, QueueDescription)
        entities.append(QueueDescription(path=_path(queue, "Name"), **settings))
    for topic in namespace.objects("Topics"):
        topic.allow_only("Name", "Properties", "Subscriptions")
        path = _path(topic, "Name")
        entities.append(TopicDescription(path=path, **_emulator_properties(topic, TopicDescription)))
        for subscription in topic.objects("Subscriptions"):
            subscription.allow_only("Name", "Properties", "Rules")
            name = _subscription_name(subscription, "Name")
            settings = _emulator_properties(subscription, SubscriptionDescription)
            rules = _emulator_rules(subscription)
            entities.append(SubscriptionDescription(topic=path, name=name, rules=rules, **settings))
    return NamespaceConfig(name=namespace_name, entities=tuple(entities))


def _emulator_properties(entity: ConfigValue, kind: type[Description]) -> dict[str, Any]:
    rows = {row.atom_name: row for row in properties_of(kind) if row.config_name}
    return _properties(entity.object("Properties"), rows)


def _emulator_rules(subscription: ConfigValue) -> Rules:
    found = []
    for rule in subscription.objects("Rules"):
        rule.allow_only("Name", "Properties")
        properties = rule.object("Properties")
        properties.allow_only("FilterType", "SqlFilter", "CorrelationFilter", "Action")
        chosen: RuleFilter = TrueFilter()
        match properties.get("FilterType").value:
            case "Sql":
                sql = properties.object("SqlFilter")
                sql.allow_only("SqlExpression")
                chosen = SqlFilter(sql.text("SqlExpression"))
            case "Correlation":
                correlation = properties.object("CorrelationFilter")
                correlation.allow_only(*_CORRELATION_FIELDS, "Properties")
                chosen = _correlation(correlation, _CORRELATION_FIELDS, "Properties")
            case other:
                properties.get("FilterType").report(f"{other!r} is neither 'Sql' nor 'Correlation'")
        action = None
        if properties.has("Action"):
            properties.object("Action").allow_only("SqlExpression")
            action = SqlAction(properties.object("Action").text("SqlExpression"))
        found.append((rule, RuleDescription(rule.text("Name"), chosen, action)))
    return _checked_rules(found, subscription.get("Rules"))


# --- both formats ----------------------------------------------------------------------------------------------------


def _properties(entity: ConfigValue, rows: Mapping[str, EntityProperty], *others: str) -> dict[str, Any]:
    """Return the fields of the description that the file sets. `others` names members that the caller reads."""
    entity.allow_only(*others, *rows)
    found: dict[str, Any] = {}
    for name, row in rows.items():
        if entity.has(name):
            value = _READERS[row.type](entity.get(name), row)
            if value is not _INVALID:
                found[row.field] = value
    return found


def _duration(given: ConfigValue, row: EntityProperty) -> Any:
    """Return the milliseconds of an ISO 8601 duration or of a number of seconds, or None for the duration "never"."""
    value = given.value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        if isinstance(value, str):
            duration = parse_duration(value)
        elif is_number and 0 <= value < _LONGEST_SECONDS:
            duration = round(value * 1000)
        else:
            raise ValueError(f"{value!r} is neither a duration such as 'PT1M' nor a number of seconds")
    except ValueError as error:
        given.report(str(error))
        return _INVALID
    least, most = row.minimum or 0, row.maximum
    if duration is None and row.type is PropertyType.DURATION_OR_NEVER:
        return None
    if duration is not None and least <= duration and (most is None or duration <= most):
        return duration
    upper = "" if most is None else f" and at most {render_duration(most)}"
    given.report(f"{value!r} is out of range: at least {render_duration(least)}{upper}")
    return _INVALID


def _boolean(given: ConfigValue, _: EntityProperty) -> Any:
    if isinstance(given.value, bool):
        return given.value
    given.report(f"{given.value!r} is neither true nor false")
    return _INVALID


def _integer(given: ConfigValue, row: EntityProperty) -> Any:
    value = given.value
    if row.choices:
        if not isinstance(value, bool) and value in row.choices:
            return value
        given.report(f"{value!r} is none of {', '.join(map(str, row.choices))}")
        return _INVALID
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and (row.minimum is None or value >= row.minimum) and (row.maximum is None or value <= row.maximum):
        return value
    given.report(f"{value!r} is not a whole number from {row.minimum} to {row.maximum}")
    return _INVALID


def _status(given: ConfigValue, _: EntityProperty) -> Any:
    try:
        return EntityStatus(given.value)
    except ValueError:
        given.report(f"{given.value!r} is none of {', '.join(EntityStatus)}")
        return _INVALID


def _text(given: ConfigValue, _: EntityProperty) -> Any:
    if isinstance(given.value, str):
        return given.value
    given.report(f"{given.value!r} is not a text")
    return _INVALID


def _entity_address(given: ConfigValue, _: EntityProperty) -> Any:
    if isinstance(given.value, str):
        return given.value or None  # in the emulator's format an empty text means that there is no target
    given.report(f"{given.value!r} is not the name of a queue or topic")
    return _INVALID


_READERS: Final[Mapping[PropertyType, Callable[[ConfigValue, EntityProperty], Any]]] = {
    PropertyType.DURATION: _duration,
    PropertyType.DURATION_OR_NEVER: _duration,
    PropertyType.BOOLEAN: _boolean,
    PropertyType.INTEGER: _integer,
    PropertyType.TEXT: _text,
    PropertyType.ENTITY_ADDRESS: _entity_address,
    PropertyType.STATUS: _status,
}


def _correlation(given: ConfigValue, fields: Mapping[str, str], properties: str) -> CorrelationFilter:
    texts: dict[str, Any] = {ours: given.text(name) for name, ours in fields.items() if given.has(name)}
    return CorrelationFilter(**texts, properties=_plain_values(given.object(properties)))


def _plain_values(given: ConfigValue) -> dict[str, Any]:
    found = {}
    for name, value in given.value.items():
        if not isinstance(value, str | int | float | bool):
            given.get(name).report(f"{value!r} is neither a text, a number, true nor false")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            given.get(name).report(f"{value} does not fit 64 bits")
        else:
            found[name] = value
    return found


def _checked_rules(found: list[tuple[ConfigValue, RuleDescription]], rules: ConfigValue) -> Rules:
    for name in _repeated(rule.name.lower() for _, rule in found):
        rules.report(f"{name!r} is there twice")
    for given, rule in found:
        refusal = rule_refusal(rule)
        if refusal is not None and rule.name:
            given.report(refusal.description)
    return tuple(rule for _, rule in found) or _DEFAULT_RULES


def _namespace_name(namespace: ConfigValue, key: str) -> str:
    name = namespace.text(key)
    if problem := namespace_name_problem(name):
        namespace.get(key).report(problem)
    return name


def namespace_name_problem(name: str) -> str | None:
    """Return why a namespace cannot have this name, or None if it can. The store's file gets the same name."""
    is_known = name.isascii() and all(character.isalnum() or character == "-" for character in name)
    if is_known and 1 <= len(name) <= 50:
        return None
    return f"{name!r} is not a name of a namespace: up to 50 letters, digits and hyphens"


def _path(entity: ConfigValue, key: str) -> str:
    path = entity.text(key).strip("/")
    if len(path) > limits.MAX_PATH_CHARACTERS:
        entity.get(key).report(f"longer than {limits.MAX_PATH_CHARACTERS} characters")
    return path


def _subscription_name(subscription: ConfigValue, key: str) -> str:
    name = subscription.text(key)
    if len(name) > limits.MAX_SUBSCRIPTION_NAME_CHARACTERS:
        subscription.get(key).report(f"longer than {limits.MAX_SUBSCRIPTION_NAME_CHARACTERS} characters")
    return name


def _report_duplicates(namespaces: tuple[NamespaceConfig, ...], problems: list[str]) -> None:
    seen: set[str] = set()
    for namespace in namespaces:
        paths = [namespace.name, *(f"{namespace.name}/{entity.path}" for entity in namespace.entities)]
        for path in paths:
            if path.lower() in seen:
                problems.append(f"{path}: is there twice; names of queues and topics are not told apart by case")
            seen.add(path.lower())


def _repeated(names: Iterable[str]) -> list[str]:
    """Return each name that occurs more than once, in the order of first occurrence."""
    given = list(names)
    return [name for name in dict.fromkeys(given) if given.count(name) > 1]


# --- writing ---------------------------------------------------------------------------------------------------------


def emulator_config(name: str, descriptions: Iterable[Description]) -> tuple[dict[str, Any], list[str]]:
    """Return the entities as a Config.json of the emulator, and a list of what that format cannot express."""
    lost: list[str] = []
    queues: list[dict[str, Any]] = []
    topics: dict[str, dict[str, Any]] = {}
    subscriptions: list[SubscriptionDescription] = []
    for each in descriptions:
        if isinstance(each, SubscriptionDescription):
            subscriptions.append(each)
            continue
        if each.authorization_rules:
            lost.append(f"{each.path}: its authorization rules, as keys do not belong into such a file")
        entity = {"Name": each.path, "Properties": _written_properties(each)}
        if isinstance(each, QueueDescription):
            queues.append(entity)
        else:
            topics[each.path] = {**entity, "Subscriptions": []}
    for each in subscriptions:
        rules = [_written_rule(each.path, rule, lost) for rule in each.rules]
        if not rules:
            lost.append(f"{each.path}: that it has no rule, for the emulator gives it one that takes everything")
        written = {"Name": each.name, "Properties": _written_properties(each), "Rules": rules}
        topics[each.topic]["Subscriptions"].append(written)
    namespace = {"Name": name, "Queues": queues, "Topics": list(topics.values())}
    return {"UserConfig": {"Namespaces": [namespace], "Logging": {"Type": "File"}}}, lost


def _written_properties(description: Description) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in properties_of(type(description)):
        value = getattr(description, row.field)
        if row.config_name and (row.atom_name in _ALWAYS_WRITTEN or value != row.default):
            found[row.atom_name] = _written_value(row, value)
    return dict(sorted(found.items()))


def _written_value(row: EntityProperty, value: Any) -> Any:
    match row.type:
        case PropertyType.DURATION | PropertyType.DURATION_OR_NEVER:
            return render_duration(value)
        case PropertyType.ENTITY_ADDRESS:
            if value is None:
                return ""
            return value.partition("://")[2].partition("/")[2] if "://" in value else value
        case _:
            return value.value if isinstance(value, Enum) else value


def _written_rule(path: str, rule: RuleDescription, lost: list[str]) -> dict[str, Any]:
    place = f"{path}, rule {rule.name}"
    chosen = rule.filter
    written: dict[str, Any]
    if isinstance(chosen, CorrelationFilter):
        fields = {name: getattr(chosen, ours) for name, ours in _CORRELATION_FIELDS.items()}
        correlation: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        plain = {name: value for name, value in chosen.properties.items() if type(value) in (str, int, float, bool)}
        lost += [f"{place}: the property {name}" for name in chosen.properties if name not in plain]
        if plain:
            correlation["Properties"] = plain
        written = {"FilterType": "Correlation", "CorrelationFilter": correlation}
    else:
        if isinstance(chosen, SqlFilter):
            expression = chosen.expression
            if chosen.parameters:
                lost.append(f"{place}: the parameters of its filter")
        else:
            expression = FALSE_EXPRESSION if isinstance(chosen, FalseFilter) else TRUE_EXPRESSION
        written = {"FilterType": "Sql", "SqlFilter": {"SqlExpression": expression}}
    if rule.action is not None:
        written["Action"] = {"SqlExpression": rule.action.expression}
        if rule.action.parameters:
            lost.append(f"{place}: the parameters of its action")
    return {"Name": rule.name, "Properties": written}
