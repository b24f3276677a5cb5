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
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from twinbus.errors import OperatorError
from twinbus.object_store import ObjectFolder
from twinbus.storage_location import StorageLocation

CHECKPOINTS_FOLDER: Final = "checkpoints"
FOLDER_VARIABLE: Final = "TWINBUS_CHECKPOINTS"
"""The environment variable that names another folder or URL for checkpoints."""


def checkpoints_of(root: StorageLocation, environment: Mapping[str, str] = os.environ) -> StorageLocation:
    """Returns where the checkpoints for the tables at `root` are.

    For tables in a folder: in that folder. For tables at a URL: in `twinbus/checkpoints` in XDG_STATE_HOME
    (`~/.local/state`). TWINBUS_CHECKPOINTS names another place for both.
    """
    name = hashlib.sha256(str(root).encode()).hexdigest()[:16]
    if named := environment.get(FOLDER_VARIABLE):
        return StorageLocation.parse(named).absolute() / name
    if not root.is_url:
        return root / CHECKPOINTS_FOLDER
    state = environment.get("XDG_STATE_HOME")
    folder = Path(state) if state else Path.home() / ".local" / "state"
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
        raise OperatorError(
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
