"""Fills a data folder of `twinbus serve` with messages in every state, and writes a list of what is in it.

Each call adds its messages to the list, so that the list does not depend on what the server returns.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiveMode,
    ServiceBusReceiver,
)
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageProperties
from azure.servicebus.management import ServiceBusAdministrationClient

from tests.formats.sets import packed, write_expected
from twinbus.testing import LocalNamespace

NAME = "primary"
FAR = datetime(2400, 1, 1, tzinfo=UTC)
"""When scheduled messages are due: later than any test that opens the folder."""
LONG_LIFE = timedelta(days=36_500)
LARGE = bytes(range(256)) * 800
_SOON = 20.0

CONFIG: dict[str, Any] = {
    "namespaces": [
        {
            "name": NAME,
            "queues": [
                {"name": "plain", "lock_duration": "PT5M", "user_metadata": "kept"},
                {"name": "scheduled"},
                {"name": "sessions", "requires_session": True},
                {"name": "dead", "max_delivery_count": 1, "dead_lettering_on_message_expiration": True},
                {
                    "name": "watched",
                    "requires_duplicate_detection": True,
                    "duplicate_detection_history_time_window": "P7D",
                },
                {"name": "target"},
                {"name": "source", "forward_to": "target"},
                {"name": "waiting", "forward_to": "target", "status": "ReceiveDisabled"},
                {"name": "closed", "status": "Disabled"},
                {"name": "failing", "forward_to": "closed"},
                {"name": "Folders/are/Paths", "max_size_in_megabytes": 2048},
            ],
            "topics": [
                {
                    "name": "news",
                    "subscriptions": [
                        {"name": "all"},
                        {
                            "name": "red",
                            "rules": [{"name": "red ones", "sql": "color = 'red'", "action": "SET seen = 1"}],
                        },
                        {
                            "name": "eu",
                            "rules": [
                                {"name": "eu", "correlation": {"label": "eu", "properties": {"color": "red"}}},
                                {"name": "size", "sql": "size > @least", "parameters": {"least": 5}},
                            ],
                        },
                        {"name": "onward", "forward_to": "target"},
                    ],
                },
            ],
        }
    ]
}

RULES = {
    "all": {"$Default": {"sql": "1=1"}},
    "red": {"red ones": {"sql": "color = 'red'", "action": "SET seen = 1"}},
    "eu": {
        "eu": {"label": "eu", "properties": {"color": "red"}},
        "size": {"sql": "size > @least", "parameters": {"least": 5}},
    },
    "onward": {"$Default": {"sql": "1=1"}},
}
ACTED = {"seen": 1, "RuleName": "red ones"}
"""What the action of that rule, and the service itself, add to a message."""
FORWARDS = {
    "source": "target",
    "waiting": "target",
    "failing": "closed",
    "news/onward": "target",
}


class Listing:
    """What is in the namespace, by entity and message id."""

    def __init__(self) -> None:
        self.messages: dict[str, dict[str, dict[str, Any]]] = {}
        self.sessions: dict[str, str] = {}
        self.seen: dict[str, list[str]] = {}

    def put(self, entity: str, name: str, body: Any, *, kind: str = "data", state: str = "active", **more: Any) -> None:
        self.messages.setdefault(entity, {})[name] = {"state": state, "kind": kind, "body": body, **more}

    def moved(self, entity: str, name: str, state: str, **more: Any) -> None:
        self.messages[entity][name] |= {"state": state, **more}

    def gone(self, entity: str, name: str) -> None:
        del self.messages[entity][name]

    def written(self, at: int) -> dict[str, Any]:
        return {
            "written_at": at,
            "messages": self.messages,
            "sessions": self.sessions,
            "seen": self.seen,
            "rules": RULES,
            "forwards": FORWARDS,
        }


def make(folder: Path, work: Path) -> None:
    """Write `data-closed` and `data-killed` into `folder`."""
    data = work / "data"
    with LocalNamespace(NAME, data=data, config=CONFIG) as namespace:
        listing = Listing()
        with ServiceBusClient.from_connection_string(namespace.connection_string) as client:
            _fill(client, namespace, listing)
        assert namespace.stop() == 0
        _pack(folder / "data-closed.tar.xz", data, listing)
    with LocalNamespace(NAME, data=data) as namespace:
        with (
            ServiceBusClient.from_connection_string(namespace.connection_string) as client,
            client.get_queue_receiver("plain") as locking,
        ):
            _go_on(client, namespace, listing, locking)
            namespace.kill()
        _pack(folder / "data-killed.tar.xz", data, listing)


def _pack(archive: Path, data: Path, listing: Listing) -> None:
    packed(data, archive, "tls")
    expected = listing.written(int(time.time() * 1000))
    write_expected(archive.with_name(archive.name.replace(".tar.xz", ".json")), expected)


# --- what is sent and received ---------------------------------------------------------------------------------------


def _fill(client: ServiceBusClient, namespace: LocalNamespace, listing: Listing) -> None:
    _plain(client, listing)
    _scheduled(client, listing)
    _sessions(client, listing)
    _dead(client, namespace, listing)
    _watched(client, listing, "one", "two")
    _forwarded(client, namespace, listing)
    _topic(client, namespace, listing)
    send(client, "Folders/are/Paths", ServiceBusMessage(b"", message_id="empty"))
    listing.put("Folders/are/Paths", "empty", [""])


def _plain(client: ServiceBusClient, listing: Listing) -> None:
    everything = ServiceBusMessage(
        b"body \x00\xff",
        message_id="every property",
        subject="subject",
        content_type="text/plain",
        correlation_id="correlation",
        to="to",
        reply_to="reply",
        reply_to_session_id="reply session",
        partition_key="key",
        time_to_live=LONG_LIFE / 1000,
        application_properties={"text": "tëxt", "number": -7, "real": 1.5, "flag": True},
    )
    others = (
        AmqpAnnotatedMessage(data_body=[b"one", b"two"], properties=_id("data twice")),
        AmqpAnnotatedMessage(value_body={"a": [1, "two", None]}, properties=_id("value")),
        AmqpAnnotatedMessage(value_body="text", properties=_id("value text")),
        AmqpAnnotatedMessage(sequence_body=[[1, 2], ["three"]], properties=_id("sequence")),
        ServiceBusMessage(LARGE, message_id="large"),
        ServiceBusMessage(b"tried", message_id="tried twice"),
        ServiceBusMessage(b"later", message_id="deferred"),
    )
    send(client, "plain", everything, *others)
    listing.put(
        "plain",
        "every property",
        ["body \x00\xff"],
        subject="subject",
        content_type="text/plain",
        correlation_id="correlation",
        to="to",
        reply_to="reply",
        reply_to_session_id="reply session",
        partition_key="key",
        time_to_live=int((LONG_LIFE / 1000).total_seconds()),
        properties={"text": "tëxt", "number": -7, "real": 1.5, "flag": True},
    )
    listing.put("plain", "data twice", ["one", "two"])
    listing.put("plain", "value", {"a": [1, "two", None]}, kind="value")
    listing.put("plain", "value text", "text", kind="value")
    listing.put("plain", "sequence", [[1, 2], ["three"]], kind="sequence")
    listing.put("plain", "large", {"bytes": len(LARGE), "sha256": hashlib.sha256(LARGE).hexdigest()})
    listing.put("plain", "tried twice", ["tried"], delivery_count=1)
    listing.put("plain", "deferred", ["later"])
    with client.get_queue_receiver("plain") as receiver:
        for message in received(receiver, 8):
            if message.message_id == "deferred":
                receiver.defer_message(message)
                listing.moved("plain", "deferred", "deferred")
            elif message.message_id == "tried twice":
                receiver.abandon_message(message)
            # The other messages return to the queue when the link closes, and their delivery count stays the same.


def _scheduled(client: ServiceBusClient, listing: Listing) -> None:
    with client.get_queue_sender("scheduled") as sender:
        due = [ServiceBusMessage(b"due", message_id=name) for name in ("in time", "cancelled")]
        numbers = sender.schedule_messages(due, FAR)
        sender.cancel_scheduled_messages(numbers[1])
    listing.put("scheduled", "in time", ["due"], state="scheduled", due=FAR.isoformat())


def _sessions(client: ServiceBusClient, listing: Listing) -> None:
    for session in ("a", "b"):
        for number in (1, 2):
            name = f"{session}{number}"
            send(client, "sessions", ServiceBusMessage(name, message_id=name, session_id=session))
            listing.put("sessions", name, [name], session=session)
    with client.get_queue_receiver("sessions", session_id="a") as receiver:
        receiver.session.set_state(b"state of a")
        (first,) = received(receiver, 1)
        receiver.complete_message(first)
    listing.gone("sessions", "a1")
    with client.get_queue_receiver("sessions", session_id="empty") as receiver:
        receiver.session.set_state(b"\x00\x01")
    listing.sessions |= {"a": "state of a", "empty": "\x00\x01"}


def _dead(client: ServiceBusClient, namespace: LocalNamespace, listing: Listing) -> None:
    send(
        client,
        "dead",
        ServiceBusMessage(b"1", message_id="rejected", application_properties={"kept": "yes"}),
        ServiceBusMessage(b"2", message_id="too often"),
    )
    with client.get_queue_receiver("dead") as receiver:
        for message in received(receiver, 2):
            if message.message_id == "rejected":
                receiver.dead_letter_message(message, reason="broken", error_description="so it is")
            else:
                receiver.abandon_message(message)
    send(client, "dead", ServiceBusMessage(b"3", message_id="expired", time_to_live=timedelta(seconds=1)))
    until(lambda: admin(namespace).get_queue_runtime_properties("dead").dead_letter_message_count == 3)
    listing.put(
        "dead",
        "rejected",
        ["1"],
        state="dead",
        reason="broken",
        description="so it is",
        properties={"kept": "yes", "DeadLetterReason": "broken", "DeadLetterErrorDescription": "so it is"},
    )
    listing.put("dead", "too often", ["2"], state="dead", reason="MaxDeliveryCountExceeded")
    listing.put("dead", "expired", ["3"], state="dead", reason="TTLExpiredException")
    send(client, "dead", ServiceBusMessage(b"4", message_id="expires later", time_to_live=timedelta(minutes=1)))
    # If the folder is opened after the message expired, the message is a dead letter.
    listing.put("dead", "expires later", ["4"], state="dead", reason="TTLExpiredException")


def _watched(client: ServiceBusClient, listing: Listing, *names: str) -> None:
    """Each name is sent twice; then the oldest message is taken. Its id stays known like the others."""
    seen = listing.seen.setdefault("watched", [])
    send(client, "watched", *(ServiceBusMessage(name, message_id=name) for name in names * 2))
    for name in names:
        if name not in seen:
            listing.put("watched", name, [name])
            seen.append(name)
    with client.get_queue_receiver("watched", receive_mode=ServiceBusReceiveMode.RECEIVE_AND_DELETE) as receiver:
        (oldest,) = received(receiver, 1)
    listing.gone("watched", str(oldest.message_id))


def _forwarded(client: ServiceBusClient, namespace: LocalNamespace, listing: Listing) -> None:
    for queue in ("source", "waiting", "failing"):
        send(client, queue, ServiceBusMessage(b"on its way", message_id=f"by {queue}"))
    until(lambda: admin(namespace).get_queue_runtime_properties("target").active_message_count == 1)
    until(lambda: admin(namespace).get_queue_runtime_properties("failing").transfer_dead_letter_message_count == 1)
    listing.put("target", "by source", ["on its way"])
    listing.put("waiting", "by waiting", ["on its way"], state="transfer")
    listing.put(
        "failing", "by failing", ["on its way"], state="transfer dead", reason="MessagingEntityDisabledException"
    )


def _topic(client: ServiceBusClient, namespace: LocalNamespace, listing: Listing) -> None:
    messages: Mapping[str, dict[str | bytes, Any]] = {
        "red": {"color": "red"},
        "large": {"color": "blue", "size": 9},
    }
    with client.get_topic_sender("news") as sender:
        for name, properties in messages.items():
            sender.send_messages(ServiceBusMessage(name, message_id=name, application_properties=properties))
        eu: dict[str | bytes, Any] = {"color": "red", "size": 9}
        sender.send_messages(ServiceBusMessage("eu", message_id="eu", subject="eu", application_properties=eu))
        sender.schedule_messages(ServiceBusMessage(b"due", message_id="of the topic"), FAR)
    until(lambda: admin(namespace).get_queue_runtime_properties("target").active_message_count == 4)
    for name, properties in {**messages, "eu": eu}.items():
        subject = {"subject": "eu"} if name == "eu" else {}
        listing.put("news/all", name, [name], properties=properties, **subject)
        listing.put("target", name, [name], properties=properties, **subject)
        if properties["color"] == "red":
            listing.put("news/red", name, [name], properties={**properties, **ACTED}, **subject)
        if name != "red":
            listing.put("news/eu", name, [name], properties=properties, **subject)
    listing.put("news", "of the topic", ["due"], state="scheduled", due=FAR.isoformat())
    with client.get_subscription_receiver("news", "all") as receiver:
        for message in received(receiver, 3):
            if message.message_id == "red":
                receiver.dead_letter_message(message, reason="seen")
    dead = {"color": "red", "DeadLetterReason": "seen"}
    listing.moved("news/all", "red", "dead", reason="seen", properties=dead)


def _go_on(client: ServiceBusClient, namespace: LocalNamespace, listing: Listing, locking: ServiceBusReceiver) -> None:
    """Add more messages to the same folder. They are only in the write-ahead log when the server is killed."""
    send(client, "plain", ServiceBusMessage(b"new", message_id="new"), ServiceBusMessage(b"done", message_id="done"))
    listing.put("plain", "new", ["new"])
    messages = received(locking, 9)
    for message in messages:
        # Messages that are not settled here are locked when the server is killed, and are available after the restart.
        if message.message_id in ("done", "data twice"):
            locking.complete_message(message)
    listing.gone("plain", "data twice")
    _watched(client, listing, "two", "three")
    with client.get_queue_sender("scheduled") as sender:
        sender.schedule_messages(ServiceBusMessage(b"due", message_id="also"), FAR)
    listing.put("scheduled", "also", ["due"], state="scheduled", due=FAR.isoformat())
    with client.get_queue_receiver("sessions", session_id="b") as receiver:
        receiver.session.set_state(b"state of b")
    with client.get_queue_receiver("sessions", session_id="empty") as receiver:
        receiver.session.set_state(None)
    listing.sessions["b"] = "state of b"
    del listing.sessions["empty"]
    with client.get_topic_sender("news") as sender:
        sender.send_messages(ServiceBusMessage("last", message_id="last", application_properties={"color": "red"}))
    until(lambda: admin(namespace).get_queue_runtime_properties("target").active_message_count == 5)
    for entity in ("news/all", "target"):
        listing.put(entity, "last", ["last"], properties={"color": "red"})
    listing.put("news/red", "last", ["last"], properties={"color": "red", **ACTED})


def send(client: ServiceBusClient, queue: str, *messages: ServiceBusMessage | AmqpAnnotatedMessage) -> None:
    with client.get_queue_sender(queue) as sender:
        for message in messages:
            sender.send_messages(message)


def received(receiver: ServiceBusReceiver, count: int) -> list[ServiceBusReceivedMessage]:
    found: list[ServiceBusReceivedMessage] = []
    while len(found) < count:
        more = receiver.receive_messages(count - len(found), max_wait_time=_SOON)
        assert more, f"{len(found)} of {count} came"
        found += more
    return found


def admin(namespace: LocalNamespace) -> ServiceBusAdministrationClient:
    return ServiceBusAdministrationClient.from_connection_string(
        namespace.connection_string, connection_verify=str(namespace.ca)
    )


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + _SOON
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def _id(name: str) -> AmqpMessageProperties:
    return AmqpMessageProperties(message_id=name)
