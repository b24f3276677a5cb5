"""`twinbus serve` as a process: what it prints, how it ends, what it refuses."""

import json
import resource
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from azure.core.exceptions import HttpResponseError, ServiceRequestError, ServiceResponseError
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import ServiceBusError
from azure.servicebus.management import ServiceBusAdministrationClient

from tests.entra import SENDER, IssuedTokens, Issuer
from twinbus import pair_connection_strings
from twinbus.namespace import FaultClient

from .running import Serving, run, serving

WELL_KNOWN = "SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true;"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve") / "data"


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[Serving]:
    with serving("--json", "--data", str(data), "--namespace", "one=0", "--namespace", "two=0") as server:
        yield server


def admin(server: Serving, name: str) -> ServiceBusAdministrationClient:
    one = server.namespaces[name]
    return ServiceBusAdministrationClient.from_connection_string(
        one["connection_string"], connection_verify=one["ca"], retry_total=0
    )


def test_json_tells_each_namespace_on_a_line_and_then_that_it_is_ready(server: Serving, data: Path) -> None:
    assert server.printed.endswith("\nready\n")
    assert list(server.namespaces) == ["one", "two"]
    for name, told in server.namespaces.items():
        assert told["connection_string"] == f"Endpoint=sb://localhost:{told['port']};{WELL_KNOWN}"
        assert Path(told["ca"]).read_text().startswith("-----BEGIN CERTIFICATE-----")
        assert Path(told["data"]) == data / f"{name}.sqlite"
        assert FaultClient(told["connection_string"]).list() == []


def test_the_data_directory_is_for_its_owner_alone(server: Serving, data: Path) -> None:
    assert server.process.poll() is None
    assert stat.S_IMODE(data.stat().st_mode) == 0o700


def test_a_second_server_on_the_same_directory_is_refused(server: Serving, data: Path) -> None:
    second = run("serve", "--data", str(data), "--namespace", "three=0")
    assert second.returncode == 1
    assert f"The data directory {data} is in use by another server" in second.stderr
    assert str(server.process.pid) in second.stderr
    assert "Traceback" not in second.stderr
    assert second.stdout == ""
    assert not (data / "three.sqlite").exists()


def test_a_port_in_use_is_refused_by_name(server: Serving, tmp_path: Path) -> None:
    port = server.namespaces["one"]["port"]
    other = run("serve", "--data", str(tmp_path / "x"), "--namespace", f"mine={port}")
    assert other.returncode == 1
    assert f"'mine' cannot listen on 127.0.0.1:{port}" in other.stderr
    assert "hint: " in other.stderr
    assert "Traceback" not in other.stderr


def test_the_well_known_key_is_refused_beyond_loopback(tmp_path: Path) -> None:
    refused = run("serve", "--host", "0.0.0.0", "--data", str(tmp_path / "x"), "--namespace", "open=0")  # noqa: S104
    assert refused.returncode == 1
    assert "would listen on 0.0.0.0 with the well-known default key" in refused.stderr
    assert "hint: " in refused.stderr


def test_a_person_is_shown_strings_to_copy_but_no_key_of_their_own(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        '[[namespaces]]\nname = "mine"\nport = 0\n[[namespaces.authorization_rules]]\n'
        'name = "app"\nclaims = ["Manage"]\nprimary_key = { environment = "MY_KEY" }\n'
    )
    options = ("--memory", "--config", str(config), "--namespace", "plain=0")
    with serving(*options, MY_KEY="not-for-the-screen") as server:
        lines = [line.strip() for line in server.printed.splitlines()]
        assert any(line.startswith("Endpoint=sb://localhost:") and line.endswith(WELL_KNOWN) for line in lines)
        assert any("SharedAccessKeyName=app;SharedAccessKey=…;" in line for line in lines)
        assert "not-for-the-screen" not in server.printed
        assert lines[-1] == "ready"
        server.signal(signal.SIGINT)
        code, stderr = server.end()
    assert (code, stderr) == (0, "")


def test_a_person_is_shown_lines_that_set_the_environment_of_programs_and_commands() -> None:
    with serving("--memory", "--namespace", "primary=0", "--namespace", "secondary=0", "--queue", "orders") as server:
        lines = [line for line in server.printed.splitlines() if line.startswith("export ")]
        shown = subprocess.run(
            ["bash", "-c", "\n".join([*lines, "env"])], env={}, capture_output=True, text=True, check=True
        )
        told = dict(line.split("=", 1) for line in shown.stdout.splitlines() if line.startswith("TWINBUS_"))
        strings = [told[f"TWINBUS_{side}_CONNECTION_STRING"] for side in ("PRIMARY", "SECONDARY")]
        with pair_connection_strings(*strings) as pair:
            with pair.get_queue_sender("orders") as sender:
                sender.send_messages(ServiceBusMessage("two coffees"))
            with pair.get_queue_receiver("orders") as receiver:
                assert [str(message) for message in receiver.peek_messages()] == ["two coffees"]


@pytest.mark.thorough
def test_n1_queues_and_topics_of_the_command_line_are_made_once_and_stay_as_they_are(tmp_path: Path) -> None:
    options = ("--json", "--data", str(tmp_path / "data"), "--namespace", "one=0", "--namespace", "two=0")
    wanted = ("--queue", "orders", "--topic", "events/audit", "--queue", "two:other")
    for round_ in range(2):
        with serving(*options, *wanted) as server:
            with admin(server, "one") as client:
                queue = client.get_queue("orders")
                assert client.get_subscription("events", "audit").name == "audit"
                assert [one.name for one in client.list_queues()] == ["orders"]
                assert queue.max_delivery_count == (10 if round_ == 0 else 3)
                queue.max_delivery_count = 3
                client.update_queue(queue)
            with admin(server, "two") as client:
                assert [one.name for one in client.list_queues()] == ["other"]
            server.signal(signal.SIGTERM)
            assert server.end()[0] == 0


@pytest.mark.parametrize(
    ("first", "second", "wanted", "kind"),
    [
        (("--topic", "orders"), ("--queue", "Orders"), "a queue", "topic"),
        pytest.param(
            ("--queue", "orders"), ("--topic", "orders/audit"), "a topic", "queue", marks=pytest.mark.thorough
        ),
        pytest.param(
            ("--topic", "orders/audit"), ("--config", "{config}"), "a queue", "topic", marks=pytest.mark.thorough
        ),
    ],
)
def test_n1_an_entity_that_exists_as_another_kind_is_refused(
    tmp_path: Path, first: tuple[str, str], second: tuple[str, str], wanted: str, kind: str
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[[namespaces]]\nname = "one"\n[[namespaces.queues]]\nname = "orders"\n', encoding="utf-8")
    options = ("--json", "--data", str(tmp_path / "data"), "--namespace", "one=0")
    with serving(*options, *first) as server:
        server.signal(signal.SIGTERM)
        assert server.end()[0] == 0
    option = " ".join(second).format(config=config)
    refused = run("serve", *options, *option.split(), "--queue", "other")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"{option}: " in refused.stderr
    assert f"is {wanted}, but namespace 'one' already has a {kind} with this name" in refused.stderr
    assert "hint: " in refused.stderr
    assert "Traceback" not in refused.stderr
    # Nothing was changed.
    with serving(*options) as server, admin(server, "one") as client:
        found = {
            "queue": [one.name for one in client.list_queues()],
            "topic": [one.name for one in client.list_topics()],
        }
        assert found == {"queue": [], "topic": [], kind: ["orders"]}


def test_n1_a_queue_that_cannot_be_named_so_starts_nothing(tmp_path: Path) -> None:
    refused = run("serve", "--data", str(tmp_path / "x"), "--queue", "or ders")
    assert refused.returncode == 2
    assert "--queue or ders: 'or ders' contains character(s) that are not allowed" in refused.stderr
    assert "hint: Write --queue NAME or --queue NAMESPACE:NAME." in refused.stderr
    assert not (tmp_path / "x").exists()


def test_entities_of_the_emulators_file_are_there(tmp_path: Path) -> None:
    config = tmp_path / "Config.json"
    queue = {"Name": "queue.1", "Properties": {"LockDuration": "PT1M", "MaxDeliveryCount": 3}}
    topic = {"Name": "topic.1", "Subscriptions": [{"Name": "subscription.1", "Properties": {"RequiresSession": True}}]}
    namespaces = [{"Name": "sbemulatorns", "Queues": [queue], "Topics": [topic]}]
    config.write_text(json.dumps({"UserConfig": {"Namespaces": namespaces, "Logging": {"Type": "Console"}}}))
    options = ("--json", "--exit-with-stdin", "--memory", "--config", str(config), "--namespace", "sbemulatorns=0")
    with serving(*options) as server:
        with admin(server, "sbemulatorns") as client:
            assert client.get_queue("queue.1").max_delivery_count == 3
            assert client.get_subscription("topic.1", "subscription.1").requires_session is True
        assert server.process.stdin is not None
        server.process.stdin.close()
        server.process.stdin = None
        code, _ = server.end()
    assert code == 0


def test_a_file_with_a_rule_that_cannot_be_taken_starts_nothing(tmp_path: Path) -> None:
    config = tmp_path / "Config.json"
    rule = {"Name": "red", "Properties": {"FilterType": "Sql", "SqlFilter": {"SqlExpression": "color ="}}}
    topic = {"Name": "t", "Subscriptions": [{"Name": "s", "Rules": [rule]}]}
    namespaces = [{"Name": "sbemulatorns", "Queues": [], "Topics": [topic]}]
    config.write_text(json.dumps({"UserConfig": {"Namespaces": namespaces}}))
    refused = run("serve", "--data", str(tmp_path / "x"), "--config", str(config))
    assert refused.returncode == 2
    assert "Subscriptions[0].Rules[0]: The filter of rule 'red' cannot be understood. At column 8" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "x").exists()


def test_a_second_signal_ends_at_once() -> None:
    with serving("--memory", "--json", "--namespace", "one=0") as server:
        # Both signals wait until the process continues: the second arrives before the first was handled.
        server.signal(signal.SIGSTOP)
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGINT)
        server.signal(signal.SIGCONT)
        code, _ = server.end()
    assert code in (128 + signal.SIGTERM, 128 + signal.SIGINT)


def test_a_namespace_that_cannot_go_on_ends_the_server_with_what_to_do(tmp_path: Path) -> None:
    with serving("--json", "--data", str(tmp_path / "x"), "--namespace", "one=0") as server:
        # From here on no file of that process can grow, as on a full disk.
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1, 1))
        with (
            admin(server, "one") as client,
            pytest.raises((HttpResponseError, ServiceRequestError, ServiceResponseError)),
        ):
            client.create_queue("orders")
        code, stderr = server.end()
    assert code == 1
    assert "error: The namespace 'one' had to stop: " in stderr
    assert "hint: " in stderr
    assert "Traceback" not in stderr


def test_sigterm_drains_and_what_was_made_is_there_after_it(tmp_path: Path) -> None:
    options = ("--json", "--data", str(tmp_path / "x"), "--namespace", "one=0")
    with serving(*options) as server:
        with admin(server, "one") as client:
            client.create_queue("kept")
        server.signal(signal.SIGTERM)
        assert server.end() == (0, "")
    with serving(*options) as again, admin(again, "one") as client:
        assert client.get_queue("kept").name == "kept"


def test_x4_sigusr1_reads_the_keys_again_and_ends_the_links_of_those_that_are_gone(tmp_path: Path) -> None:
    config = tmp_path / "keys.toml"

    def write(key: str, *, name: str = "one") -> None:
        rule = f'name = "root"\nclaims = ["Manage", "Send", "Listen"]\nprimary_key = "{key}"\n'
        queue = '[[namespaces.queues]]\nname = "orders"\n'
        config.write_text(f'[[namespaces]]\nname = "{name}"\n{queue}[[namespaces.authorization_rules]]\n{rule}')

    write("the-first-key")
    with serving("--json", "--memory", "--config", str(config), "--namespace", "one=0") as server:
        first = server.namespaces["one"]["connection_string"]
        second = first.replace("the-first-key", "the-second-key")
        assert first != second

        def after_signal() -> str:
            server.signal(signal.SIGUSR1)
            assert server.process.stderr is not None
            return server.process.stderr.readline().decode()

        with ServiceBusClient.from_connection_string(first, retry_total=0) as client:
            sender = client.get_queue_sender("orders")
            sender.send_messages(ServiceBusMessage("1"))
            config.write_text("not TOML")
            assert f"keys not changed: {config} cannot be used" in after_signal()
            write("the-second-key", name="two")
            assert "keys not changed: The configuration has no keys for the namespace 'one'" in after_signal()
            sender.send_messages(ServiceBusMessage("2"))
            write("the-second-key")
            assert "keys read again namespace=one" in after_signal()
            with pytest.raises(ServiceBusError):
                sender.send_messages(ServiceBusMessage("3"))
        with ServiceBusClient.from_connection_string(second, retry_total=0) as client:
            receiver = client.get_queue_receiver("orders")
            assert [str(message) for message in receiver.peek_messages(5)] == ["1", "2"]
        server.signal(signal.SIGTERM)
        code, stderr = server.end()
    assert (code, "the-second-key" in stderr) == (0, False)


@pytest.mark.thorough
def test_x4_n6_sigusr1_reads_the_key_set_again_and_ends_the_links_of_keys_that_are_gone(tmp_path: Path) -> None:
    first, second, file = Issuer("first"), Issuer("second"), tmp_path / "jwks.json"
    file.write_text(json.dumps(first.key_set))
    with serving("--json", "--memory", "--namespace", "one=0", "--queue", "orders", "--jwks", str(file)) as server:

        def after_signal() -> str:
            server.signal(signal.SIGUSR1)
            assert server.process.stderr is not None
            return server.process.stderr.readline().decode()

        def client(issuer: Issuer) -> ServiceBusClient:
            host = f"localhost:{server.namespaces['one']['port']}"
            return ServiceBusClient(host, IssuedTokens(issuer, SENDER), use_tls=False, retry_total=0)

        with client(first) as old, client(second) as new:
            sender = old.get_queue_sender("orders")
            sender.send_messages(ServiceBusMessage("1"))
            file.write_text("{")
            assert f"keys not changed: --jwks: {file} cannot be used" in after_signal()
            sender.send_messages(ServiceBusMessage("2"))
            file.write_text(json.dumps(second.key_set))
            assert "keys read again namespace=one" in after_signal()
            with pytest.raises(ServiceBusError):
                sender.send_messages(ServiceBusMessage("3"))
            new.get_queue_sender("orders").send_messages(ServiceBusMessage("4"))
        server.signal(signal.SIGTERM)
        code, stderr = server.end()
    assert (code, "Traceback" in stderr) == (0, False)
