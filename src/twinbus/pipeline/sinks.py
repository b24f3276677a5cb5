"""Where the results of jobs go (D4): a Delta Lake table per job, and a database table if the user names one."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pyspark.sql import DataFrame

from twinbus.errors import OperatorError
from twinbus.pipeline.jobs import LedgerJob
from twinbus.pipeline.tables import RESULTS_FOLDER, VACUUM_COMMITS, Tables, columns, struct
from twinbus.pipeline.time_window import TimeWindow

_DRIVERS: Final = {"jdbc:postgresql:": "org.postgresql.Driver"}


@contextmanager
def saved_result(
    tables: Tables, job: LedgerJob, result: DataFrame, window: TimeWindow | None = None
) -> Iterator[DataFrame]:
    """Writes the result to the job's table in place of the old one, and yields the rows for use inside the block.

    The rows are computed once. Other processes may replace the table at the same time, but the yielded rows are always
    those of `result`. The tables of results are about all time: if `window` is limited, nothing is written.
    """
    found = result.select(*columns(job.result)).persist()
    try:
        if window is None or window.is_unlimited:
            _replace(tables, job, found)
        yield found
    finally:
        found.unpersist()


def _replace(tables: Tables, job: LedgerJob, rows: DataFrame) -> None:
    table = f"{RESULTS_FOLDER}/{job.name}"
    log, files = tables.log(table), tables.write(table, rows)
    with (tables.root / RESULTS_FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        log.create(struct(job.result).json())
        version = log.commit(files, log.files())
        if version % VACUUM_COMMITS == 0:
            log.vacuum()


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
