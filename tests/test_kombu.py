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
from celery import Celery
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.exceptions import OperationalError
from kombu.transport import azureservicebus

from tests.compat.celery.workers import HERE, SECONDS, SOURCE
from twinbus import EntityMode, OptionError, SendAvailabilityOptions
from twinbus.errors import OperatorError
from twinbus.kombu import KombuChannel, KombuTransport, broker_url
from twinbus.testing import LocalNamespace

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


def test_s17_the_transport_is_kombus_own_with_a_pair() -> None:
    """A new version of kombu that renames what we replace is found here."""
    assert issubclass(KombuTransport, azureservicebus.Transport)
    replaced = {name for name in vars(KombuChannel) if not name.startswith("__")}
    assert len(replaced) > 5
    assert [name for name in replaced if not hasattr(azureservicebus.Channel, name)] == []
