"""`twinbus entity`: queues, topics, subscriptions and their messages, on a real namespace (N1)."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest
from azure.core.exceptions import ResourceNotFoundError
from typer.testing import Result

from tests.cli.running import COMMAND, PATIENCE, environment, invoke
from twinbus.connect import ReceivedMessage, ServiceBusConnection, connect
from twinbus.message import BodyType, Message
from twinbus.pairing import Administration
from twinbus.testing import LocalNamespaces

T = TypeVar("T")
_numbers = itertools.count()
CONFIG = {
    "namespaces": [
        {
            "name": "one",
            "authorization_rules": [
                {"name": "all", "claims": ["Manage"], "primary_key": "key-of-all"},
                {"name": "app", "claims": ["Send", "Listen"], "primary_key": "key-of-app"},
            ],
        }
    ]
}


class Bus:
    """One namespace, the verbs of `twinbus entity` on it, and other ways to look at it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.authority = text.split("//")[1].split(";", maxsplit=1)[0]

    @property
    def weaker(self) -> str:
        return self.text.replace("=all;", "=app;").replace("key-of-all", "key-of-app")

    def run(self, *arguments: str, input: str | None = None, text: str | None = None, **more: str) -> Result:
        return invoke("entity", *arguments, input=input, TWINBUS_CONNECTION_STRING=text or self.text, **more)

    def well(self, *arguments: str, **more: Any) -> str:
        done = self.run(*arguments, **more)
        assert done.exit_code == 0, done.output
        return done.stdout

    def new(self, *options: str, kind: str = "queue") -> str:
        path = f"{kind}-{next(_numbers)}"
        self.well("create", path, *options)
        return path

    def administered(self, method: str, *arguments: str) -> Any:
        with Administration.from_connection_string(self.text) as administration:
            return administration.request(getattr(administration.client, method), *arguments)

    def peek(self, path: str, address: str | None = None) -> list[ReceivedMessage]:
        return self.on(lambda bus: bus.management(path, address=address).peek(0, 500))

    def on(self, call: Callable[[ServiceBusConnection], Awaitable[T]]) -> T:
        async def work() -> T:
            async with connect(self.text, timeout=10) as bus:
                return await call(bus)

        return asyncio.run(work())


@pytest.fixture(scope="module")
def bus() -> Iterator[Bus]:
    with LocalNamespaces("one", memory=True, config=CONFIG) as found:
        yield Bus(found["one"].connection_string)


def test_n1_a_queue_is_created_with_its_properties_and_shown(bus: Bus) -> None:
    path, target = bus.new(kind="orders"), bus.new()
    made = f"{path}-special"
    options = ("--sessions", "--lock-duration", "30s", "--max-delivery-count", "5", "--time-to-live", "14d")
    more = ("--dead-letter-expired", "--detect-duplicates", "10m", "--auto-delete", "1h", "--max-size", "2048")
    told = bus.well("create", made, *options, *more, "--forward-dead-letters-to", target)
    assert told == f"created: queue {made} on {bus.authority}\n"
    found = bus.administered("get_queue", made)
    assert (found.requires_session, found.max_delivery_count, found.max_size_in_megabytes) == (True, 5, 2048)
    assert (found.lock_duration, found.default_message_time_to_live) == (timedelta(seconds=30), timedelta(days=14))
    assert (found.dead_lettering_on_message_expiration, found.requires_duplicate_detection) == (True, True)
    assert found.duplicate_detection_history_time_window == timedelta(minutes=10)
    assert found.auto_delete_on_idle == timedelta(hours=1)
    assert found.forward_dead_lettered_messages_to.endswith(target)

    shown = bus.well("show", made)
    assert shown.startswith(f"queue {made} on {bus.authority}\n")
    for line in ("lock duration            30s", "time to live             14d", "max delivery count       5"):
        assert line in shown
    assert "auto-delete after        never" in bus.well("show", path)
    described = json.loads(bus.well("show", made, "--json"))
    assert (described["kind"], described["lock_duration"], described["messages"]) == ("queue", 30.0, 0)


@pytest.mark.thorough
def test_n1_a_topic_with_subscriptions_takes_and_filters_messages(bus: Bus) -> None:
    topic = bus.new("--topic", "--detect-duplicates", "1m", kind="events")
    for name, options in (("all", ()), ("eu", ("--filter", "region = 'eu' AND weight > 2"))):
        bus.well("create", f"{topic}/subscriptions/{name}", *options)
    bus.well("send", topic, "near", "--property", "region=eu", "--property", "weight:=3")
    bus.well("send", topic, "far", "--property", "region=us", "--property", "weight:=3")
    bodies = {
        name: [
            json.loads(line)["body"]
            for line in bus.well("peek", f"{topic}/Subscriptions/{name}", "--json").splitlines()
        ]
        for name in ("all", "eu")
    }
    assert bodies == {"all": ["near", "far"], "eu": ["near"]}
    assert "rule filter              region = 'eu' AND weight > 2" in bus.well("show", f"{topic}/subscriptions/eu")

    bad = bus.run("create", f"{topic}/subscriptions/bad", "--filter", "region =")
    assert (bad.exit_code, "cannot be understood" in bad.stderr) == (2, True)
    listed = json.loads(bus.well("list", f"{topic.upper()}*", "--json"))
    assert [(one["path"], one["kind"], one["messages"]) for one in listed] == [
        (topic, "topic", None),
        (f"{topic}/subscriptions/all", "subscription", 2),
        (f"{topic}/subscriptions/eu", "subscription", 1),
    ]
    assert f"3 entities on {bus.authority}" in bus.well("list", f"{topic}*")
    assert "2 subscriptions" in bus.run("delete", topic, input="n\n").stdout


def test_n1_nothing_is_deleted_or_purged_without_a_yes(bus: Bus) -> None:
    path = bus.new()
    bus.well("send", path, "one")
    for verb, question in (("delete", "with 1 message?"), ("purge", "Remove 1 message of queue")):
        refused = bus.run(verb, path, input="n\n")
        assert (refused.exit_code, question in refused.stdout) == (1, True)
        assert bus.run(verb, path, "--json").exit_code == 2
    assert len(bus.peek(path)) == 1
    assert f"deleted: queue {path} on {bus.authority}, with 1 message\n" in bus.well("delete", path, "--yes")
    with pytest.raises(ResourceNotFoundError):
        bus.administered("get_queue", path)


@pytest.mark.thorough
def test_n1_what_exists_is_not_created_again(bus: Bus) -> None:
    path = bus.new("--max-delivery-count", "3")
    again = bus.run("create", path)
    assert (again.exit_code, f"queue '{path}' is on {bus.authority} already" in again.stderr) == (1, True)
    assert bus.well("create", path, "--if-missing") == f"existed: queue {path} on {bus.authority}\n"
    other = bus.run("create", path, "--topic", "--if-missing")
    assert (other.exit_code, "is a queue, not a topic" in other.stderr) == (1, True)
    assert bus.administered("get_queue", path).max_delivery_count == 3


def test_n1_a_message_is_sent_with_its_properties(bus: Bus) -> None:
    path = bus.new("--sessions")
    before = datetime.now(UTC)
    bus.well(
        "send", path, '{"n": 1}', "--id", "m1", "--session", "s", "--subject", "new", "--content-type", "text/x",
        "--correlation-id", "c", "--property", "a=b=c", "--property", "on:=true", "--time-to-live", "1h",
        "--delay", "30m", text=bus.weaker,
    )  # fmt: skip
    (found,) = bus.peek(path)
    assert (found.body, found.message_id, found.session_id, found.subject) == (b'{"n": 1}', "m1", "s", "new")
    assert (found.content_type, found.correlation_id, found.state.name) == ("text/x", "c", "SCHEDULED")
    assert found.application_properties == {"a": "b=c", "on": True}
    assert found.time_to_live == timedelta(hours=1)
    assert found.scheduled_enqueue_time is not None
    assert found.scheduled_enqueue_time >= before + timedelta(minutes=30) - timedelta(milliseconds=1)


@pytest.mark.thorough
def test_n1_bodies_come_from_standard_input_a_file_or_lines(bus: Bus, tmp_path: Any) -> None:
    path = bus.new()
    (tmp_path / "body").write_bytes(b"\xff\x00")
    bus.well("send", path, input="two\nlines\n")
    bus.well("send", path, "--file", str(tmp_path / "body"))
    told = json.loads(bus.well("send", path, "--lines", "--count", "2", "--json", input="x\ny\n"))
    found = bus.peek(path)
    assert [one.body for one in found] == [b"two\nlines\n", b"\xff\x00", b"x", b"y", b"x", b"y"]
    assert [one.message_id for one in found[2:]] == told["message_ids"]
    assert len(set(told["message_ids"])) == 4


@pytest.mark.thorough
def test_n1_peek_shows_messages_page_by_page_and_changes_nothing(bus: Bus) -> None:
    path = bus.new()
    bus.well("send", path, "--lines", input="".join(f"body {number}\n" for number in range(5)))
    bus.well("send", path, "x" * 200 + "\x1b[31m", "--id", "long")
    first = bus.well("peek", path, "--count", "4", text=bus.weaker)
    assert "body 3" in first
    assert "body 4" not in first
    rest = bus.well("peek", path, "--after", first.split("--after ")[1].split()[0])
    assert "body 4" in rest
    assert "x" * 59 + "…" in rest
    assert rest.endswith("2 messages\n")
    whole = bus.well("peek", path, "--after", "5", "--whole")
    assert "x" * 200 + r"\u001b[31m" in whole
    assert "message id               long" in whole
    assert [one.delivery_count for one in bus.peek(path)] == [0] * 6


@pytest.mark.thorough
def test_n1_dead_letters_are_peeked_and_purged_alone(bus: Bus) -> None:
    path = bus.new()
    bus.well("send", path, "--lines", input="bad\ngood\n")

    async def dead_letter(on: ServiceBusConnection) -> None:
        async with await on.receiver(path, prefetch=0) as receiver:
            (one,) = await receiver.receive(1, 10)
            await receiver.dead_letter([one], "Spoiled", "smells")

    bus.on(dead_letter)
    shown = bus.well("peek", path, "--dead-letter")
    assert ("Spoiled" in shown, "bad" in shown, "1 dead letter\n" in shown) == (True, True, True)
    done = bus.well("purge", path, "--dead-letter", "--yes")
    assert done == f"removed: 1 message of the dead-letter queue of queue {path} on {bus.authority}\n"
    assert bus.peek(path, f"{path}/$DeadLetterQueue") == []
    assert [one.body for one in bus.peek(path)] == [b"good"]


@pytest.mark.parametrize("sessions", [False, True])
@pytest.mark.thorough
def test_n1_a_purge_removes_waiting_deferred_and_scheduled_messages(bus: Bus, sessions: bool) -> None:
    path = bus.new(*(["--sessions"] if sessions else []))
    for session in ("a", "b"):
        more = ["--session", session] if sessions else []
        bus.well("send", path, "--lines", *more, input="1\n2\n3\n")
        bus.well("send", path, "later", "--delay", "1h", *more)

    async def defer(on: ServiceBusConnection) -> None:
        async with await on.receiver(path, prefetch=0, session="b" if sessions else None) as receiver:
            await receiver.defer(await receiver.receive(2, 10))

    bus.on(defer)
    told = json.loads(bus.well("purge", path, "--yes", "--json"))
    assert (told["removed"], told["left"]) == (8, 0)
    assert bus.peek(path) == []


@pytest.mark.thorough
def test_n1_a_purge_removes_no_more_messages_than_there_were_when_it_began(bus: Bus) -> None:
    path = bus.new()
    bus.well("send", path, "--lines", input="1\n2\n3\n")
    for body in ("old", "older"):
        bus.well("send", path, body, "--delay", "1h")

    with subprocess.Popen(
        [*COMMAND, "entity", "purge", path],
        env=environment(TWINBUS_CONNECTION_STRING=bus.text),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as purge:
        assert purge.stdout is not None
        question = ""
        while not question.endswith("?"):
            question += (more := purge.stdout.read(1))
            assert more, question
        assert question.startswith("Remove 5 messages of queue")
        bus.well("send", path, "--lines", "--delay", "1h", input="new\n" * 4)
        printed, _ = purge.communicate("y\n", timeout=PATIENCE)
    assert "removed: 5 messages of queue" in printed
    assert [one.body for one in bus.peek(path)] == [b"new"] * 4


@pytest.mark.thorough
def test_n1_a_purge_leaves_what_a_receiver_has_locked_and_ends_with_3(bus: Bus) -> None:
    path = bus.new()
    bus.well("send", path, "--lines", input="1\n2\n3\n")

    async def purge(on: ServiceBusConnection) -> Result:
        async with await on.receiver(path, prefetch=0) as receiver:
            (held,) = await receiver.receive(1, 10)
            done = await asyncio.to_thread(bus.run, "purge", path, "--yes")
            await receiver.complete([held])
            return done

    done = bus.on(purge)
    assert done.exit_code == 3, done.output
    assert "removed: 2 messages" in done.stdout
    assert "1 are left: a receiver has locked them" in done.stdout
    assert bus.peek(path) == []


@pytest.mark.thorough
def test_n1_a_purge_of_nothing_asks_nothing(bus: Bus) -> None:
    path = bus.new()
    assert bus.well("purge", path) == f"removed: 0 messages of queue {path} on {bus.authority}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("show", "nosuch"), "queue or topic 'nosuch'"),
        (("delete", "nosuch", "--yes"), "queue or topic 'nosuch'"),
        (("purge", "nosuch", "--yes"), "queue or topic 'nosuch'"),
        (("peek", "nosuch"), "queue 'nosuch'"),
        (("send", "nosuch", "x"), "queue or topic 'nosuch'"),
        (("create", "nosuch/subscriptions/s"), "topic 'nosuch'"),
        (("show", "nosuch/subscriptions/s"), "topic 'nosuch'"),
        (("peek", "nosuch/subscriptions/s"), "subscription 'nosuch/subscriptions/s'"),
    ],
)
@pytest.mark.thorough
def test_n1_a_missing_entity_is_named_with_its_namespace(bus: Bus, arguments: tuple[str, ...], says: str) -> None:
    done = bus.run(*arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"error: {says} is not on {bus.authority}\n" in done.stderr


@pytest.mark.thorough
def test_n1_a_near_name_is_offered(bus: Bus) -> None:
    path = bus.new("--topic", kind="payments")
    bus.well("create", f"{path}/subscriptions/audit")
    assert f"Is it '{path}'?" in bus.run("show", path.replace("pay", "pya")).stderr
    near = bus.run("show", f"{path}/subscriptions/audti").stderr
    assert f"Is it '{path}/subscriptions/audit'?" in near


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("send", "t/subscriptions/s", "x"), "only its topic takes messages"),
        (("send", "q", "x", "--file", "f"), "the body is given twice"),
        (("send", "q", "--lines"), "the input has no line"),
        (("send", "q", "x", "--count", "2", "--id", "1"), "--id is for one message"),
        (("send", "q", "x", "--property", "a"), "--property 'a' is not name=text"),
        (("send", "q", "x", "--property", "a:=[1]"), "--property 'a:=[1]' has no value that a message can carry"),
        (("send", "q", "x", "--property", 'a:="b"'), "after = it is text"),
        (("send", "q", "x", "--property", "a:=NaN"), "a number of at most 64 bits, true or false"),
        (("send", "q", "x", "--property", "a:=1e400"), "--property 'a:=1e400' has no value"),
        (("send", "q", "x", "--property", f"a:={2**63}"), f"--property 'a:={2**63}' has no value"),
        (("send", "q", "x", "--time-to-live", "0"), "--time-to-live is shorter than 1 ms"),
        (("send", "q", "x", "--delay", "9999999d"), "--delay ends after the last date"),
        (("send", "q", "x", "--delay", "soon"), "'soon' is not a span of time. Give a number with ms, s, m, h or d"),
        (("peek", "q/$DeadLetterQueue"), "is a dead-letter queue"),
        (("peek", "/"), "the path of the entity is empty"),
        (("peek", "q", "--after", str(2**63)), f"{2**63} is not in the range"),
        (("create", "t/subscriptions/s", "--topic"), "is a subscription"),
        (("create", "t", "--topic", "--sessions"), "a topic has no --sessions"),
        (("create", "q", "--filter", "1=1"), "a queue has no --filter"),
        (("create", "q", "--lock-duration", "30h"), "LockDuration is 5 s to 300 s"),
    ],
)
@pytest.mark.thorough
def test_n1_wrong_usage_ends_with_2(bus: Bus, arguments: tuple[str, ...], says: str) -> None:
    done = bus.run(*arguments, input="")
    assert (done.exit_code, done.stdout) == (2, "")
    assert says in done.stderr


@pytest.mark.thorough
def test_n1_what_the_service_refuses_has_a_hint(bus: Bus) -> None:
    queue, topic = bus.new("--sessions"), bus.new("--topic", kind="topic")
    sent = bus.run("send", queue, "hi")
    assert (sent.exit_code, sent.stdout) == (2, "")
    assert f"error: {bus.authority} refuses this: The entity requires sessions" in sent.stderr
    assert "hint: Add --session ID" in sent.stderr
    peeked = bus.run("peek", topic)
    assert (peeked.exit_code, peeked.stdout) == (2, "")
    assert f"error: {bus.authority} refuses this: '{topic}' is a topic" in peeked.stderr
    assert f"hint: Peek at {topic}/subscriptions/NAME." in peeked.stderr
    long = bus.run("send", queue, "hi", "--session", "s" * 200)
    assert (long.exit_code, "longer than 128 characters" in long.stderr, "hint:" in long.stderr) == (2, True, False)


@pytest.mark.thorough
def test_n1_an_error_after_a_part_of_the_messages_was_sent_says_how_many(bus: Bus) -> None:
    queue = bus.new()
    ids = "".join(f"{number}\n" for number in range(1500))
    sent = bus.run("send", queue, "--lines", input=ids + "x" * 300_000 + "\n")
    assert (sent.exit_code, sent.stdout) == (1, "")
    assert "error: 1,000 of 1,501 messages were sent. Then: a message of 300" in sent.stderr
    assert "hint: The first 1,000 are there: send only the rest." in sent.stderr
    assert bus.administered("get_queue_runtime_properties", queue).active_message_count == 1000
    none = bus.run("send", queue, "--lines", input="1\n" + "x" * 300_000 + "\n")
    assert (none.exit_code, none.stderr.startswith("error: a message of 300")) == (1, True)


@pytest.mark.parametrize("arguments", [("list",), ("peek", "q"), ("send", "q", "x")])
@pytest.mark.thorough
def test_n1_a_wrong_key_and_a_namespace_that_is_away_are_told_apart(bus: Bus, arguments: tuple[str, ...]) -> None:
    wrong = bus.run(*arguments, text=bus.text.replace("key-of-all", "other"))
    assert wrong.exit_code == 1
    assert f"error: the key was refused by {bus.authority}: " in wrong.stderr
    assert wrong.stderr.count("signature does not match") == 1
    away = bus.run(*arguments, text=bus.text.replace(bus.authority, "localhost:1"))
    assert away.exit_code == 1
    assert "error: localhost:1 cannot be reached: " in away.stderr


@pytest.mark.thorough
def test_n1_a_key_without_the_manage_right_is_told_what_it_lacks(bus: Bus) -> None:
    refused = bus.run("list", text=bus.weaker)
    assert (refused.exit_code, "Manage" in refused.stderr) == (1, True)


@pytest.mark.thorough
def test_n1_other_bodies_and_properties_are_shown(bus: Bus) -> None:
    path = bus.new()
    properties = {"raw": b"\x01", "at": datetime(2026, 1, 2, tzinfo=UTC)}
    with_values = Message([1, "two"], body_type=BodyType.VALUE, application_properties=properties)

    async def send(on: ServiceBusConnection) -> None:
        async with await on.sender(path) as sender:
            await sender.send([with_values, Message(b"\xff\xfe")])

    bus.on(send)
    value, binary = (json.loads(line) for line in bus.well("peek", path, "--json").splitlines())
    assert value["body"] == '[1, "two"]'
    assert value["application_properties"] == {"raw": "AQ==", "at": "2026-01-02T00:00:00+00:00"}
    assert binary["body_base64"] == "//4="
    assert "binary, 2 bytes" in bus.well("peek", path)
