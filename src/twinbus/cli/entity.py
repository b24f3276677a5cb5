"""`twinbus entity list|show|create|delete`: queues, topics and subscriptions of any namespace."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Annotated, Any, Final

import typer

from twinbus.cli import connections
from twinbus.cli.connections import Seconds
from twinbus.cli.entity_access import AnyNamespace, EntityAdministration, EntityPath, Json, Kind, Namespace, Path, Yes
from twinbus.cli.errors import Debug, WrongUsageError, errors_reported
from twinbus.cli.network import namespace_network_options
from twinbus.cli.option_values import as_option_text, span_option
from twinbus.cli.tables import Cell, print_table
from twinbus.errors import OperatorError
from twinbus.printable import printable

app = typer.Typer(
    help="Queues, topics, subscriptions and messages of any namespace.",
    no_args_is_help=True,
)

# Service Bus has no "never": it uses the longest span of .NET.
_NEVER: Final = timedelta(days=10_000_000)
_COUNTS: Final = {
    "active_message_count": "messages",
    "dead_letter_message_count": "dead_lettered",
    "scheduled_message_count": "scheduled",
    "transfer_message_count": "in_transfer",
    "size_in_bytes": "size_bytes",
    "subscription_count": "subscriptions",
}
# Properties that `show` prints: the label, and the option of `create` that sets the property.
_PROPERTIES: Final = {
    "status": ("status", ""),
    "requires_session": ("sessions", "--sessions"),
    "lock_duration": ("lock duration", "--lock-duration"),
    "max_delivery_count": ("max delivery count", "--max-delivery-count"),
    "default_message_time_to_live": ("time to live", "--time-to-live"),
    "dead_lettering_on_message_expiration": ("dead-letter expired", "--dead-letter-expired"),
    "requires_duplicate_detection": ("detect duplicates", "--detect-duplicates"),
    "duplicate_detection_history_time_window": ("duplicates within", "--detect-duplicates"),
    "auto_delete_on_idle": ("auto-delete after", "--auto-delete"),
    "max_size_in_megabytes": ("max size, MB", "--max-size"),
    "forward_to": ("forward to", "--forward-to"),
    "forward_dead_lettered_messages_to": ("forward dead letters to", "--forward-dead-letters-to"),
}
_NOT_OF: Final = {
    Kind.QUEUE: {"--filter"},
    Kind.TOPIC: {
        "--sessions",
        "--lock-duration",
        "--max-delivery-count",
        "--dead-letter-expired",
        "--forward-to",
        "--forward-dead-letters-to",
        "--filter",
    },
    Kind.SUBSCRIPTION: {"--detect-duplicates", "--max-size"},
}


@app.command("list")
@namespace_network_options
def list_(
    connection_string: AnyNamespace,
    pattern: Annotated[
        str | None, typer.Argument(help="Only paths like this; * and ? are wildcards.", show_default="all")
    ] = None,
    seconds: Seconds = 10.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the entities of a namespace, with their messages.

    Needs a key with the Manage right, as `show`, `create`, `delete` and `purge` do.

    Examples:
      twinbus entity list
      twinbus entity list 'orders*' --json
    """
    with errors_reported(debug=debug), Namespace(connection_string, seconds).administration() as administration:
        wanted = "*" if pattern is None else pattern.strip("/").lower()
        found = [one for one in _all_entities(administration) if fnmatchcase(one["path"].lower(), wanted)]
        if json:
            typer.echo(json_text.dumps(found))
            return
        if found:
            columns = ("entity", "kind", "messages", "dead letters", "scheduled", "bytes", "status")
            print_table(columns, [_row(one) for one in found], optional={"scheduled", "status"})
        typer.echo(f"{_number(len(found), 'entity', 'entities')} on {administration.name}")


@app.command()
@namespace_network_options
def show(
    path: Path,
    connection_string: AnyNamespace,
    seconds: Seconds = 10.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show one entity: its messages and its properties.


    Examples:
      twinbus entity show orders
      twinbus entity show events/subscriptions/audit --json
    """
    with errors_reported(debug=debug):
        wanted = EntityPath.parse(path)
        with Namespace(connection_string, seconds).administration() as administration:
            found = _description(administration, wanted)
        _print(administration.name, found, json=json)


@app.command()
@namespace_network_options
def create(
    path: Path,
    connection_string: AnyNamespace,
    topic: Annotated[bool, typer.Option("--topic", help="Create a topic. Without it: a queue.")] = False,
    sessions: Annotated[bool, typer.Option("--sessions", help="Every message belongs to a session.")] = False,
    lock_duration: Annotated[
        timedelta | None, span_option("How long a received message is locked: 30s, up to 5m.")
    ] = None,
    max_delivery_count: Annotated[
        int | None, typer.Option(min=1, help="Deliveries after which a message is dead-lettered.", show_default="10")
    ] = None,
    time_to_live: Annotated[
        timedelta | None, span_option("Time to live of messages that have none of their own: 1h, 14d.")
    ] = None,
    dead_letter_expired: Annotated[
        bool, typer.Option("--dead-letter-expired", help="Dead-letter expired messages instead of dropping them.")
    ] = False,
    detect_duplicates: Annotated[
        timedelta | None, span_option("Drop a message whose id was sent in this time before: 10m.")
    ] = None,
    auto_delete: Annotated[
        timedelta | None, span_option("Delete the entity after this time without use: 1h; at least 5m.")
    ] = None,
    max_size: Annotated[int | None, typer.Option(min=1, help="Megabytes of messages that it may hold.")] = None,
    forward_to: Annotated[str | None, typer.Option(help="Forward its messages to this queue or topic.")] = None,
    forward_dead_letters_to: Annotated[
        str | None, typer.Option(help="Forward its dead letters to this queue or topic.")
    ] = None,
    filter: Annotated[
        str | None,
        typer.Option(help="SQL filter of a subscription: \"region = 'eu'\".", show_default="all messages"),
    ] = None,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Exit with 0 if it exists already.")] = False,
    seconds: Seconds = 10.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Create a queue, a topic or a subscription.

    A property that is not given has the service's default.

    Examples:
      twinbus entity create orders --max-delivery-count 5 --dead-letter-expired
      twinbus entity create events --topic --detect-duplicates 10m
      twinbus entity create events/subscriptions/audit --filter "region = 'eu'"
    """
    with errors_reported(debug=debug):
        wanted = EntityPath.parse(path)
        kind = Kind.SUBSCRIPTION if wanted.subscription is not None else Kind.TOPIC if topic else Kind.QUEUE
        given: dict[str, Any] = {
            "requires_session": sessions or None,
            "lock_duration": lock_duration,
            "max_delivery_count": max_delivery_count,
            "default_message_time_to_live": time_to_live,
            "dead_lettering_on_message_expiration": dead_letter_expired or None,
            "requires_duplicate_detection": None if detect_duplicates is None else True,
            "duplicate_detection_history_time_window": detect_duplicates,
            "auto_delete_on_idle": auto_delete,
            "max_size_in_megabytes": max_size,
            "forward_to": forward_to,
            "forward_dead_lettered_messages_to": forward_dead_letters_to,
        }
        properties = {name: value for name, value in given.items() if value is not None}
        options = {_PROPERTIES[name][1] for name in properties} | ({"--filter"} if filter is not None else set())
        if kind is Kind.SUBSCRIPTION and topic:
            raise WrongUsageError(f"{path} is a subscription", "Leave out --topic.")
        if wrong := sorted(options & _NOT_OF[kind]):
            raise WrongUsageError(f"a {kind} has no {', '.join(wrong)}", "Leave it out.")
        with Namespace(connection_string, seconds).administration() as administration:
            made = _create(administration, kind, wanted, properties, filter)
            if not made and not if_missing:
                raise OperatorError(
                    f"{kind} {str(wanted)!r} is on {administration.name} already",
                    "`twinbus entity show` shows its properties. --if-missing accepts it as it is.",
                )
            if json:
                _print(administration.name, _description(administration, wanted), json=True)
            else:
                typer.echo(printable(f"{'created' if made else 'existed'}: {kind} {wanted} on {administration.name}"))


@app.command()
@namespace_network_options
def delete(
    path: Path,
    connection_string: AnyNamespace,
    yes: Yes = False,
    seconds: Seconds = 10.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Delete an entity with all its messages.

    Asks for confirmation first, and says how many messages it has. A topic is deleted with its subscriptions.

    Examples:
      twinbus entity delete orders
      twinbus entity delete events/subscriptions/audit --yes
    """
    with errors_reported(debug=debug):
        wanted = EntityPath.parse(path)
        if json and not yes:
            raise WrongUsageError("delete asks for confirmation, and --json cannot ask", "Add --yes.")
        with Namespace(connection_string, seconds).administration() as administration:
            found = _description(administration, wanted)
            kind, client = Kind(found["kind"]), administration.client
            if not yes:
                typer.confirm(
                    printable(f"Delete {kind} {found['path']} on {administration.name}{_contents(found)}?"), abort=True
                )
            match kind:
                case Kind.SUBSCRIPTION:
                    administration.call(client.delete_subscription, wanted.root, wanted.subscription)
                case Kind.TOPIC:
                    administration.call(client.delete_topic, wanted.root)
                case Kind.QUEUE:
                    administration.call(client.delete_queue, wanted.root)
            if json:
                typer.echo(json_text.dumps({"namespace": administration.name, "deleted": found}))
            else:
                typer.echo(printable(f"deleted: {kind} {found['path']} on {administration.name}{_contents(found)}"))


# --- work ------------------------------------------------------------------------------------------------------------


def _create(
    administration: EntityAdministration, kind: Kind, path: EntityPath, properties: dict[str, Any], sql: str | None
) -> bool:
    """Create the entity. Returns whether it is new: False if an entity of this kind exists already."""
    from azure.core.exceptions import ResourceExistsError, ResourceNotFoundError  # noqa: PLC0415 - slow

    client = administration.client
    try:
        if kind is Kind.QUEUE:
            administration.call(client.create_queue, path.root, **properties)
        elif kind is Kind.TOPIC:
            administration.create_topic(path.root, **properties)
        else:
            administration.call(client.create_subscription, path.root, path.subscription, **properties)
            if sql is not None:
                _set_filter(administration, path, sql)
    except ResourceNotFoundError as error:
        raise connections.missing_entity("topic", path.root, administration.name) from error
    except OperatorError as error:
        if not isinstance(error.__cause__, ResourceExistsError):
            raise
        found, _ = administration.find(path)
        if found is not kind:
            raise OperatorError(
                f"{path} on {administration.name} is a {found}, not a {kind}", "Choose another path."
            ) from error
        return False
    return True


def _set_filter(administration: EntityAdministration, path: EntityPath, sql: str) -> None:
    """Replace the rule of a new subscription. Without a valid filter the subscription would take every message."""
    from azure.servicebus.management import SqlRuleFilter  # noqa: PLC0415 - slow

    client = administration.client
    try:
        administration.call(client.create_rule, path.root, path.subscription, "filter", filter=SqlRuleFilter(sql))
        administration.call(client.delete_rule, path.root, path.subscription, "$Default")
    except Exception:
        administration.call(client.delete_subscription, path.root, path.subscription)
        raise


def _all_entities(administration: EntityAdministration) -> list[dict[str, Any]]:
    client, listed = administration.client, administration.listed
    found = [
        *_with_counts(Kind.QUEUE, "", listed(client.list_queues), listed(client.list_queues_runtime_properties)),
        *_with_counts(Kind.TOPIC, "", listed(client.list_topics), listed(client.list_topics_runtime_properties)),
    ]
    for topic in [one["path"] for one in found if one["kind"] == Kind.TOPIC]:
        found += _with_counts(
            Kind.SUBSCRIPTION,
            f"{topic}/subscriptions/",
            listed(client.list_subscriptions, topic),
            listed(client.list_subscriptions_runtime_properties, topic),
        )
    return sorted(found, key=lambda one: str(one["path"]).lower())


def _with_counts(kind: Kind, above: str, entities: Iterable[Any], counts: Iterable[Any]) -> Iterator[dict[str, Any]]:
    by_name = {str(one.name).lower(): one for one in counts}
    for one in entities:
        yield {
            "path": f"{above}{one.name}",
            "kind": str(kind),
            "status": None if one.status is None else str(getattr(one.status, "value", one.status)).lower(),
            **_counts(by_name.get(str(one.name).lower())),
        }


def _row(entity: dict[str, Any]) -> list[Cell]:
    status = None if entity["status"] == "active" else entity["status"]
    counts = [entity[key] for key in ("messages", "dead_lettered")]
    return [entity["path"], entity["kind"], *counts, entity["scheduled"] or None, entity["size_bytes"], status]


def _counts(runtime: Any) -> dict[str, int | None]:
    return {ours: getattr(runtime, theirs, None) for theirs, ours in _COUNTS.items()}


def _description(administration: EntityAdministration, path: EntityPath) -> dict[str, Any]:
    """Return what `show` prints: path, kind, counts and properties, with plain values for JSON."""
    kind, found = administration.find(path)
    counts = {name: value for name, value in _counts(administration.counts(kind, path)).items() if value is not None}
    properties = {name: getattr(found, name) for name in _PROPERTIES if hasattr(found, name)}
    described: dict[str, Any] = {
        "path": str(EntityPath(str(found.name)) if path.subscription is None else EntityPath(path.root, found.name)),
        "kind": str(kind),
        "namespace": administration.name,
        **counts,
        **{name: _plain(value) for name, value in properties.items()},
    }
    if kind is Kind.SUBSCRIPTION:
        rules = administration.listed(administration.client.list_rules, path.root, path.subscription)
        described["rules"] = {str(rule.name): _rule(rule) for rule in rules}
    return described


def _rule(rule: Any) -> str:
    sql = getattr(rule.filter, "sql_expression", None)
    if sql is None:
        set_ = {name: value for name, value in vars(rule.filter).items() if value and name != "requires_preprocessing"}
        sql = "correlation " + ", ".join(f"{name} = {value}" for name, value in sorted(set_.items()))
    action = getattr(rule.action, "sql_expression", None)
    return str(sql) if action is None else f"{sql}; action: {action}"


def _plain(value: Any) -> Any:
    """Return a value for JSON: spans as seconds, and None for a span without end."""
    if isinstance(value, timedelta):
        return None if value > _NEVER else value.total_seconds()
    return value.isoformat() if isinstance(value, datetime) else getattr(value, "value", value)


def _print(namespace: str, found: dict[str, Any], *, json: bool) -> None:
    if json:
        typer.echo(json_text.dumps(found))
        return
    typer.echo(printable(f"{found['kind']} {found['path']} on {namespace}"))
    hidden = {"path", "kind", "namespace", "rules"}
    if not found.get("requires_duplicate_detection"):
        hidden.add("duplicate_detection_history_time_window")
    for name, value in found.items():
        if name not in hidden:
            label = _PROPERTIES[name][0] if name in _PROPERTIES else name.replace("_", " ")
            typer.echo(printable(f"  {label:24} {_shown(name, value)}"))
    for name, text in found.get("rules", {}).items():
        typer.echo(printable(f"  {f'rule {name}':24} {text}"))


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "never" if name == "auto_delete_on_idle" else "none" if name.startswith("forward") else "unlimited"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return as_option_text(timedelta(seconds=value))
    return f"{value:,}" if isinstance(value, int) else str(value).lower() if name == "status" else str(value)


def _contents(found: dict[str, Any]) -> str:
    """Return what is deleted with an entity: `, with 3 messages and 1 dead letter`; empty if there is nothing."""
    parts = [
        _number(found.get(key) or 0, one, many)
        for key, one, many in (
            ("subscriptions", "subscription", "subscriptions"),
            ("messages", "message", "messages"),
            ("scheduled", "scheduled message", "scheduled messages"),
            ("dead_lettered", "dead letter", "dead letters"),
        )
        if found.get(key)
    ]
    if not parts:
        return ""
    return f", with {', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else f", with {parts[0]}"


def _number(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
