"""Memory and latency of the server while many peers make it hold as much as they can, with a key and without (X1).

For each kind of attack: the resident memory before, the highest, and after the peers have gone; and how long the
official SDK waits for a send during the attack, on an open connection and on a new one.

    python bench/hostile_connections.py [--connections 1000] [--seconds 5] [--only KIND] [--json]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import select
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from azure.servicebus import ServiceBusClient, ServiceBusMessage

from bench.measuring import Figure, quantile, show, write_json
from bench.serving import Server, watched
from twinbus.amqp import RECEIVER, SENDER, Properties, Source, Target, build_message
from twinbus.amqp.frames import AMQP_HEADER, FRAME_HEADER, SASL_FRAME, SASL_HEADER, performative_frame
from twinbus.amqp.performatives import Attach, Begin, Detach, End, Flow, Open, SaslInit, Transfer
from twinbus.values import Int, Symbol

RSS_AIM: Final = 150.0
RSS_WITH_KEY_AIM: Final = 800.0  # 512 MiB for what connections hold, a quarter for buffers that grow, the server
LATENCY_AIM: Final = 0.1
FRAME: Final = 64 * 1024
LARGEST_ATTACH: Final = 4000
ROUNDS: Final = 16  # more than any limit before authentication lets a peer use

Hostility = Callable[[], list[bytes]]
"""The pieces that a peer sends, in order."""

OPENED: Final = AMQP_HEADER + performative_frame(0, Open("hostile", "localhost", 1 << 20))
BEGIN: Final = Begin(next_outgoing_id=0, incoming_window=65_536, outgoing_window=65_536)
BEGUN: Final = OPENED + performative_frame(0, BEGIN)


def to_node(handle: int, node: str = "$cbs") -> bytes:
    attach = Attach(
        f"sender-{handle}", handle, SENDER, source=Source("here"), target=Target(node), initial_delivery_count=0
    )
    return performative_frame(0, attach)


def from_node(handle: int, node: str = "$cbs", properties: dict[Symbol, object] | None = None) -> bytes:
    attach = Attach(
        f"receiver-{handle}", handle, RECEIVER, source=Source(node), target=Target("here"), properties=properties
    )
    return performative_frame(0, attach)


def with_payload(transfer: Transfer, payload: bytes) -> bytes:
    head = performative_frame(0, transfer)
    return FRAME_HEADER.pack(len(head) + len(payload), 2, 0, 0) + head[8:] + payload


def unfinished_deliveries() -> list[bytes]:
    """Deliveries to $cbs whose last frame never comes, on as many links as there may be."""
    links = range(ROUNDS)
    parts = [
        with_payload(Transfer(link, link, b"t", more=True), bytes(FRAME - 1024))
        for _ in range(ROUNDS)
        for link in links
    ]
    return [BEGUN + b"".join(map(to_node, links)), *parts]


def half_frames() -> list[bytes]:
    """One byte less than the largest frame."""
    return [OPENED, (FRAME).to_bytes(4) + b"\x02\x00\x00\x00" + bytes(FRAME - 9)]


def announced_frames() -> list[bytes]:
    """Half of a frame as large as the namespace announces."""
    return [OPENED, (1 << 20).to_bytes(4) + b"\x02\x00\x00\x00" + bytes(1 << 19)]


def huge_attaches() -> list[bytes]:
    """Attaches whose properties are many small values: one byte on the wire, 64 in memory."""
    lists: list[list[object]] = [[] for _ in range(LARGEST_ATTACH)]
    return [BEGUN, *(from_node(handle, properties={Symbol("p"): lists}) for handle in range(ROUNDS))]


def many_links() -> list[bytes]:
    return [BEGUN, b"".join(to_node(handle) for handle in range(4096))]


def many_sessions() -> list[bytes]:
    return [OPENED + b"".join(performative_frame(channel, BEGIN) for channel in range(4999))]


def churned_links() -> list[bytes]:
    """Sessions that begin and end, and links that come and go, on every channel and handle."""
    links = b"".join(to_node(handle) + performative_frame(0, Detach(handle, True)) for handle in range(2048))
    sessions = b"".join(performative_frame(n, BEGIN) + performative_frame(n, End()) for n in range(1, 2048))
    return [BEGUN + links + sessions]


def unread_replies() -> list[bytes]:
    """Requests to $cbs whose replies are never taken."""
    request = build_message(
        properties=Properties(message_id="m", reply_to="here"),
        application_properties={"operation": "put-token", "name": "sb://localhost/"},
        value="no token",
    )
    transfers = [with_payload(Transfer(0, n, b"t", settled=True), request) for n in range(4000)]
    return [BEGUN + to_node(0) + from_node(1) + b"".join(transfers)]


def unread_answers() -> list[bytes]:
    """Flows that want an echo, and a peer that reads none of them."""
    echo = Flow(next_incoming_id=0, incoming_window=1, next_outgoing_id=0, outgoing_window=1, echo=True)
    flow = performative_frame(0, echo)
    return [BEGUN, *[flow * 1000] * 64]


def half_requests() -> list[bytes]:
    """An HTTP request with a large head that does not end."""
    return [b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"y" * 1000) for n in range(60))]


def half_bodies() -> list[bytes]:
    """An HTTP request whose body does not end."""
    return [b"PUT /q HTTP/1.1\r\nHost: localhost\r\nContent-Length: 260000\r\n\r\n" + bytes(250_000)]


def unread_pages() -> list[bytes]:
    """HTTP requests whose answers are never read."""
    return [b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500] * 20


def half_hellos() -> list[bytes]:
    """A TLS handshake message of 16 KB that does not end."""
    body = b"\x01\x00\x3f\x00" + b"\x03\x03" + bytes(15_000)
    return [b"\x16\x03\x01\x3f\x00" + body]


def silence() -> list[bytes]:
    return []


KINDS: Final[dict[str, Hostility]] = {
    one.__name__.replace("_", " "): one
    for one in (
        unfinished_deliveries, half_frames, announced_frames, huge_attaches, many_links, many_sessions, churned_links,
        unread_replies, unread_answers, half_requests, half_bodies, unread_pages, half_hellos, silence,
    )
}  # fmt: skip


def after_key(*pieces: bytes) -> list[bytes]:
    """The same with a key: the peer may do everything."""
    init = SaslInit("PLAIN", b"\0RootManageSharedAccessKey\0SAS_KEY_VALUE")
    return [SASL_HEADER + performative_frame(0, init, SASL_FRAME) + OPENED, *pieces]


def with_key_unfinished() -> list[bytes]:
    links = range(ROUNDS)
    parts = [
        with_payload(Transfer(link, link, b"t", more=True), bytes(FRAME - 1024)) for _ in range(64) for link in links
    ]
    return after_key(performative_frame(0, BEGIN) + b"".join(to_node(link, "sends") for link in links), *parts)


def with_key_receivers(window: int) -> list[bytes]:
    """Receivers of large messages that grant much credit and read nothing."""
    begin = Begin(next_outgoing_id=0, incoming_window=window, outgoing_window=65_536)
    links = b"".join(from_node(handle, "receives") for handle in range(100))
    flow = Flow(
        next_incoming_id=0, incoming_window=window, next_outgoing_id=0, outgoing_window=65_536, link_credit=10_000
    )
    flows = b"".join(performative_frame(0, replace(flow, handle=handle)) for handle in range(100))
    return after_key(performative_frame(0, begin) + links, flows)


def with_key_peeks() -> list[bytes]:
    """Requests for a megabyte of messages each, whose replies are never taken."""
    request = build_message(
        properties=Properties(message_id="m", reply_to="here"),
        application_properties={"operation": "com.microsoft:peek-message"},
        value={"from-sequence-number": 0, "message-count": Int(100)},
    )
    links = to_node(0, "receives/$management") + from_node(1, "receives/$management")
    transfers = [with_payload(Transfer(0, n, b"t", settled=True), request) for n in range(4000)]
    return after_key(performative_frame(0, BEGIN) + links + b"".join(transfers))


KEY_KINDS: Final = {
    "with a key: unfinished deliveries": with_key_unfinished,
    "with a key: receivers that do not read": lambda: with_key_receivers(65_536),
    "with a key: closed session windows": lambda: with_key_receivers(0),
    "with a key: unread peeks": with_key_peeks,
}
TLS_KINDS: Final = {
    "TLS: unfinished deliveries": unfinished_deliveries,
    "TLS: a burst of heartbeats": lambda: [OPENED, b"\x00\x00\x00\x08\x02\x00\x00\x00" * 32_768],
}


class Peers:
    """Many sockets that are written to as far as the server reads, and never read from."""

    def __init__(self, port: int, tls: ssl.SSLContext | None) -> None:
        self._port = port
        self._tls = tls
        self._sockets: dict[int, socket.socket] = {}
        self._left: dict[int, list[memoryview]] = {}
        self.refused = 0

    def connect(self, count: int, pieces: list[bytes]) -> None:
        for number in range(count):
            try:
                one = socket.create_connection(("127.0.0.1", self._port), timeout=5)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                if self._tls is not None:
                    one = self._tls.wrap_socket(one, server_hostname="localhost")
            except OSError:
                self.refused += 1
                continue
            one.setblocking(False)
            self._sockets[one.fileno()] = one
            self._left[one.fileno()] = [memoryview(piece) for piece in pieces]
            if number % 50 == 0:
                self.write(0.0)

    def write(self, seconds: float) -> None:
        """Write what can be written for some seconds."""
        end = time.monotonic() + seconds
        while True:
            poll = select.poll()
            for number, left in self._left.items():
                if left:
                    poll.register(number, select.POLLOUT)
            for number, _ in poll.poll(50 if seconds else 0):
                self._write(number)
            if time.monotonic() >= end:
                return
            if not any(self._left.values()):
                time.sleep(max(0.0, end - time.monotonic()))
                return

    def _write(self, number: int) -> None:
        left = self._left[number]
        try:
            while left:
                sent = self._sockets[number].send(left[0])
                left[0] = left[0][sent:]
                if not left[0]:
                    left.pop(0)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return
        except OSError:  # the server has closed it
            left.clear()
            self.refused += 1

    def close(self) -> None:
        for one in self._sockets.values():
            with suppress(OSError):
                one.close()


class Benign:
    """The official SDK in a process of its own: sends on an open connection, and on a new one each time."""

    def __init__(self, connection_string: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_send, args=(connection_string, theirs), daemon=True)
        self._process.start()
        self._ours.recv()

    def forget(self) -> None:
        """Discard the measurements so far."""
        self._ours.send("forget")

    def end(self) -> tuple[list[float], list[float]]:
        """Seconds of each send, and of each connection with a send."""
        self._ours.send("end")
        found: tuple[list[float], list[float]] = self._ours.recv()
        self._process.join()
        return found


def _send(connection_string: str, pipe: Connection) -> None:
    sends: list[float] = []
    connects: list[float] = []
    ended = threading.Event()
    with ServiceBusClient.from_connection_string(connection_string) as client:

        def send_anew() -> None:
            before = time.perf_counter()
            with client.get_queue_sender("sends") as another:
                another.send_messages(ServiceBusMessage(b"x"))
                connects.append(time.perf_counter() - before)

        def keep_connecting() -> None:
            while not ended.is_set():
                send_anew()

        with client.get_queue_sender("sends") as sender:
            sender.send_messages(ServiceBusMessage(b"x"))
            connecting = threading.Thread(target=keep_connecting)
            connecting.start()
            pipe.send("ready")
            while True:
                if pipe.poll(0.01):
                    if pipe.recv() == "end":
                        break
                    sends.clear()
                    connects.clear()
                sends.append(_seconds(lambda: sender.send_messages(ServiceBusMessage(b"x"))))
            ended.set()
            connecting.join()
    pipe.send((sends, connects))


def _seconds(call: Callable[[], object]) -> float:
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


def fill(connection_string: str) -> None:
    """100 MB of large messages."""
    with (
        ServiceBusClient.from_connection_string(connection_string) as client,
        client.get_queue_sender("receives") as sender,
    ):
        for _ in range(400):
            sender.send_messages(ServiceBusMessage(bytes(250_000)))


def measure(name: str, hostility: Hostility, tls: bool, count: int, seconds: float, folder: Path) -> list[Figure]:
    data = folder / name.replace(" ", "-").replace(":", "")
    with Server(data) as server:
        port = int(server.connection_string.split(":")[2].split(";")[0])
        context = None
        if tls:
            context = ssl.create_default_context(cafile=str(data / "tls" / "ca.pem"))
        pieces = hostility()
        if hostility in KEY_KINDS.values():
            fill(server.connection_string)
        benign = Benign(server.connection_string)
        time.sleep(1.0)
        before = server.meter.rss_megabytes()
        cpu = server.meter.cpu_seconds()
        benign.forget()
        peers = Peers(port, context)
        with watched(server, 0.02) as seen:
            peers.connect(count, pieces)
            peers.write(seconds)
        cpu = server.meter.cpu_seconds() - cpu
        sends, connects = benign.end()
        connects = connects or [float("nan")]
        peers.close()
        time.sleep(12.0)  # the server returns free memory to the system every 5 s
        after = server.meter.rss_megabytes()
    highest = max(seen.values)
    aim = RSS_WITH_KEY_AIM if hostility in KEY_KINDS.values() else RSS_AIM
    p50, p99 = quantile(sends, 0.5), quantile(sends, 0.99)
    values = {
        "before": before, "highest": highest, "after": after, "refused": peers.refused, "cpu": cpu,
        "send_p50": p50, "send_p99": p99, "send_max": max(sends), "connect_p50": quantile(connects, 0.5),
        "connect_max": max(connects),
    }  # fmt: skip
    return [
        Figure(
            f"{name}: RSS, MB",
            f"{highest:.0f}",
            f"before {before:.0f}, after {after:.0f}, refused {peers.refused}, CPU {cpu:.1f} s",
            aim=f"< {aim:.0f} MB",
            met=highest < aim,
            values=values,
        ),
        Figure(
            f"{name}: SDK send p50, p99, longest, ms",
            f"{p50 * 1000:.0f}, {p99 * 1000:.0f}, {max(sends) * 1000:.0f}",
            f"new connection {quantile(connects, 0.5) * 1000:.0f}, {max(connects) * 1000:.0f}",
            aim="" if hostility in KEY_KINDS.values() else f"p99 < {LATENCY_AIM * 1000:.0f} ms",
            met=None if hostility in KEY_KINDS.values() else p99 < LATENCY_AIM,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = {**dict.fromkeys([*KINDS, *KEY_KINDS], False), **dict.fromkeys(TLS_KINDS, True)}
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--with-key", type=int, default=100, help="peers of the kinds that have a key")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long peers go on after all are connected")
    parser.add_argument("--only", choices=every, action="append")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    notes = [
        f"{asked.connections} peers without a token, {asked.with_key} with a key.",
        "Peers, SDK and server share the machine's cores.",
        "A new connection of the SDK takes half a second by itself: it waits in steps while it opens.",
    ]
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        for kind in asked.only or every:
            hostility = {**KINDS, **TLS_KINDS, **KEY_KINDS}[kind]
            count = asked.with_key if kind in KEY_KINDS else asked.connections
            figures += measure(kind, hostility, every[kind], count, asked.seconds, Path(name))
    if asked.json:
        write_json(figures, notes)
    else:
        show("Hostile connections", figures, notes)


if __name__ == "__main__":
    main()
