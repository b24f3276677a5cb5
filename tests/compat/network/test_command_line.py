"""The verbs of the command line where only a CONNECT proxy with credentials goes out: WebSocket, TLS and the CA."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tinyproxy
from tests.cli.running import invoke, run
from tests.cli.syphoned import CONFIG, Backlog, ids_of
from twinbus.cli import connections
from twinbus.cli.network import Way, network_options
from twinbus.sdk import connection_settings
from twinbus.testing import LocalNamespaces

IDS = [f"message-{number}" for number in range(60)]


@pytest.fixture(scope="module")
def namespaces() -> Iterator[LocalNamespaces]:
    with LocalNamespaces("primary", "secondary", memory=True, config=CONFIG) as found:
        yield found


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tinyproxy.Tinyproxy]:
    with tinyproxy.running(tmp_path_factory.mktemp("proxy"), username="twin", password="sesame") as proxy:
        yield proxy


def environment(namespaces: LocalNamespaces, backlog: Backlog, proxy: tinyproxy.Tinyproxy) -> dict[str, str]:
    """What a user sets where only the proxy goes out. The SDK's WebSockets need the ports of the local namespaces."""
    found = {name: text.replace("UseDevelopmentEmulator=true;", "") for name, text in backlog.environment.items()}
    for side in ("primary", "secondary"):
        found[f"TWINBUS_{side.upper()}_ENDPOINT"] = f"sb://localhost:{namespaces[side].port}"
    return {
        **found,
        "TWINBUS_CA": str(namespaces["primary"].ca),
        "TWINBUS_PROXY": proxy.url,
        "TWINBUS_PROXY_CREDENTIALS": f"{proxy.username}:{proxy.password}",
    }


@pytest.mark.parametrize("transport", ["native", pytest.param("sdk", marks=pytest.mark.thorough)])
def test_y3_a_syphon_through_a_proxy_brings_everything_home_and_writes_the_same_ledger(
    namespaces: LocalNamespaces, proxy: tinyproxy.Tinyproxy, tmp_path: Path, transport: str
) -> None:
    seen = []
    for number, way in enumerate(("plain", "proxy")):
        backlog = Backlog(namespaces)
        backlog.divert(*IDS[:40])
        backlog.divert(*IDS[40:], queue=1)
        chosen = environment(namespaces, backlog, proxy) if way == "proxy" else backlog.environment
        before, ledger = proxy.tunnels, tmp_path / f"ledger-{number}"
        done = run("syphon", "--drain", "--transport", transport, "--ledger", str(ledger), **chosen)
        assert done.returncode == 0, done.stderr
        assert (proxy.tunnels > before) is (way == "proxy")
        assert ids_of(backlog.arrived()) == sorted(IDS)
        assert backlog.left() == []
        lines = [json.loads(line) for file in sorted(ledger.rglob("*.jsonl")) for line in file.read_text().splitlines()]
        kinds = {(line["kind"], line.get("stage"), line.get("result")) for line in lines}
        # Deliveries have other sizes each time, so messages are counted: the operations and moves of each.
        steps = Counter((line.get("stage") or line["move"], one) for line in lines for one in line.get("ids", ()))
        seen.append((kinds, steps))
    assert seen[0] == seen[1]
    assert {one for _, one in seen[0][1]} == set(IDS)


@pytest.mark.thorough
def test_every_verb_that_connects_goes_through_the_proxy(
    namespaces: LocalNamespaces, proxy: tinyproxy.Tinyproxy, tmp_path: Path
) -> None:
    backlog = Backlog(namespaces)
    backlog.divert("dead", "alive")
    backlog.dead_letter("dead")
    chosen = environment(namespaces, backlog, proxy)
    ledger = str(tmp_path / "ledger")
    verbs: list[tuple[list[str], int]] = [
        (["provision", "--count", "2", "--state", "secondary"], 0),
        (["doctor", "--count", "2", "--no-ping", "--state", "secondary"], 3),
        (["doctor", "--conformance"], 0),
        (["deadletter", "list"], 0),
        (["deadletter", "resubmit", "--all", "--yes"], 0),
        (["syphon", "--dry-run"], 0),
        (["syphon", "--drain", "--ledger", ledger], 0),
        (["ledger", "audit", ledger], 0),
    ]
    chosen["TWINBUS_CONNECTION_STRING"] = chosen["TWINBUS_PRIMARY_CONNECTION_STRING"]
    verbs += [
        (["entity", "list"], 0),
        (["entity", "create", "through", "--topic"], 0),
        (["entity", "send", backlog.destination, "x"], 0),
        (["entity", "peek", backlog.destination], 0),
    ]
    for verb, code in verbs:
        before = proxy.tunnels
        done = invoke(*verb, **chosen)
        assert done.exit_code == code, (verb, done.output)
        assert proxy.tunnels > before, verb
    assert {"alive", "dead"} <= set(ids_of(backlog.arrived()))


@pytest.mark.thorough
def test_a_drill_goes_over_websockets(namespaces: LocalNamespaces) -> None:
    """Not through the proxy: aiohttp sends a WebSocket without TLS through a proxy as a plain request."""
    backlog = Backlog(namespaces)
    chosen = {
        **backlog.environment,
        "TWINBUS_TRANSPORT_TYPE": "websocket",
        "TWINBUS_PRIMARY_ENDPOINT": f"sb://localhost:{namespaces['primary'].port}",
        "TWINBUS_SECONDARY_ENDPOINT": f"sb://localhost:{namespaces['secondary'].port}",
    }
    done = invoke("drill", "--entity", backlog.destination, "--count", "2", "--yes", **chosen)
    assert done.exit_code == 0, done.output


@pytest.mark.thorough
def test_a_proxy_that_is_away_is_named_without_its_credentials(namespaces: LocalNamespaces) -> None:
    backlog = Backlog(namespaces)
    away = {"TWINBUS_PROXY": "http://127.0.0.1:9", "TWINBUS_PROXY_CREDENTIALS": "twin:sesame"}
    for verb in (["provision"], ["syphon", "--drain"], ["deadletter", "list"]):
        done = invoke(*verb, **{**backlog.environment, **away})
        assert done.exit_code == 1, done.output
        assert re.search(r"127\.0\.0\.1'?[:,] ?9\b|port=9\b", done.output), done.output
        assert "sesame" not in done.output


def test_a_proxy_means_a_websocket_for_the_sdk_too_whatever_the_transport_type() -> None:
    made: list[bool] = []

    @network_options
    def verb() -> None:
        text = "Endpoint=sb://contoso.example;SharedAccessKeyName=a;SharedAccessKey=b"
        made.append(connection_settings(connections.aio_client(text)).uses_websocket)

    endpoints = {"primary_endpoint": "sb://gateway.example", "secondary_endpoint": None}
    ways = {"credential": None, "proxy": "http://127.0.0.1:1", **endpoints}
    verb(transport_type=Way.AMQP, ca=None, **ways)
    verb(transport_type=Way.AMQP, ca=None, **{**ways, "proxy": None})
    verb(transport_type=None, ca=None, **{**ways, "proxy": None})
    assert made == [True, False, True]


def test_credentials_of_a_proxy_are_refused_on_the_command_line(tmp_path: Path) -> None:
    done = run("provision", "--primary", "x", "--secondary", "y", "--proxy", "http://twin:sesame@127.0.0.1:1")
    assert done.returncode == 2
    assert "must not contain a user name" in done.stderr
    assert "TWINBUS_PROXY_CREDENTIALS" in done.stderr
    assert "sesame" not in done.stderr


@pytest.mark.thorough
def test_the_settings_file_holds_the_way_and_the_credentials(
    namespaces: LocalNamespaces, proxy: tinyproxy.Tinyproxy, tmp_path: Path
) -> None:
    backlog = Backlog(namespaces)
    backlog.divert("one")
    chosen = environment(namespaces, backlog, proxy)
    names = {
        "primary": "TWINBUS_PRIMARY_CONNECTION_STRING",
        "secondary": "TWINBUS_SECONDARY_CONNECTION_STRING",
        "primary_endpoint": "TWINBUS_PRIMARY_ENDPOINT",
        "secondary_endpoint": "TWINBUS_SECONDARY_ENDPOINT",
        "ca": "TWINBUS_CA",
        "proxy": "TWINBUS_PROXY",
        "proxy_credentials": "TWINBUS_PROXY_CREDENTIALS",
    }
    file = tmp_path / "twinbus.toml"
    file.write_text(
        "[connections]\n"
        + "".join(f"{name} = {json.dumps(chosen[variable])}\n" for name, variable in names.items())
        + f'transport_type = "websocket"\n[pairing]\nprimary_name = "{backlog.name}"\n'
    )
    file.chmod(0o644)
    before = proxy.tunnels
    done = run("--settings", str(file), "syphon", "--drain")
    assert done.returncode == 0, done.stderr
    assert proxy.tunnels > before
    assert ids_of(backlog.arrived()) == ["one"]
    assert "holds keys and others may read it" in done.stderr
