"""Where results land (D4): a folder of Parquet files for each job, and a table of a database where one is asked for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final
from uuid import uuid4

from pyspark.sql import DataFrame

from twinbus.pipeline.jobs import Job
from twinbus.pipeline.tables import Tables, columns

RESULTS: Final = "results"
_DRIVERS: Final = {"jdbc:postgresql:": "org.postgresql.Driver"}


def land(tables: Tables, job: Job, result: DataFrame) -> DataFrame:
    """What the job found before gives way to this. They are worked out once, and read from there."""
    folder = tables.root / RESULTS
    new, old = folder / f".{uuid4().hex}", folder / f".{uuid4().hex}"
    result.select(*columns(job.result)).write.parquet(str(new))
    place = folder / job.name
    if place.exists():
        place.rename(old)
    new.rename(place)
    shutil.rmtree(old, ignore_errors=True)
    return landed(tables, job)


def landed(tables: Tables, job: Job) -> DataFrame:
    return tables.spark.read.schema(job.result).parquet(str(place_of(tables, job)))


def place_of(tables: Tables, job: Job) -> Path:
    return tables.root / RESULTS / job.name


def to_database(job: Job, result: DataFrame, url: str) -> str:
    """Its table, which is made where it is not there and emptied where it is. The session has its driver."""
    table = f"twinbus_{job.name}"
    driver = next((name for prefix, name in _DRIVERS.items() if url.startswith(prefix)), None)
    # With `truncate` the table stays, and with it what was granted on it.
    writer = result.coalesce(1).write.format("jdbc").mode("overwrite").option("truncate", "true")
    writer = writer.option("url", url).option("dbtable", table)
    (writer.option("driver", driver) if driver else writer).save()
    return table
