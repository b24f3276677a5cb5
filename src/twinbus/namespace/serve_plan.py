"""Makes the plan of a server from command-line options and a configuration file. Starts nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from twinbus.errors import OperatorError
from twinbus.namespace.config import ConfigError, NamespaceConfig, namespace_name_problem, parse_config
from twinbus.namespace.engine.descriptions import (
    Description,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.validation import new_entity_refusal
from twinbus.namespace.identity import DEFAULT_AUDIENCE, IdentityOptions, KeySetError, parse_key_set
from twinbus.namespace.own_names import parse_authority
from twinbus.namespace.resources import ResourceLimits

DEFAULT_NAMESPACES: Final = ("primary=5672", "secondary=5673")
DEFAULT_DATA: Final = Path("twinbus-data")
_FIRST_PORT: Final = 5672
# Where clients of Service Bus find a namespace.
AMQPS_PORT: Final = 5671
HTTPS_PORT: Final = 443
AZURE_DOMAIN: Final = "servicebus.windows.net"
_LABEL: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class AzureNames:
    """What `--azure-names` and `--azure-ports` ask for: the namespace of each host name, and the two ports."""

    namespaces: Mapping[str, str]
    amqps_port: int = AMQPS_PORT
    https_port: int = HTTPS_PORT


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan:
    """The namespaces that a server runs. Every namespace has a port. If `data` is None, all data is only in memory."""

    host: str
    data: Path | None
    namespaces: tuple[NamespaceConfig, ...]
    limits: ResourceLimits = field(default_factory=ResourceLimits)
    accept_damage: bool = False
    azure: AzureNames | None = None
    identity: IdentityOptions | None = None

    @property
    def keys(self) -> list[str]:
        """All keys of the plan. The logs must not contain these keys."""
        rules = [rule for found in self.namespaces for rule in found.rules]
        return [key for rule in rules for key in (rule.primary_key, rule.secondary_key)]


def make_serve_plan(
    *,
    data: Path | None,
    memory: bool,
    namespaces: Sequence[str],
    host: str,
    config: Path | None,
    ledger: Path | None = None,
    host_names: Sequence[str] = (),
    limits: ResourceLimits | None = None,
    queues: Sequence[str] = (),
    topics: Sequence[str] = (),
    accept_damage: bool = False,
    azure_names: Sequence[str] = (),
    azure_ports: str | None = None,
    jwks: Path | None = None,
    audiences: Sequence[str] = (),
    issuers: Sequence[str] = (),
) -> ServePlan:
    """Return the plan. Raises OperatorError for options that are invalid or contradict each other.

    Each of `namespaces` is NAME=PORT. `ledger` and `host_names` apply to all namespaces. Each of `queues` is NAME, each
    of `topics` is NAME or NAME/SUBSCRIPTION. These entities are created in the first namespace, or with NAMESPACE:NAME
    in another namespace. With `accept_damage`, damaged stores are rebuilt from what is intact. Each of `azure_names` is
    NAME=NAMESPACE; `azure_ports` is `AMQPS,HTTPS`. `jwks` is a file with the public keys whose JSON web tokens are
    accepted for these `audiences`, and from these `issuers` only if there are any.
    """
    if memory and data is not None:
        raise OperatorError("--data and --memory exclude each other", "Leave one of them out.")
    planned = {found.name: found for found in _read(config)} if config is not None else {}
    for index, (name, found) in enumerate(planned.items()):
        if found.port is None:
            planned[name] = replace(found, port=_FIRST_PORT + index)
    for text in namespaces or (() if planned else DEFAULT_NAMESPACES):
        name, port = _named_port(text)
        planned[name] = replace(planned.get(name, NamespaceConfig(name=name)), port=port)
    if ledger is not None:
        planned = {name: replace(found, ledger=str(ledger)) for name, found in planned.items()}
    if host_names:
        _check_host_names(host_names)
        planned = {
            name: replace(found, host_names=tuple(dict.fromkeys([*host_names, *found.host_names])))
            for name, found in planned.items()
        }
    for option, form, texts, read in (
        ("--queue", "NAME", queues, _queue),
        ("--topic", "NAME[/SUBSCRIPTION]", topics, _topic),
    ):
        hint = f"Write {option} {form} or {option} NAMESPACE:{form}."
        for text in texts:
            of, _, path = text.rpartition(":")
            name = of or next(iter(planned))
            if name not in planned:
                raise OperatorError(
                    f"{option} {text}: there is no namespace {name!r}", f"Choose from {', '.join(planned)}."
                )
            planned[name] = _with_entities(planned[name], read(path), f"{option} {text}", hint)
    for found in planned.values():
        sharing = [other.name for other in planned.values() if found.port and other.port == found.port]
        if len(sharing) > 1:
            raise OperatorError(
                f"Port {found.port} is given to several namespaces: {', '.join(sharing)}", "Each needs its own."
            )
    return ServePlan(
        host=host,
        data=None if memory else data or DEFAULT_DATA,
        namespaces=tuple(planned.values()),
        limits=limits or ResourceLimits(),
        accept_damage=accept_damage,
        azure=_azure(azure_names, azure_ports, list(planned)),
        identity=_identity(jwks, audiences, issuers),
    )


def _azure(names: Sequence[str], ports: str | None, namespaces: Sequence[str]) -> AzureNames | None:
    """Return the names in Azure, in full: contoso becomes contoso.servicebus.windows.net."""
    hint = "Write NAME=NAMESPACE, as in contoso=primary."
    found: dict[str, str] = {}
    for text in names:
        name, _, namespace = text.partition("=")
        host = name.strip().lower().removesuffix(".")
        if "." not in host:
            host = f"{host}.{AZURE_DOMAIN}"
        if len(host) > 253 or not all(map(_LABEL.fullmatch, host.split("."))):
            raise OperatorError(f"--azure-names {text}: {name!r} is not a name of a namespace in Azure", hint)
        if namespace not in namespaces:
            raise OperatorError(
                f"--azure-names {text}: there is no namespace {namespace!r}", f"{hint} Here: {', '.join(namespaces)}."
            )
        if found.setdefault(host, namespace) != namespace:
            raise OperatorError(f"--azure-names: {host} is given to {found[host]} and to {namespace}", "Leave one out.")
    if ports is not None and not found:
        raise OperatorError("--azure-ports needs --azure-names", hint)
    if not found:
        return None
    if ports is None:
        return AzureNames(found)
    parts = ports.split(",")
    if len(parts) != 2 or not all(one.isascii() and one.isdigit() and int(one) <= 65535 for one in parts):
        raise OperatorError(
            f"--azure-ports {ports} is not two ports", "Write AMQPS,HTTPS, as in 15671,10443; 0 is a free port."
        )
    return AzureNames(found, int(parts[0]), int(parts[1]))


def _identity(jwks: Path | None, audiences: Sequence[str], issuers: Sequence[str]) -> IdentityOptions | None:
    if jwks is None:
        if audiences or issuers:
            raise OperatorError("--audience and --issuer need --jwks", "Give the file with the issuer's public keys.")
        return None
    try:
        keys = parse_key_set(jwks.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"--jwks: {jwks} cannot be read: {error}") from error
    except KeySetError as error:
        raise OperatorError(
            f"--jwks: {jwks} cannot be used: {error}", "Give the key set that the issuer publishes (jwks_uri)."
        ) from error
    return IdentityOptions(keys, tuple(audiences) or (DEFAULT_AUDIENCE,), tuple(issuers))


def _read(path: Path) -> tuple[NamespaceConfig, ...]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"{path} cannot be read: {error}") from error
    try:
        read = parse_config(text, toml=path.suffix.lower() == ".toml", environment=os.environ)
    except ConfigError as error:
        problems = "\n".join(f"  {problem}" for problem in error.problems)
        raise OperatorError(f"{path} cannot be used:\n{problems}") from error
    return tuple(
        replace(found, requested_by={entity.path.lower(): f"--config {path}" for entity in found.entities})
        for found in read
    )


def _check_host_names(host_names: Sequence[str]) -> None:
    for name in host_names:
        try:
            parse_authority(name)
        except ValueError as error:
            raise OperatorError(
                f"--host-name: {error}", "Write NAME or NAME:PORT, as in bus.example or localhost:15672."
            ) from None


def _named_port(text: str) -> tuple[str, int]:
    name, _, port = text.partition("=")
    if problem := namespace_name_problem(name):
        raise OperatorError(f"--namespace {text}: {problem}", "Write NAME=PORT, as in primary=5672.")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise OperatorError(f"--namespace {text}: {port!r} is not a port", "Write NAME=PORT, as in primary=5672.")
    return name, int(port)


def _queue(text: str) -> tuple[Description, ...]:
    return (QueueDescription(path=text),)


def _topic(text: str) -> tuple[Description, ...]:
    """Return a topic, and its subscription if the text names one: `events/audit` or `events/Subscriptions/audit`."""
    topic, _, subscription = text.rpartition("/")
    if not topic:
        return (TopicDescription(path=text),)
    if topic.lower().endswith("/subscriptions"):
        topic = topic[: -len("/subscriptions")]
    return TopicDescription(path=topic), SubscriptionDescription(topic=topic, name=subscription)


def _with_entities(config: NamespaceConfig, wanted: tuple[Description, ...], option: str, hint: str) -> NamespaceConfig:
    """Return the namespace with these entities added. Entities that the configuration file defines are not changed."""
    for description in wanted:
        if (refusal := new_entity_refusal(description)) is not None:
            raise OperatorError(f"{option}: {refusal.description}", hint)
        same = [one for one in config.entities if one.path.lower() == description.path.lower()]
        if same and type(same[0]) is not type(description):
            raise OperatorError(f"{option}: {description.path!r} is both a queue and a topic", "Rename one of them.")
        if not same:
            requested_by = {**config.requested_by, description.path.lower(): option}
            config = replace(config, entities=(*config.entities, description), requested_by=requested_by)
    return config
