"""`twinbus ledger ingest|reconcile|…` as their users have them; a stream that is killed; results in PostgreSQL."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from tests.cli.running import environment
from tests.pipeline.books import history, operation, segment_name, write_segments
from twinbus.cli.main import app
from twinbus.ledger import balance, read_ledger
from twinbus.ledger.encoding import encode
from twinbus.ledger.entries import Stage
from twinbus.pipeline.ingest import ingest
from twinbus.pipeline.jobs import JOBS, following, over_history, so_far
from twinbus.pipeline.landing import RESULTS
from twinbus.pipeline.reconcile import JUDGED
from twinbus.pipeline.tables import OPERATIONS, Tables, struct

pytestmark = pytest.mark.timeout(600)  # where others are at work, Spark takes its time
PATIENCE = 500.0
JAR = Path("/usr/share/java/postgresql.jar")
PASSWORD = "open-sesame"


def run(*arguments: str, **environment: str) -> tuple[int, str]:
    """In this process, whose Spark session the verb finds: how it ended, and what it told or what was wrong."""
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
    (folder / segment_name(1)).write_text("".join(map(encode, entries)) + "rubbish\n")
    return folder


@pytest.mark.usefixtures("spark")
def test_d3_the_verbs_ingest_and_tell_and_a_loss_ends_with_1(ledger: Path, tmp_path: Path) -> None:
    code, said = run("reconcile", str(tmp_path / "tables"))
    assert (code, "holds no tables" in said) == (1, True)
    code, said = run("ingest", str(ledger), str(tmp_path / "tables"))
    assert code == 0, said
    assert ["operations", "3"] in [line.split() for line in said.splitlines()]
    assert f"{ledger / segment_name(1)}, line 4: no JSON" in said
    code, said = run("reconcile", str(tmp_path / "tables"))
    assert code == 1
    assert "  contoso/orders  lost\n" in said
    code, said = run("reconcile", str(tmp_path / "tables"), "--ledger", str(ledger), "--format", "json")
    report = json.loads(said)
    assert (code, report["accepted"], report["delivered"], report["in_backlog"], report["lost"]) == (1, 3, 1, 1, 1)
    assert report["messages"]["lost"] == [{"destination": "contoso/orders", "id": "lost", "count": 1}]
    code, said = run("reconcile", str(tmp_path / "tables"), "--until", "2026-01-01")
    assert code == 0, "nothing was lost before then"


@pytest.mark.usefixtures("spark")
def test_d3_d4_cost_incidents_and_latency_are_told_and_land_in_files(
    ledger: Path, tmp_path: Path, spark: SparkSession
) -> None:
    folder = tmp_path / "tables"
    code, said = run("cost", str(folder), "--ledger", str(ledger), "--format", "json")
    assert code == 0, said
    first = json.loads(said)[0]
    assert (first["day"], first["stage"], first["units"], first["bytes"]) == ("2026-09-22", "complete_backlog", 2, 200)
    code, said = run("incidents", str(folder), "--format", "json")
    assert code == 0, said
    assert [(row["began"], row["diverted"], row["returned"]) for row in json.loads(said)] == [(None, 3, 1)]
    code, said = run("latency", str(folder))
    assert code == 0, said
    assert "contoso/orders" in said
    for job in ("cost", "incidents", "latency"):
        kept = spark.read.parquet(str(folder / RESULTS / job))
        assert kept.count() > 0
        assert [(one.name, one.dataType) for one in kept.schema] == [
            (one.name, one.dataType) for one in struct(JOBS[job].result)
        ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["ingest", "nowhere", "tables"], "is no directory"),
        (["cost", "tables", "--follow"], "--follow needs a ledger"),
    ],
)
def test_what_cannot_work_is_told_before_spark_starts(arguments: list[str], told: str) -> None:
    code, said = run(*arguments)
    assert code == 1
    assert told in said


@pytest.mark.usefixtures("spark")
def test_d3_a_ledger_without_entries_has_nothing_to_tell(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    code, said = run("ingest", str(tmp_path / "ledger"), str(tmp_path / "tables"), "--format", "json")
    assert (code, json.loads(said)) == (0, {"operations": 0, "pending": 0, "entries": 0, "problems": []})
    for verb in ("cost", "incidents", "latency"):
        code, said = run(verb, str(tmp_path / "tables"), "--format", "json")
        assert (code, json.loads(said)) == (0, [])
    code, said = run("reconcile", str(tmp_path / "tables"), "--ledger", str(tmp_path / "ledger"), "--format", "json")
    assert (code, json.loads(said)["accepted"]) == (0, 0)


def test_d3_while_another_process_writes_the_tables_a_second_is_refused_in_a_line(
    spark: SparkSession, ledger: Path, tmp_path: Path
) -> None:
    tables = Tables(spark, tmp_path / "tables")
    with tables.changing():
        code, said = run("ingest", str(ledger), str(tables.root))
    assert code == 1
    assert f"another process is writing the tables in {tables.root}" in said
    assert "Traceback" not in said
    code, said = run("ingest", str(ledger), str(tables.root))
    assert code == 0, said


@pytest.mark.usefixtures("spark")
def test_d3_a_segment_that_cannot_be_read_is_told_in_a_line(tmp_path: Path) -> None:
    segment = tmp_path / "ledger" / segment_name(1)
    segment.mkdir(parents=True)
    code, said = run("ingest", str(segment.parent), str(tmp_path / "tables"))
    assert code == 1
    assert f"Is a directory: '{segment}'" in said
    assert "Traceback" not in said


# --- a process that is killed ----------------------------------------------------------------------------------------

# All of them die at every step in test_ledger_jobs.
FOLLOWED = ("reconcile", "incidents")
FOLLOWER = f"""
import sys
from pathlib import Path
from tests.pipeline.conftest import QUICK
from twinbus.pipeline.ingest import ingest
from twinbus.pipeline.jobs import following
from twinbus.pipeline.session import session
spark = session("follower", settings={{"spark.driver.defaultJavaOptions": QUICK}})
ledger, tables = map(Path, sys.argv[1:])
ingest(spark, ledger, tables, every=1, most_bytes=20_000, extend=following({FOLLOWED})).awaitTermination()
"""


def test_d3_a_stream_whose_driver_and_jvm_are_killed_goes_on_where_it_was(spark: SparkSession, tmp_path: Path) -> None:
    ledger, tables = tmp_path / "ledger", Tables(spark, tmp_path / "tables")
    write_segments(ledger, history(2), seed=2, count=12)
    root = Path(__file__).resolve().parents[2]
    follower = subprocess.Popen(
        [sys.executable, "-c", FOLLOWER, str(ledger), str(tables.root)],
        env={**environment(), "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while tables.version().number < 1 and time.monotonic() < deadline:
            assert follower.poll() is None, "the follower ended by itself"
            time.sleep(0.05)
    finally:
        os.killpg(follower.pid, signal.SIGKILL)
        follower.wait()
    reached = tables.version()
    assert reached.number >= 1
    assert reached.followed == dict.fromkeys(FOLLOWED, reached.number)
    whole = balance(read_ledger(ledger, lambda _: None))
    assert tables.read(OPERATIONS).count() > 0
    ingest(spark, ledger, tables.root, extend=following(FOLLOWED)).awaitTermination()
    version = tables.version()
    assert version.number > reached.number
    assert version.followed == dict.fromkeys(FOLLOWED, version.number)
    for name in FOLLOWED:
        followed, anew = so_far(tables, JOBS[name]).collect(), over_history(tables, JOBS[name]).collect()
        assert sorted(map(str, followed)) == sorted(map(str, anew))
    rows = so_far(tables, JOBS["reconcile"]).collect()
    for name in (name for name in JUDGED if name != "in_flight"):
        assert sum(row[name] for row in rows) == getattr(whole, name).total()


# --- PostgreSQL ------------------------------------------------------------------------------------------------------


def binaries() -> Path | None:
    """Of the newest PostgreSQL that Debian has installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


@pytest.fixture
def postgres() -> Iterator[str]:
    """The address of a server of our own."""
    folder = binaries()
    assert folder is not None
    # It refuses to run as root.
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


@pytest.mark.skipif(binaries() is None or not JAR.exists(), reason="needs postgresql and libpostgresql-jdbc-java")
def test_d4_results_land_in_postgresql_and_a_second_one_takes_the_place_of_the_first(
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
        code, said = run("cost", tables, "--format", "json", TWINBUS_JDBC=postgres)
        assert code == 0, said
    assert PASSWORD not in said
    reader = spark.read.format("jdbc").option("url", postgres).option("driver", "org.postgresql.Driver")
    kept = reader.option("dbtable", "twinbus_cost").load()
    assert sorted(map(str, kept.collect())) == sorted(
        map(str, over_history(Tables(spark, tables), JOBS["cost"]).collect())
    )
