"""Where results land (D4): a folder of Parquet files for each job, and a table of a database where one is asked for."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from uuid import uuid4

from pyspark.sql import DataFrame

from twinbus.errors import OperatorError
from twinbus.pipeline.jobs import LedgerJob
from twinbus.pipeline.tables import Tables, columns

RESULTS_FOLDER: Final = "results"
_DRIVERS: Final = {"jdbc:postgresql:": "org.postgresql.Driver"}


@contextmanager
def saved_result(tables: Tables, job: LedgerJob, result: DataFrame) -> Iterator[DataFrame]:
    """The rows, worked out once; in the folder they have taken the place of those before.

    Others may land theirs meanwhile: whoever asks is told what it found itself.
    """
    found = result.select(*columns(job.result)).persist()
    try:
        folder = tables.root / RESULTS_FOLDER
        new, old = folder / f".{uuid4().hex}", folder / f".{uuid4().hex}"
        found.write.parquet(str(new))
        place = folder / job.name
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if place.exists():
                place.rename(old)
            new.rename(place)
        shutil.rmtree(old, ignore_errors=True)
        yield found
    finally:
        found.unpersist()


def write_to_database(job: LedgerJob, result: DataFrame, url: str) -> str:
    """Its table, which is made where it is not there and emptied where it is. The session has its driver."""
    table = f"twinbus_{job.name}"
    driver = next((name for prefix, name in _DRIVERS.items() if url.startswith(prefix)), None)
    # With `truncate` the table stays, and with it what was granted on it.
    writer = result.coalesce(1).write.format("jdbc").mode("overwrite").option("truncate", "true")
    writer = writer.option("url", url).option("dbtable", table)
    try:
        (writer.option("driver", driver) if driver else writer).save()
    except Exception as error:  # what a driver throws is nothing that Python knows
        raise _not_written(table, url, error) from None  # a trace might hold the address, and in it the password
    return table


def _not_written(table: str, url: str, error: Exception) -> OperatorError:
    thrown = getattr(error, "java_exception", None)
    text = (str(error) if thrown is None else str(thrown.toString())).partition("\n")[0].replace(url, "the address")
    missing = "ClassNotFoundException" in text or "No suitable driver" in text
    hint = "Give Spark the driver of the database: --jars postgresql.jar." if missing else "Look at the address."
    return OperatorError(f"the table {table} could not be written: {text}", hint)
