"""`twinbus ledger ingest|reconcile|…`, run as a user runs them; results in PostgreSQL."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from tests.components import component_missing
from tests.pipeline.books import MIDNIGHT, halves, operation, segment_name, writer
from twinbus.answers import Results
from twinbus.cli.main import app
from twinbus.ledger import Role, SegmentHeader, Stage, encode_entry
from twinbus.pipeline.jobs import JOBS, result_over_history
from twinbus.pipeline.result_tables import RESULTS_FOLDER
from twinbus.pipeline.table_storage import TableStorage
from twinbus.pipeline.tables import Tables, struct

pytestmark = pytest.mark.timeout(600)  # Spark is slow on a busy machine
JAR = Path("/usr/share/java/postgresql.jar")
PASSWORD = "open-sesame"


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run the verb in this process, with the Spark session of the tests. Returns its exit code and its output."""
    done = CliRunner().invoke(app, ["ledger", *arguments], env={"COLUMNS": "250", **environment})
    return done.exit_code, done.stdout or done.stderr


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ledger")
    entries = [
        operation(Stage.SEND_BACKLOG, "lost", "home", "waiting"),
        operation(Stage.RETURN_PRIMARY, "home"),
        operation(Stage.COMPLETE_BACKLOG, "lost", "home"),
    ]
    (folder / segment_name(1)).write_text("".join(map(encode_entry, entries)) + "rubbish\n")
    return folder


@pytest.mark.usefixtures("spark")
def test_d3_the_verbs_ingest_and_report_and_a_loss_exits_with_1(ledger: Path, tmp_path: Path) -> None:
    code, said = run("reconcile", str(tmp_path / "tables"))
    assert (code, "contains neither a ledger nor tables" in said) == (1, True)
    code, said = run("ingest", str(ledger), str(tmp_path / "tables"))
    assert code == 0, said
    assert ["operations", "3"] in [line.split() for line in said.splitlines()]
    assert f"{ledger / segment_name(1)}, line 4: not JSON" in said
    code, said = run("reconcile", str(tmp_path / "tables"))
    assert code == 1
    assert "  contoso/orders  lost\n" in said
    code, said = run("reconcile", str(tmp_path / "tables"), "--ledger", str(ledger), "--json")
    report = json.loads(said)
    assert (report["verdict"], report["sentence"].partition(".")[0]) == (
        "lost",
        "1 of 3 accepted messages is in neither namespace",
    )
    assert (code, report["accepted"], report["delivered"], report["in_backlog"], report["lost"]) == (1, 3, 1, 1, 1)
    assert report["messages"]["lost"] == [{"destination": "contoso/orders", "id": "lost", "count": 1}]
    code, said = run("reconcile", str(tmp_path / "tables"), "--until", "2026-01-01")
    assert (code, said.splitlines()[0].partition(":")[0]) == (3, "not proven"), "a line cannot be read"


@pytest.mark.thorough
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(("silence", "verdict"), [("900", "proven"), ("300", "not proven")])
def test_l1_dead_after_means_the_same_in_check_reconcile_and_report(tmp_path: Path, silence: str, verdict: str) -> None:
    """A syphon on another host that began a delivery, and whose segment is 10 minutes old."""
    folder, tables = tmp_path / "ledger", str(tmp_path / "tables")
    folder.mkdir()
    begun, _ = halves(operation(Stage.RETURN_PRIMARY, "a", by=2))
    text = "".join(encode_entry(one) for one in (header(2), operation(Stage.SEND_BACKLOG, "a"), begun))
    path = folder / f"syphon-elsewhere-7-{writer(2)}-0.jsonl.open"
    path.write_text(text)
    os.utime(path, (time.time() - 600,) * 2)
    code, said = run("check", str(folder), "--json", "--dead-after", silence)
    checked = json.loads(said)
    assert (code, checked["verdict"]) == (3 if verdict == "not proven" else 0, verdict)
    assert (checked["unknown"], checked["in_backlog"]) == ((1, 0) if code else (0, 1))
    code, said = run("reconcile", tables, "--ledger", str(folder), "--json", "--dead-after", silence)
    reconciled = json.loads(said)
    shared = reconciled.keys() & checked.keys()
    assert {name: reconciled[name] for name in shared} == {name: checked[name] for name in shared}
    assert code == (3 if verdict == "not proven" else 0)
    if silence == "300":  # not the default
        page = ["-o", str(tmp_path / "page.html"), "--tables", tables, "--json", "--dead-after", silence]
        done = CliRunner().invoke(app, ["report", str(folder), *page])
        assert json.loads(done.stdout)["verdict"] == verdict


def header(number: int) -> SegmentHeader:
    name = f"syphon-elsewhere-7-{writer(number)}"
    return SegmentHeader(
        at=MIDNIGHT, id=f"{writer(number)}-h", writer=name, role=Role.SYPHON, host="elsewhere", pid=7, version="1",
        segment=0, durability="process",
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.usefixtures("spark")
def test_d3_d4_cost_incidents_and_latency_are_printed_and_written_to_files(
    ledger: Path, tmp_path: Path, spark: SparkSession
) -> None:
    folder = tmp_path / "tables"
    code, said = run("cost", str(folder), "--ledger", str(ledger), "--json")
    assert code == 0, said
    first = json.loads(said)[0]
    assert (first["day"], first["stage"], first["units"], first["bytes"]) == ("2026-09-22", "complete_backlog", 2, 200)
    code, said = run("incidents", str(folder), "--json")
    assert code == 0, said
    assert [(row["began"], row["diverted"], row["returned"]) for row in json.loads(said)] == [(None, 3, 1)]
    code, said = run("latency", str(folder))
    assert code == 0, said
    assert "contoso/orders" in said
    for job in ("cost", "incidents", "latency"):
        kept = spark.read.parquet(*DeltaTable(folder / RESULTS_FOLDER / job).file_uris())
        assert kept.count() > 0
        assert [(one.name, one.dataType) for one in kept.schema] == [
            (one.name, one.dataType) for one in struct(JOBS[job].stored)
        ]
    before = DeltaTable(folder / RESULTS_FOLDER / "cost").version()
    # Spark computes this window. Result tables would answer for a window of whole hours.
    code, said = run("cost", str(folder), "--until", "2026-01-01T00:30:00", "--json")
    assert (code, json.loads(said)) == (0, [])
    assert DeltaTable(folder / RESULTS_FOLDER / "cost").version() == before, "tables of results are about all time"


@pytest.mark.parametrize(
    ("arguments", "told", "exits"),
    [
        (["ingest", "nowhere", "tables"], "the ledger nowhere does not exist", 1),
        (["cost", "tables", "--follow"], "--follow needs a ledger", 2),
        (["audit", "nowhere", "--secondary", "x", "--tables", "tables"], "--master need --engine spark", 2),
    ],
)
def test_impossible_options_are_refused_before_spark_starts(arguments: list[str], told: str, exits: int) -> None:
    code, said = run(*arguments)
    assert code == exits
    assert told in said


@pytest.mark.thorough
@pytest.mark.usefixtures("spark")
def test_the_deprecated_format_json_prints_the_same_as_json_and_a_warning(ledger: Path, tmp_path: Path) -> None:
    tables = str(tmp_path / "tables")
    code, said = run("ingest", str(ledger), tables, "--json")
    assert code == 0, said
    done = CliRunner().invoke(app, ["ledger", "cost", tables, "--format", "json"])
    assert (done.exit_code, done.stdout) == run("cost", tables, "--json")
    assert "--format json is deprecated" in done.stderr


@pytest.mark.thorough
@pytest.mark.usefixtures("spark")
def test_d3_a_ledger_without_entries_gives_empty_results(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    code, said = run("ingest", str(tmp_path / "ledger"), str(tmp_path / "tables"), "--json")
    assert (code, json.loads(said)) == (0, {"operations": 0, "pending": 0, "entries": 0, "problems": [], "steps": 0})
    for verb in ("cost", "incidents", "latency"):
        code, said = run(verb, str(tmp_path / "tables"), "--json")
        assert (code, json.loads(said)) == (0, [])
    code, said = run("reconcile", str(tmp_path / "tables"), "--json")
    assert (code, json.loads(said)["accepted"]) == (0, 0)


@pytest.mark.thorough
def test_d3_a_second_process_that_writes_the_tables_is_refused_in_one_line(
    spark: SparkSession, ledger: Path, tmp_path: Path
) -> None:
    tables = Tables(spark, tmp_path / "tables")
    with tables.locked():
        code, said = run("ingest", str(ledger), str(tables.root))
    assert code == 1
    assert f"another process is writing the tables in {tables.root}" in said
    assert "Traceback" not in said
    code, said = run("ingest", str(ledger), str(tables.root))
    assert code == 0, said


@pytest.mark.usefixtures("spark")
def test_d3_a_segment_that_cannot_be_read_is_reported_in_one_line(tmp_path: Path) -> None:
    segment = tmp_path / "ledger" / segment_name(1)
    segment.mkdir(parents=True)
    code, said = run("ingest", str(segment.parent), str(tmp_path / "tables"))
    assert code == 1
    assert f"Is a directory: '{segment}'" in said
    assert "Traceback" not in said


@pytest.mark.thorough
@pytest.mark.usefixtures("spark")
def test_d7_an_answer_over_all_time_is_kept_in_tables_without_a_ledger(ledger: Path, tmp_path: Path) -> None:
    code, said = run("ingest", str(ledger), str(tmp_path / "tables"))
    assert code == 0, said
    done = CliRunner().invoke(app, ["report", str(tmp_path / "tables"), "-o", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.stderr
    assert Results(TableStorage(tmp_path / "tables")).as_of("report") is not None


@pytest.mark.thorough
@pytest.mark.usefixtures("spark")
def test_d7_tables_that_cannot_be_written_are_enough_for_an_answer(ledger: Path, tmp_path: Path) -> None:
    tables = tmp_path / "tables"
    code, said = run("ingest", str(ledger), str(tables))
    assert code == 0, said
    # Root may write everywhere, but cannot open a folder as a file.
    (tables / ".lock").unlink()
    (tables / ".lock").mkdir()
    done = CliRunner().invoke(app, ["ledger", "cost", str(tables), "--json"])
    assert (done.exit_code, len(json.loads(done.stdout))) == (0, 3)
    assert f"the results are not kept: {tables} cannot be written" in done.stderr


@pytest.mark.thorough
@pytest.mark.usefixtures("spark")
def test_d7_a_ledger_whose_only_segment_is_empty_has_an_answer(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / segment_name(1)).touch()
    code, said = run("cost", str(tmp_path / "ledger"), "--json")
    assert (code, json.loads(said)) == (0, [])


# --- PostgreSQL ------------------------------------------------------------------------------------------------------


def binaries() -> Path | None:
    """Return the folder with the programs of the newest installed PostgreSQL."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


@pytest.fixture
def postgres() -> Iterator[str]:
    """Start a PostgreSQL server for the tests, and yield its address."""
    folder = binaries()
    if folder is None or not JAR.exists():
        component_missing("PostgreSQL and its JDBC driver", "postgresql libpostgresql-jdbc-java")
    # PostgreSQL refuses to run as root.
    user = "postgres" if os.geteuid() == 0 else None
    data = Path(tempfile.mkdtemp(prefix="twinbus-postgres-"))
    if user:
        shutil.chown(data, user)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def call(*command: str | Path) -> None:
        subprocess.run(command, user=user, cwd=data, stdout=subprocess.DEVNULL, check=True)

    control: list[str | Path] = [
        folder / "pg_ctl",
        "-D",
        data / "db",
        "-w",
        "-o",
        f"-p {port} -c listen_addresses=127.0.0.1 -k {data}",
    ]
    try:
        (data / "password").write_text(PASSWORD)
        if user:
            shutil.chown(data / "password", user)
        words: list[str | Path] = ["-A", "scram-sha-256", "--pwfile", data / "password"]
        call(folder / "initdb", "-D", data / "db", "-U", "books", *words, "-N")
        call(*control, "-l", data / "log", "start")
        try:
            yield f"jdbc:postgresql://127.0.0.1:{port}/postgres?user=books&password={PASSWORD}"
        finally:
            call(*control, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(data)


@pytest.mark.thorough
def test_d4_results_are_written_to_postgresql_and_replace_earlier_ones(
    spark: SparkSession, ledger: Path, tmp_path: Path, postgres: str
) -> None:
    tables = str(tmp_path / "tables")
    code, said = run("ingest", str(ledger), tables)
    assert code == 0, said
    code, said = run("reconcile", tables, TWINBUS_JDBC=postgres)
    assert (code, "--jars postgresql.jar" in said) == (1, True), "the session has no driver yet"
    spark.sql(f"add jar '{JAR}'")
    code, said = run("reconcile", tables, TWINBUS_JDBC=postgres.replace(PASSWORD, "wrong-word"))
    assert (code, "password authentication failed" in said, "wrong-word" in said) == (1, True, False)
    for _ in range(2):
        code, said = run("cost", tables, "--json", TWINBUS_JDBC=postgres)
        assert code == 0, said
    assert PASSWORD not in said
    reader = spark.read.format("jdbc").option("url", postgres).option("driver", "org.postgresql.Driver")
    kept = reader.option("dbtable", "twinbus_cost").load()
    assert sorted(map(str, kept.collect())) == sorted(
        map(str, result_over_history(Tables(spark, tables), JOBS["cost"]).collect())
    )
