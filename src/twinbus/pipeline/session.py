"""The Spark session of the jobs: the cluster that the caller's surroundings name, or else a local one tuned for them.

No job depends on which it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Final

from twinbus.errors import OperatorError
from twinbus.pipeline.java import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A task that fails is tried again, up to four times in all: locally Spark would give up after the first.
_LOCAL: Final = "local[{cores},4]"
_LOGGING: Final = Path(__file__).with_name("log4j2.properties")
_PATIENCE: Final = "spark.python.authenticate.socketTimeout"
SETTINGS: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.speculation": "false",  # a second attempt beside a living one would move messages twice
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.pyspark.udf.faulthandler.enabled": "true",
    "spark.python.worker.faulthandler.enabled": "true",
    # Else every function on a column asks the JVM four times more, to tell in an error which line of ours it was.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    _PATIENCE: "120s",  # a Python starts slowly on a busy machine: 15 s end the query
}
LOCAL_SETTINGS: Final[Mapping[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    "spark.sql.adaptive.advisoryPartitionSizeInBytes": "16m",
    "spark.shuffle.sort.bypassMergeThreshold": "8",  # else every task would make a file for every piece
}


class SparkMissingError(OperatorError):
    """pyspark is not installed."""


def session(
    name: str = "twinbus", *, master: str | None = None, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """The session for the jobs.

    `master` is Spark's own word for where to run. Without it, what `spark-submit` or SPARK_REMOTE say holds, and else
    this machine with all its cores. `settings` go over the built-in ones.
    """
    if util.find_spec("pyspark") is None:
        raise SparkMissingError("pyspark is not installed", "Install it: pip install 'twinbus[spark]'.")
    from pyspark.sql import SparkSession  # noqa: PLC0415  # there only with the extra

    builder = SparkSession.builder.appName(name)
    remote = os.environ.get("SPARK_REMOTE")
    chosen: dict[str, str] = dict(SETTINGS)
    if master is None and remote:
        builder = builder.remote(remote)
    elif master is not None or not is_submitted():
        place = master or _LOCAL.format(cores=os.cpu_count() or 2)
        # The JVM is started from here, and its workers run this very Python.
        os.environ["JAVA_HOME"] = str(java_home())
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        # The Python beside a streaming source is not told of the setting.
        os.environ.setdefault("SPARK_AUTH_SOCKET_TIMEOUT", SETTINGS[_PATIENCE].removesuffix("s"))
        builder = builder.master(place)
        if place.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            chosen |= LOCAL_SETTINGS
            chosen["spark.driver.extraJavaOptions"] = f"-Dlog4j2.configurationFile={_LOGGING}"
            chosen["spark.sql.shuffle.partitions"] = str(os.cpu_count() or 2)
    for key, value in (chosen | dict(settings or {})).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def is_submitted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `spark-submit` has started this program, and with it the JVM."""
    return "PYSPARK_GATEWAY_PORT" in environment
