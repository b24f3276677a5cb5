"""A real namespace in its own process, with one queue for each test."""

from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest

from twinbus.connect import ServiceBusConnection, connect
from twinbus.testing import LocalNamespace

ENOUGH = 60
KEY = "SAS_KEY_VALUE"
_numbers = count()


def config() -> dict[str, object]:
    queues: list[dict[str, object]] = [{"name": f"plain-{number}"} for number in range(ENOUGH)]
    queues += [{"name": f"sessions-{number}", "requires_session": True} for number in range(ENOUGH)]
    topic = {"name": "topic", "subscriptions": [{"name": "first"}, {"name": "second"}]}
    claims = {"RootManageSharedAccessKey": ["Listen", "Manage", "Send"], "sends": ["Send"]}
    rules = [{"name": name, "claims": claim, "primary_key": KEY} for name, claim in claims.items()]
    namespace = {"name": "primary", "queues": queues, "topics": [topic], "authorization_rules": rules}
    return {"namespaces": [namespace]}


@pytest.fixture(scope="session")
def namespace() -> Iterator[LocalNamespace]:
    with LocalNamespace(memory=True, config=config()) as found:
        yield found
        # No test may cause an internal error of the namespace.
        assert "Traceback" not in found.log.read_text()


@pytest.fixture
async def bus(namespace: LocalNamespace) -> AsyncIterator[ServiceBusConnection]:
    async with connect(namespace.connection_string, timeout=20) as found:
        yield found


@pytest.fixture
def queue() -> str:
    return f"plain-{next(_numbers) % ENOUGH}"


@pytest.fixture
def session_queue() -> str:
    return f"sessions-{next(_numbers) % ENOUGH}"
