"""L7: the data folder of a running server is removed or replaced. A send that reaches no file is not acknowledged.

What is on disk is counted from the files, without the server.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusSender
from azure.servicebus.exceptions import ServiceBusError

from twinbus.testing import LocalNamespace

pytestmark = pytest.mark.usefixtures("compiled")

CONFIG = {"namespaces": [{"name": "primary", "queues": [{"name": "orders"}]}]}
BEFORE = 5
AFTER = 20


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[LocalNamespace]:
    with LocalNamespace(data=tmp_path / "data", config=CONFIG) as made:
        yield made


def client_of(namespace: LocalNamespace) -> ServiceBusClient:
    """Return a sender that does not retry: a repeated send would falsify the count."""
    return ServiceBusClient.from_connection_string(
        namespace.connection_string, retry_total=0, retry_backoff_factor=0.01
    )


def acknowledged(sender: ServiceBusSender, first: int, count: int) -> list[str]:
    """Send messages one after the other. Returns the ids of those that were accepted."""
    done: list[str] = []
    for number in range(first, first + count):
        try:
            sender.send_messages(ServiceBusMessage(b"x", message_id=str(number)), timeout=5)
        except (ServiceBusError, ValueError):  # ValueError: the SDK's sender is shut down by then
            continue
        done.append(str(number))
    return done


def on_disk(data: Path, scratch: Path) -> set[str]:
    """Return the ids of the messages in a copy of the files of a store."""
    shutil.copytree(data, scratch)
    connection = apsw.Connection(str(scratch / "primary.sqlite"))
    raws = [bytes(raw) for (raw,) in connection.execute("SELECT raw FROM message")]
    connection.close()
    # The id is the first string of a message: the byte a1, its length, its characters.
    found = set()
    for raw in raws:
        at = raw.index(b"\xa1") + 1
        found.add(raw[at + 1 : at + 1 + raw[at]].decode())
    return found


def removed(data: Path) -> None:
    shutil.rmtree(data)


def renamed(data: Path) -> None:
    data.rename(data.with_name("moved"))


def replaced(data: Path) -> None:
    shutil.copytree(data, data.with_name("copy"))
    data.rename(data.with_name("moved"))
    data.with_name("copy").rename(data)


def main_file_removed(data: Path) -> None:
    (data / "primary.sqlite").unlink()


def log_removed(data: Path) -> None:
    (data / "primary.sqlite-wal").unlink()


@pytest.mark.parametrize("happens", [removed, renamed, replaced, main_file_removed, log_removed])
def test_l7_no_send_is_acknowledged_after_the_data_folder_is_gone(
    namespace: LocalNamespace, tmp_path: Path, happens: Callable[[Path], None]
) -> None:
    data = tmp_path / "data"
    with client_of(namespace) as client, client.get_queue_sender("orders") as sender:
        before = acknowledged(sender, 0, BEFORE)
        assert len(before) == BEFORE
        happens(data)
        assert acknowledged(sender, BEFORE, AFTER) == []
    assert namespace.wait() == 1
    told = namespace.log.read_text()
    assert "removed or replaced while it was in use" in told
    assert "Put the data folder back" in told
    assert "Traceback" not in told
    if happens in (renamed, replaced):
        assert on_disk(tmp_path / "moved", tmp_path / "scratch") >= set(before)
    elif happens is log_removed:
        assert on_disk(data, tmp_path / "scratch") >= set(before)
    if happens is renamed:
        (tmp_path / "moved").rename(data)
    if happens in (renamed, replaced, log_removed):
        namespace.start()
        with client_of(namespace) as client, client.get_queue_receiver("orders") as receiver:
            assert {str(message.message_id) for message in receiver.peek_messages(100)} >= set(before)


def test_l7_of_sends_under_way_while_the_folder_is_renamed_every_acknowledged_one_is_on_disk(
    namespace: LocalNamespace, tmp_path: Path
) -> None:
    data, done, lock, warm = tmp_path / "data", list[str](), threading.Lock(), threading.Barrier(5)

    def send(first: int) -> None:
        with client_of(namespace) as client, client.get_queue_sender("orders") as sender:
            begun = acknowledged(sender, first, 10)
            warm.wait(30)
            for number in range(first + 10, first + 10_000):
                found = acknowledged(sender, number, 1)
                if not found:
                    break
                begun += found
        with lock:
            done.extend(begun)

    threads = [threading.Thread(target=send, args=(worker * 10_000,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    warm.wait(30)
    renamed(data)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert namespace.wait() == 1
    assert len(done) >= 40
    assert on_disk(tmp_path / "moved", tmp_path / "scratch") >= set(done)
