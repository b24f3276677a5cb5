"""A Spark driver that uses the data source and the syphon, and saves all that Spark shows of them.

`python -m tests.pipeline.secrets_shown FOLDER QUEUE`, with connection strings in the environment. The test looks for
keys in the files.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pyspark.sql import SparkSession

from tests.spark_fixtures import QUICK
from tests.syphon.fixed_queues import FixedQueues
from twinbus.amqp import Properties, build_message
from twinbus.backlog import PATH_PROPERTY
from twinbus.connect import NetworkOptions, connect
from twinbus.pipeline.servicebus import ServiceBusDataSource
from twinbus.pipeline.session import session
from twinbus.pipeline.syphon_job import SparkSyphon, SparkSyphonOptions, SyphonJob

NAMED, WRONG = "NAMESPACE", "WRONG_NAMESPACE"
HOST, AUTHORITY = "NAMESPACE_HOST", "NAMESPACE_CA"
SIGNED_IN = "managed-identity"
PAGES = ("/environment/", "/jobs/", "/stages/", "/SQL/", "/executors/", "/StreamingQuery/", "/storage/")
REST = ("environment", "jobs", "stages?details=true", "sql?details=true&planDescription=true&length=1000", "executors")


def use(spark: SparkSession, folder: Path, queue: str) -> None:
    """Read, write and stream, in each way that takes a connection string. Some of these are refused."""
    text = os.environ[NAMED]
    options = {"connectionString": text, "entity": queue}
    rows = spark.range(20).selectExpr("CAST(id AS string) AS message_id", "'x' AS body")
    rows.write.format("servicebus").mode("append").options(**options).save()
    read = spark.read.format("servicebus").options(**options).load().where("sequence_number > 2")
    for mode in ("extended", "formatted"):
        read.explain(mode)
    print(read.collect()[0].message_id)
    spark.sql(f"CREATE TEMPORARY VIEW v USING servicebus OPTIONS (connectionString '{text}', entity '{queue}')")
    spark.sql("SELECT count(*) FROM v").show()
    spark.sql(f"CREATE TABLE t USING servicebus OPTIONS (connectionStringEnv '{NAMED}', entity '{queue}')")
    spark.sql("SELECT count(*) FROM t").show()
    spark.sql("DESCRIBE EXTENDED t").show(100, truncate=False)
    refused = [
        {**options, "nonsense": "1"},
        {**options, "entity": "missing"},
        {**options, "connectionString": text.replace("Endpoint=sb://", "Endpoint=")},
        {**options, "connectionString": os.environ[WRONG]},
    ]
    for wrong in refused:
        with suppress(Exception):
            spark.read.format("servicebus").options(**wrong).load().collect()
            raise SystemExit(f"{wrong} was accepted")
    with suppress(Exception):
        spark.sql(f"CREATE TABLE k USING servicebus OPTIONS (connectionString '{text}', entity '{queue}')")
        raise SystemExit("a table took a key")
    stream = spark.readStream.format("servicebus").options(**options).load()
    writer = stream.writeStream.format("servicebus").options(**options).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).queryName("streamed").start()
    query.awaitTermination()
    query.explain(extended=True)
    print(query.lastProgress)


def use_signed_in(spark: SparkSession, folder: Path, queue: str) -> None:
    """Read, write and stream with a credential. The workers are processes of their own, and make their own tokens."""
    host, authority = os.environ[HOST], os.environ[AUTHORITY]
    options = {"fullyQualifiedNamespace": host, "credential": SIGNED_IN, "caFile": authority, "entity": queue}
    before = spark.read.format("servicebus").options(**options).load().count()
    rows = spark.range(20).selectExpr("CAST(id AS string) AS message_id", "'signed' AS body")
    rows.write.format("servicebus").mode("append").options(**options).save()
    read = spark.read.format("servicebus").options(**options).load()
    read.explain("extended")
    assert read.count() == before + 20
    given = ", ".join(f"{name} '{value}'" for name, value in options.items())
    spark.sql(f"CREATE TABLE signed USING servicebus OPTIONS ({given})")
    assert spark.sql("SELECT count(*) FROM signed").collect()[0][0] == before + 20
    spark.sql("DESCRIBE EXTENDED signed").show(100, truncate=False)
    taken: list[int] = []
    writer = spark.readStream.format("servicebus").options(**options).load().writeStream.trigger(availableNow=True)
    writer = writer.option("checkpointLocation", str(folder / "checkpoint-signed"))
    writer.foreachBatch(lambda frame, _: taken.append(frame.count())).start().awaitTermination()
    assert sum(taken) == before + 20


async def syphon(spark: SparkSession, folder: Path, queue: str) -> None:
    text, host = os.environ[NAMED], os.environ[HOST]
    network = NetworkOptions(connection_verify=os.environ[AUTHORITY])
    by_key = SyphonJob(
        primary=text, secondary=text, primary_name="one", secondary_name="two", ledger=str(folder / "ledger")
    )
    signed_in = replace(
        by_key, primary=host, secondary=host, primary_network=network, secondary_network=network, credential=SIGNED_IN
    )
    (backlog,) = queues = ["one/x-servicebus-transfer/0"]
    for number, job in enumerate((by_key, signed_in)):
        options = SparkSyphonOptions(drain=True, checkpoint=str(folder / f"checkpoint-syphon-{number}"))
        message = build_message(
            data=b"x", properties=Properties(message_id="diverted"), application_properties={PATH_PROPERTY: queue}
        )
        async with connect(text) as bus:
            await (await bus.sender(backlog)).send([message])
        async with SparkSyphon(spark, FixedQueues(queues), job, options) as made:
            ended = await made.run()
        assert ended.total.returned == 1, ended


def save_pages(spark: SparkSession, folder: Path) -> None:
    address, application = spark.sparkContext.uiWebUrl, spark.sparkContext.applicationId

    def got(path: str) -> str:
        with urllib.request.urlopen(f"{address}{path}") as answer:  # noqa: S310 - our own Spark
            return str(answer.read().decode())

    rest = f"/api/v1/applications/{application}/"
    executions = [one["id"] for one in json.loads(got(f"{rest}sql?length=1000"))]
    jobs = [one["jobId"] for one in json.loads(got(f"{rest}jobs"))]
    paths = [*PAGES, *(rest + name for name in REST)]
    paths += [f"/SQL/execution/?id={number}" for number in executions] + [f"/jobs/job/?id={number}" for number in jobs]
    for number, path in enumerate(paths):
        (folder / f"page-{number}").write_text(f"{path}\n{got(path)}")


def save_commands(folder: Path) -> None:
    """Save the command lines of all processes of this user that Spark has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if (line := process.read_bytes()) and b"spark" in line:
                found.append(line)
    (folder / "commands").write_bytes(b"\n".join(found))


def main(folder: Path, queue: str) -> None:
    events = folder / "events"
    events.mkdir()
    settings = {
        "spark.driver.defaultJavaOptions": QUICK,
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": events.as_uri(),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    spark = session("shown", master="local[2]", settings=settings)
    spark.sparkContext.setLogLevel("INFO")
    spark.dataSource.register(ServiceBusDataSource)
    use(spark, folder, queue)
    use_signed_in(spark, folder, queue)
    asyncio.run(syphon(spark, folder, queue))
    save_pages(spark, folder)
    save_commands(folder)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
