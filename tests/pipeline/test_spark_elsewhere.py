"""The pipeline in programs that Spark starts, and over Spark Connect: real `spark-submit`, real remote sessions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pyspark
import pytest

from tests.pipeline.queues import new_queue
from tests.spark_fixtures import QUICK
from twinbus.ledger import Ledger, Role, Stage
from twinbus.pipeline.session import java_home
from twinbus.testing import LocalNamespace

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(500)]
ROOT = Path(__file__).resolve().parents[2]
SUBMIT = (str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", "local[2]")
FAST = ("--conf", f"spark.driver.extraJavaOptions={QUICK}")

# The program of docs/guides/spark-source.md.
SOURCE = """
import os

from twinbus.pipeline.servicebus import ServiceBusDataSource
from twinbus.pipeline.session import session

spark = session()
spark.dataSource.register(ServiceBusDataSource)

options = {"connectionString": os.environ["NAMESPACE"], "entity": os.environ["QUEUE"]}
orders = spark.createDataFrame([("1", "two coffees"), ("2", "one tea")], "message_id string, body string")
orders.write.format("servicebus").mode("append").options(**options).save()

waiting = spark.read.format("servicebus").options(**options).load()
for row in waiting.orderBy("message_id").collect():
    print(row.message_id, row.body.decode())
"""
RESULT = "1 two coffees\n2 one tea\n"


def run(*command: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if name not in {"PYSPARK_PYTHON", "SPARK_REMOTE"}}
    usual = {"PYTHONPATH": str(ROOT / "src"), "SPARK_LOCAL_IP": "127.0.0.1", "JAVA_HOME": str(java_home())}
    given = {**known, **usual, **environment}
    return subprocess.run(command, env=given, cwd=folder, capture_output=True, text=True, check=False)


def script(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text)
    return str(path)


# --- spark-submit -----------------------------------------------------------------------------------------------------


def test_d4_under_spark_submit_only_the_result_of_a_program_is_on_stdout(
    namespace: LocalNamespace, tmp_path: Path
) -> None:
    queue, text = new_queue(namespace, "submitted"), namespace.connection_string
    program = script(tmp_path, SOURCE)
    done = run(*SUBMIT, *FAST, program, NAMESPACE=text, QUEUE=queue, PYSPARK_PYTHON=sys.executable)
    assert (done.returncode, done.stdout) == (0, RESULT), done.stderr[-3000:]


def test_d4_under_spark_submit_only_the_result_of_a_verb_is_on_stdout(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger", Role.CLIENT) as ledger:
        ledger.done(Stage.SEND_BACKLOG, "two", "q", ["1"], (1,), "one/orders", seconds=0.1)
    verb = "import sys\nfrom twinbus.cli.main import app\napp(sys.argv[1:])\n"
    program = script(tmp_path, verb)
    asked = ("ledger", "reconcile", str(tmp_path / "tables"), "--ledger", str(tmp_path / "ledger"), "--json")
    done = run(*SUBMIT, *FAST, program, *asked, PYSPARK_PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert json.loads(done.stdout)["verdict"] == "proven"
    # Errors are on the standard error, which spark-submit itself would join with the standard output.
    failed = run(*SUBMIT, program, "ledger", "reconcile", str(tmp_path / "none"), PYSPARK_PYTHON=sys.executable)
    assert (failed.returncode, failed.stdout) == (1, ""), failed.stderr[-3000:]
    assert "error: " in failed.stderr
    # The same as a command, with a master of its own.
    alone = run(sys.executable, "-m", "twinbus", *asked, "--master", "local[2]")
    assert alone.returncode == 0, alone.stderr[-3000:]
    assert json.loads(alone.stdout)["verdict"] == "proven"


# --- Spark Connect ----------------------------------------------------------------------------------------------------

STREAM = """
stream = spark.readStream.format("servicebus").options(**options).load()
writer = stream.writeStream.format("parquet").option("path", "out").option("checkpointLocation", "checkpoint")
writer.trigger(availableNow=True).start().awaitTermination()
print(spark.read.parquet("out").count(), "streamed,", waiting.count(), "left")
"""
SIGNATURE = "c2lnbmVkLWJ5LW5vYm9keQ"
SQL = """
given = ", ".join(f"{name} '{value}'" for name, value in options.items())
spark.sql(f"CREATE TEMPORARY VIEW v USING servicebus OPTIONS ({given})").collect()
waiting.explain("extended")
signed = "Endpoint=sb://localhost:1;SharedAccessSignature=SharedAccessSignature sr=x&sig=SIGNATURE&se=1&skn=a"
for wrong in ({"nonsense": "1"}, {"connectionString": signed}):
    try:
        spark.read.format("servicebus").options(**{**options, **wrong}).load().collect()
    except Exception as error:
        print("refused:", error)
""".replace("SIGNATURE&", f"{SIGNATURE}&")
SYPHON = """
from twinbus.pipeline.syphon_job import SparkSyphon
from twinbus.pipeline.syphon_job.driver import RemoteSparkError

try:
    SparkSyphon(spark, None, None)
except RemoteSparkError as error:
    print(error)
spark.stop()
"""


@dataclass
class Remote:
    """A program that has ended, whose session was one of Spark Connect."""

    done: subprocess.CompletedProcess[str]
    folder: Path
    key: str


@pytest.fixture(scope="module")
def remote(namespace: LocalNamespace, tmp_path_factory: pytest.TempPathFactory) -> Remote:
    folder, text = tmp_path_factory.mktemp("remote"), namespace.connection_string
    (folder / "events").mkdir()
    settings = f"spark.eventLog.enabled true\nspark.eventLog.compress false\nspark.eventLog.dir {folder / 'events'}\n"
    (folder / "spark-defaults.conf").write_text(f"{settings}spark.redaction.string.regex SAVE_MODE_[A-Z]+\n")
    program = script(folder, SOURCE + STREAM + SQL + SYPHON)
    environment = {"SPARK_REMOTE": "local[2]", "SPARK_CONF_DIR": str(folder)}
    queue = new_queue(namespace, "remote")
    done = run(sys.executable, program, NAMESPACE=text, QUEUE=queue, folder=folder, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return Remote(done, folder, text.partition("SharedAccessKey=")[2].partition(";")[0])


def test_d1_d2_a_local_remote_needs_no_set_up_and_the_syphon_says_why_it_does_not_run_there(remote: Remote) -> None:
    done = remote.done
    assert done.stdout.startswith(f"{RESULT}2 streamed, 0 left\n"), done.stdout
    assert "cannot run over Spark Connect" in done.stdout
    assert "foreachBatch" in done.stdout
    assert "SparkConnectWarning" not in done.stderr, "no setting is attempted that Spark Connect cannot change"


def test_d1_n6_over_spark_connect_no_key_is_in_event_logs_plans_errors_or_checkpoints(remote: Remote) -> None:
    """The pages of Spark show what is in the event log: plans, and each request of the client as a text."""
    texts = {path: path.read_bytes() for path in remote.folder.rglob("*") if path.is_file()}
    events = b"".join(text for path, text in texts.items() if "events" in path.parts)
    assert b'key: \\"connectionString\\"' in events, "requests are shown with their options"
    assert events.count(b"(redacted)") > 5
    assert b"SAVE_MODE_APPEND" not in events, "what the cluster hides stays hidden"
    shown = {**texts, Path("stdout"): remote.done.stdout.encode(), Path("stderr"): remote.done.stderr.encode()}
    del shown[remote.folder / "program.py"]
    assert remote.done.stdout.count("refused: ") == 2
    secrets = (remote.key.encode(), SIGNATURE.encode())
    assert [path for path, text in shown.items() if any(one in text for one in secrets)] == []
