"""X2: `twinbus serve` on damaged files: what it refuses, what `--accept-damage` lists, what receivers get."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage, ServiceBusReceiveMode
from azure.servicebus.exceptions import ServiceBusError

from .running import Serving, run, serving

pytestmark = pytest.mark.thorough

COUNT = 60
BODIES = {str(number): Random(number).randbytes(1_000) for number in range(COUNT)}
ARGUMENTS = ("--json", "--namespace", "one=0", "--queue", "orders")


def send_all(server: Serving) -> None:
    with client(server) as bus, bus.get_queue_sender("orders") as sender:
        for name, body in BODIES.items():
            sender.send_messages(ServiceBusMessage(body, message_id=name))


def receive_all(server: Serving, wait: float = 1) -> dict[str, bytes]:
    """Return the bodies of all messages that can be received, by message id."""
    found: dict[str, bytes] = {}
    deleting = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    with client(server) as bus, bus.get_queue_receiver("orders", receive_mode=deleting) as receiver:
        while more := receiver.receive_messages(COUNT, max_wait_time=wait):
            found |= {str(message.message_id): b"".join(message.body) for message in more}
    return found


def client(server: Serving) -> ServiceBusClient:
    return ServiceBusClient.from_connection_string(
        server.namespaces["one"]["connection_string"], retry_total=0, retry_backoff_factor=0.01
    )


def stored(data: Path, end: signal.Signals) -> Path:
    """Send all messages to a server, and end it. Returns the path of its store."""
    with serving(*ARGUMENTS, "--data", str(data)) as server:
        send_all(server)
        server.signal(end)
        server.end()
    return data / "one.sqlite"


def change(path: Path, *places: int) -> None:
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 0x10
    path.write_bytes(content)


def test_x2_one_byte_changed_in_the_log_is_refused_and_can_be_accepted(tmp_path: Path) -> None:
    path = stored(tmp_path, signal.SIGKILL)
    log = path.with_name("one.sqlite-wal")
    change(log, log.stat().st_size // 2)
    refused = run("serve", *ARGUMENTS, "--data", str(tmp_path))
    assert refused.returncode == 1
    assert re.search(r"the last \d+ commits are missing", refused.stderr)
    assert "--accept-damage" in refused.stderr
    assert "Traceback" not in refused.stderr
    with serving(*ARGUMENTS, "--data", str(tmp_path), "--accept-damage") as server:
        found = receive_all(server)
        server.signal(signal.SIGTERM)
        code, told = server.end()
    assert code == 0
    assert 0 < len(found) < COUNT
    assert found.items() <= BODIES.items()
    assert re.search(r"damaged: the last \d+ commits are missing", told)
    assert path.with_name("one.sqlite.damaged-1-wal").exists()


def places_of_bodies(path: Path, *numbers: int) -> list[int]:
    """Return where the file has the bodies of these messages. Unused space may have copies."""
    content = path.read_bytes()
    return [
        found.start() for number in numbers for found in re.finditer(re.escape(BODIES[str(number)][500:600]), content)
    ]


def test_x2_damaged_messages_are_listed_by_number_and_the_others_are_received_as_they_were(tmp_path: Path) -> None:
    path = stored(tmp_path, signal.SIGTERM)
    change(path, *places_of_bodies(path, 10, 11, 12))
    refused = run("serve", *ARGUMENTS, "--data", str(tmp_path))
    assert refused.returncode == 1
    assert "orders: 3 messages (sequence numbers 11, 12, 13) are damaged" in refused.stderr
    with serving(*ARGUMENTS, "--data", str(tmp_path), "--accept-damage") as server:
        found = receive_all(server)
        server.signal(signal.SIGTERM)
        code, told = server.end()
    assert code == 0
    assert found == {name: body for name, body in BODIES.items() if int(name) not in (10, 11, 12)}
    assert "lost: orders: 3 of 60 messages; sequence numbers 11, 12, 13" in told
    listed = (tmp_path / "one.sqlite.damaged-1.txt").read_text()
    assert "lost: orders: 3 of 60 messages; sequence numbers 11, 12, 13\n" in listed
    # The rebuilt store is a store like any other.
    with serving(*ARGUMENTS, "--data", str(tmp_path)) as server:
        assert receive_all(server) == {}


def test_x2_a_message_that_is_damaged_while_the_server_runs_is_never_delivered(tmp_path: Path) -> None:
    path = stored(tmp_path, signal.SIGTERM)
    with serving(*ARGUMENTS, "--data", str(tmp_path)) as server:
        change(path, *places_of_bodies(path, 0))
        try:
            found = receive_all(server)
        except ServiceBusError:
            found = {}
        code, told = server.end()
    assert (code, found) == (1, {})
    assert "orders: message 1 is damaged" in told
    assert "--accept-damage" in told
    assert "Traceback" not in told


def everything_lost(path: Path) -> None:
    path.unlink()


def header_lost(path: Path) -> None:
    change(path, 30)


@pytest.mark.parametrize(("happens", "expected"), [(everything_lost, {}), (header_lost, BODIES)])
def test_x2_without_the_file_or_its_header_the_server_says_so(
    tmp_path: Path, happens: Callable[[Path], None], expected: dict[str, bytes]
) -> None:
    path = stored(tmp_path, signal.SIGTERM)
    happens(path)
    refused = run("serve", *ARGUMENTS, "--data", str(tmp_path))
    assert refused.returncode == 1
    assert "The store is damaged" in refused.stderr
    with serving(*ARGUMENTS, "--data", str(tmp_path), "--accept-damage") as server:
        assert receive_all(server) == expected
