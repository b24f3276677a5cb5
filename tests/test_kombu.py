"""The kombu transport `twinbus://`: its settings, what it prints, and what it does while a namespace is down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.core.exceptions import ClientAuthenticationError
from azure.servicebus import TransportType
from celery import Celery
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.exceptions import OperationalError
from kombu.transport import azureservicebus

from tests import tinyproxy
from tests.compat.celery.workers import HERE, SECONDS, SOURCE
from tests.entra import OWNER, RECEIVER, IssuedTokens, Issuer, TokenEndpoint
from twinbus import EntityMode, OptionError, SendAvailabilityOptions
from twinbus.connect import HttpProxy, NetworkOptions, named_credential
from twinbus.connect import TransportType as NativeTransportType
from twinbus.errors import CallerError, OperatorError
from twinbus.kombu import KombuChannel, KombuTransport, broker_url
from twinbus.testing import LocalNamespace, LocalNamespaces

KEY = "tHe+seCret/kEy="
ONE, OTHER = (
    f"Endpoint=sb://{name}.servicebus.windows.net/;SharedAccessKeyName=tasks;SharedAccessKey={KEY}"
    for name in ("contoso", "contoso-backup")
)
VARIABLES = {"TWINBUS_PRIMARY_CONNECTION_STRING": ONE, "TWINBUS_SECONDARY_CONNECTION_STRING": OTHER}
BRIEF = {"try_timeout": "3s", "backlog_queue_count": 2, "backlog_check_interval": 0, "ping_interval": "1s"}


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith("TWINBUS_") and "TEST" not in name]:
        monkeypatch.delenv(name)
    for name, text in VARIABLES.items():
        monkeypatch.setenv(name, text)
    return monkeypatch


def settings(url: str, **transport_options: Any) -> Any:
    return Connection(url, transport_options=transport_options).transport.settings


def test_s17_the_url_goes_before_the_transport_options_and_these_before_the_environment(
    environment: pytest.MonkeyPatch,
) -> None:
    assert settings("twinbus://").options == SendAvailabilityOptions(failover_interval=timedelta(0))
    for name in ("FAILOVER_INTERVAL", "PING_INTERVAL", "TRY_TIMEOUT"):
        environment.setenv(f"TWINBUS_{name}", "1m")
    pairing = {"ping_interval": "2m", "try_timeout": timedelta(minutes=2), "enable_syphon": True}
    found = settings("twinbus://?try_timeout=3m&backlog_queue_count=4&failover_on=-timeout", pairing=pairing)
    assert found.options == SendAvailabilityOptions(
        failover_interval=timedelta(minutes=1),
        ping_interval=timedelta(minutes=2),
        try_timeout=timedelta(minutes=3),
        enable_syphon=True,
        backlog_queue_count=4,
        failover_on=["-timeout"],
    )
    exactly = SendAvailabilityOptions(ttl="absolute")
    assert settings("twinbus://", pairing=exactly).options == exactly


def test_s17_connection_strings_come_from_the_url_or_the_environment(environment: pytest.MonkeyPatch) -> None:
    for url in ("twinbus://", "twinbus:///", broker_url(ONE), broker_url(ONE, OTHER)):
        assert (settings(url).primary, settings(url).secondary) == (ONE, OTHER)
    for name in VARIABLES:
        environment.delenv(name)
    assert (settings(broker_url(ONE, OTHER)).primary, settings(broker_url(ONE, OTHER)).secondary) == (ONE, OTHER)
    for url, missing in (("twinbus://", "PRIMARY"), (broker_url(ONE), "SECONDARY")):
        with pytest.raises(OperatorError, match=f"Set TWINBUS_{missing}_CONNECTION_STRING"):
            Connection(url).connect()


@pytest.mark.usefixtures("environment")
def test_s17_p2_an_option_that_is_out_of_range_is_refused_at_connecting() -> None:
    with pytest.raises(OptionError, match="ping_interval"):
        Connection("twinbus://?ping_interval=0s").connect()


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("url", "pairing"), [(broker_url(options={"primry": ONE}), {}), ("twinbus://", {"primry": ONE})]
)
def test_s17_p2_x4_an_unknown_option_is_refused_by_name_without_its_value(url: str, pairing: dict[str, str]) -> None:
    with pytest.raises(OperatorError, match="primry is not an option of a pair") as caught:
        Connection(url, transport_options={"pairing": pairing}).connect()
    assert not shows_key(str(caught.value))


@pytest.mark.usefixtures("environment")
def test_s17_the_options_of_both_clients_are_those_of_kombu_and_of_the_sdk() -> None:
    found = settings("twinbus://", retry_total=1, client={"connection_verify": "ca.pem"})
    assert found.client == {
        "retry_total": 1,
        "retry_backoff_factor": 0.8,
        "retry_backoff_max": 120,
        "connection_verify": "ca.pem",
    }


HOSTS = ("contoso.servicebus.windows.net", "contoso-backup.servicebus.windows.net")


@pytest.mark.usefixtures("environment")
def test_s17_n6_a_host_needs_a_credential_from_the_transport_options_or_the_environment(
    environment: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(OperatorError, match=f"the primary, {HOSTS[0]}, is a host name, which has no key") as caught:
        Connection(broker_url(*HOSTS)).connect()
    assert "TWINBUS_CREDENTIAL" in caught.value.hint
    environment.setenv("TWINBUS_CREDENTIAL", "cli")
    assert settings(broker_url(*HOSTS)).credential == "cli"
    assert settings(broker_url(*HOSTS), credential="managed-identity= abc").credential == "managed-identity=abc"
    own = IssuedTokens(Issuer())
    assert settings(broker_url(*HOSTS), credential=own).credential is own
    environment.setenv("TWINBUS_CREDENTIAL", "nobody")
    with pytest.raises(CallerError, match="'nobody' is not a credential: choose default, cli"):
        Connection(broker_url(*HOSTS)).connect()


def test_s17_n6_the_child_of_a_fork_makes_a_credential_of_its_own() -> None:
    """The parent's may have connections open, which the child must not use."""
    parents = named_credential("cli")
    if (child := os.fork()) == 0:
        os._exit(int(named_credential("cli") is parents))
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (KEY, "Endpoint is missing from the connection string"),
        ("contoso", "it is neither a connection string nor a host such as contoso.servicebus.windows.net"),
        (ONE.replace("Endpoint=", ""), "part 1 of the connection string"),
        (ONE.rpartition(";")[0], "SharedAccessKey is missing from the connection string"),
    ],
)
def test_s17_x4_what_is_no_namespace_is_refused_by_side_and_reason_without_showing_it(text: str, reason: str) -> None:
    with pytest.raises(OperatorError, match="the secondary cannot be used: ") as caught:
        Connection(broker_url(ONE, text), transport_options={"credential": "cli"}).connect()
    assert reason in str(caught.value)
    assert not shows_key(str(caught.value))


@pytest.mark.usefixtures("environment")
def test_s17_the_way_to_the_namespaces_comes_from_the_variables_of_the_command_line(
    environment: pytest.MonkeyPatch,
) -> None:
    assert settings("twinbus://").network == {"primary": NetworkOptions(), "secondary": NetworkOptions()}
    for name, text in {
        "TRANSPORT_TYPE": "websocket",
        "PROXY": "http://proxy:3128",
        "PROXY_CREDENTIALS": "twin:sesame",
        "PRIMARY_ENDPOINT": "sb://gateway.example",
        "CA": "ca.pem",
    }.items():
        environment.setenv(f"TWINBUS_{name}", text)
    found = settings("twinbus://")
    both: dict[str, Any] = {
        "transport_type": NativeTransportType.AmqpOverWebsocket,
        "http_proxy": HttpProxy("proxy", 3128, "twin", "sesame"),
        "connection_verify": "ca.pem",
    }
    assert found.network == {
        "primary": NetworkOptions(**both, custom_endpoint_address="sb://gateway.example"),
        "secondary": NetworkOptions(**both),
    }
    assert "sesame" not in repr(found)
    for name, text in (("TRANSPORT_TYPE", "pigeon"), ("PROXY", "https://proxy"), ("SECONDARY_ENDPOINT", "a:b:c")):
        with environment.context() as changed:
            changed.setenv(f"TWINBUS_{name}", text)
            with pytest.raises(CallerError, match=f"TWINBUS_{name}"):
                Connection("twinbus://").connect()


# --- secrets ---------------------------------------------------------------------------------------------------------


def shows_key(text: str) -> bool:
    return KEY in text or broker_url(KEY).partition("=")[2] in text


@pytest.mark.parametrize("url", ["twinbus://", broker_url(ONE, OTHER)], ids=["from variables", "in the URL"])
@pytest.mark.usefixtures("environment")
def test_s17_x4_neither_kombu_nor_celery_prints_a_key(url: str) -> None:
    connection = Connection(url)
    hosts = "contoso.servicebus.windows.net,contoso-backup.servicebus.windows.net"
    assert connection.as_uri() == f"twinbus://{hosts}"
    app = Celery("shop", broker=url)
    report = app.bugreport()
    assert hosts in report
    assert "twinbus" in report
    for text in (repr(connection), repr(connection.transport.settings), report):
        assert not shows_key(text)
    assert connection.as_uri(include_password=True) == url
    assert Connection(broker_url(*HOSTS)).as_uri() == f"twinbus://{hosts}"


@pytest.mark.parametrize("url", [f"twinbus://tasks:{KEY}@contoso", f"twinbus://tasks:{KEY}@contoso/?ttl=absolute"])
@pytest.mark.usefixtures("environment")
def test_s17_x4_a_url_with_a_key_in_another_place_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(OperatorError, match="neither a host nor a path") as caught:
        Connection(url).connect()
    assert not shows_key(str(caught.value))
    assert Connection(url).as_uri() == "twinbus://**"


@pytest.mark.usefixtures("environment")
def test_s17_x4_a_connection_string_in_the_transport_options_is_refused_because_celery_prints_them() -> None:
    with pytest.raises(OperatorError, match="Celery prints these options") as caught:
        Connection("twinbus://", transport_options={"secondary": OTHER}).connect()
    assert not shows_key(str(caught.value))


# --- the scheme ------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_s17_without_an_import_the_scheme_is_found_by_the_name_of_the_class() -> None:
    program = (
        "from celery import Celery\n"
        "app = Celery('shop', broker='twinbus://', broker_transport='twinbus.kombu:KombuTransport')\n"
        "print(app.connection().as_uri())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **VARIABLES, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("twinbus://contoso")


# --- with namespaces -------------------------------------------------------------------------------------------------


@pytest.fixture
def both() -> Iterator[tuple[LocalNamespace, LocalNamespace]]:
    with LocalNamespace("primary") as primary, LocalNamespace("secondary") as secondary:
        yield primary, secondary


@pytest.fixture
def url(both: tuple[LocalNamespace, LocalNamespace]) -> str:
    return broker_url(*(side.connection_string for side in both), options={"primary_name": "shop"})


QUEUE = Queue("orders", Exchange("orders"), routing_key="order")


def publish(connection: Any, body: str) -> None:
    Producer(connection.default_channel).publish(body, exchange=QUEUE.exchange, routing_key="order", declare=[QUEUE])


def received(connection: Any, count: int) -> list[str]:
    found: list[str] = []

    def take(body: str, message: Any) -> None:
        message.ack()
        found.append(body)

    with Consumer(connection.default_channel, [QUEUE], callbacks=[take]):
        while len(found) < count:
            connection.drain_events(timeout=SECONDS)
    return sorted(found)


@pytest.mark.thorough
def test_n1_kombu_publishes_consumes_settles_and_manages_queues(url: str) -> None:
    program = f"import twinbus.kombu, runpy, sys; sys.argv[1:] = [{url!r}, 'own.orders/1']\n"
    program += f"runpy.run_path({str(HERE / 'kombu_program.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert seen.pop("bodies")[1:] == ["ünï ✓", {"bytes": "x" * 100_000}]
    assert seen == {
        "size": 3,
        "again": ["rejected", "requeued"],
        "no_ack": "not acknowledged",
        "purged": 3,
        "left": 0,
    }


@pytest.mark.thorough
def test_s17_s4_what_is_published_while_the_primary_is_down_is_received_after_it(
    url: str, both: tuple[LocalNamespace, LocalNamespace]
) -> None:
    options = {"pairing": {**BRIEF, "enable_syphon": True}, "wait_time_seconds": 1}
    with Connection(url, transport_options=options) as connection:
        publish(connection, "before")
        both[0].kill()
        publish(connection, "during 1")
        publish(connection, "during 2")
        pair = connection.transport.shared.pair
        assert [(entity.path, entity.state) for entity in pair.entities()] == [("orders", EntityMode.FAILED_OVER)]
        both[0].start()
        assert received(connection, 3) == ["before", "during 1", "during 2"]


@pytest.mark.thorough
def test_s17_a_program_that_starts_during_an_outage_publishes_and_consumes_when_the_primary_is_back(
    url: str, both: tuple[LocalNamespace, LocalNamespace]
) -> None:
    """Nobody has declared the queue before: the consumer makes up for it."""
    both[0].kill()
    options = {"pairing": {**BRIEF, "enable_syphon": True}, "wait_time_seconds": 1}
    with Connection(url, transport_options=options) as connection:
        publish(connection, "one")
        both[0].start()
        assert received(connection, 1) == ["one"]


@pytest.mark.thorough
def test_s17_s6_with_both_namespaces_down_publishing_raises_kombus_operational_error(
    url: str, both: tuple[LocalNamespace, LocalNamespace]
) -> None:
    with Connection(url, transport_options={"pairing": BRIEF}) as connection:
        publish(connection, "before")
        for side in both:
            side.kill()
        with pytest.raises(OperationalError, match="orders"):
            publish(connection, "during")


@pytest.mark.thorough
def test_s17_p3_all_connections_of_a_process_share_one_pair_which_the_last_one_closes(url: str) -> None:
    first, second = (Connection(url, transport_options={"pairing": BRIEF}) for _ in range(2))
    pairs = []
    for connection in (first, second):
        publish(connection, "one")
        pairs.append(connection.transport.shared.pair)
    assert pairs[0] is pairs[1]
    first.release()
    publish(second, "two")
    second.release()
    assert pairs[0].primary.state == "closed"
    with Connection(url, transport_options={"pairing": BRIEF}) as third:
        assert received(third, 3) == ["one", "one", "two"]
        assert third.transport.shared.pair is not pairs[0]


@pytest.mark.thorough
def test_s17_s13_the_child_of_a_fork_publishes_through_a_pair_of_its_own(url: str, tmp_path: Path) -> None:
    program = tmp_path / "forking.py"
    program.write_text(
        "import os, sys\n"
        "from tests.test_kombu import BRIEF, publish, received\n"
        "from kombu import Connection\n"
        "import twinbus.kombu\n"
        "make = lambda: Connection(sys.argv[1], transport_options={'pairing': BRIEF})\n"
        "parent = make()\n"
        "publish(parent, 'parent 1')\n"
        "if (child := os.fork()) == 0:\n"
        "    parent.collect()\n"
        "    with make() as connection:\n"
        "        publish(connection, 'child')\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "publish(parent, 'parent 2')\n"
        "print(*received(parent, 3), sep=', ')\n"
        "parent.release()\n"
    )
    done = subprocess.run(
        [sys.executable, str(program), url],
        env={**os.environ, "PYTHONPATH": f"{SOURCE}:{SOURCE.parent}"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.stdout == "child, parent 1, parent 2\n", done.stderr


# --- without keys, and through a proxy -------------------------------------------------------------------------------

KEYS = Issuer()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenEndpoint]:
    with TokenEndpoint(IssuedTokens(KEYS, OWNER)) as endpoint:
        for name, text in endpoint.environment.items():
            monkeypatch.setenv(name, text)
        # A credential keeps the endpoint that it was made with.
        named_credential.cache_clear()
        yield endpoint
    named_credential.cache_clear()


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[tinyproxy.Tinyproxy]:
    with tinyproxy.running(tmp_path, username="twin", password="sesame") as proxy:
        yield proxy


def diverted_and_home(connection: Any) -> None:
    """Publish to the primary and to the backlog, and wait until the syphon has brought home what was diverted."""
    publish(connection, "before")
    pair = connection.transport.shared.pair
    pair.force_failover("orders")
    publish(connection, "during")
    [entity] = pair.entities()
    assert entity.state is EntityMode.FAILED_OVER
    pair.force_restore("orders")
    assert received(connection, 2) == ["before", "during"]


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["AMQP", "a proxy"])
def test_s17_n6_a_credential_signs_in_to_both_namespaces(
    endpoint: TokenEndpoint, proxy: tinyproxy.Tinyproxy, environment: pytest.MonkeyPatch, way: str
) -> None:
    """All settings are variables, as of the command line. No variable and no URL has a key."""
    environment.setenv("TWINBUS_CREDENTIAL", "managed-identity")
    if way == "a proxy":
        environment.setenv("TWINBUS_PROXY", proxy.url)
        environment.setenv("TWINBUS_PROXY_CREDENTIALS", "twin:sesame")
    with LocalNamespaces("primary", "secondary", memory=True, jwks=KEYS.key_set) as found:
        environment.setenv("TWINBUS_CA", str(found["primary"].ca))
        for side, name in zip(("primary", "secondary"), VARIABLES, strict=True):
            environment.setenv(name, f"localhost:{found[side].port}")
        options = {"pairing": {**BRIEF, "enable_syphon": True}, "wait_time_seconds": 1}
        with Connection("twinbus://", transport_options=options) as connection:
            diverted_and_home(connection)
    assert endpoint.asked
    assert (proxy.tunnels > 0) is (way == "a proxy")


@pytest.mark.thorough
def test_s17_n6_the_role_of_a_token_counts(environment: pytest.MonkeyPatch) -> None:
    credential = IssuedTokens(KEYS, RECEIVER)
    with LocalNamespaces("primary", "secondary", memory=True, jwks=KEYS.key_set) as found:
        environment.setenv("TWINBUS_CA", str(found["primary"].ca))
        url = broker_url(*(f"localhost:{found[side].port}" for side in ("primary", "secondary")))
        options = {"pairing": {**BRIEF, "provision": "assume"}, "credential": credential}
        with Connection(url, transport_options=options) as connection, pytest.raises(ClientAuthenticationError):
            publish(connection, "before")
    assert credential.given


@pytest.mark.thorough
def test_s17_the_options_of_the_clients_lead_through_a_proxy(
    both: tuple[LocalNamespace, LocalNamespace], url: str, proxy: tinyproxy.Tinyproxy
) -> None:
    client = {"transport_type": TransportType.AmqpOverWebsocket, "http_proxy": proxy.for_sdk}
    options = {"pairing": BRIEF, "client": client}
    with pytest.MonkeyPatch.context() as patch:
        for side, namespace in zip(("PRIMARY", "SECONDARY"), both, strict=True):
            patch.setenv(f"TWINBUS_{side}_ENDPOINT", f"sb://localhost:{namespace.port}")
        with Connection(url, transport_options=options) as connection:
            publish(connection, "through")
            assert proxy.tunnels >= 2, "a request of the administration, and the link of a sender"
            assert received(connection, 1) == ["through"]


def test_s17_the_transport_is_kombus_own_with_a_pair() -> None:
    """A new version of kombu that renames what we replace is found here."""
    assert issubclass(KombuTransport, azureservicebus.Transport)
    replaced = {name for name in vars(KombuChannel) if not name.startswith("__")}
    assert len(replaced) > 5
    assert [name for name in replaced if not hasattr(azureservicebus.Channel, name)] == []
