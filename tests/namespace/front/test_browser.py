"""X3 in a real browser: pages of another origin read nothing from a namespace and change nothing.

The server of the attacker listens on 127.0.0.2 and on localhost. It serves the page, takes its results, and passes all
other requests on to the namespace. So the browser sees one origin whose page came from the attacker and whose answers
come from the namespace: what DNS rebinding gives, without a name server.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests import chromium
from twinbus.connect import make_sas_token
from twinbus.namespace.front.sas_verifier import DEFAULT_KEY, DEFAULT_KEY_NAME
from twinbus.testing import LocalNamespace

pytestmark = pytest.mark.timeout(180)

PAGE = Path(__file__).with_name("attack.html").read_bytes()
SECONDS = 90.0
SECRETS = ("orders", "BEGIN CERTIFICATE", "# HELP", '"faults"', '"namespace"', "QueueDescription")
CONFIG = {"namespaces": [{"name": "primary", "queues": [{"name": "orders"}]}]}


class Attacker:
    """Serves the page at `/page`, receives `/results`, and forwards all other requests to the namespace's port."""

    def __init__(self, host: str, port: int, namespace_port: int) -> None:
        self.results: list[dict[str, Any]] = []
        self.arrived = threading.Condition()
        self._namespace_port = namespace_port
        self._listener = socket.create_server((host, port))
        self.port = self._listener.getsockname()[1]
        self._threads = ThreadPoolExecutor(64)
        self._threads.submit(self._accept)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads.shutdown(cancel_futures=True)

    def wait_for(self, number: int) -> dict[str, dict[str, Any]]:
        """Wait for the results of so many pages. Returns them by origin."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.results) >= number, SECONDS), "the page did not report"
        return {found["origin"]: found["results"] for found in self.results}

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self._threads.submit(self._serve, self._listener.accept()[0])

    def _serve(self, browser: socket.socket) -> None:
        with closing(browser), suppress(OSError):
            browser.settimeout(SECONDS)
            head = b""
            while b"\r\n\r\n" not in head:
                read = browser.recv(65536)
                if not read:
                    return
                head += read
            if head.startswith(b"GET /page"):
                self._answer(browser, PAGE)
            elif head.startswith(b"POST /results"):
                self._take_results(browser, head)
            else:
                self._pass_on(browser, head)

    def _answer(self, browser: socket.socket, body: bytes) -> None:
        # Closed at once: the next request of the page opens a connection, as after the name was pointed elsewhere.
        lines = ["HTTP/1.1 200 OK", "Content-Type: text/html", f"Content-Length: {len(body)}", "Connection: close"]
        browser.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    def _take_results(self, browser: socket.socket, head: bytes) -> None:
        text, _, body = head.partition(b"\r\n\r\n")
        lines = dict(line.lower().split(": ", 1) for line in text.decode().split("\r\n")[1:])
        while len(body) < int(lines["content-length"]):
            body += browser.recv(65536)
        with self.arrived:
            self.results.append(json.loads(body))
            self.arrived.notify_all()
        self._answer(browser, b"")

    def _pass_on(self, browser: socket.socket, head: bytes) -> None:
        with socket.create_connection(("127.0.0.1", self._namespace_port), SECONDS) as namespace:
            namespace.sendall(head)
            back = self._threads.submit(_copy, namespace, browser)
            _copy(browser, namespace)
            back.result()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while read := source.recv(65536):
            sink.sendall(read)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextmanager
def attacking(*places: tuple[str, int], namespace_port: int) -> Iterator[list[Attacker]]:
    attackers: list[Attacker] = []
    try:
        for host, port in places:
            attackers.append(Attacker(host, port, namespace_port))
        yield attackers
    finally:
        for attacker in attackers:
            attacker.close()


@pytest.fixture
def namespace() -> Iterator[LocalNamespace]:
    with LocalNamespace(memory=True, config=CONFIG, log_level="info") as namespace:
        yield namespace


def page(origin: str, target: str, reports_to: Attacker, **more: Any) -> str:
    """Return the URL of the page on this origin that attacks the namespace under this name."""
    token = make_sas_token(f"{target}/", DEFAULT_KEY_NAME, DEFAULT_KEY, 4_000_000_000)
    report = f"http://127.0.0.1:{reports_to.port}/results"
    return f"{origin}/page#{quote(json.dumps({'target': target, 'token': token, 'report': report, **more}))}"


def statuses(namespace: LocalNamespace) -> list[str]:
    """Return the statuses of all responses of the namespace, from its log."""
    lines = namespace.log.read_text(encoding="utf-8").splitlines()
    return [line.partition(" status=")[2].split()[0] for line in lines if " status=" in line]


def test_x3_pages_of_another_origin_read_nothing_and_change_nothing(namespace: LocalNamespace, tmp_path: Path) -> None:
    port = namespace.port
    with attacking(("127.0.0.2", port), ("127.0.0.1", 0), namespace_port=port) as (_, elsewhere):
        # A page on the namespace's own port under the attacker's name, with a name that now means the namespace.
        rebinding = f"http://evil.example:{port}"
        # A page of another port of this machine: the same site for a browser, another origin all the same.
        neighbour = f"http://localhost:{elsewhere.port}"
        # A page of any other site.
        foreign = f"http://other.example:{elsewhere.port}"
        target = f"http://localhost:{port}"
        frames = [page(rebinding, rebinding, elsewhere, crash=True), page(neighbour, target, elsewhere, crash=True)]
        rules = f"MAP evil.example 127.0.0.2, MAP other.example 127.0.0.1:{elsewhere.port}"
        start = page(foreign, target, elsewhere, frames=frames, crash=True)
        with chromium.opened(start, tmp_path / "profile", f"--host-resolver-rules={rules}"):
            found = elsewhere.wait_for(3)

    assert set(found) == {rebinding, neighbour, foreign}
    for origin, results in found.items():
        assert results.pop("beacon") == {"queued": True}
        for attempt, result in results.items():
            told = f"{origin} could {attempt}: {result}"
            assert not any(secret in result.get("text", "") for secret in SECRETS), told
            assert not result.get("loaded"), told
            assert not result.get("opened"), told
            if origin == rebinding and attempt.startswith(("read", "set", "put", "delete", "lift", "crash")):
                # The browser lets it read the answer: all of it is the refusal.
                assert result["status"] == 421, told
            elif "status" in result:
                # What is asked for without CORS comes back empty.
                assert (result["status"], result["type"], result["text"]) == (0, "opaque", ""), told

    # All of these requests did arrive, and none was carried out.
    answered = statuses(namespace)
    assert set(answered) == {"403", "421"}
    assert answered.count("421") >= 10
    assert answered.count("403") >= 20
    assert namespace.running
    assert namespace.faults.list() == []
    with socket.create_connection(("127.0.0.1", port)) as here:
        token = make_sas_token(f"http://localhost:{port}/", DEFAULT_KEY_NAME, DEFAULT_KEY, 4_000_000_000)
        lines = ["GET /$config HTTP/1.1", f"Host: localhost:{port}", f"Authorization: {token}", "Connection: close"]
        here.sendall("\r\n".join([*lines, "", ""]).encode())
        told = b"".join(iter(lambda: here.recv(65536), b"")).decode()
    assert "orders" in told
    assert "planted" not in told


@pytest.mark.thorough
def test_x3_the_same_page_under_an_own_name_reads_and_changes_all_of_it(
    namespace: LocalNamespace, tmp_path: Path
) -> None:
    """Proves that the other test can fail: from an own origin the same attempts succeed, up to the crash."""
    port = namespace.port
    own = f"http://127.0.0.2:{port}"
    with attacking(("127.0.0.2", port), ("127.0.0.1", 0), namespace_port=port) as (_, elsewhere):
        with chromium.opened(page(own, own, elsewhere), tmp_path / "profile"):
            found = elsewhere.wait_for(1)[own]
        with chromium.opened(page(own, own, elsewhere, crash=True), tmp_path / "second"):
            assert namespace.wait(SECONDS) != 0
    for attempt, secret in (
        ("read ca", "BEGIN CERTIFICATE"),
        ("read metrics", "# HELP"),
        ("read config", "orders"),
        ("read queues", "QueueDescription"),
    ):
        assert (found[attempt]["status"], secret in found[attempt]["text"]) == (200, True)
    assert found["set a fault"]["status"] == 201
    assert found["delete a queue"]["status"] == 200
