"""JSON web tokens on `$cbs` and in HTTP requests: what they open, when they end, what ends with their key (N6)."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.entra import AUDIENCE, OWNER, RECEIVER, SENDER, Issuer
from tests.namespace.front.amqp_peer import Peer
from twinbus.amqp import LinkState
from twinbus.namespace import IdentityOptions, NamespaceOptions, NamespaceServer, parse_key_set

from .conftest import ENTITIES, RULES, Errors
from .test_cbs import is_open

Dial = Callable[[], Awaitable[Peer]]
ISSUER = Issuer("first")
DEAD = "/$DeadLetterQueue"


def identity(*issuers: Issuer) -> IdentityOptions:
    return IdentityOptions(parse_key_set(json.dumps({"keys": [one.public_jwk for one in issuers]})), (AUDIENCE,))


@pytest.fixture
async def server(tls_folder: Path, errors: Errors) -> AsyncIterator[NamespaceServer]:
    options = NamespaceOptions(
        name="primary", file=None, tls=tls_folder, rules=RULES, entities=ENTITIES, identity=identity(ISSUER)
    )
    server = NamespaceServer(options)
    await server.start()
    yield server
    await server.stop()
    assert errors.found == []


async def put(peer: Peer, token: str, path: str = "") -> tuple[int, str]:
    """Put a token as azure-servicebus does. Returns status and description of the reply."""
    properties = {"type": "jwt", "name": f"sb://localhost:{peer.port}/{path}"}
    reply = await peer.ask("$cbs", "put-token", token, properties)
    return reply["statusCode"], reply["statusDescription"]


@pytest.mark.parametrize(
    ("role", "sends", "listens"), [(SENDER, True, False), (RECEIVER, False, True), (OWNER, True, True)]
)
async def test_n6_a_token_opens_what_its_role_allows(dial: Dial, role: str, sends: bool, listens: bool) -> None:
    peer = await dial()
    assert await put(peer, ISSUER.token(role), "orders") == (202, "Accepted")
    assert await is_open(peer, peer.attach_sender("orders")) is sends
    assert await is_open(peer, peer.attach_receiver("orders" + DEAD)) is listens
    assert not await is_open(peer, peer.attach_receiver("bills"))
    peeked = await peer.ask("orders/$management", "com.microsoft:peek-message", {})
    assert (peeked["statusCode"] == 204) is listens


async def test_n6_a_role_of_one_entity_opens_no_other(dial: Dial) -> None:
    peer = await dial()
    token = ISSUER.token(f"{SENDER}:ruled", f"{RECEIVER}:events")
    assert (await put(peer, token, "ruled"))[0] == 202
    assert (await put(peer, token, "events/Subscriptions/first"))[0] == 202
    for path in ("ruled/below", "bills", ""):
        status, text = await put(peer, token, path)
        assert (status, "no role for" in text) == (401, True)
    assert await is_open(peer, peer.attach_sender("ruled"))
    assert not await is_open(peer, peer.attach_sender("ruled/below"))
    assert await is_open(peer, peer.attach_receiver("events/Subscriptions/first"))


async def test_n6_a_refused_token_is_named_and_grants_nothing(dial: Dial, caplog: pytest.LogCaptureFixture) -> None:
    peer = await dial()
    token = ISSUER.token(OWNER, aud="https://elsewhere.example")
    status, text = await put(peer, token, "orders")
    assert (status, text) == (401, f"InvalidToken: the token's audience is 'https://elsewhere.example', not {AUDIENCE}")
    assert text.removeprefix("InvalidToken: ") in caplog.text
    assert token not in caplog.text
    assert not await is_open(peer, peer.attach_sender("orders"))
    assert (await put(peer, ISSUER.token(OWNER), "nowhere"))[0] == 404


async def test_x3_a_token_for_a_foreign_name_is_refused_whoever_signed_it(dial: Dial) -> None:
    peer = await dial()
    reply = await peer.ask("$cbs", "put-token", ISSUER.token(OWNER), {"name": "sb://elsewhere/orders"})
    assert (reply["statusCode"], "'elsewhere'" in reply["statusDescription"]) == (401, True)


async def test_n6_an_expired_token_detaches_its_links_and_a_renewed_one_keeps_them(dial: Dial) -> None:
    ends, renewed = await dial(), await dial()
    for peer in (ends, renewed):
        assert (await put(peer, ISSUER.token(SENDER, seconds=2), "orders"))[0] == 202
    lost, kept = await ends.sender("orders"), await renewed.sender("orders")
    assert (await put(renewed, ISSUER.token(SENDER), "orders"))[0] == 202
    assert await ends.refused(lost) == "amqp:unauthorized-access The token has expired; put a new one on $cbs."
    await renewed.echo()
    assert kept.state is LinkState.ATTACHED


async def test_x4_a_key_that_left_the_key_set_ends_its_links_and_no_others(server: NamespaceServer, dial: Dial) -> None:
    ends, stays = await dial(), await dial()
    second = Issuer("second")
    server.replace_identity(identity(ISSUER, second))
    assert (await put(ends, ISSUER.token(SENDER), "orders"))[0] == 202
    assert (await put(stays, second.token(SENDER), "orders"))[0] == 202
    lost, kept = await ends.sender("orders"), await stays.sender("orders")
    server.replace_identity(identity(second))
    assert (await ends.refused(lost)).startswith("amqp:unauthorized-access The key of the token was rotated")
    await stays.echo()
    assert kept.state is LinkState.ATTACHED
    assert (await put(ends, ISSUER.token(SENDER), "orders")) == (
        401,
        "InvalidToken: there is no key with the kid 'first'",
    )


async def ask(server: NamespaceServer, path: str, token: str, method: str = "GET") -> tuple[int, str]:
    """Send a request with a bearer token. Returns status and body."""
    request = Request(f"http://localhost:{server.port}{path}", method=method, headers={"Authorization": token})

    def send() -> tuple[int, str]:
        try:
            with urlopen(request, timeout=20) as answer:  # noqa: S310 - the URL is http
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(send)


@pytest.mark.parametrize(
    ("roles", "path", "status"),
    [
        ([OWNER], "/$Resources/queues?api-version=2021-05", 200),
        ([OWNER], "/orders?api-version=2021-05", 200),
        ([OWNER], "/$faults", 200),
        ([f"{OWNER}:orders"], "/orders?api-version=2021-05", 200),
        ([f"{OWNER}:orders"], "/bills?api-version=2021-05", 401),
        ([f"{OWNER}:orders"], "/$faults", 401),
        ([f"{OWNER}:orders"], "/$Resources/queues?api-version=2021-05", 401),
        ([f"{OWNER}:Events"], "/events/Subscriptions/First/rules?api-version=2021-05", 200),
        ([SENDER, RECEIVER], "/orders?api-version=2021-05", 401),
        ([], "/orders?api-version=2021-05", 401),
    ],
)
async def test_n6_the_management_api_needs_the_role_data_owner(
    server: NamespaceServer, roles: list[str], path: str, status: int
) -> None:
    answer = await ask(server, path, f"Bearer {ISSUER.token(*roles)}")
    assert answer[0] == status, answer


async def test_n6_a_bearer_token_that_is_not_valid_is_refused_with_the_reason(server: NamespaceServer) -> None:
    path = "/orders?api-version=2021-05"
    assert (await ask(server, path, f"bearer {ISSUER.token(OWNER)}"))[0] == 200
    status, text = await ask(server, path, f"Bearer {ISSUER.token(OWNER, seconds=-5)}")
    assert (status, "the token expired at" in text) == (401, True)
    status, text = await ask(server, path, "Bearer x")
    assert (status, "not a signed JSON web token" in text) == (401, True)
    assert (await ask(server, "/orders", f"Bearer {ISSUER.token(OWNER)}", "DELETE"))[0] == 200


async def test_n6_without_a_key_set_only_sas_is_accepted(tls_folder: Path) -> None:
    async with AsyncExitStack() as stack:
        server = NamespaceServer(NamespaceOptions(name="primary", file=None, tls=tls_folder, entities=ENTITIES))
        await server.start()
        stack.push_async_callback(server.stop)
        peer = await Peer.to(server)
        stack.callback(peer.close)
        for status, text in (
            await put(peer, ISSUER.token(OWNER), "orders"),
            await ask(server, "/orders?api-version=2021-05", f"Bearer {ISSUER.token(OWNER)}"),
        ):
            assert (status, "takes SAS tokens only" in text) == (401, True)
