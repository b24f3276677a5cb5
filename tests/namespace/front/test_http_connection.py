"""HTTP/1.1 on a connection without a network: framing, order, bounds, and authorization."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator

import h11
import pytest

from tests.namespace.front import recorded_requests
from tests.namespace.front.bare_namespace import BORN, start_runtime
from tests.namespace.front.http_peer import NAMES, TOKEN, RecordingStream, converse, handler, settle
from tests.namespace.front.recorded_requests import request
from twinbus.connect import make_sas_token
from twinbus.namespace.engine.descriptions import (
    AuthorizationRule,
    Claim,
    Description,
    EntityInfo,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.engine.effects import Refusal
from twinbus.namespace.front.http_connection import MAX_BODY_BYTES, MAX_HEADER_BYTES, HttpConnection
from twinbus.namespace.front.http_handler import HttpHandler
from twinbus.namespace.front.sas_verifier import DEFAULT_KEY, DEFAULT_KEY_NAME
from twinbus.namespace.runtime import NamespaceRuntime

SIGNED = [("Authorization", TOKEN)]
SENDER = AuthorizationRule("sender", "send-key", "send-key", frozenset({Claim.SEND}))
OWN = AuthorizationRule("own", "own-key", "own-key", frozenset({Claim.MANAGE}))
OF_ORDERS = AuthorizationRule("of-orders", "orders-key", "orders-key", frozenset(Claim))
V = "api-version=2024-05"
SUPPLEMENTARY, DLQ_SUPPLEMENTARY = "ServiceBusSupplementaryAuthorization", "ServiceBusDlqSupplementaryAuthorization"


@pytest.fixture
async def runtime() -> AsyncIterator[NamespaceRuntime]:
    made = await start_runtime(
        NamespaceRuntime,
        QueueDescription(path="orders", authorization_rules=(OF_ORDERS,)),
        QueueDescription(path="metrics"),
        TopicDescription(path="news"),
        SubscriptionDescription(topic="news", name="all"),
    )
    yield made
    await made.close()


@pytest.fixture
def http(runtime: NamespaceRuntime) -> HttpHandler:
    return handler(runtime, SENDER, OWN)


class Answer:
    """One response, parsed by h11's client."""

    def __init__(self, head: h11.Response, body: bytes) -> None:
        self.status = head.status_code
        self.headers = {name.decode(): value.decode() for name, value in head.headers}
        self.body = body

    @property
    def detail(self) -> str:
        return self.body.decode().partition("<Detail>")[2].partition("</Detail>")[0]


def answers(stream: RecordingStream, *methods: str) -> list[Answer]:
    """Parse what was written, as the responses to requests with these methods."""
    data = bytes(stream.written)
    found = []
    for method in methods:
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method=method, target="/", headers=[("Host", "h")]))
        client.send(h11.EndOfMessage())
        client.receive_data(data)
        found.append(Answer(*_one(client)))
        data = client.trailing_data[0]
    assert data == b"", "more was written than asked for"
    return found


def _one(client: h11.Connection) -> tuple[h11.Response, bytes]:
    head, body = None, b""
    while True:
        event = client.next_event()
        if isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            return head, body
        else:
            assert isinstance(event, h11.InformationalResponse)


async def ask(http: HttpHandler, *args: object, loopback: bool = True) -> Answer:
    method = str(args[0])
    stream = await converse(http, request(*args), loopback=loopback)  # type: ignore[arg-type]  # request's own arguments
    return answers(stream, method)[0]


# --- framing ---------------------------------------------------------------------------------------------------------


async def test_a_request_may_come_byte_by_byte(http: HttpHandler) -> None:
    data = request("PUT", f"/q?{V}", recorded_requests.PYTHON_QUEUE, SIGNED)
    stream = await converse(http, *[data[place : place + 1] for place in range(len(data))])
    assert answers(stream, "PUT")[0].status == 201


async def test_pipelined_requests_are_answered_in_their_order(http: HttpHandler) -> None:
    several = [
        request("PUT", f"/q?{V}", recorded_requests.PYTHON_QUEUE, SIGNED),
        request("GET", f"/q?{V}", None, SIGNED),
        request("DELETE", f"/q?{V}", None, SIGNED),
        request("GET", f"/q?{V}", None, SIGNED),
        request("HEAD", "/$health"),
        request("GET", "/$health"),
    ]
    stream = await converse(http, b"".join(several))
    got = answers(stream, "PUT", "GET", "DELETE", "GET", "HEAD", "GET")
    assert [answer.status for answer in got] == [201, 200, 200, 404, 200, 200]
    assert stream.closed


async def test_a_connection_stays_open_until_it_is_told_to_close(http: HttpHandler) -> None:
    stream = await converse(http, request("GET", "/$health"), end=False)
    assert not stream.closed
    stream = await converse(http, request("GET", "/$health", None, [("Connection", "close")]), end=False)
    assert stream.closed
    stream = await converse(http, b"GET /$health HTTP/1.0\r\n\r\n", end=False)
    assert stream.closed


async def test_a_chunked_body_is_put_together(http: HttpHandler) -> None:
    lines = [f"PUT /q?{V} HTTP/1.1", "Host: localhost", f"Authorization: {TOKEN}", "Transfer-Encoding: chunked"]
    head = "\r\n".join([*lines, "", ""]).encode()
    body = recorded_requests.PYTHON_QUEUE
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(part), part)
        for part in (body[place : place + 100] for place in range(0, len(body), 100))
    )
    stream = await converse(http, head + chunks + b"0\r\n\r\n")
    assert answers(stream, "PUT")[0].status == 201


async def test_a_client_that_waits_is_told_to_continue(http: HttpHandler) -> None:
    data = request("PUT", f"/q?{V}", recorded_requests.PYTHON_QUEUE, [*SIGNED, ("Expect", "100-continue")])
    head, body = data[: -len(recorded_requests.PYTHON_QUEUE)], recorded_requests.PYTHON_QUEUE
    stream = RecordingStream()
    connection = HttpConnection(http, stream, NAMES, peer_is_loopback=True)
    connection.data_received(head)
    assert stream.written.startswith(b"HTTP/1.1 100 ")
    connection.data_received(body)
    await settle()
    assert answers(stream, "PUT")[0].status == 201


async def test_head_is_answered_like_get_without_the_body(http: HttpHandler) -> None:
    got = await ask(http, "GET", "/$health")
    head = await ask(http, "HEAD", "/$health")
    assert head.body == b""
    assert head.headers["content-length"] == got.headers["content-length"] == str(len(got.body))


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nbroken header\r\n\r\n",
        b"PUT / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET * HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /%FF HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"a" * 70_000,
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000,
    ],
)
async def test_what_is_not_http_is_answered_with_an_error_and_closed(http: HttpHandler, data: bytes) -> None:
    stream = await converse(http, data, end=False)
    (answer,) = answers(stream, "GET")
    assert 400 <= answer.status < 600
    assert answer.status != 500
    assert answer.headers["connection"] == "close"
    assert stream.closed


async def test_an_end_in_the_middle_of_a_request_closes(http: HttpHandler) -> None:
    for data in (b"", b"GET / HT", request("PUT", "/q", b"12345")[:-2]):
        assert (await converse(http, data)).closed


@pytest.mark.parametrize(
    ("version", "headers"),
    [
        ("1.1", ("Content-Length: 5", "Transfer-Encoding: chunked")),
        ("1.1", ("Transfer-Encoding: chunked", "Content-Length: 5")),
        ("1.1", ("transfer-encoding: CHUNKED", "content-length: 0")),
        ("1.0", ("Transfer-Encoding: chunked",)),
    ],
)
async def test_x3_a_body_whose_end_is_ambiguous_is_refused(
    http: HttpHandler, version: str, headers: tuple[str, ...]
) -> None:
    lines = [f"PUT /q?{V} HTTP/{version}", "Host: localhost", f"Authorization: {TOKEN}", *headers, "", ""]
    smuggled = request("DELETE", f"/orders?{V}", None, SIGNED)
    stream = await converse(http, "\r\n".join(lines).encode() + b"0\r\n\r\n" + smuggled)
    (answer,) = answers(stream, "PUT")
    assert (answer.status, "Transfer-Encoding" in answer.detail) == (400, True)
    assert stream.closed
    assert (await ask(http, "GET", f"/orders?{V}", None, SIGNED)).status == 200


def _headers(size: int) -> bytes:
    """Return a request whose head has exactly so many bytes."""
    start = b"GET /$health HTTP/1.1\r\nHost: localhost\r\nX: "
    return start + b"a" * (size - len(start) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize("before", [0, 1, 300])
async def test_x1_headers_in_one_piece_count_towards_the_limit(http: HttpHandler, before: int) -> None:
    earlier = request("GET", "/$health") * before  # pipelined, in the same piece
    methods = ["GET"] * (before + 1)
    stream = await converse(http, earlier + _headers(MAX_HEADER_BYTES))
    assert {answer.status for answer in answers(stream, *methods)} == {200}
    for size in (MAX_HEADER_BYTES + 1, 200_000):
        stream = await converse(http, earlier + _headers(size))
        got = answers(stream, *methods)
        assert [answer.status for answer in got] == [200] * before + [431]
        assert stream.closed


async def test_x1_trailers_in_one_piece_count_towards_the_limit(http: HttpHandler) -> None:
    head = b"PUT /q HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    stream = await converse(http, head + b"a: b\r\n" * 20_000 + b"\r\n")
    assert answers(stream, "PUT")[0].status == 431
    assert stream.closed


async def test_a_body_over_the_bound_is_refused_before_it_is_sent(http: HttpHandler) -> None:
    head = f"PUT /q HTTP/1.1\r\nHost: localhost\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode()
    stream = await converse(http, head, b"x" * 1000, end=False)
    assert answers(stream, "PUT")[0].status == 413
    assert not stream.closed, "the answer can still be read"
    assert (await converse(http, head, b"x" * 1000)).closed
    assert (await converse(http, head, b"x" * 40_000_000, end=False)).closed


async def test_a_chunked_body_over_the_bound_is_refused_on_the_way(http: HttpHandler) -> None:
    head = b"PUT /q HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    stream = await converse(http, head, *[chunk] * 20)
    assert answers(stream, "PUT")[0].status == 413
    assert stream.closed


async def test_a_body_at_the_bound_is_read(http: HttpHandler) -> None:
    answer = await ask(http, "PUT", f"/q?{V}", b"<" * MAX_BODY_BYTES, SIGNED)
    assert (answer.status, "well-formed" in answer.detail) == (400, True)


class Stuck(NamespaceRuntime):
    """A runtime whose `create` waits for an event."""

    word: asyncio.Event

    async def create(self, description: Description) -> EntityInfo | Refusal:
        await self.word.wait()
        return await super().create(description)


async def stuck() -> Stuck:
    made = await start_runtime(Stuck)
    made.word = asyncio.Event()
    return made


async def test_bytes_sent_ahead_are_bounded() -> None:
    runtime = await stuck()
    stream = RecordingStream()
    connection = HttpConnection(handler(runtime), stream, NAMES, peer_is_loopback=True)
    connection.data_received(request("PUT", f"/q?{V}", recorded_requests.PYTHON_QUEUE, SIGNED))
    for _ in range(40):
        connection.data_received(b"x" * 65_536)
    runtime.word.set()
    await settle()
    assert answers(stream, "PUT")[0].status == 201
    assert stream.closed


async def test_a_running_change_is_carried_out_although_the_client_is_gone() -> None:
    runtime = await stuck()
    stream = RecordingStream()
    connection = HttpConnection(handler(runtime), stream, NAMES, peer_is_loopback=True)
    connection.data_received(request("PUT", f"/q?{V}", recorded_requests.PYTHON_QUEUE, SIGNED))
    connection.connection_lost()
    runtime.word.set()
    await settle()
    assert runtime.namespace.info("q") is not None
    assert stream.written == b""


async def test_a_running_request_is_the_last_to_be_answered_when_the_namespace_stops() -> None:
    runtime = await stuck()
    stream = RecordingStream()
    connection = HttpConnection(handler(runtime), stream, NAMES, peer_is_loopback=True)
    connection.data_received(request("PUT", f"/q?{V}", recorded_requests.PYTHON_QUEUE, SIGNED) * 2)
    connection.shut_down()
    runtime.word.set()
    await settle()
    assert [answer.headers["connection"] for answer in answers(stream, "PUT")] == ["close"]
    assert stream.closed


class Watch:
    """The event loop's clock, moved by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._ahead = 0.0
        real = loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + self._ahead)

    async def passes(self, seconds: float) -> None:
        """Move the clock. On return, every timer that was due has fired."""
        self._ahead += seconds
        done = asyncio.Event()
        asyncio.get_running_loop().call_later(0, done.set)
        await done.wait()


async def test_an_idle_connection_is_closed_after_two_minutes(
    http: HttpHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, stream = Watch(monkeypatch), RecordingStream()
    connection = HttpConnection(http, stream, NAMES, peer_is_loopback=True)
    for _ in range(3):
        connection.data_received(request("GET", "/$health"))
        await settle()
        await watch.passes(110)
        assert not stream.closed
    await watch.passes(11)
    assert stream.closed
    assert len(answers(stream, "GET", "GET", "GET")) == 3, "an idle one is closed without a word"


async def test_a_request_begun_on_an_idle_connection_has_its_own_minute(
    http: HttpHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, stream = Watch(monkeypatch), RecordingStream()
    connection = HttpConnection(http, stream, NAMES, peer_is_loopback=True)
    connection.data_received(request("GET", "/$health"))
    await settle()
    await watch.passes(100)
    begun = request("GET", "/$health")
    connection.data_received(begun[:5])
    await watch.passes(50)
    connection.data_received(begun[5:10])
    assert [answer.status for answer in answers(stream, "GET")] == [200]
    await watch.passes(11)
    assert [answer.status for answer in answers(stream, "GET", "GET")] == [200, 408]
    assert stream.closed


async def test_an_answer_that_takes_long_does_not_make_its_connection_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = await stuck()
    watch, stream = Watch(monkeypatch), RecordingStream()
    connection = HttpConnection(handler(runtime), stream, NAMES, peer_is_loopback=True)
    connection.data_received(request("PUT", f"/q?{V}", recorded_requests.PYTHON_QUEUE, SIGNED))
    await watch.passes(1000)
    assert not stream.closed
    runtime.word.set()
    await settle()
    assert answers(stream, "PUT")[0].status == 201
    connection.connection_lost()


class Broken(NamespaceRuntime):
    async def delete(self, path: str) -> EntityInfo | Refusal:
        raise RuntimeError("the secret of the house")


async def test_an_internal_error_is_a_500_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    stream = await converse(
        handler(await start_runtime(Broken)), request("DELETE", f"/q?{V}", None, SIGNED) + request("GET", "/$health")
    )
    failed, alive = answers(stream, "DELETE", "GET")
    assert (failed.status, alive.status) == (500, 200)
    assert b"secret" not in failed.body
    assert "the secret of the house" in caplog.text


# --- what is there ---------------------------------------------------------------------------------------------------


async def test_health_metrics_and_a_page_are_there_for_anyone_on_this_machine(http: HttpHandler) -> None:
    assert json.loads((await ask(http, "GET", "/$health")).body) == {"status": "ok", "namespace": "primary"}
    metrics = await ask(http, "GET", "/metrics")
    assert b"sends_total 1.0" in metrics.body
    assert metrics.headers["content-type"].startswith("text/plain")
    page = await ask(http, "GET", "/", None, [("Accept", "text/html,*/*")])
    assert page.headers["content-type"].startswith("text/html")
    assert b"<h1>primary</h1>" in page.body
    assert (await ask(http, "GET", "/")).body.startswith(b"primary: ")
    for path in ("/$health", "/metrics"):
        assert (await ask(http, "POST", path, b"")).status == 405


@pytest.mark.parametrize("signed", [SIGNED, []], ids=["with a key", "without a key"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/orders/messages"),
        ("POST", f"/orders/messages?timeout=60&{V}"),
        ("POST", "/orders/messages/head?timeout=60"),
        ("DELETE", "/orders/messages/head"),
        ("DELETE", "/events/Subscriptions/audit/Messages/1/31907572-1647-43c3-8741-631acd554d6f"),
        ("PUT", "/orders/$DeadLetterQueue/messages/1/31907572-1647-43c3-8741-631acd554d6f"),
    ],
)
async def test_n1_the_rest_interface_for_messages_is_refused_by_name(
    http: HttpHandler, method: str, path: str, signed: list[tuple[str, str]]
) -> None:
    refused = await ask(http, method, path, b"hello" if method == "POST" else None, signed)
    assert refused.status == 501
    assert b"the REST interface for messages is not served" in refused.body
    assert b"AMQP" in refused.body


async def test_n1_a_queue_may_be_named_like_an_address_of_the_rest_interface(http: HttpHandler) -> None:
    path = f"/orders/messages/head?{V}"
    for method, body, status in (
        ("PUT", recorded_requests.PYTHON_QUEUE, 201),
        ("GET", None, 200),
        ("DELETE", None, 200),
    ):
        assert (await ask(http, method, path, body, SIGNED)).status == status


async def test_metrics_need_the_manage_claim_from_elsewhere(http: HttpHandler) -> None:
    own = make_sas_token("sb://localhost/", "own", "own-key", BORN // 1000 + 60)
    assert (await ask(http, "GET", "/metrics", loopback=False)).status == 401
    assert (await ask(http, "GET", "/metrics", None, SIGNED, loopback=False)).status == 401
    assert (await ask(http, "GET", "/metrics", None, [("Authorization", own)], loopback=False)).status == 200
    assert (await ask(http, "GET", "/$health", loopback=False)).status == 200


async def test_a_queue_may_be_called_metrics(http: HttpHandler) -> None:
    answer = await ask(http, "GET", f"/metrics?{V}", None, SIGNED)
    assert b"<QueueDescription" in answer.body


async def test_faults_are_set_listed_and_cleared(http: HttpHandler) -> None:
    made = await ask(http, "POST", "/$faults", b'{"kind": "server-busy"}', SIGNED)
    assert made.status == 201
    name = json.loads(made.body)["id"]
    assert [fault["id"] for fault in json.loads((await ask(http, "GET", "/$faults", None, SIGNED)).body)["faults"]] == [
        name
    ]
    assert (await ask(http, "GET", f"/$faults/{name}", None, SIGNED)).status == 200
    assert (await ask(http, "DELETE", "/$faults/nobody", None, SIGNED)).status == 404
    assert (await ask(http, "GET", "/$faults/nobody", None, SIGNED)).status == 404
    assert json.loads((await ask(http, "DELETE", f"/$faults/{name}", None, SIGNED)).body) == {"cleared": 1}
    assert json.loads((await ask(http, "DELETE", "/$faults", None, SIGNED)).body) == {"cleared": 0}


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"kind": "nonsense"}', b"\xff", b"[" * 100_000])
async def test_an_invalid_fault_is_refused(http: HttpHandler, body: bytes) -> None:
    answer = await ask(http, "POST", "/$faults", body, SIGNED)
    assert answer.status == 400
    assert json.loads(answer.body)["error"]


async def test_faults_need_the_manage_claim(http: HttpHandler) -> None:
    sender = make_sas_token("sb://localhost/", "sender", "send-key", BORN // 1000 + 60)
    for headers in ([], [("Authorization", sender)], [("Authorization", "nonsense")]):
        for method in ("GET", "POST", "DELETE"):
            assert (await ask(http, method, "/$faults", b"{}", headers)).status == 401
    assert (await ask(http, "PUT", "/$faults", b"{}", SIGNED)).status == 405


# --- who may manage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "says"),
    [
        (None, "no Authorization header"),
        ("Bearer x.y.z", "SAS tokens only"),
        ("Basic x.y.z", "SharedAccessSignature"),
        (make_sas_token("sb://localhost/", DEFAULT_KEY_NAME, "wrong", BORN // 1000 + 60), "signature"),
        (make_sas_token("sb://localhost/", DEFAULT_KEY_NAME, DEFAULT_KEY, BORN // 1000), "expired"),
        (make_sas_token("sb://localhost/", "nobody", DEFAULT_KEY, BORN // 1000 + 60), "nobody"),
        (make_sas_token("sb://localhost/news", DEFAULT_KEY_NAME, DEFAULT_KEY, BORN // 1000 + 60), "not for"),
        (make_sas_token("sb://localhost/", "sender", "send-key", BORN // 1000 + 60), "Manage claim is required"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
async def test_the_management_api_needs_a_token(
    http: HttpHandler, runtime: NamespaceRuntime, token: str | None, says: str, method: str
) -> None:
    headers = [] if token is None else [("Authorization", token)]
    answer = await ask(http, method, f"/orders?{V}", b"", headers)
    assert (answer.status, says in answer.detail) == (401, True)
    assert answer.headers["www-authenticate"] == "SharedAccessSignature"
    assert runtime.namespace.info("orders") is not None


async def test_a_rule_of_an_entity_manages_that_entity_only(http: HttpHandler) -> None:
    headers = [("Authorization", make_sas_token("sb://localhost/", "of-orders", "orders-key", BORN // 1000 + 60))]
    assert (await ask(http, "GET", f"/Orders?{V}", None, headers)).status == 200
    for other in ("/metrics", "/$Resources/queues", "/$namespaceinfo", "/new", "/orders2"):
        assert (await ask(http, "GET", f"{other}?{V}", None, headers)).status == 401


def _forwarding(element: str, target: str) -> bytes:
    return recorded_requests.python("QueueDescription", f"<{element}>{target}</{element}>")


def _signed(path: str, name: str, key: str) -> str:
    return make_sas_token(f"sb://localhost/{path}", name, key, BORN // 1000 + 3600)


@pytest.mark.parametrize(
    ("element", "header", "other"),
    [
        ("ForwardTo", SUPPLEMENTARY, DLQ_SUPPLEMENTARY),
        ("ForwardDeadLetteredMessagesTo", DLQ_SUPPLEMENTARY, SUPPLEMENTARY),
    ],
)
@pytest.mark.parametrize("target", ["orders", "sb://localhost:5672/ORDERS", "no-such-queue"])
async def test_x4_forwarding_needs_the_manage_claim_on_its_target(
    http: HttpHandler, runtime: NamespaceRuntime, element: str, header: str, other: str, target: str
) -> None:
    body = _forwarding(element, target)
    path = target.rpartition("/")[2]
    not_enough = {
        "no token for the target": [],
        "the wrong header": [(other, TOKEN)],
        "a token for another entity": [(header, _signed("news", "own", "own-key"))],
        "no Manage claim": [(header, _signed(path, "sender", "send-key"))],
        "a wrong key": [(header, _signed(path, "own", "other-key"))],
        "a rule of another entity": [(header, _signed("", "of-bills", "bills-key"))],
        "what is not a token": [(header, "Bearer x")],
    }
    of_bills = AuthorizationRule("of-bills", "bills-key", "", frozenset(Claim))
    await runtime.create(QueueDescription(path="bills", authorization_rules=(of_bills,)))
    for why, headers in not_enough.items():
        for condition in ([], [("If-Match", "*")]):
            answer = await ask(http, "PUT", f"/bills-2?{V}", body, [*SIGNED, *headers, *condition])
            assert (answer.status, element in answer.detail) == (401, True), (why, answer.detail)
    if target == "no-such-queue":
        return
    for token in (TOKEN, _signed(path, "own", "own-key"), _signed(path, "of-orders", "orders-key")):
        assert (await ask(http, "PUT", f"/f?{V}", body, [*SIGNED, (header, token)])).status == 201
        assert (await ask(http, "PUT", f"/f?{V}", body, [*SIGNED, (header, token), ("If-Match", "*")])).status == 200
        assert (await ask(http, "PUT", f"/f?{V}", body, [*SIGNED, ("If-Match", "*")])).status == 401
        shown = await ask(http, "GET", f"/f?{V}", None, SIGNED)
        assert f"<{element}>sb://localhost/{path}</{element}>" in shown.body.decode()
        assert (await ask(http, "DELETE", f"/f?{V}", None, SIGNED)).status == 200


async def test_x4_the_target_that_is_checked_is_the_target_that_is_used(http: HttpHandler) -> None:
    """Manage on `mine` gives no way to `orders`, however the address is written."""
    mine = [(SUPPLEMENTARY, _signed("mine", "own", "own-key"))]
    assert (await ask(http, "PUT", f"/mine?{V}", recorded_requests.PYTHON_QUEUE, SIGNED)).status == 201
    for address in (
        "sb://mine/orders",
        "sb://localhost://orders",
        "x://y/orders",
        "orders/",
        "/orders",
        "mine/../orders",
    ):
        answer = await ask(http, "PUT", f"/f?{V}", _forwarding("ForwardTo", address), [*SIGNED, *mine])
        assert answer.status in (400, 401), address
        assert (await ask(http, "GET", f"/f?{V}", None, SIGNED)).status == 404


async def test_the_default_key_does_not_manage_from_elsewhere(http: HttpHandler) -> None:
    answer = await ask(http, "GET", f"/orders?{V}", None, SIGNED, loopback=False)
    assert (answer.status, "loopback only" in answer.detail) == (401, True)


# --- the management API's own refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "target", "body", "headers", "status", "says"),
    [
        ("PUT", f"/?{V}", recorded_requests.PYTHON_QUEUE, [], 400, "empty"),
        ("GET", f"/?{V}", None, [], 400, "empty"),
        ("PUT", f"/q?{V}", b"", [], 400, "no body"),
        ("PUT", f"/q?{V}", b"<", [], 400, "well-formed"),
        ("PUT", f"/q?{V}", recorded_requests.JAVASCRIPT_SUBSCRIPTION, [], 400, "does not fit"),
        ("PUT", f"/q?{V}", recorded_requests.JAVASCRIPT_RULE, [], 400, "does not fit"),
        ("PUT", f"/news/subscriptions/s?{V}", recorded_requests.PYTHON_QUEUE, [], 400, "does not fit"),
        ("PUT", f"/news?{V}", recorded_requests.PYTHON_QUEUE, [("If-Match", "*")], 400, "another kind"),
        ("PUT", f"/q?{V}", recorded_requests.PYTHON_QUEUE, [("If-Match", '"etag"')], 412, "If-Match"),
        ("PUT", f"/absent?{V}", recorded_requests.PYTHON_QUEUE, [("If-Match", "*")], 404, "absent"),
        ("PUT", f"/a%20b?{V}", recorded_requests.PYTHON_QUEUE, [], 400, "not allowed"),
        ("PUT", f"/{'x' * 300}?{V}", recorded_requests.PYTHON_QUEUE, [], 400, "260"),
        ("PUT", f"/q?{V}", recorded_requests.JAVASCRIPT_QUEUE, [(SUPPLEMENTARY, TOKEN)], 400, "ForwardTo"),
        ("PUT", f"/orders?{V}", recorded_requests.PYTHON_QUEUE, [("If-Match", "*")], 400, "RequiresSession"),
        ("PUT", f"/orders?{V}", recorded_requests.PYTHON_QUEUE, [], 409, "exists"),
        ("PUT", f"/ORDERS?{V}", recorded_requests.PYTHON_QUEUE, [], 409, "exists"),
        ("PUT", f"/q%00?{V}", recorded_requests.PYTHON_QUEUE, [], 400, "characters"),
        ("PUT", f"/q%0A?{V}", recorded_requests.PYTHON_QUEUE, [], 400, "characters"),
        ("PUT", f"/absent/subscriptions/s?{V}", recorded_requests.JAVASCRIPT_SUBSCRIPTION, [], 404, "absent"),
        ("PUT", f"/news/subscriptions/all/rules/r?{V}", recorded_requests.JAVASCRIPT_RULE, [], 400, "named 'r2'"),
        ("PUT", f"/news/subscriptions/all/rules/r2?{V}", recorded_requests.PYTHON_QUEUE, [], 400, "does not fit"),
        (
            "PUT",
            f"/news/subscriptions/all/rules/r2?{V}",
            recorded_requests.JAVASCRIPT_RULE,
            [("If-Match", "*")],
            404,
            "Rules/r2'",
        ),
        (
            "PUT",
            f"/news/subscriptions/all/rules/r2?{V}",
            recorded_requests.JAVASCRIPT_RULE,
            [("If-Match", "1")],
            412,
            "If-Match",
        ),
        ("PUT", f"/news/subscriptions/none/rules/r2?{V}", recorded_requests.JAVASCRIPT_RULE, [], 404, "none"),
        ("DELETE", f"/news/subscriptions/all/rules/r?{V}", None, [], 404, "Rules/r'"),
        ("DELETE", f"/news/subscriptions/none/rules/r?{V}", None, [], 404, "none"),
        ("GET", f"/news/subscriptions/all/rules/r?{V}", None, [], 404, "no rule 'r'"),
        ("GET", f"/news/subscriptions/none/rules?{V}", None, [], 404, "none"),
        ("GET", f"/absent?{V}", None, [], 404, "absent"),
        ("DELETE", f"/absent?{V}", None, [], 404, "absent"),
        ("GET", f"/orders/subscriptions?{V}", None, [], 404, "not a topic"),
        ("GET", f"/absent/subscriptions?{V}", None, [], 404, "absent"),
        ("GET", f"/$Resources/relays?{V}", None, [], 404, "relays"),
        ("PUT", f"/$Resources/queues?{V}", recorded_requests.PYTHON_QUEUE, [], 405, "PUT"),
        ("DELETE", f"/$namespaceinfo?{V}", None, [], 405, "DELETE"),
        ("POST", f"/orders?{V}", b"hello", [], 405, "POST"),
        ("PATCH", f"/orders?{V}", b"hello", [], 405, "PATCH"),
        ("GET", f"/$Resources/queues?$top=0&{V}", None, [], 400, "$top"),
        ("GET", f"/$Resources/queues?$top=x&{V}", None, [], 400, "$top"),
        ("GET", f"/$Resources/queues?$skip=-1&{V}", None, [], 400, "$skip"),
        ("GET", f"/$Resources/queues?$skip={'9' * 5000}&{V}", None, [], 400, "$skip"),
    ],
)
async def test_the_management_api_names_what_it_refuses(
    http: HttpHandler,
    method: str,
    target: str,
    body: bytes | None,
    headers: list[tuple[str, str]],
    status: int,
    says: str,
) -> None:
    answer = await ask(http, method, target, body, [*SIGNED, *headers])
    assert (answer.status, says in answer.detail) == (status, True), answer.detail
    assert answer.headers["content-type"].startswith("application/xml")


async def test_a_title_that_contradicts_the_url_is_refused(http: HttpHandler) -> None:
    titled = recorded_requests.PYTHON_QUEUE.replace(b"<ns0:content", b"<ns0:title>%s</ns0:title><ns0:content", 1)
    assert (await ask(http, "PUT", f"/q?{V}", titled.replace(b"%s", b"other"), SIGNED)).status == 400
    assert (await ask(http, "PUT", f"/q?{V}", titled.replace(b"%s", b"Q"), SIGNED)).status == 201


async def test_an_update_replaces_all_but_fixed_properties(http: HttpHandler, runtime: NamespaceRuntime) -> None:
    first = recorded_requests.python(
        "QueueDescription", "<RequiresSession>true</RequiresSession><MaxDeliveryCount>3</MaxDeliveryCount>"
    )
    assert (await ask(http, "PUT", f"/Q?{V}", first, SIGNED)).status == 201
    then = recorded_requests.python("QueueDescription", "<UserMetadata>new</UserMetadata>")
    assert (await ask(http, "PUT", f"/q?{V}", then, [*SIGNED, ("If-Match", "*")])).status == 200
    info = runtime.namespace.info("q")
    assert info is not None
    assert info.description == QueueDescription(path="Q", requires_session=True, user_metadata="new")


@pytest.mark.parametrize(("size", "pages"), [(1, 7), (3, 3), (7, 1), (100, 1), (5000, 1)])
async def test_pages_hold_everything_once_and_in_order(size: int, pages: int) -> None:
    names = [f"q{number}" for number in range(7)]
    http = handler(await start_runtime(NamespaceRuntime, *(QueueDescription(path=name) for name in names)))
    target: str | None = f"/$Resources/queues?$top={size}&{V}"
    seen: list[str] = []
    turned = 0
    while target is not None:
        text = (await ask(http, "GET", target, None, SIGNED)).body.decode()
        seen += [part.partition("</title>")[0] for part in text.split('<title type="text">')[2:]]
        following = text.partition('rel="next" href="')[2].partition('"')[0]
        target = following.replace("&amp;", "&").removeprefix("https://localhost") or None
        turned += 1
    assert (seen, turned) == (names, pages)


async def test_a_page_holds_a_hundred_at_most() -> None:
    http = handler(
        await start_runtime(NamespaceRuntime, *(QueueDescription(path=f"q{number}") for number in range(150)))
    )
    for query in ("", "$top=1000&"):
        body = (await ask(http, "GET", f"/$Resources/queues?{query}{V}", None, SIGNED)).body
        assert body.count(b"<entry ") == 100
        assert b'rel="next"' in body
    assert (await ask(http, "GET", f"/$Resources/queues?$skip=200&{V}", None, SIGNED)).body.count(b"<entry ") == 0


async def test_links_carry_the_host_that_was_asked(http: HttpHandler) -> None:
    for host in ("127.0.0.1:5672", "[::1]:5672", "LOCALHOST"):
        data = request("GET", f"/orders?{V}", None, SIGNED, host)
        (answer,) = answers(await converse(http, data), "GET")
        assert f"<id>https://{host.lower()}/orders?".encode() in answer.body


# --- logs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="twinbus.namespace.http"):
        yield caplog


async def test_every_request_is_logged_without_token_query_or_body(
    http: HttpHandler, log: pytest.LogCaptureFixture
) -> None:
    await ask(http, "PUT", f"/q?{V}&sig=hidden", recorded_requests.PYTHON_QUEUE, SIGNED)
    await converse(http, b"nonsense\r\n\r\n")
    ours = [record.__dict__ for record in log.records if record.name == "twinbus.namespace.http"]
    assert [(record["method"], record["path"], record["status"]) for record in ours] == [
        ("PUT", "/q", 201),
        ("-", "-", 400),
    ]
    told = " ".join(str(record) for record in ours)
    assert "hidden" not in told
    assert TOKEN[30:60] not in told
    assert "UserMetadata" not in told
