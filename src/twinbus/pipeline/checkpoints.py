"""Where Spark keeps how far each ledger was read: its checkpoints (D6).

Spark itself writes them, so they need a file system of Spark. The package of Spark from PyPI has none for object
stores. The checkpoints of tables in an object store are therefore in a local folder, unless Spark has a file system
for the URL. A checkpoint that is lost costs time only: the whole ledger is read again, and entries that the tables
have already are left out.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final
from zipfile import ZipFile

from twinbus.errors import OperatorError
from twinbus.object_store import ObjectFolder
from twinbus.storage_location import AZURE_SCHEMES, S3_SCHEMES, LocationError, StorageLocation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CHECKPOINTS_FOLDER: Final = "checkpoints"
FOLDER_VARIABLE: Final = "TWINBUS_CHECKPOINTS"
"""The environment variable that names another folder or URL for checkpoints."""
_FILE_SYSTEMS: Final = {
    **dict.fromkeys(S3_SCHEMES, "org/apache/hadoop/fs/s3a/S3AFileSystem.class"),
    **dict.fromkeys(AZURE_SCHEMES, "org/apache/hadoop/fs/azurebfs/AzureBlobFileSystem.class"),
}
# If one of these is set, Spark may have further JARs, or runs already.
_SPARK_VARIABLES: Final = (
    "PYSPARK_GATEWAY_PORT", "PYSPARK_SUBMIT_ARGS",
    "SPARK_CONF_DIR", "SPARK_DIST_CLASSPATH", "SPARK_HOME", "SPARK_REMOTE",
)  # fmt: skip


def checkpoints_of(root: StorageLocation, environment: Mapping[str, str] = os.environ) -> StorageLocation:
    """Returns where the checkpoints for the tables at `root` are.

    For tables in a folder: in that folder. For tables at a URL: in `twinbus/checkpoints` in XDG_STATE_HOME
    (`~/.local/state`). TWINBUS_CHECKPOINTS names another place for both. Raises LocationError if that cannot be used.
    """
    name = hashlib.sha256(str(root).encode()).hexdigest()[:16]
    if named := environment.get(FOLDER_VARIABLE):
        try:
            return StorageLocation.parse(named).absolute() / name
        except LocationError as error:
            raise LocationError(f"{FOLDER_VARIABLE}: {error}") from None
    if not root.is_url:
        return root / CHECKPOINTS_FOLDER
    state = environment.get("XDG_STATE_HOME")
    try:
        folder = Path(state) if state else Path.home() / ".local" / "state"
    except RuntimeError:
        raise LocationError(
            f"this user has no home folder for the checkpoints: set {FOLDER_VARIABLE} or XDG_STATE_HOME"
        ) from None
    return StorageLocation(str((folder / "twinbus" / CHECKPOINTS_FOLDER / name).absolute()))


def remove_checkpoints(root: StorageLocation) -> None:
    """Removes the checkpoints for the tables at `root`, if there are any."""
    place = checkpoints_of(root)
    if not place.is_url:
        shutil.rmtree(place, ignore_errors=True)
        return
    folder = ObjectFolder(place)
    for one in folder.list():
        folder.remove(one.name)


def refuse_no_file_system(spark: SparkSession, checkpoints: StorageLocation) -> None:
    """Raises OperatorError if checkpoints are at a URL for which Spark has no file system."""
    if checkpoints.is_url and not has_file_system(spark, checkpoints.scheme):
        raise _no_file_system(checkpoints)


def refuse_unusable_checkpoints(root: StorageLocation, environment: Mapping[str, str] = os.environ) -> None:
    """Raises an error if the checkpoints for the tables at `root` cannot be stored. Does not start Spark.

    Checks only a Spark from PyPI without further JARs or settings. For any other, `refuse_no_file_system` decides when
    Spark runs.
    """
    place = checkpoints_of(root, environment)
    if not place.is_url or any(environment.get(name) for name in _SPARK_VARIABLES):
        return
    found = find_spec("pyspark")
    if found is None or found.origin is None:
        return  # the start of Spark names the extra to install
    home = Path(found.origin).parent
    if not (home / "conf").exists() and not any(_has_class(jar, place.scheme) for jar in (home / "jars").glob("*.jar")):
        raise _no_file_system(place)


def _has_class(jar: Path, scheme: str) -> bool:
    with ZipFile(jar) as file:
        return _FILE_SYSTEMS[scheme] in file.NameToInfo


def _no_file_system(checkpoints: StorageLocation) -> OperatorError:
    return OperatorError(
        f"Spark has no file system for {checkpoints.scheme}://, so the checkpoints cannot be at {checkpoints}",
        "Name a local folder, or start Spark with the JAR of the file system: docs/guides/storage.md.",
    )


def has_file_system(spark: SparkSession, scheme: str) -> bool:
    """Returns whether Spark has a file system for this scheme. Spark Connect cannot show it: then it returns False."""
    java = getattr(spark, "_jvm", None)
    if java is None:
        return False
    try:
        settings = spark._jsc.hadoopConfiguration()  # pyspark has no public name for it
        java.org.apache.hadoop.fs.FileSystem.getFileSystemClass(scheme, settings)
    except Exception:
        return False
    return True
