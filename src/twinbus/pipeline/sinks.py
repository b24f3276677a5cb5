"""Writes the result of a job to a table of a database (D4). `results` writes the result tables."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame

from twinbus.errors import OperatorError
from twinbus.pipeline.jobs import LedgerJob

_DRIVERS: Final = {"jdbc:postgresql:": "org.postgresql.Driver"}


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
