"""X3: a request for another name, or from a page of another origin, is refused on every route of a real port."""

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.namespace.front.amqp_peer import SECONDS, Peer
from tests.namespace.front.recorded_requests import PYTHON_QUEUE
from twinbus.amqp import Connection, ConnectionClosed, LinkDetached
from twinbus.connect import make_sas_token
from twinbus.namespace.front.sas_verifier import DEFAULT_KEY, DEFAULT_KEY_NAME
from twinbus.namespace.server import NamespaceOptions, NamespaceServer

from .conftest import ENTITIES, KEY, RULES

Dial = Callable[..., Awaitable[Peer]]
V = "api-version=2024-05"
BUSY = b'{"kind": "server-busy", "entity": "orders"}'
ROUTES = [
    ("GET", "/", b""),
    ("GET", "/$health", b""),
    ("GET", "/$ca", b""),
    ("GET", "/metrics", b""),
    ("GET", "/$config", b""),
    ("GET", "/$faults", b""),
    ("POST", "/$faults", BUSY),
    ("POST", "/$faults", b'{"kind": "crash"}'),
    ("DELETE", "/$faults", b""),
    ("GET", f"/$Resources/queues?{V}", b""),
    ("GET", f"/orders?{V}", b""),
    ("PUT", f"/new?{V}", PYTHON_QUEUE),
    ("DELETE", f"/orders?{V}", b""),
    ("HEAD", "/$health", b""),
    ("OPTIONS", "/$faults", b""),
    ("OPTIONS", f"/orders?{V}", b""),
    ("GET", "/nothing/of/the/kind", b""),
]


def signed(host: str) -> tuple[str, str]:
    """Return an Authorization header for everything on this host, made with the public default key."""
    return "Authorization", make_sas_token(f"http://{host}/", DEFAULT_KEY_NAME, DEFAULT_KEY, 4_000_000_000)


async def ask(
    server: NamespaceServer,
    method: str,
    target: str,
    *headers: tuple[str, str],
    body: bytes = b"",
    tls: ssl.SSLContext | None = None,
    version: str = "1.1",
) -> tuple[int, dict[str, str], bytes]:
    """Send a request with exactly these headers. Returns status, headers (names in lower case) and body."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.port, ssl=tls, server_hostname=None if tls is None else "localhost"
    )
    lines = [f"{method} {target} HTTP/{version}", *(f"{name}: {value}" for name, value in headers)]
    lines += [f"Content-Length: {len(body)}", "Connection: close"]
    try:
        writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
        async with asyncio.timeout(SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
            first, *rest = head.decode().strip().split("\r\n")
            found = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
            length = 0 if method == "HEAD" else int(found["content-length"])
            return int(first.split()[1]), found, await reader.readexactly(length)
    finally:
        writer.close()


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest, trust: ssl.SSLContext) -> ssl.SSLContext | None:
    return trust if request.param == "tls" else None


async def nothing_changed(server: NamespaceServer) -> None:
    """Assert that the namespace is alive, has its entities and no fault."""
    host = f"localhost:{server.port}"
    status, _, body = await ask(server, "GET", "/$faults", ("Host", host), signed(host))
    assert (status, json.loads(body)) == (200, {"faults": []})
    assert server.runtime.namespace.info("orders") is not None
    assert server.runtime.namespace.info("new") is None


@pytest.mark.parametrize("name", ["evil.example", "localhost.evil.example", "192.0.2.1", "[2001:db8::1]"])
async def test_x3_a_request_for_a_foreign_name_gets_only_the_reason_on_every_route(
    server: NamespaceServer, tls: ssl.SSLContext | None, name: str
) -> None:
    host = f"{name}:{server.port}"
    for method, target, body in ROUTES:
        answer = await ask(server, method, target, ("Host", host), signed(host), body=body, tls=tls)
        status, headers, text = answer
        assert (method, target, status) == (method, target, 421)
        assert not any(header.startswith("access-control-") for header in headers)
        if method != "HEAD":
            for said in (host, f"localhost:{server.port}", "--host-name"):
                assert said in text.decode()
    await nothing_changed(server)


@pytest.mark.parametrize("host", ["::1%@evil.example", '::1%"><evil/>', "::1%evil.example", "bus..x", "."])
async def test_x3_a_host_that_only_looks_like_an_address_is_refused(server: NamespaceServer, host: str) -> None:
    own = signed(f"localhost:{server.port}")
    assert (await ask(server, "GET", f"/$Resources/queues?{V}", ("Host", host), own))[0] in (400, 421)


@pytest.mark.parametrize(
    ("given", "linked"), [("l\u00bacalhost:{port}", "localhost:{port}"), ("::1", "[::1]"), ("LOCALHOST.", "localhost")]
)
async def test_x3_links_have_the_normalised_name_of_the_request(
    server: NamespaceServer, given: str, linked: str
) -> None:
    host = ("Host", given.format(port=server.port))
    status, _, body = await ask(server, "GET", f"/orders?{V}", host, signed(f"localhost:{server.port}"))
    links = set(re.findall(r"https://[^/]*/orders", body.decode()))
    assert (status, links) == (200, {f"https://{linked.format(port=server.port)}/orders"})


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://evil.example:{port}", "null", "http://localhost:1", "file://", "", "*"]
)
async def test_x3_a_page_of_another_origin_gets_nothing_from_any_route(
    server: NamespaceServer, tls: ssl.SSLContext | None, origin: str
) -> None:
    host = f"localhost:{server.port}"
    for method, target, body in ROUTES:
        given = ("Origin", origin.format(port=server.port))
        status, headers, _ = await ask(server, method, target, ("Host", host), given, signed(host), body=body, tls=tls)
        assert (method, target, status) == (method, target, 403)
        assert not any(header.startswith("access-control-") for header in headers)
    await nothing_changed(server)


@pytest.mark.parametrize("site", ["cross-site", "same-site", "whatever"])
async def test_x3_what_a_browser_marks_as_foreign_gets_nothing_though_it_has_no_origin(
    server: NamespaceServer, site: str
) -> None:
    host = f"localhost:{server.port}"
    for method, target, body in ROUTES:
        marked = ("Sec-Fetch-Site", site)
        status, _, _ = await ask(server, method, target, ("Host", host), marked, signed(host), body=body)
        assert (method, target, status) == (method, target, 403)
    await nothing_changed(server)


async def test_x3_the_namespaces_own_pages_and_programs_are_answered(
    server: NamespaceServer, tls: ssl.SSLContext | None
) -> None:
    for name in ("localhost", "127.0.0.1", "127.0.0.2", "[::1]", "LOCALHOST"):
        host = f"{name}:{server.port}"
        for headers in (
            [],
            [("Origin", f"http://{host}"), ("Sec-Fetch-Site", "same-origin")],
            [("Origin", f"https://{host}")],
            [("Sec-Fetch-Site", "none")],
        ):
            answer = await ask(server, "GET", "/$config", ("Host", host), *headers, signed(host), tls=tls)
            assert (answer[0], "orders" in answer[2].decode()) == (200, True)


async def test_x3_a_token_for_a_foreign_name_grants_nothing_under_an_own_name(server: NamespaceServer) -> None:
    host = f"localhost:{server.port}"
    for method, target, body in ROUTES:
        if target in ("/", "/$health", "/$ca", "/metrics"):
            continue
        status, _, text = await ask(server, method, target, ("Host", host), signed("evil.example"), body=body)
        assert (method, target, status) == (method, target, 401)
        assert b"evil.example" in text
        assert b"--host-name" in text
    await nothing_changed(server)


@pytest.mark.parametrize(
    ("target", "headers", "status"),
    [
        ("/$health", [], 400),
        ("/$health", [("Host", "")], 400),
        ("/$health", [("Host", "localhost"), ("Host", "localhost")], 400),
        ("/$health", [("Host", "localhost"), ("Host", "evil.example")], 400),
        ("/$health", [("Host", '"><script>')], 400),
        ("/$health", [("Host", "user@localhost")], 400),
        ("http://evil.example/$health", [("Host", "localhost")], 400),
        ("http://evil.example/$health", [("Host", "evil.example")], 421),
        ("http://localhost/$health", [("Host", "evil.example")], 400),
        ("http://localhost/$health", [], 400),
        ("http://x@localhost/$health", [("Host", "localhost")], 400),
        ("http:///$health", [("Host", "localhost")], 400),
        ("http://localhost/$health", [("Host", "localhost")], 200),
        ("https://localhost/$health", [("Host", "localhost")], 200),
        ("*", [("Host", "localhost")], 400),
        ("/$health", [("Host", "localhost"), ("Origin", "http://localhost"), ("Origin", "http://evil.example")], 403),
    ],
)
async def test_x3_a_request_that_contradicts_itself_is_refused(
    server: NamespaceServer, target: str, headers: list[tuple[str, str]], status: int
) -> None:
    assert (await ask(server, "GET", target, *headers))[0] == status


async def test_x3_refusals_say_what_is_wrong_and_what_to_do(server: NamespaceServer) -> None:
    own = ("Host", f"localhost:{server.port}")
    for target in ("*", "health", "ftp://localhost/$health", "$health?at=http://localhost"):
        status, _, body = await ask(server, "OPTIONS", target, own)
        assert (status, "the target must be a path or an absolute URL" in body.decode()) == (400, True)
    _, _, body = await ask(server, "GET", "/$health", own, ("Origin", "http://evil.example"))
    assert "requests from pages of the origin 'http://evil.example' are refused" in body.decode()
    _, _, body = await ask(server, "GET", "/$health", own, ("Sec-Fetch-Site", "cross-site"))
    assert "to open this page, type its address into the browser" in body.decode()


async def test_x3_http_1_0_may_leave_the_name_out_but_not_come_from_a_page(server: NamespaceServer) -> None:
    assert (await ask(server, "GET", "/$health", version="1.0"))[0] == 200
    assert (await ask(server, "GET", "/$health", ("Origin", "http://localhost"), version="1.0"))[0] == 403
    assert (await ask(server, "GET", "/$health", ("Host", "evil.example"), version="1.0"))[0] == 421
    assert (await ask(server, "GET", "http://evil.example/$health", version="1.0"))[0] == 421


async def test_x3_no_web_socket_is_opened_for_a_page(server: NamespaceServer) -> None:
    upgrade = [
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA=="),
    ]
    host = ("Host", f"localhost:{server.port}")
    for path in ("/", "/$servicebus/websocket"):
        assert (await ask(server, "GET", path, host, *upgrade, ("Origin", "http://evil.example")))[0] == 403
        assert (await ask(server, "GET", path, host, *upgrade))[0] in (200, 400), "no subprotocol, so no WebSocket"


async def test_x3_an_answer_may_not_be_framed_sniffed_or_embedded(server: NamespaceServer) -> None:
    for host, status in ((f"localhost:{server.port}", 200), ("evil.example", 421)):
        answer = await ask(server, "GET", "/$ca", ("Host", host))
        assert answer[0] == status
        assert answer[1]["cross-origin-resource-policy"] == "same-origin"
        assert answer[1]["x-content-type-options"] == "nosniff"
        assert answer[1]["x-frame-options"] == "DENY"


async def test_x3_a_foreign_request_uses_up_no_fault(server: NamespaceServer) -> None:
    host = f"localhost:{server.port}"
    server.faults.set({"kind": "server-busy", "points": ["http"], "count": 1})
    for headers in ([("Host", "evil.example")], [("Host", host), ("Origin", "null")]):
        assert (await ask(server, "GET", f"/orders?{V}", *headers, signed(host)))[0] in (403, 421)
    assert [fault["hits"] for fault in server.faults.list()] == [0]
    assert (await ask(server, "GET", f"/orders?{V}", ("Host", host), signed(host)))[0] == 503


async def test_x3_a_refused_request_with_a_large_body_is_answered_before_it_is_read(server: NamespaceServer) -> None:
    body = b"x" * 300_000
    status, headers, _ = await ask(server, "POST", "/$faults", ("Host", "evil.example"), body=body)
    assert (status, headers["connection"]) == (421, "close")


# --- names that the operator gave ------------------------------------------------------------------------------------


@pytest.fixture
async def named(tls_folder: Path) -> AsyncIterator[NamespaceServer]:
    """A namespace behind a tunnel: bus.example at its own port, and localhost at the tunnel's."""
    server = NamespaceServer(
        NamespaceOptions(
            name="primary",
            file=None,
            tls=tls_folder,
            entities=ENTITIES,
            rules=RULES,
            host_names=("bus.example", "localhost:1"),
        )
    )
    await server.start()
    yield server
    await server.stop()


async def test_x3_names_of_the_option_are_answered_with_their_port(named: NamespaceServer) -> None:
    for host in (f"bus.example:{named.port}", "bus.example", "localhost:1", f"localhost:{named.port}"):
        assert (await ask(named, "GET", "/$config", ("Host", host), signed(host)))[0] == 200
        assert (await ask(named, "GET", "/$config", ("Host", host), ("Origin", f"https://{host}"), signed(host)))[
            0
        ] == 200
    for host in ("bus.example:1", "localhost:2", "127.0.0.1:1", f"evil.example:{named.port}"):
        assert (await ask(named, "GET", "/$config", ("Host", host), signed(host)))[0] == 421
    # Another port of an own name is another origin.
    host = f"bus.example:{named.port}"
    assert (await ask(named, "GET", "/$config", ("Host", host), ("Origin", "http://bus.example:8080")))[0] == 403


async def test_x3_the_certificate_is_for_the_names_of_the_option(named: NamespaceServer) -> None:
    context = ssl.create_default_context(cafile=str(named.ca))
    for name in ("bus.example", "localhost", "127.0.0.1"):
        _, writer = await asyncio.open_connection("127.0.0.1", named.port, ssl=context, server_hostname=name)
        writer.close()
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.open_connection("127.0.0.1", named.port, ssl=context, server_hostname="evil.example")


# --- AMQP ------------------------------------------------------------------------------------------------------------


async def opened_as(server: NamespaceServer, name: str | None, **options: object) -> Peer:
    """Return a peer whose open has this host name."""
    core = Connection.client("raw", name, **options)  # type: ignore[arg-type]  # options of the core
    loop = asyncio.get_running_loop()
    _, peer = await loop.create_connection(lambda: Peer(core, server.port), "127.0.0.1", server.port)
    return peer


@pytest.mark.parametrize("name", ["evil.example", "evil.example:5672", "\x1b[31m"])
async def test_x3_an_amqp_connection_for_a_foreign_name_is_granted_nothing(server: NamespaceServer, name: str) -> None:
    peer = await opened_as(server, name)
    link = peer.attach_sender("orders")
    assert "amqp:unauthorized-access" in await peer.refused(link)
    reply = await peer.ask(
        "$cbs",
        "put-token",
        make_sas_token(f"sb://localhost:{server.port}/", DEFAULT_KEY_NAME, DEFAULT_KEY, 4_000_000_000),
        {"name": f"sb://localhost:{server.port}/orders"},
    )
    assert (reply["statusCode"], reply["errorCondition"]) == (401, "amqp:unauthorized-access")
    for said in (repr(name)[1:-1], f"localhost:{server.port}", "--host-name"):
        assert said in reply["statusDescription"]
    link = peer.attach_sender("orders")
    assert isinstance(await peer.event(LinkDetached, link), LinkDetached)
    peer.close()


async def test_x3_a_key_given_with_sasl_for_a_foreign_name_ends_the_connection(server: NamespaceServer) -> None:
    peer = await opened_as(server, "evil.example", sasl=("PLAIN", "manages", KEY))
    closed = await peer.event(ConnectionClosed)
    assert closed.error is not None
    assert closed.error.condition == "amqp:unauthorized-access"
    assert "--host-name" in str(closed.error.description)
    peer.close()


@pytest.mark.parametrize("name", [None, "", "localhost", "LOCALHOST", "127.0.0.1", "::1", "[::1]"])
async def test_x3_an_amqp_connection_for_an_own_name_or_none_is_served(
    server: NamespaceServer, name: str | None
) -> None:
    peer = await opened_as(server, name)
    assert await peer.put_token("orders") == 202
    peer.close()


@pytest.mark.parametrize(
    ("audience", "resource"),
    [
        ("sb://evil.example:{port}/orders", "sb://localhost:{port}/"),
        ("sb://localhost:{port}/orders", "sb://evil.example:{port}/"),
        ("orders", "sb://evil.example:{port}/"),
        ("sb://evil.example:{port}/orders", "sb://evil.example:{port}/"),
        ("sb://localhost:1/orders", "sb://localhost:{port}/"),
    ],
)
async def test_x3_a_token_or_an_audience_of_a_foreign_name_is_refused_on_cbs(
    server: NamespaceServer, dial: Dial, audience: str, resource: str
) -> None:
    peer = await dial()
    token = make_sas_token(resource.format(port=server.port), DEFAULT_KEY_NAME, DEFAULT_KEY, 4_000_000_000)
    reply = await peer.ask("$cbs", "put-token", token, {"name": audience.format(port=server.port)})
    assert reply["statusCode"] == 401
    assert "--host-name" in reply["statusDescription"]
    assert "amqp:unauthorized-access" in await peer.refused(peer.attach_sender("orders"))
