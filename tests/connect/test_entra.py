"""Our own client signs in with a credential, sync or asyncio, and renews its tokens (N6)."""

from __future__ import annotations

import json
import logging
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from azure.core.exceptions import ClientAuthenticationError, ServiceRequestError

from tests.entra import OWNER, RECEIVER, SENDER, AioIssuedTokens, IssuedTokens, Issuer
from twinbus.backlog import CREDENTIAL_REFUSED, FailureKind, failure_kind
from twinbus.connect import (
    AioCredential,
    ConnectionString,
    ConnectionStringError,
    CredentialNameError,
    ServiceBusConnection,
    ServiceBusError,
    cbs,
    check_credential_name,
    connect,
)
from twinbus.message import Message
from twinbus.namespace import IdentityOptions, NamespaceOptions, NamespaceServer, QueueDescription, parse_key_set

KEYS = Issuer()
SECONDS = 20.0


@pytest.fixture(scope="module")
def tls_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture
async def server(tls_folder: Path) -> AsyncIterator[NamespaceServer]:
    identity = IdentityOptions(parse_key_set(json.dumps(KEYS.key_set)))
    entities = (QueueDescription(path="orders"),)
    server = NamespaceServer(
        NamespaceOptions(name="primary", file=None, tls=tls_folder, entities=entities, identity=identity)
    )
    await server.start()
    yield server
    await server.stop()


def connected(server: NamespaceServer, credential: Any) -> ServiceBusConnection:
    tls = ssl.create_default_context(cafile=str(server.ca))
    return connect(f"localhost:{server.port}", tls=tls, credential=credential, timeout=SECONDS)


@pytest.mark.parametrize("kind", [IssuedTokens, AioIssuedTokens, lambda *given: AioCredential(IssuedTokens(*given))])
async def test_n6_a_credential_takes_the_place_of_a_key(server: NamespaceServer, kind: Any) -> None:
    async with connected(server, kind(KEYS, SENDER, RECEIVER)) as bus:
        sender, receiver = await bus.sender("orders"), await bus.receiver("orders")
        await sender.send([Message(b"two coffees")])
        [message] = await receiver.receive(1)
        await receiver.complete([message])


@pytest.mark.thorough
async def test_n6_links_outlive_their_tokens(
    server: NamespaceServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is attached again: the namespace detaches no link. Early renewals leave a busy machine time for them."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(cbs, "RENEW_AFTER", 0.1)
    tokens = IssuedTokens(KEYS, OWNER, seconds=5)
    async with connected(server, tokens) as bus:
        sender, receiver = await bus.sender("orders"), await bus.receiver("orders")
        first, expired_at = sender._link, time.time() + tokens.seconds
        while time.time() <= expired_at:
            await sender.send([Message(b"x")])
            await receiver.complete(await receiver.receive(10))
        assert sender._link is first
    assert tokens.given > 2
    assert "was not renewed" not in caplog.text


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (ClientAuthenticationError("Please run 'az login'"), FailureKind.AUTHENTICATION, "Please run 'az login'"),
        (ServiceRequestError("no route"), FailureKind.TOKEN_UNAVAILABLE, "no route"),
        (TimeoutError(), FailureKind.CONNECTION_LOST, "TimeoutError"),
    ],
)
async def test_n6_a_credential_without_a_token_is_named(
    server: NamespaceServer, raised: Exception, kind: FailureKind, said: str
) -> None:
    class Refusing:
        def get_token(self, *_: str) -> Any:
            raise raised

    async with connected(server, Refusing()) as bus:
        with pytest.raises(ServiceBusError, match="the credential gave no token") as refused:
            await bus.sender("orders")
    assert said in str(refused.value)
    assert failure_kind(refused.value) is kind


async def test_n6_a_refused_token_is_an_error_with_the_reason(server: NamespaceServer) -> None:
    async with connected(server, IssuedTokens(KEYS, SENDER, aud="https://elsewhere.example")) as bus:
        with pytest.raises(ServiceBusError, match=r"audience is 'https://elsewhere\.example'") as refused:
            await bus.sender("orders")
    assert failure_kind(refused.value) in CREDENTIAL_REFUSED


# --- addresses and names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "authority", "namespace"),
    [
        ("contoso.servicebus.windows.net", "contoso.servicebus.windows.net:5671", "contoso.servicebus.windows.net"),
        (" contoso.servicebus.windows.net ", "contoso.servicebus.windows.net:5671", "contoso.servicebus.windows.net"),
        ("localhost:15672", "localhost:15672", "localhost:15672"),
        ("[::1]:15672", "[::1]:15672", "[::1]:15672"),
    ],
)
def test_n6_a_namespace_may_be_given_by_its_host(text: str, authority: str, namespace: str) -> None:
    found = ConnectionString.of(text)
    assert (found.authority, found.namespace, found.tls, found.has_key) == (authority, namespace, True, False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "sb://contoso",
        "a.b/queue",
        "a:b",
        "a:99999",
        "user@a.b",
        "a.b?c",
        "a.b#c",
        "a.b\nc",
        "[::1",
        "a.b?",
        "a b.c",
    ],
)
def test_n6_a_text_that_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ConnectionStringError, match="neither a connection string nor a host"):
        ConnectionString.of(text)


@pytest.mark.parametrize("key", ["SAS_KEY_VALUE", "c2VjcmV0LWtleS1vZi1teS1uYW1lc3BhY2U", "c2Vj+mV0/LWtleS1v"])
def test_n6_a_key_that_is_given_as_a_host_is_not_repeated_in_the_error(key: str) -> None:
    with pytest.raises(ConnectionStringError) as refused:
        ConnectionString.of(key)
    assert key not in str(refused.value)


def test_n6_a_host_needs_a_credential() -> None:
    with pytest.raises(ConnectionStringError, match=r"contoso\.example is a host name, which has no key"):
        connect("contoso.example")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("default", "default"),
        ("cli", "cli"),
        (" environment ", "environment"),
        ("managed-identity", "managed-identity"),
        ("managed-identity= 1-2 ", "managed-identity=1-2"),
    ],
)
def test_n6_credentials_have_names(text: str, name: str) -> None:
    assert check_credential_name(text) == name


@pytest.mark.parametrize("text", ["", "Default", "managed-identity=", "cli=1", "=x", "managed identity", "none"])
def test_n6_an_unknown_credential_is_refused_with_the_names(text: str) -> None:
    with pytest.raises(CredentialNameError, match=r"default, cli, environment or managed-identity\[=ID\]"):
        check_credential_name(text)
