"""The official JavaScript SDK, over AMQP and WebSocket, and rhea, unmodified, against a local namespace.

Node's own test runner runs each `*.test.js` beside this file; its failing tests are reported by name. This file asserts
nothing about Service Bus: the JavaScript tests do, written as a user of the SDK would write them.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import private_machine, tinyproxy
from tests.cli.running import SOURCE
from tests.compat.javascript.node_tests import HERE, outcomes_in, run_chapter
from tests.entra import OWNER, RECEIVER, SENDER, Issuer
from tests.private_machine import PrivateMachine
from twinbus.testing import LocalNamespace, LocalNamespaces

PROXIED, SIGNED_IN, DIVERTED = "proxy.test.js", "entra.test.js", "backlog.test.js"
PLAIN = "rhea.test.js"
CHAPTERS = sorted({path.name for path in HERE.glob("*.test.js")} - {PROXIED, SIGNED_IN, DIVERTED})
THOROUGH = ["websocket.test.js"]
# Each way of the SDK to a namespace: AMQP, HTTPS and WebSocket.
UNDER_NAMES = ["sending.test.js", "admin_queues.test.js", "websocket.test.js"]


@pytest.mark.parametrize(
    "chapter",
    [pytest.param(name, marks=pytest.mark.thorough) if name in THOROUGH else name for name in CHAPTERS],
)
def test_the_javascript_sdk_is_served(chapter: str, node: list[str], namespace: LocalNamespace) -> None:
    run_chapter(node, chapter, environment_of(namespace))


@pytest.mark.thorough
@pytest.mark.parametrize("credentials", [{}, {"username": "twin", "password": "sesame"}], ids=["open", "credentials"])
def test_n1_the_javascript_sdk_is_served_through_a_proxy(
    credentials: dict[str, str], node: list[str], namespace: LocalNamespace, tmp_path: Path
) -> None:
    with tinyproxy.running(tmp_path, **credentials) as proxy:
        run_chapter(node, PROXIED, {**environment_of(namespace), **environment_through(proxy)})
        # The administration, and one for each client.
        assert proxy.tunnels >= 2


@pytest.mark.thorough
@pytest.mark.parametrize("credentials", [{}, {"username": "twin", "password": "sesame"}], ids=["open", "credentials"])
def test_n1_rhea_is_served_through_a_proxy(
    credentials: dict[str, str], node: list[str], namespace: LocalNamespace, tmp_path: Path
) -> None:
    with tinyproxy.running(tmp_path, **credentials) as proxy:
        run_chapter(node, PLAIN, {**environment_of(namespace), **environment_through(proxy)})
        assert proxy.tunnels == 1


@pytest.mark.thorough
def test_n1_n6_the_javascript_sdk_signs_in_with_a_credential(node: list[str]) -> None:
    issuer = Issuer()
    tokens = {"OWNER": issuer.token(OWNER), "SENDER": issuer.token(SENDER), "RECEIVER": issuer.token(RECEIVER)}
    tokens["EXPIRED"] = issuer.token(OWNER, seconds=-60)
    with LocalNamespace(jwks=issuer.key_set) as namespace:
        named = {f"TOKEN_OF_{role}": token for role, token in tokens.items()}
        run_chapter(node, SIGNED_IN, {**environment_of(namespace), **named})


@pytest.mark.thorough
def test_n1_y1_what_the_javascript_sdk_encoded_is_syphoned_and_resubmitted_as_it_was(node: list[str]) -> None:
    with LocalNamespaces("primary", "secondary", memory=True) as found:
        strings = {"TWINBUS_SECONDARY_CONNECTION_STRING": found["secondary"].connection_string}
        python = {"PYTHON": sys.executable, "PYTHONPATH": str(SOURCE)}
        ca = {"NODE_EXTRA_CA_CERTS": str(found["primary"].ca)}
        strings["TWINBUS_CONNECTION_STRING"] = found["primary"].connection_string
        run_chapter(node, DIVERTED, {**strings, **python, **ca})


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PrivateMachine, dict[str, str]]]:
    """A machine with a namespace under its name in Azure, and the environment of its clients."""
    with private_machine.with_contoso(tmp_path_factory.mktemp("machine")) as (machine, told):
        text = told["connection_strings"][0]
        assert text.startswith("Endpoint=sb://contoso.servicebus.windows.net/;")
        yield machine, {"TWINBUS_CONNECTION_STRING": text, "NODE_EXTRA_CA_CERTS": told["ca"]}


@pytest.mark.thorough
@pytest.mark.parametrize("chapter", UNDER_NAMES)
def test_n3_the_javascript_sdk_is_served_under_a_name_in_azure_on_its_real_ports(
    chapter: str, node: list[str], machine: tuple[PrivateMachine, dict[str, str]]
) -> None:
    run_chapter(machine[0].inside(node, HERE), chapter, machine[1])


def environment_of(namespace: LocalNamespace) -> dict[str, str]:
    return {"TWINBUS_CONNECTION_STRING": namespace.connection_string, "NODE_EXTRA_CA_CERTS": str(namespace.ca)}


def environment_through(proxy: tinyproxy.Tinyproxy) -> dict[str, str]:
    named = {"PROXY_PORT": str(proxy.port), "PROXY_USERNAME": proxy.username, "PROXY_PASSWORD": proxy.password}
    return {name: text for name, text in named.items() if text is not None}


def test_a_report_tells_tests_from_suites_and_failures_by_name() -> None:
    report = """TAP version 13
# Subtest: sending
    # Subtest: arrives - in order
    ok 1 - arrives - in order
      ---
      duration_ms: 1
      ...
    # Subtest: is refused
    not ok 2 - is refused
      ---
      error: 'was not'
      ...
    1..2
not ok 1 - sending
  ---
  type: 'suite'
  ...
1..1
"""
    assert [(outcome.name, outcome.passed) for outcome in outcomes_in(report)] == [
        ("arrives - in order", True),
        ("is refused", False),
    ]
    assert "was not" in outcomes_in(report)[1].details


def test_a_report_without_tests_has_no_outcomes() -> None:
    assert outcomes_in("TAP version 13\n1..0\n# tests 0\n") == []
