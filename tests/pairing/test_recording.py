"""M1, M2: the recorded operation of a send, for every kind of message. Without a server: the sender returns at once."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus.amqp import AmqpAnnotatedMessage

from tests.ledger.disks import hanging_disk
from twinbus.ledger import (
    UNKNOWN,
    Gap,
    Intent,
    Ledger,
    LedgerOptions,
    LedgerUnavailableError,
    Operation,
    Outcome,
    Stage,
    billable_units,
    group_writer,
    read_ledger,
)
from twinbus.ledger.running_operation import NOTIFY_EVERY
from twinbus.pairing.recording import OperationRecorder
from twinbus.sdk import encoded_size, outgoing_message

HUGE = 64 * 1024


def plain(body: Any = b"x" * 1000, message_id: Any = "a", **properties: Any) -> ServiceBusMessage:
    """`properties` by their names in AMQP: `message_id` need not be a text there."""
    message = ServiceBusMessage(body, message_id="to be replaced")
    for name, value in {"message_id": message_id, **properties}.items():
        setattr(message.raw_amqp_message.properties, name, value)
    return message


def annotated(**sections: Any) -> ServiceBusMessage:
    return outgoing_message(AmqpAnnotatedMessage(properties={"message_id": "a"}, **sections))


PREFIX = OperationRecorder(None, "contoso").prefix(Stage.SEND_PRIMARY, "orders")


class Sender:
    """A replacement of the SDK's sender, with the methods that recording calls."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def send_messages(self, message: object) -> None:
        self._act()


class AioSender:
    def __init__(self, act: Callable[[], Awaitable[object]]) -> None:
        self._act = act

    async def send_messages(self, message: object) -> None:
        await self._act()


def send(ledger: Ledger, message: Any, act: Callable[[], object] = lambda: None) -> None:
    recorder = OperationRecorder(ledger, "contoso")
    recorder.recorded(PREFIX, message, lambda sender, _: sender.send_messages(message))(Sender(act), None)


@pytest.mark.parametrize(
    ("message", "id_"),
    [
        (plain(), "a"),
        (plain(b""), "a"),
        (plain(message_id=""), ""),
        (plain(message_id='uuid:"é'), 'string:uuid:"é'),
        (plain(message_id=7), "ulong:7"),
        (plain(message_id=b"\x07"), "binary:07"),
        (plain(message_id=UUID(int=7)), f"uuid:{UUID(int=7)}"),
        (plain(b"x" * (HUGE - 3000)), "a"),
        (plain(b"x" * (HUGE - 100)), "a"),
        (plain(b"x" * HUGE), "a"),
        (plain(b"x" * 3 * HUGE), "a"),
        *((plain(**{name: "s" * 5000}), "a") for name in ("subject", "to", "reply_to", "correlation_id")),
        *((plain(**{name: "s" * 5000}), "a") for name in ("content_type", "group_id", "reply_to_group_id")),
        (plain(b"x" * (HUGE - 5000), subject="s" * 6000), "a"),
        (ServiceBusMessage(b"x", message_id="a", application_properties={"name": "v" * 5000}), "a"),
        (ServiceBusMessage(b"x", message_id="a", partition_key="k" * 100, time_to_live=timedelta(hours=1)), "a"),
        (annotated(data_body=[b"x" * 500, b"y" * 500]), "a"),
        (annotated(value_body="v" * 5000), "a"),
        (annotated(sequence_body=[["v" * 5000]]), "a"),
        (annotated(data_body=b"x", annotations={"x-opt": "v" * 5000}), "a"),
        (annotated(data_body=b"x", annotations={7: "v" * 5000}), "a"),
        (annotated(data_body=b"x", annotations={"é": "é" * 5000, "n": 7, "b": b"b" * 5000}), "a"),
        (plain(user_id=b"u" * 5000), "a"),
        (plain(content_encoding="s" * 5000), "a"),
        (plain(correlation_id=UUID(int=7), subject="é" * 3000), "a"),
        (annotated(data_body=b"x", application_properties={"name": "v" * 5000}), "a"),
    ],
)  # fmt: skip
def test_m1_m2_an_operation_has_its_messages_id_size_and_units_whatever_the_message_holds(
    tmp_path: Path, message: ServiceBusMessage, id_: str
) -> None:
    with Ledger(tmp_path) as ledger:
        send(ledger, message)
        send(ledger, [message])
    one, listed = (entry for entry in read_ledger(tmp_path) if isinstance(entry, Operation))
    size = encoded_size(message.raw_amqp_message)
    assert (one.ids, one.result, one.units) == ((id_,), "ok", billable_units(1, [size]))
    assert abs(one.bytes - size) < 64
    assert (one.ids, one.bytes, one.units) == (listed.ids, listed.bytes, listed.units)


def test_m1_operations_of_many_threads_are_each_there_once_whenever_the_writer_looks(tmp_path: Path) -> None:
    count, workers = 500, 4
    interval = sys.getswitchinterval()
    with Ledger(tmp_path, options=LedgerOptions(group_interval=timedelta(milliseconds=1))) as ledger:
        over = threading.Event()

        def work(name: int) -> None:
            for number in range(count):
                # Other tasks run during the send.
                send(ledger, plain(b"x", f"{name}-{number}"), lambda: time.sleep(0))

        def flush() -> None:
            while not over.is_set():
                ledger.flush()

        threads = [threading.Thread(target=work, args=(name,)) for name in range(workers)]
        flusher = threading.Thread(target=flush)
        sys.setswitchinterval(1e-6)
        try:
            for thread in (*threads, flusher):
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
            over.set()
            flusher.join()
    entries = [entry for entry in read_ledger(tmp_path) if isinstance(entry, Operation | Intent | Outcome | Gap)]
    begun = [entry for entry in entries if isinstance(entry, Operation | Intent)]
    outcomes = [entry for entry in entries if isinstance(entry, Outcome)]
    assert Counter(entry.ids for entry in begun) == Counter(
        (f"{name}-{number}",) for name in range(workers) for number in range(count)
    )
    assert Counter(entry.id for entry in outcomes) == Counter(e.id for e in begun if isinstance(e, Intent))
    assert len(begun) + len(outcomes) == len(entries)
    assert outcomes, "the writer has looked at some while they were under way"


async def test_m1_a_send_of_asyncio_that_outlasts_its_group_is_an_intent_and_an_outcome(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        recorder, message = OperationRecorder(ledger, "contoso"), plain()
        await recorder.aio_recorded(PREFIX, message, lambda sender: sender.send_messages(message))(
            AioSender(ledger.flushed)
        )
    intent, outcome = (entry for entry in read_ledger(tmp_path) if isinstance(entry, Operation | Intent | Outcome))
    assert isinstance(intent, Intent)
    assert isinstance(outcome, Outcome)
    assert (intent.ids, intent.id, outcome.result) == (("a",), outcome.id, "ok")


def test_m1_behind_a_disk_that_hangs_the_queue_has_an_end_and_what_found_no_room_is_told_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, more = 2000, 5000
    monkeypatch.setattr(group_writer, "_QUEUE_LIMIT", room)
    with Ledger(tmp_path, options=LedgerOptions(durability="lazy")) as ledger:
        with hanging_disk(monkeypatch) as asked:
            send(ledger, plain(message_id="first"))
            assert asked.wait(10)
            for number in range(more):
                send(ledger, plain(message_id=str(number)))
        assert ledger.flush()
        assert room <= more - ledger.missing < room + NOTIFY_EVERY
    names = {name for entry in read_ledger(tmp_path) if isinstance(entry, Operation) for name in entry.ids}
    assert {"first", "0", str(room - 1)} <= names


def test_m1_a_send_that_outlasts_its_group_is_an_intent_and_an_outcome(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        send(ledger, plain(), ledger.flush)
    intent, outcome = (entry for entry in read_ledger(tmp_path) if isinstance(entry, Operation | Intent | Outcome))
    assert isinstance(intent, Intent)
    assert isinstance(outcome, Outcome)
    assert (intent.ids, intent.units, intent.id, outcome.result) == (("a",), 1, outcome.id, "ok")


def interrupted() -> None:
    raise KeyboardInterrupt


def test_s8_a_send_that_is_interrupted_is_unknown(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger, pytest.raises(KeyboardInterrupt):
        send(ledger, plain(), interrupted)
    (entry,) = (entry for entry in read_ledger(tmp_path) if isinstance(entry, Operation))
    assert (entry.ids, entry.result) == (("a",), UNKNOWN)


def test_m1_a_ledger_that_stops_is_asked_before_every_try(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, options=LedgerOptions(on_error="stop"))
    tries = Counter[str]()
    send(ledger, plain(), lambda: tries.update(["before"]))
    ledger.close()
    with pytest.raises(LedgerUnavailableError, match="closed"):
        send(ledger, plain(), lambda: tries.update(["after"]))
    assert tries == {"before": 1}


def test_m1_a_ledger_that_stops_is_asked_before_every_try_of_asyncio(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, options=LedgerOptions(on_error="stop"))
    ledger.close()
    with pytest.raises(LedgerUnavailableError, match="closed"):
        OperationRecorder(ledger, "contoso").aio_recorded(PREFIX, plain(), lambda _: pytest.fail("it was tried"))
