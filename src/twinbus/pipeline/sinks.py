"""Where the results of jobs go (D4): a folder of Parquet files per job, and a database table if the user names one."""

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
    """Writes the result to the job's folder in place of the old one, and yields the rows for use inside the block.

    The rows are computed once. Other processes may replace the folder at the same time, but the yielded rows are always
    those of `result`.
    """
    found = result.select(*columns(job.result)).persist()
    try:
        folder = tables.root / RESULTS_FOLDER
        new, old = folder / f".{uuid4().hex}", folder / f".{uuid4().hex}"
        found.write.parquet(str(new))
        target = folder / job.name
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.exists():
                target.rename(old)
            new.rename(target)
        shutil.rmtree(old, ignore_errors=True)
        yield found
    finally:
        found.unpersist()


def write_to_database(job: LedgerJob, result: DataFrame, url: str) -> str:
    """Writes the result to the table of the job, and returns the name of the table.

    Makes the table if it does not exist; otherwise removes its old rows. Raises OperatorError if the table cannot be
    written. The Spark session must have the JDBC driver.
    """
    table = f"twinbus_{job.name}"
    driver = next((name for prefix, name in _DRIVERS.items() if url.startswith(prefix)), None)
    # With `truncate` Spark removes the rows and does not drop the table, so that the grants on the table stay.
    writer = result.coalesce(1).write.format("jdbc").mode("overwrite").option("truncate", "true")
    writer = writer.option("url", url).option("dbtable", table)
    try:
        (writer.option("driver", driver) if driver else writer).save()
    except Exception as error:  # a driver may throw anything
        raise _not_written(table, url, error) from None  # the traceback might show the URL with its password
    return table


def _not_written(table: str, url: str, error: Exception) -> OperatorError:
    thrown = getattr(error, "java_exception", None)
    text = (str(error) if thrown is None else str(thrown.toString())).partition("\n")[0].replace(url, "the address")
    missing = "ClassNotFoundException" in text or "No suitable driver" in text
    hint = "Give Spark the driver of the database: --jars postgresql.jar." if missing else "Check the address."
    return OperatorError(f"the table {table} could not be written: {text}", hint)
