"""Configuration files, read: our own TOML or JSON, and the Config.json of Microsoft's emulator.

Text and environment come in, namespaces with rules and entities go out; every mistake is told with its exact place.
Nothing here opens a file or starts anything.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
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
from twinbus.namespace.engine.validation import rule_refusal
from twinbus.namespace.iso8601 import parse_duration, render_duration
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
    root = ConfigValue(value, "", problems)
    emulator = isinstance(value, dict) and "UserConfig" in value
    namespaces = _emulator(root) if emulator else _own(root, environment)
    if not namespaces and not problems:
        problems.append(f"{'UserConfig.Namespaces' if emulator else 'namespaces'}: there is none")
    _refuse_same_names(namespaces, problems)
    if problems:
        raise ConfigError(problems)
    return namespaces


def _own(root: ConfigValue, environment: Mapping[str, str]) -> tuple[NamespaceConfig, ...]:
    root.takes("namespaces")
    return tuple(_own_namespace(node, environment) for node in root.objects("namespaces"))


def _own_namespace(node: ConfigValue, environment: Mapping[str, str]) -> NamespaceConfig:
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


def _emulator(root: ConfigValue) -> tuple[NamespaceConfig, ...]:
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


def _emulator_namespace(node: ConfigValue) -> NamespaceConfig:
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


def _emulator_properties(node: ConfigValue, properties: Properties) -> dict[str, Any]:
    return read_properties(node.object("Properties"), properties, emulator_name)


def _rules(node: ConfigValue, environment: Mapping[str, str]) -> tuple[AuthorizationRule, ...]:
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


def _key(node: ConfigValue, environment: Mapping[str, str]) -> str:
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


def _host_names(node: ConfigValue) -> tuple[str, ...]:
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


def _port(node: ConfigValue) -> int | None:
    port = node.get("port")
    if port.value is None:
        return None
    if isinstance(port.value, bool) or not isinstance(port.value, int) or not 0 <= port.value <= 65535:
        port.bad(f"{port.value!r} is not a port (0 to 65535; 0 takes a free one)")
        return None
    return port.value


def _namespace_name(node: ConfigValue, key: str) -> str:
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


def _path(node: ConfigValue, key: str) -> str:
    path = node.text(key).strip("/")
    if len(path) > limits.MAX_PATH_CHARACTERS:
        node.get(key).bad(f"longer than {limits.MAX_PATH_CHARACTERS} characters")
    return path


def _subscription_name(node: ConfigValue, key: str) -> str:
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


_LONGEST_SECONDS: Final = 10_675_199 * 24 * 3600


@dataclass(frozen=True, slots=True)
class ConfigValue:
    """One value of the file with its place, and the list that problems go to."""

    value: Any
    path: str
    problems: list[str]

    def bad(self, text: str) -> None:
        self.problems.append(f"{self.path}: {text}" if self.path else text)

    def has(self, name: str) -> bool:
        return isinstance(self.value, dict) and self.value.get(name) is not None

    def get(self, name: str) -> ConfigValue:
        value = self.value.get(name) if isinstance(self.value, dict) else None
        return ConfigValue(value, f"{self.path}.{name}" if self.path else name, self.problems)

    def object(self, name: str) -> ConfigValue:
        """A member that is an object; an empty one where it is missing."""
        node = self.get(name)
        if node.value is not None and not isinstance(node.value, dict):
            node.bad("is not an object")
        return node if isinstance(node.value, dict) else ConfigValue({}, node.path, self.problems)

    def objects(self, name: str) -> list[ConfigValue]:
        """The members of a list of objects; none where the list is missing."""
        node = self.get(name)
        if node.value is None:
            return []
        if not isinstance(node.value, list):
            node.bad("is not a list")
            return []
        members = [ConfigValue(value, f"{node.path}[{index}]", self.problems) for index, value in enumerate(node.value)]
        for member in members:
            if not isinstance(member.value, dict):
                member.bad("is not an object")
        return [member for member in members if isinstance(member.value, dict)]

    def text(self, name: str) -> str:
        node = self.get(name)
        if not isinstance(node.value, str) or not node.value.strip():
            node.bad("a name is needed")
            return "?"
        return node.value

    def takes(self, *names: str) -> None:
        """Any other member is a problem, by name."""
        if not isinstance(self.value, dict):
            self.bad("is not an object")
            return
        for name in self.value:
            if name not in names:
                self.get(name).bad(f"is not known here; known are {', '.join(names)}")


Read = Callable[[ConfigValue], Any]
# SDK name → (field of the description, how its value is read)
Properties = Mapping[str, tuple[str, Read]]


def own_name(name: str) -> str:
    return name


def emulator_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_"))


def read_properties(
    node: ConfigValue, properties: Properties, spell: Callable[[str], str], *others: str
) -> dict[str, Any]:
    """The fields that the file sets. `others` are members that are read elsewhere."""
    node.takes(*others, *map(spell, properties))
    found: dict[str, Any] = {}
    for name, (attribute, read) in properties.items():
        if not node.has(spell(name)):
            continue
        value = read(node.get(spell(name)))
        if value is not _WRONG:
            found[attribute] = value
    return found


_WRONG: Final = object()


def _span(value: Any) -> int | None:
    """Milliseconds of an ISO 8601 duration or of a number of seconds; None for never. Raises ValueError."""
    if isinstance(value, str):
        return parse_duration(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LONGEST_SECONDS:
        raise ValueError(f"{value!r} is neither a duration such as 'PT1M' nor a number of seconds")
    return round(value * 1000)


def _duration(least: int, most: int | None = None) -> Read:
    """With no upper bound, it may be never."""

    def read(node: ConfigValue) -> Any:
        try:
            span = _span(node.value)
        except ValueError as error:
            node.bad(str(error))
            return _WRONG
        if (span is None and most is None) or (span is not None and least <= span <= (most or span)):
            return span
        upper = "" if most is None else f" and at most {render_duration(most)}"
        node.bad(f"{node.value!r} is out of range: at least {render_duration(least)}{upper}")
        return _WRONG

    return read


def _flag(node: ConfigValue) -> Any:
    if isinstance(node.value, bool):
        return node.value
    node.bad(f"{node.value!r} is neither true nor false")
    return _WRONG


def _delivery_count(node: ConfigValue) -> Any:
    value = node.value
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31:
        return value
    node.bad(f"{value!r} is not a whole number from 1 to {2**31 - 1}")
    return _WRONG


def _megabytes(node: ConfigValue) -> Any:
    if not isinstance(node.value, bool) and node.value in limits.QUEUE_MEGABYTES:
        return node.value
    node.bad(f"{node.value!r} is none of {', '.join(map(str, limits.QUEUE_MEGABYTES))}")
    return _WRONG


def _status(node: ConfigValue) -> Any:
    try:
        return EntityStatus(node.value)
    except ValueError:
        node.bad(f"{node.value!r} is none of {', '.join(EntityStatus)}")
        return _WRONG


def _metadata(node: ConfigValue) -> Any:
    if isinstance(node.value, str):
        return node.value
    node.bad(f"{node.value!r} is not a text")
    return _WRONG


def _target(node: ConfigValue) -> Any:
    if isinstance(node.value, str):
        return node.value or None  # the emulator writes an empty text for "nowhere"
    node.bad(f"{node.value!r} is not the name of a queue or topic")
    return _WRONG


_TTL: Final = ("default_time_to_live", _duration(limits.MIN_TTL))
_IDLE: Final = ("auto_delete_on_idle", _duration(limits.MIN_IDLE_DELETE))
_LOCK: Final = ("lock_duration", _duration(limits.MIN_LOCK, limits.MAX_LOCK))
_WINDOW: Final = ("duplicate_window", _duration(limits.MIN_DUPLICATE_WINDOW, limits.MAX_DUPLICATE_WINDOW))

_EVERYWHERE: Final[Properties] = {
    "default_message_time_to_live": _TTL,
    "auto_delete_on_idle": _IDLE,
    "enable_batched_operations": ("batched_operations", _flag),
    "status": ("status", _status),
    "user_metadata": ("user_metadata", _metadata),
}
_STORING: Final[Properties] = {
    "max_size_in_megabytes": ("max_size_megabytes", _megabytes),
    "requires_duplicate_detection": ("requires_duplicate_detection", _flag),
    "duplicate_detection_history_time_window": _WINDOW,
    "enable_partitioning": ("enable_partitioning", _flag),
    "enable_express": ("enable_express", _flag),
}
_DELIVERING: Final[Properties] = {
    "lock_duration": _LOCK,
    "requires_session": ("requires_session", _flag),
    "max_delivery_count": ("max_delivery_count", _delivery_count),
    "dead_lettering_on_message_expiration": ("dead_lettering_on_expiration", _flag),
    "forward_to": ("forward_to", _target),
    "forward_dead_lettered_messages_to": ("forward_dead_letters_to", _target),
}
QUEUE: Final[Properties] = {**_EVERYWHERE, **_STORING, **_DELIVERING}
TOPIC: Final[Properties] = {**_EVERYWHERE, **_STORING, "support_ordering": ("support_ordering", _flag)}
SUBSCRIPTION: Final[Properties] = {
    **_EVERYWHERE,
    **_DELIVERING,
    "dead_lettering_on_filter_evaluation_exceptions": ("dead_lettering_on_filter_errors", _flag),
}


Rules = tuple[RuleDescription, ...]

_BORN_WITH: Final = (RuleDescription(DEFAULT_RULE),)
EMULATOR_FIELDS: Final = {
    "ContentType": "content_type",
    "CorrelationId": "correlation_id",
    "Label": "label",
    "MessageId": "message_id",
    "ReplyTo": "reply_to",
    "ReplyToSessionId": "reply_to_session_id",
    "SessionId": "session_id",
    "To": "to",
}


def own_rules(subscription: ConfigValue) -> Rules:
    """`rules` of our own dialect: `sql` or `correlation` (neither: everything), `action`, `parameters`."""
    found = []
    for node in subscription.objects("rules"):
        node.takes("name", "sql", "correlation", "action", "parameters")
        parameters = _values(node.object("parameters"))
        chosen: RuleFilter = TrueFilter()
        if node.has("sql") and node.has("correlation"):
            node.bad("has both sql and correlation: a rule has one filter")
        elif node.has("sql"):
            chosen = SqlFilter(node.text("sql"), parameters)
        elif node.has("correlation"):
            inner = node.object("correlation")
            inner.takes(*EMULATOR_FIELDS.values(), "properties")
            chosen = _correlation(inner, {field: field for field in EMULATOR_FIELDS.values()}, "properties")
        action = SqlAction(node.text("action"), parameters) if node.has("action") else None
        found.append((node, RuleDescription(node.text("name"), chosen, action)))
    return _checked(found, subscription.get("rules"))


def emulator_rules(subscription: ConfigValue) -> Rules:
    """`Rules` of the emulator: FilterType Sql or Correlation."""
    found = []
    for node in subscription.objects("Rules"):
        node.takes("Name", "Properties")
        properties = node.object("Properties")
        properties.takes("FilterType", "SqlFilter", "CorrelationFilter", "Action")
        chosen: RuleFilter = TrueFilter()
        match properties.get("FilterType").value:
            case "Sql":
                sql = properties.object("SqlFilter")
                sql.takes("SqlExpression")
                chosen = SqlFilter(sql.text("SqlExpression"))
            case "Correlation":
                correlation = properties.object("CorrelationFilter")
                correlation.takes(*EMULATOR_FIELDS, "Properties")
                chosen = _correlation(correlation, EMULATOR_FIELDS, "Properties")
            case other:
                properties.get("FilterType").bad(f"{other!r} is neither 'Sql' nor 'Correlation'")
        action = None
        if properties.has("Action"):
            properties.object("Action").takes("SqlExpression")
            action = SqlAction(properties.object("Action").text("SqlExpression"))
        found.append((node, RuleDescription(node.text("Name"), chosen, action)))
    return _checked(found, subscription.get("Rules"))


def _correlation(node: ConfigValue, fields: dict[str, str], properties: str) -> CorrelationFilter:
    texts: dict[str, Any] = {field: node.text(name) for name, field in fields.items() if node.has(name)}
    return CorrelationFilter(**texts, properties=_values(node.object(properties)))


def _values(node: ConfigValue) -> dict[str, Any]:
    found = {}
    for name, value in node.value.items():
        if not isinstance(value, str | int | float | bool):
            node.get(name).bad(f"{value!r} is neither a text, a number, true nor false")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            node.get(name).bad(f"{value} does not fit 64 bits")
        else:
            found[name] = value
    return found


def _checked(found: list[tuple[ConfigValue, RuleDescription]], rules: ConfigValue) -> Rules:
    names = [rule.name.lower() for _, rule in found]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        rules.bad(f"{name!r} is there twice")
    for node, rule in found:
        refusal = rule_refusal(rule)
        if refusal is not None and rule.name:
            node.bad(refusal.description)
    return tuple(rule for _, rule in found) or _BORN_WITH


# What the emulator's own file always says; the rest only where it is not what an entity is born with.
_ALWAYS: Final = frozenset(
    {
        "dead_lettering_on_message_expiration",
        "default_message_time_to_live",
        "duplicate_detection_history_time_window",
        "forward_dead_lettered_messages_to",
        "forward_to",
        "lock_duration",
        "max_delivery_count",
        "requires_duplicate_detection",
        "requires_session",
    }
)
_DURATIONS: Final = frozenset({"default_time_to_live", "duplicate_window", "lock_duration", "auto_delete_on_idle"})
_TARGETS: Final = frozenset({"forward_to", "forward_dead_letters_to"})


def emulator_config(name: str, descriptions: Iterable[Description]) -> tuple[dict[str, Any], list[str]]:
    """The file, and what of the namespace it does not say."""
    lost: list[str] = []
    queues: list[dict[str, Any]] = []
    topics: dict[str, dict[str, Any]] = {}
    waiting: list[SubscriptionDescription] = []
    for each in descriptions:
        if isinstance(each, SubscriptionDescription):
            waiting.append(each)
            continue
        if each.authorization_rules:
            lost.append(f"{each.path}: its authorization rules, as keys do not belong into such a file")
        if isinstance(each, QueueDescription):
            queues.append({"Name": each.path, "Properties": _properties(each, QUEUE)})
        else:
            topics[each.path] = {"Name": each.path, "Properties": _properties(each, TOPIC), "Subscriptions": []}
    for each in waiting:
        rules = [_rule(each.path, rule, lost) for rule in each.rules]
        if not rules:
            lost.append(f"{each.path}: that it has no rule, for the emulator gives it one that takes everything")
        told = {"Name": each.name, "Properties": _properties(each, SUBSCRIPTION), "Rules": rules}
        topics[each.topic]["Subscriptions"].append(told)
    namespace = {"Name": name, "Queues": queues, "Topics": list(topics.values())}
    return {"UserConfig": {"Namespaces": [namespace], "Logging": {"Type": "File"}}}, lost


def _properties(description: Description, properties: Properties) -> dict[str, Any]:
    born_with = _born_with(description)
    found: dict[str, Any] = {}
    for name, (attribute, _) in properties.items():
        value = getattr(description, attribute)
        if name in _ALWAYS or value != born_with[attribute]:
            found[emulator_name(name)] = _written(attribute, value)
    return dict(sorted(found.items()))


def _born_with(description: Description) -> dict[str, Any]:
    if isinstance(description, SubscriptionDescription):
        fresh: Description = SubscriptionDescription(topic="", name="")
    else:
        fresh = QueueDescription(path="") if isinstance(description, QueueDescription) else TopicDescription(path="")
    return {field.name: getattr(fresh, field.name) for field in fields(fresh)}


def _written(field: str, value: Any) -> Any:
    if field in _DURATIONS:
        return render_duration(value)
    if field in _TARGETS:
        return "" if value is None else value.partition("://")[2].partition("/")[2] if "://" in value else value
    return value.value if isinstance(value, Enum) else value


def _rule(path: str, rule: RuleDescription, lost: list[str]) -> dict[str, Any]:
    place = f"{path}, rule {rule.name}"
    chosen = rule.filter
    told: dict[str, Any]
    if isinstance(chosen, CorrelationFilter):
        named = {name: getattr(chosen, field) for name, field in EMULATOR_FIELDS.items()}
        correlation: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        plain = {name: value for name, value in chosen.properties.items() if type(value) in (str, int, float, bool)}
        lost += [f"{place}: the property {name}" for name in chosen.properties if name not in plain]
        if plain:
            correlation["Properties"] = plain
        told = {"FilterType": "Correlation", "CorrelationFilter": correlation}
    else:
        if isinstance(chosen, SqlFilter):
            expression = chosen.expression
            if chosen.parameters:
                lost.append(f"{place}: the parameters of its filter")
        else:
            expression = FALSE_EXPRESSION if isinstance(chosen, FalseFilter) else TRUE_EXPRESSION
        told = {"FilterType": "Sql", "SqlFilter": {"SqlExpression": expression}}
    if rule.action is not None:
        told["Action"] = {"SqlExpression": rule.action.expression}
        if rule.action.parameters:
            lost.append(f"{place}: the parameters of its action")
    return {"Name": rule.name, "Properties": told}
