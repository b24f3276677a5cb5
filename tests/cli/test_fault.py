"""`twinbus fault` against a running namespace."""

import json
from collections.abc import Iterator

import pytest

from .running import Serving, authorization_rule, run, serving, serving_config

RULES = f"""
[[namespaces]]
name = "one"
port = 0
{authorization_rule("all", "Manage")}
{authorization_rule("sends", "Send")}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving_config(tmp_path_factory.mktemp("fault"), RULES) as server:
        yield server


@pytest.fixture
def connection(server: Serving) -> str:
    return str(server.namespaces["one"]["connection_string"])


def test_a_fault_is_set_listed_and_cleared(connection: str) -> None:
    spec = (
        "--entity",
        "orders",
        "--on",
        "send",
        "--on",
        "settle",
        "--probability",
        "0.5",
        "--count",
        "3",
        "--seed",
        "9",
    )
    made = run("fault", "set", "server-busy", "-c", connection, *spec, "--duration", "1m", "--json")
    assert made.returncode == 0, made.stderr
    fault = json.loads(made.stdout)
    wanted = {"kind": "server-busy", "entity": "orders", "points": ["send", "settle"], "probability": 0.5, "count": 3}
    assert {name: fault[name] for name in wanted} == wanted
    assert (fault["seed"], fault["duration"], fault["hits"]) == (9, 60, 0)

    listed = run("fault", "list", "--json", TWINBUS_CONNECTION_STRING=connection)
    assert [one["id"] for one in json.loads(listed.stdout)["faults"]] == [fault["id"]]
    table = run("fault", "list", TWINBUS_CONNECTION_STRING=connection).stdout
    assert "server-busy" in table
    assert "0 of 3" in table

    cleared = run("fault", "clear", fault["id"], "-c", connection)
    assert (cleared.returncode, cleared.stdout) == (0, "1 cleared\n")
    again = run("fault", "clear", fault["id"], "-c", connection)
    assert (again.returncode, again.stdout) == (1, "0 cleared\n")
    assert run("fault", "list", "-c", connection).stdout == "no fault is set\n"


@pytest.mark.parametrize("kind", ["refuse", "black-hole"])
def test_even_a_namespace_that_answers_nobody_lets_its_faults_be_cleared(connection: str, kind: str) -> None:
    assert run("fault", "set", kind, "-c", connection).returncode == 0
    cleared = run("fault", "clear", "-c", connection)
    assert (cleared.returncode, cleared.stdout) == (0, "1 cleared\n"), cleared.stderr


def test_a_fault_that_makes_no_sense_is_refused_with_what_is_allowed(connection: str) -> None:
    refused = run("fault", "set", "refuse", "--on", "send", "-c", connection)
    assert refused.returncode == 2
    assert "--on: 'refuse' cannot hit 'send'; it can hit connect" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_key_without_the_manage_claim_may_not_set_faults(connection: str) -> None:
    weaker = connection.replace(
        "SharedAccessKeyName=all;SharedAccessKey=key-of-all", "SharedAccessKeyName=sends;SharedAccessKey=key-of-sends"
    )
    refused = run("fault", "set", "server-busy", "-c", weaker)
    assert refused.returncode == 1
    assert "refused the key 'sends'" in refused.stderr
    assert "Manage claim" in refused.stderr


def test_a_namespace_that_is_not_there_and_a_string_that_is_none_are_told_apart() -> None:
    nobody = "Endpoint=sb://localhost:1;SharedAccessKeyName=a;SharedAccessKey=b;UseDevelopmentEmulator=true;"
    absent = run("fault", "list", "-c", nobody)
    assert absent.returncode == 1
    assert "The namespace at localhost:1 did not answer" in absent.stderr
    assert "error: Endpoint is missing" in run("fault", "list", "-c", "A=b").stderr


def test_a_crash_ends_the_server_at_once() -> None:
    with serving("--json", "--memory", "--namespace", "one=0") as server:
        told = run("fault", "set", "crash", "-c", server.namespaces["one"]["connection_string"])
        assert (told.returncode, told.stdout) == (0, "the namespace crashes now\n"), told.stderr
        code, _ = server.end()
    assert code == -9
