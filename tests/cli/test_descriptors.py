"""A server without free file descriptors serves open connections, refuses new ones, and logs this once (X1)."""

import http.client
import re
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusMessage

from .running import PATIENCE, Serving, serving_config

CONFIG = '[[namespaces]]\nname = "one"\nport = 0\n[[namespaces.queues]]\nname = "orders"\n'
COUNTED = re.compile(r'^twinbus_limit_exceeded_total\{limit="file-descriptors"\} ([0-9.]+)$', re.MULTILINE)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with serving_config(tmp_path, CONFIG) as server:
        yield server


class Refusals:
    """Reads from the metrics how often descriptors ran out, on one connection that stays open."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        self.count()

    def count(self) -> float:
        self._connection.request("GET", "/metrics")
        found = COUNTED.search(self._connection.getresponse().read().decode())
        return float(found[1]) if found else 0.0

    def more_than(self, count: float) -> float:
        """Read the metrics until there are more refusals than this."""
        while (found := self.count()) <= count:
            pass
        return found


@contextmanager
def sending(server: Serving) -> Iterator[Callable[[], None]]:
    """Yield a sender of the official SDK on an open connection."""
    string = server.namespaces["one"]["connection_string"]
    with (
        ServiceBusClient.from_connection_string(string, retry_total=0) as client,
        client.get_queue_sender("orders") as sender,
    ):
        yield lambda: sender.send_messages(ServiceBusMessage("x"))


def limit(server: Serving, descriptors: int) -> None:
    _, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (descriptors, hard))


def in_use(server: Serving) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def logged(server: Serving) -> int:
    """Stop the server, and return how often it logged that descriptors ran out."""
    server.signal(signal.SIGTERM)
    code, stderr = server.end()
    assert code == 0
    assert "Traceback" not in stderr
    return stderr.count("no file descriptors left for connections")


def test_x1_some_descriptors_are_left_for_files_and_peers_that_come_later_are_refused(server: Serving) -> None:
    port = server.namespaces["one"]["port"]
    with sending(server) as send, ExitStack() as sockets:
        refusals = Refusals(port)
        own = in_use(server)
        limit(server, 100)
        for _ in range(120):
            sockets.enter_context(socket.create_connection(("127.0.0.1", port)))
        refusals.more_than(0)
        send()
        assert in_use(server) < 100
        sockets.close()
        while in_use(server) > own:
            refusals.count()
        with sending(server) as send_anew:
            send_anew()
    assert logged(server) == 1


def test_x1_accepting_waits_for_descriptors_without_spinning_and_then_goes_on(server: Serving) -> None:
    port = server.namespaces["one"]["port"]
    request = b"GET /$health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with sending(server) as send:
        refusals = Refusals(port)
        limit(server, in_use(server))
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as waiting:
            waiting.sendall(request)
            count = refusals.more_than(0)
            send()
            assert refusals.more_than(count) - count <= 3, "tried a few times a second"
            limit(server, in_use(server) + 4)
            told = waiting.makefile("rb").read()
            assert told.startswith(b"HTTP/1.1 503")
            assert b"no file descriptors left for connections" in told
        limit(server, 1000)
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as welcome:
            welcome.sendall(request)
            assert welcome.recv(1000).startswith(b"HTTP/1.1 200")
        send()
    assert logged(server) == 1
