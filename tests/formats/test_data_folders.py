"""Data folders of earlier versions: the server opens a copy as it is, and holds what was sent to it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiveMode,
    ServiceBusReceiver,
    ServiceBusSubQueue,
)
from azure.servicebus.management import EntityStatus, ServiceBusAdministrationClient

from tests.formats.sets import expected, sets_with, unpacked
from twinbus.namespace.engine.storage_protocol import KnownIds
from twinbus.namespace.store import SqliteStore
from twinbus.testing import LocalNamespace

T = TypeVar("T")

FOLDERS = ("data-closed", "data-killed")
SESSIONS = ("a", "b", "empty")
SUB_QUEUES = {
    None: None,
    ServiceBusSubQueue.DEAD_LETTER: "dead",
    ServiceBusSubQueue.TRANSFER_DEAD_LETTER: "transfer dead",
}
_LARGE = 10_000


class Opened:
    """A folder that a server uses, and the list of what should be in it."""

    def __init__(self, namespace: LocalNamespace, said: dict[str, Any]) -> None:
        self.namespace = namespace
        self.said = said
        self.client = ServiceBusClient.from_connection_string(namespace.connection_string)
        self.admin = ServiceBusAdministrationClient.from_connection_string(
            namespace.connection_string, connection_verify=str(namespace.ca)
        )

    def receivers(self, entity: str) -> Iterator[tuple[ServiceBusReceiver, str | None]]:
        """Yield receivers for the sessions and sub-queues of an entity, each with its kind of dead letters or None."""
        topic, _, subscription = entity.partition("/")
        for sub_queue, dead in SUB_QUEUES.items():
            if topic == "news":
                yield self.client.get_subscription_receiver(topic, subscription, sub_queue=sub_queue), dead
            elif entity == "sessions" and sub_queue is None:
                for session in SESSIONS:
                    yield self.client.get_queue_receiver(entity, session_id=session), dead
            elif sub_queue is not None or entity not in self.said["forwards"]:
                yield self.client.get_queue_receiver(entity, sub_queue=sub_queue), dead

    def peeked(self, entities: Iterable[str]) -> dict[str, dict[str, dict[str, Any]]]:
        """Return all messages of these entities and of their sub-queues, by id."""
        found: dict[str, dict[str, dict[str, Any]]] = {entity: {} for entity in entities}

        def peek(entity: str, one: ServiceBusReceiver, dead: str | None) -> None:
            with one as receiver:
                for message in receiver.peek_messages(100, sequence_number=1):
                    assert message.message_id not in found[entity]
                    found[entity][str(message.message_id)] = shown(message, dead)

        at_once([partial(peek, entity, *one) for entity in found for one in self.receivers(entity)])
        return found


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run the calls at the same time: the SDK waits half a second to open a receiver, and again to close it."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(lambda call: call(), calls))


def sets_of_data_folders() -> list[Any]:
    """Parameters for a test. `make test` opens only the oldest set."""
    oldest, *newer = sets_with("data-closed.tar.xz")
    return [oldest, *(pytest.param(*each.values, id=each.id, marks=pytest.mark.thorough) for each in newer)]


@pytest.fixture(params=sets_of_data_folders(), scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    found = request.param
    assert isinstance(found, Path)
    return found


@pytest.fixture(params=FOLDERS, scope="module")
def opened(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    data = unpacked(folder / f"{request.param}.tar.xz", tmp_path_factory.mktemp("data"))
    with LocalNamespace(data=data) as namespace:
        found = Opened(namespace, expected(folder / f"{request.param}.json"))
        with found.client, found.admin:
            yield found


def test_n2_every_message_of_an_older_folder_is_there_as_it_was_sent(opened: Opened) -> None:
    said = {entity: names for entity, names in opened.said["messages"].items() if entity not in ("news", "waiting")}
    assert len(said) > 8
    peeked = opened.peeked(said)
    for entity, names in said.items():
        found = peeked[entity]
        assert found.keys() == names.keys(), entity
        for name, wanted in names.items():
            assert {key: found[name].get(key) for key in wanted} == wanted, (entity, name)


def test_n1_entities_of_an_older_folder_keep_their_rules_targets_and_figures(opened: Opened) -> None:
    admin, messages = opened.admin, opened.said["messages"]
    assert admin.get_queue("plain").user_metadata == "kept"
    assert admin.get_queue("Folders/are/Paths").max_size_in_megabytes == 2048
    assert admin.get_queue("closed").status == EntityStatus.DISABLED
    for entity, target in opened.said["forwards"].items():
        topic, _, subscription = entity.partition("/")
        described = admin.get_subscription(topic, subscription) if subscription else admin.get_queue(entity)
        assert str(described.forward_to).rpartition("/")[2] == target
    for subscription, rules in opened.said["rules"].items():
        assert {rule.name: rule_shown(rule) for rule in admin.list_rules("news", subscription)} == rules
    assert admin.get_topic_runtime_properties("news").scheduled_message_count == len(messages["news"]) == 1
    waiting = admin.get_queue_runtime_properties("waiting")
    assert (waiting.transfer_message_count, waiting.active_message_count) == (len(messages["waiting"]), 0)


def test_n1_sessions_of_an_older_folder_have_their_state(opened: Opened) -> None:
    def state(session: str) -> str:
        with opened.client.get_queue_receiver("sessions", session_id=session) as receiver:
            return (receiver.session.get_state() or b"").decode("latin-1")

    found = dict(zip(SESSIONS, at_once([partial(state, session) for session in SESSIONS]), strict=True))
    assert {session: text for session, text in found.items() if text} == opened.said["sessions"]


def test_n2_an_older_folder_goes_on_where_it_was(opened: Opened) -> None:
    """Sequence numbers continue, waiting messages are forwarded, deferred and dead-lettered ones can be received."""
    client, admin = opened.client, opened.admin
    waiting = admin.get_queue("waiting")
    waiting.status = EntityStatus.ACTIVE
    admin.update_queue(waiting)
    messages, taking = opened.said["messages"], ServiceBusReceiveMode.RECEIVE_AND_DELETE

    def plain() -> None:
        with client.get_queue_receiver("plain") as receiver, client.get_queue_sender("plain") as sender:
            numbers = _numbers(receiver)
            (deferred,) = receiver.receive_deferred_messages(numbers["deferred"])
            receiver.complete_message(deferred)
            sender.send_messages(ServiceBusMessage(b"after", message_id="after"))
            after = _numbers(receiver)
        assert after.keys() == (numbers.keys() - {"deferred"}) | {"after"}
        assert after["after"] > max(numbers.values())

    def target() -> None:
        with client.get_queue_receiver("target", receive_mode=taking) as receiver:
            assert _taken(receiver, len(messages["target"]) + 1) == {*messages["target"], "by waiting"}

    def dead() -> None:
        sub_queue = ServiceBusSubQueue.DEAD_LETTER
        with client.get_queue_receiver("dead", sub_queue=sub_queue, receive_mode=taking) as receiver:
            assert _taken(receiver, len(messages["dead"])) == messages["dead"].keys()

    at_once([plain, target, dead])


@pytest.mark.parametrize("name", FOLDERS)
def test_n1_ids_for_duplicate_detection_are_known_to_the_store(folder: Path, name: str, tmp_path: Path) -> None:
    """A server forgets them after their window of 7 days; the store still knows them."""
    said = expected(folder / f"{name}.json")
    store = SqliteStore(unpacked(folder / f"{name}.tar.xz", tmp_path) / "primary.sqlite")
    queues = {stored.entity.path: stored.entity.queue for stored in store.open().entities}
    try:
        for entity, ids in said["seen"].items():
            since = said["written_at"] - 3600_000
            assert store.load(KnownIds(queues[entity], (*ids, "never sent"), since)) == set(ids)
            assert store.load(KnownIds(queues[entity], tuple(ids), said["written_at"] + 1)) == set()
    finally:
        store.close()


# --- what the SDK shows ----------------------------------------------------------------------------------------------


def shown(message: ServiceBusReceivedMessage, dead: str | None) -> dict[str, Any]:
    raw = message.raw_amqp_message
    properties = {_text(key): _text(value) for key, value in (message.application_properties or {}).items()}
    life, due = message.time_to_live, message.scheduled_enqueue_time_utc
    return {
        "state": dead or message.state.name.lower(),
        "kind": raw.body_type.value,
        "body": _body(raw.body_type.value, raw.body),
        "session": message.session_id,
        "subject": message.subject,
        "content_type": message.content_type,
        "correlation_id": message.correlation_id,
        "to": message.to,
        "reply_to": message.reply_to,
        "reply_to_session_id": message.reply_to_session_id,
        "partition_key": message.partition_key,
        "time_to_live": None if life is None else int(life.total_seconds()),
        "due": None if due is None else due.replace(tzinfo=UTC).isoformat(),
        "delivery_count": message.delivery_count,
        "reason": message.dead_letter_reason,
        "description": message.dead_letter_error_description,
        "properties": properties,
    }


def rule_shown(rule: Any) -> dict[str, Any]:
    said: dict[str, Any] = {}
    chosen = rule.filter
    if (sql := getattr(chosen, "sql_expression", None)) is not None:
        said["sql"] = sql
        if chosen.parameters:
            said["parameters"] = {name.lstrip("@"): value for name, value in chosen.parameters.items()}
    else:
        said |= {"label": chosen.label, "properties": dict(chosen.properties)}
    if getattr(rule.action, "sql_expression", None):
        said["action"] = rule.action.sql_expression
    return said


def _body(kind: str, body: Any) -> Any:
    if kind != "data":
        return _plain(body if kind == "value" else list(body))
    parts = [bytes(part) for part in body]
    whole = b"".join(parts)
    if len(whole) > _LARGE:
        return {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    return [part.decode("latin-1") for part in parts]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_text(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else _text(value)


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _numbers(receiver: ServiceBusReceiver) -> dict[str, int]:
    found = receiver.peek_messages(100, sequence_number=1)
    return {str(message.message_id): message.sequence_number or 0 for message in found}


def _taken(receiver: ServiceBusReceiver, count: int) -> set[str]:
    found: list[ServiceBusReceivedMessage] = []
    while len(found) < count:
        more = receiver.receive_messages(count - len(found), max_wait_time=10)
        assert more, f"{len(found)} of {count} came"
        found += more
    return {str(message.message_id) for message in found}


def test_nobody_opens_a_folder_before_it_was_written(folder: Path) -> None:
    """The clock of this machine must not be behind the clock that wrote the set: times of messages depend on it."""
    said = expected(folder / "data-closed.json")
    assert datetime.fromtimestamp(said["written_at"] / 1000, UTC) < datetime.now(UTC)
