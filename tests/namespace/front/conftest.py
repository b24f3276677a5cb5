"""A namespace in the test's own loop, with a few entities; whatever its peers do, it logs no error."""

import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.namespace.front.amqp_peer import SECONDS, Peer
from twinbus.connect import ServiceBusConnection, connect
from twinbus.namespace.engine.descriptions import (
    AuthorizationRule,
    Claim,
    QueueDescription,
    SubscriptionDescription,
    TopicDescription,
)
from twinbus.namespace.front.sas_verifier import default_rule
from twinbus.namespace.server import NamespaceOptions, NamespaceServer

KEY = "key-of-its-own"


def rule(name: str, *claims: Claim) -> AuthorizationRule:
    return AuthorizationRule(name, KEY, "", frozenset(claims))


ENTITIES = (
    QueueDescription(path="orders"),
    QueueDescription(path="bills"),
    QueueDescription(path="visits", requires_session=True),
    QueueDescription(path="ruled", authorization_rules=(rule("of-ruled", Claim.SEND),)),
    QueueDescription(path="ruled/below"),
    TopicDescription(path="events", authorization_rules=(rule("of-events", Claim.LISTEN),)),
    SubscriptionDescription(topic="events", name="first"),
)
RULES = (
    default_rule(),
    rule("sends", Claim.SEND),
    rule("listens", Claim.LISTEN),
    rule("manages", Claim.MANAGE),
)


class Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(logging.Formatter().format(record))


@pytest.fixture
def errors() -> Iterator[Errors]:
    handler = Errors()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


@pytest.fixture(scope="session")
def tls_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture
async def server(tls_folder: Path, errors: Errors) -> AsyncIterator[NamespaceServer]:
    options = NamespaceOptions(name="primary", file=None, tls=tls_folder, rules=RULES, entities=ENTITIES)
    server = NamespaceServer(options)
    await server.start()
    yield server
    await server.stop()
    assert errors.found == []


@pytest.fixture
def trust(server: NamespaceServer) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(server.ca))


@pytest.fixture
async def dial(server: NamespaceServer) -> AsyncIterator[Callable[..., Awaitable[Peer]]]:
    """Makes raw peers, and ends them with the test."""
    peers: list[Peer] = []

    async def made(**options: object) -> Peer:
        peers.append(await Peer.to(server, **options))  # type: ignore[arg-type]  # options of the core and TLS
        return peers[-1]

    yield made
    for peer in peers:
        peer.close()


@pytest.fixture
async def peer(dial: Callable[..., Awaitable[Peer]]) -> Peer:
    """A raw peer that may do everything."""
    peer = await dial()
    assert await peer.put_token() == 202
    return peer


@pytest.fixture
async def bus(server: NamespaceServer) -> AsyncIterator[ServiceBusConnection]:
    async with connect(server.connection_string, timeout=SECONDS) as bus:
        yield bus
