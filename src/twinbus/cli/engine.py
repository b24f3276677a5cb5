"""Where a verb does its work: in this process, or on Spark. Its options, and the start of Spark."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinbus.cli.errors import WrongUsageError
from twinbus.cli.ledger import refuse_no_ledger
from twinbus.cli.spinner import spinner
from twinbus.errors import OperatorError
from twinbus.pipeline import TableStorage, refuse_unusable_checkpoints
from twinbus.storage_location import StorageLocation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Engine(StrEnum):
    """Values of the option --engine."""

    NATIVE = "native"
    SPARK = "spark"


Master = Annotated[str | None, typer.Option(help="Spark master URL.", show_default="as submitted, or this machine")]


def spark_session(name: str, master: str | None, settings: Mapping[str, str] | None = None) -> SparkSession:
    """Start Spark. Check all paths and options before: the start takes seconds."""
    from twinbus.pipeline.session import session  # noqa: PLC0415 - slow; its error names the extra to install

    before = signal.getsignal(signal.SIGINT)
    with spinner("starting Spark"):
        spark = session(name, master=master, settings=settings)
    if threading.current_thread() is threading.main_thread():
        # pyspark's own handler calls the JVM, on a connection that is in use, and prints what the JVM answers.
        signal.signal(signal.SIGINT, before)
    return spark


def refuse_no_folder(what: str, location: StorageLocation) -> None:
    """Raise OperatorError if this is not a folder that can be read, or a URL with segments of a ledger.

    `what` names the folder: `the ledger`.
    """
    if location.is_url:
        refuse_no_ledger(location)
        return
    folder = Path(location)
    if not folder.is_dir():
        kind = "is not a folder" if folder.exists() else "does not exist"
        raise OperatorError(f"{what} {folder} {kind}", "Give the directory that the option `ledger` names.")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise OperatorError(f"{what} {folder} cannot be read by this user", "Check its permissions.")


def refuse_unusable_tables(location: StorageLocation, jars: str | None = None) -> None:
    """Raise an error if tables cannot be written to this folder or URL, which need not exist yet.

    Also if Spark has no file system for their checkpoints; `jars` may bring one.
    """
    if not jars:
        refuse_unusable_checkpoints(location.absolute())
    if location.is_url:
        TableStorage(location).has_tables()  # raises an error if the object store cannot be used
        return
    folder = Path(location)
    existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not existing.is_dir():
        raise OperatorError(f"the tables cannot be in {folder}: {existing} is a file", "Name another directory.")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise OperatorError(
            f"the tables cannot be in {folder}: {existing} cannot be written ({error.strerror})",
            "Name another directory.",
        ) from error


def holds_tables(location: StorageLocation) -> bool:
    """Return whether a ledger was ingested into this folder or URL."""
    return TableStorage(location).has_tables()


def refuse_missing_jars(jars: str | None) -> None:
    """Raise WrongUsageError if a JAR file of the option --jars does not exist. Spark only warns of it."""
    for jar in (jars or "").split(","):
        if jar and "://" not in jar and not Path(jar).is_file():
            raise WrongUsageError(f"--jars: {jar} is not a file", "Name JAR files, separated by commas.")
