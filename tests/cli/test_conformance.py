"""`twinbus doctor --conformance`: a local namespace agrees, differences are shown, and nothing is left behind."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

import pytest
from azure.servicebus.management import ServiceBusAdministrationClient

import twinbus
from tests.cli.running import COMMAND, PATIENCE, environment, invoke
from twinbus.cli.conformance_checks import ASSUMPTIONS, PREFIX, Observation
from twinbus.testing import LocalNamespace

PRIMARY = "TWINBUS_PRIMARY_CONNECTION_STRING"
RULES = [
    {"name": "all", "claims": ["Manage"], "primary_key": "all"},
    {"name": "app", "claims": ["Send", "Listen"], "primary_key": "app"},
]


@pytest.fixture(scope="module")
def namespace() -> Iterator[LocalNamespace]:
    config = {"namespaces": [{"name": "primary", "queues": [{"name": "orders"}], "authorization_rules": RULES}]}
    with LocalNamespace("primary", memory=True, config=config) as found:
        yield found


def entities(namespace: LocalNamespace) -> list[str]:
    admin = ServiceBusAdministrationClient.from_connection_string(
        namespace.connection_string, connection_verify=str(namespace.ca), use_env_settings=False
    )
    with admin:
        return [queue.name for queue in admin.list_queues()] + [topic.name for topic in admin.list_topics()]


def test_p6_every_assumption_has_a_name_of_its_own_and_a_difference_is_a_difference() -> None:
    assert len({one.name for one in ASSUMPTIONS}) == len(ASSUMPTIONS)
    assert Observation("ping", "hidden", "hidden").agrees
    assert not Observation("ping", "hidden", "visible").agrees


def test_p6_without_the_right_to_make_entities_the_check_fails_and_says_why(namespace: LocalNamespace) -> None:
    weak = namespace.connection_string.replace("SharedAccessKeyName=all", "SharedAccessKeyName=app")
    result = invoke("doctor", "--conformance", **{PRIMARY: weak.replace("SharedAccessKey=all", "SharedAccessKey=app")})
    assert result.exit_code == 1
    assert "error: the key was refused by" in result.stderr
    assert entities(namespace) == ["orders"]


@pytest.mark.parametrize(
    ("options", "told"),
    [(["--conformance", "--clean"], "do not go together"), ([], "--secondary is missing")],
)
def test_p6_wrong_options_of_the_doctor_are_refused(namespace: LocalNamespace, options: list[str], told: str) -> None:
    result = invoke("doctor", *options, **{PRIMARY: namespace.connection_string})
    assert (result.exit_code, told in result.stderr) == (2, True)


@pytest.mark.thorough
def test_p6_a_local_namespace_shows_what_twinbus_assumes(namespace: LocalNamespace) -> None:
    log = namespace.log.read_text()
    result = invoke("doctor", "--conformance", "--json", **{PRIMARY: namespace.connection_string})
    told = json.loads(result.stdout)
    assert [one for one in told["observations"] if not one["agrees"]] == []
    assert result.exit_code == 0
    assert [one["check"] for one in told["observations"]] == [one.name for one in ASSUMPTIONS]
    assert (told["state"], told["differences"], told["left"]) == ("agrees", 0, [])
    assert (told["twinbus"], told["tier"]) == (twinbus.__version__, "Standard")
    assert datetime.fromisoformat(told["time"]).utcoffset() == timedelta(0)
    made = re.findall(rf"method=PUT path=/{PREFIX}[^/ ]+ status=201", namespace.log.read_text().removeprefix(log))
    assert len(made) == 30, made
    assert told["units"] >= told["operations"] > len(ASSUMPTIONS)
    assert 0 < told["cost_at_most"] < 0.001
    assert entities(namespace) == ["orders"]


def test_p6_a_namespace_that_is_not_there_is_named() -> None:
    away = "Endpoint=sb://localhost:1;SharedAccessKeyName=a;SharedAccessKey=b;UseDevelopmentEmulator=true;"
    result = invoke("doctor", "--conformance", "--timeout", "2", **{PRIMARY: away})
    assert (result.exit_code, "localhost:1 cannot be reached" in result.stderr) == (1, True)


@pytest.mark.thorough
def test_p6_differences_are_listed_with_what_was_expected(namespace: LocalNamespace) -> None:
    namespace.faults.set("internal-error", points=["send"])
    try:
        result = invoke("doctor", "--conformance", **{PRIMARY: namespace.connection_string})
    finally:
        namespace.faults.clear()
    assert result.exit_code == 3
    [row] = [line for line in result.stdout.splitlines() if line.startswith("disabled_entity")]
    assert row.split() == ["disabled_entity", "com.microsoft:entity-disabled", "amqp:internal-error"]
    assert f"of {len(ASSUMPTIONS)} assumptions differ" in result.stdout
    assert "forward_to_itself" not in result.stdout
    assert entities(namespace) == ["orders"]


def started(namespace: LocalNamespace) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "doctor", "--conformance", "--json"],
        env=environment(**{PRIMARY: namespace.connection_string}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(holds: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        assert process is None or process.poll() is None


def scratch_entities(namespace: LocalNamespace) -> list[str]:
    return [name for name in entities(namespace) if name.startswith(PREFIX)]


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_p6_a_signal_ends_the_check_and_removes_its_entities(namespace: LocalNamespace, number: signal.Signals) -> None:
    process = started(namespace)
    wait_until(lambda: scratch_entities(namespace), process)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stdout) == (128 + number, ""), stderr
    assert entities(namespace) == ["orders"]


@pytest.mark.thorough
def test_p6_a_signal_during_the_removal_does_not_interrupt_it(namespace: LocalNamespace) -> None:
    log = namespace.log.read_text()
    namespace.faults.set("delay", points=["http"], delay=0.3)  # so the removal takes some seconds
    process = started(namespace)
    wait_until(lambda: f"method=DELETE path=/{PREFIX}" in namespace.log.read_text().removeprefix(log), process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    namespace.faults.clear()
    assert (process.returncode, stdout) == (128 + signal.SIGINT, ""), stderr
    assert entities(namespace) == ["orders"]


@pytest.mark.thorough
def test_p6_an_entity_whose_creation_a_signal_interrupts_is_removed_too(namespace: LocalNamespace) -> None:
    """The namespace creates the first entity some seconds after the signal."""
    log = namespace.log.read_text()
    namespace.faults.set("delay", points=["http"], delay=4, count=1)
    process = started(namespace)
    wait_until(lambda: not namespace.faults.list(), process)  # its one hit is used up
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert (process.returncode, stdout) == (128 + signal.SIGINT, ""), stderr
    wait_until(lambda: f"method=PUT path=/{PREFIX}" in namespace.log.read_text().removeprefix(log))
    assert entities(namespace) == ["orders"]


@pytest.mark.thorough
def test_p6_what_could_not_be_removed_is_listed() -> None:
    with LocalNamespace("primary", memory=True) as namespace:
        process = started(namespace)
        # Without an answer about the first entity and the tier, the verb would fail with exit code 1.
        wait_until(lambda: len(scratch_entities(namespace)) > 1, process)
        namespace.faults.set("internal-error", points=["http"])
        stdout, stderr = process.communicate(timeout=4 * PATIENCE)
        namespace.faults.clear()
        left = scratch_entities(namespace)
    assert process.returncode == 3, stderr
    assert left
    assert set(left) <= set(json.loads(stdout)["left"])
    assert [path for path in left if f"{path} could not be removed: remove it by hand" not in stderr] == []
