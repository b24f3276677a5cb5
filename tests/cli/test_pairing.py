"""`twinbus provision`, `doctor` and `drill`, run as an operator runs them.

One test starts a process; the others run the verbs in the test's own process, which imports the SDK only once.
"""

import itertools
import json
from collections.abc import Iterator

import pytest

from twinbus.namespace import FaultClient
from twinbus.pairing import Administration

from .running import Serving, authorization_rule, invoke, pair_environment, run, serving_config

RULES = f"""
[[namespaces]]
name = "primary"
port = 0
[[namespaces.queues]]
name = "orders"
[[namespaces]]
name = "secondary"
port = 0
{authorization_rule("all", "Manage")}
{authorization_rule("app", "Send", "Listen")}
"""
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving_config(tmp_path_factory.mktemp("pairing"), RULES) as server:
        yield server


@pytest.fixture
def strings(server: Serving) -> dict[str, str]:
    """Return the connection strings as environment variables. Each test has its own primary name."""
    return pair_environment(server, f"contoso-{next(NUMBERS)}")


def test_p8_provision_creates_what_is_missing_and_says_what_was_there(strings: dict[str, str]) -> None:
    name = strings["TWINBUS_PRIMARY_NAME"]
    first = run("provision", "--count", "2", **strings)
    assert first.returncode == 0, first.stderr
    assert f"created  {name}/x-servicebus-transfer/1" in first.stdout
    again = invoke("provision", "--count", "3", "--json", **strings)
    told = json.loads(again.stdout)
    assert [path.rpartition("/")[2] for path in told["created"]] == ["2"]
    assert [path.rpartition("/")[2] for path in told["existed"]] == ["0", "1"]


def test_p8_provision_does_not_contact_the_primary(strings: dict[str, str]) -> None:
    nobody = "Endpoint=sb://contoso.servicebus.windows.net;SharedAccessKeyName=a;SharedAccessKey=b"
    del strings["TWINBUS_PRIMARY_NAME"]
    done = invoke("provision", "--primary", nobody, "--count", "1", **strings)
    assert done.exit_code == 0, done.stderr
    assert "created  contoso/x-servicebus-transfer/0" in done.stdout


def test_p7_provision_with_a_key_that_may_not_says_what_right_is_missing(strings: dict[str, str]) -> None:
    weaker = (
        strings["TWINBUS_SECONDARY_CONNECTION_STRING"].replace("=all;", "=app;").replace("key-of-all", "key-of-app")
    )
    refused = invoke("provision", "--secondary", weaker, **strings)
    assert refused.exit_code == 1
    assert "the key was refused by the secondary: the Manage claim is required" in refused.stderr
    assert "Manage" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert "key-of-app" not in refused.stderr


def test_p6_doctor_tells_extras_and_cleans_only_those_that_are_empty(strings: dict[str, str]) -> None:
    invoke("provision", "--count", "4", **strings)
    found = invoke("doctor", "--count", "2", "--json", **strings)
    assert found.exit_code == 0, found.stderr
    report = json.loads(found.stdout)
    assert [queue["path"].rpartition("/")[2] for queue in report["queues"]] == ["0", "1"]
    assert [queue["path"].rpartition("/")[2] for queue in report["extras"]] == ["2", "3"]
    assert report["pings"]["visibility"] == "hidden"

    table = invoke("doctor", "--count", "5", "--no-ping", **strings)
    assert table.exit_code == 3
    assert "missing" in table.stdout
    assert "twinbus provision" in table.stdout

    refused = invoke("doctor", "--count", "2", "--no-ping", "--clean", **strings)
    assert refused.exit_code == 1
    assert "Remove 2 queues from" in refused.stdout
    cleaned = invoke("doctor", "--count", "2", "--no-ping", "--clean", "--yes", "--json", **strings)
    assert list(json.loads(cleaned.stdout)["cleaned"].values()) == ["removed", "removed"]


@pytest.mark.parametrize("verb", [("provision",), ("doctor",), ("drill", "--entity", "orders", "--yes")])
def test_two_namespaces_that_are_one_and_a_string_that_is_none_are_refused(
    strings: dict[str, str], verb: tuple[str, ...]
) -> None:
    primary = strings["TWINBUS_PRIMARY_CONNECTION_STRING"]
    same = invoke(*verb, "--secondary", primary, **strings)
    assert same.exit_code == 2
    assert "the same namespace" in same.stderr
    wrong = invoke(*verb, "--secondary", "contoso.servicebus.windows.net", **strings)
    assert wrong.exit_code == 2
    assert "--secondary: contoso.servicebus.windows.net is a host name, which has no key" in wrong.stderr


def test_s11_a_drill_fails_over_diverts_restores_and_takes_back_what_it_sent(strings: dict[str, str]) -> None:
    done = invoke("drill", "--entity", "orders", "--messages", "2", "--count", "2", "--yes", **strings)
    assert done.exit_code == 0, done.stdout + done.stderr
    told = [line.split(" s  ", 1)[-1] for line in done.stdout.splitlines()]
    starts = (
        "paired; 2 of 2",
        "before: 2 sent to the primary, 0 diverted",
        "failover_engaged entity=orders episode=1 cause=forced",
        "meanwhile: 0 sent to the primary, 2 diverted",
        "restored entity=orders",
        "trial_passed entity=orders",
        "after: 2 sent to the primary, 0 diverted",
        "2 of 2 diverted messages taken back",
    )
    assert [line.startswith(start) for line, start in zip(told, starts, strict=False)] == [True] * len(starts)
    assert told[-1] == "everything went as expected"


def test_s11_a_drill_may_wait_for_a_ping_and_leave_what_was_diverted(strings: dict[str, str]) -> None:
    done = invoke("drill", "--entity", "orders", "--by-ping", "--leave", "--count", "1", "--json", **strings)
    assert done.exit_code == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["as_meant"] is True
    assert any("forced=False" in moment["what"] for moment in told["moments"])
    with Administration.from_connection_string(strings["TWINBUS_SECONDARY_CONNECTION_STRING"]) as administration:
        path = f"{strings['TWINBUS_PRIMARY_NAME']}/x-servicebus-transfer/0"
        left = administration.request(administration.client.get_queue_runtime_properties, path)
    assert left.active_message_count == 1


@pytest.mark.thorough
def test_s11_a_drill_whose_sends_fail_ends_with_3(server: Serving, strings: dict[str, str]) -> None:
    faults = FaultClient(str(server.namespaces["primary"]["connection_string"]))
    faults.set("internal-error", entity="orders", points=["send"])
    try:
        done = invoke("drill", "--entity", "orders", "--count", "1", "--timeout", "3", "--yes", **strings)
    finally:
        faults.clear()
    assert done.exit_code == 3, done.stdout + done.stderr
    assert "send failed" in done.stdout
    assert done.stdout.splitlines()[-1] == "something did not go as expected"


def test_s11_a_drill_looks_for_its_entity_before_it_asks(strings: dict[str, str]) -> None:
    missing = invoke("drill", "--entity", "nothing", "--count", "1", "--timeout", "3", input="n\n", **strings)
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "error: queue or topic 'nothing' is not on localhost:" in missing.stderr
    asked = invoke("drill", "--entity", "orders", "--count", "1", "--timeout", "3", input="n\n", **strings)
    assert "Receivers of orders will get" in asked.stdout


def test_s11_a_drill_of_an_entity_that_is_not_there_says_so(strings: dict[str, str]) -> None:
    done = invoke("drill", "--entity", "nothing", "--count", "1", "--timeout", "3", "--yes", **strings)
    assert done.exit_code == 1
    assert "error: queue or topic 'nothing' is not on localhost:" in done.stderr
    assert "Traceback" not in done.stderr
