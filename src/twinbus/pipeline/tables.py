"""The tables of the pipeline, on a disk that the driver and all executors share.

A table is a set of parts. A part is a folder of Parquet files that never changes. One small file, `current.json`, names
the live parts of all tables. A commit replaces this file, so that either all rows of a batch become visible or none.
Parts that no commit names remain after a crash; the next process that locks the tables removes them.

docs/tables.md describes the columns.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from twinbus.errors import OperatorError

OPERATIONS, PENDING, ENTRIES, PROBLEMS = "operations", "pending", "entries", "problems"
_ENTRY: Final = """at long, id string, writer string, role string, host string, pid long, version string, segment long,
    stage string, namespace string, entity string, ids array<string>, bytes long, units long, destination string,
    seconds double, result string, cause string, failed array<string>, event string, pair string,
    facts map<string,string>, move string, source string, reason string, op string, operation string, count long,
    since long, until long, durability string, by string, broker_at long, waited array<long>"""
SCHEMAS: Final[Mapping[str, str]] = {
    OPERATIONS: """id string, whole boolean, at long, ended long, stage string, namespace string, entity string,
        destination string, ids array<string>, bytes long, units long, seconds double, result string, cause string,
        failed array<string>, day date, count long, broker_at long, waited array<long>""",
    PENDING: f"kind string, {_ENTRY}",
    ENTRIES: f"kind string, {_ENTRY}, day date",
    PROBLEMS: "file string, line long, cause string",
}
TALLIES: Final = "tallies-"
"""Prefix of the tables that hold the tallies of a job; the job's name follows."""
BY_DAY: Final = frozenset({OPERATIONS, ENTRIES})
_CURRENT: Final = "current.json"
# This number of parts of one level are merged into one part of the next level. So the number of files stays low, and a
# row is rewritten only once per level.
_MERGED_PARTS: Final = 16
# A replaced part is removed only after this number of commits, because readers may still use it.
_KEPT_COMMITS: Final = 16
_PARTITIONS: Final = "spark.sql.adaptive.coalescePartitions.initialPartitionNum"
# The size of a shuffle partition, as bytes of Parquet files. The rows need several times as much memory.
_PARTITION_BYTES: Final = 4 * 1024 * 1024
_ROW_BYTES: Final = 40
_FEWEST_PARTITIONS: Final = 2
_MOST_PARTITIONS: Final = 200
_PARALLEL_QUERIES: Final = 4


@dataclass(frozen=True, slots=True)
class TablePart:
    """A folder of Parquet files."""

    path: str
    level: int = 0
    """How often the rows of this part were merged with rows of other parts."""


@dataclass(frozen=True, slots=True)
class TablesVersion:
    """The state of all tables after a commit."""

    number: int = 0
    """How many commits there were."""
    parts: Mapping[str, tuple[TablePart, ...]] = field(default_factory=dict)
    """The live parts of each table."""
    followed: Mapping[str, int] = field(default_factory=dict)
    """For each followed job, the commit up to which its tallies are complete."""
    retired: Mapping[str, int] = field(default_factory=dict)
    """Parts that were replaced by others, with the number of the commit that replaced them."""
    newest: int = 0
    """Time of the newest entry, in milliseconds since the epoch."""

    def of(self, table: str) -> tuple[TablePart, ...]:
        return self.parts.get(table, ())

    def having(self, table: str, parts: Sequence[TablePart]) -> TablesVersion:
        return replace(self, parts={**self.parts, table: tuple(parts)})


class Tables:
    """The tables in the folder `root`. One process at a time may change them; any process may read them."""

    def __init__(self, spark: SparkSession, root: str | os.PathLike[str]) -> None:
        self.spark = spark
        self.root = Path(root).absolute()
        self._parallel = 0
        """How many `parallel_queries` blocks are open."""

    # --- reading -----------------------------------------------------------------------------------------------------

    def version(self) -> TablesVersion:
        """Returns the version of the last commit."""
        try:
            values = json.loads((self.root / _CURRENT).read_text())
        except FileNotFoundError:
            return TablesVersion()
        parts = {table: tuple(TablePart(**part) for part in found) for table, found in values["parts"].items()}
        return TablesVersion(values["number"], parts, values["followed"], values["retired"], values["newest"])

    def read(self, table: str, schema: str | None = None, version: TablesVersion | None = None) -> DataFrame:
        """Returns all rows of a table. `schema` is needed for tables of tallies only."""
        version = version or self.version()
        return self.read_parts(version.of(table), schema or SCHEMAS[table])

    def read_parts(self, parts: Sequence[TablePart], schema: str) -> DataFrame:
        if not parts:
            return self.spark.createDataFrame([], schema)
        frames = [self.spark.read.schema(schema).parquet(str(self.root / part.path)) for part in parts]
        return _union(frames)

    def set_partitions(self, version: TablesVersion, *tables: str, rows: int = 0) -> None:
        """Sets the number of shuffle partitions for queries on these tables and on `rows` rows that are not stored yet.

        64 partitions for ten rows would take seconds; 2 partitions for 100 million rows would need too much memory.
        Does nothing inside a `parallel_queries` block, which has set the number for all tables.
        """
        if self._parallel:
            return
        parts = [self.root / part.path for table in tables for part in version.of(table)]
        size = sum(file.stat().st_size for part in parts for file in part.glob("**/*.parquet")) + rows * _ROW_BYTES
        # A user may allow more partitions than we do, with Spark's own setting.
        allowed = int(self.spark.conf.get("spark.sql.shuffle.partitions") or 1)
        most = max(_MOST_PARTITIONS, allowed)
        self.spark.conf.set(_PARTITIONS, str(max(_FEWEST_PARTITIONS, min(most, size // _PARTITION_BYTES))))

    @contextlib.contextmanager
    def parallel_queries(self) -> Iterator[ThreadPoolExecutor]:
        """Yields a thread pool for concurrent queries: while Spark plans one query, it computes another.

        Get the results of the queries inside the block. The number of shuffle partitions is set for the size of all
        tables together. If the block raises an exception (also at Ctrl-C), queries that have not started are cancelled,
        and the end of running queries is not awaited.
        """
        version = self.version()
        self.set_partitions(version, *version.parts)
        pool = ThreadPoolExecutor(_PARALLEL_QUERIES)
        self._parallel += 1
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        else:
            pool.shutdown()
        finally:
            self._parallel -= 1

    # --- writing -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the tables for changes by this process. Raises OperatorError if another process has the lock."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OperatorError(
                    f"another process is writing the tables in {self.root}", "Wait for it, or end it."
                ) from None
            self._remove_unused()
            yield

    def write(self, table: str, rows: DataFrame, level: int = 0) -> TablePart | None:
        """Writes rows as a new part.

        Returns the part; None if there are no rows. A commit has to make the part live.
        """
        path = f"{table}/{uuid4().hex}"
        writer = rows.write.option("compression", "zstd")
        (writer.partitionBy("day") if table in BY_DAY else writer).parquet(str(self.root / path))
        if next((self.root / path).glob("**/*.parquet"), None) is None:
            shutil.rmtree(self.root / path)
            return None
        return TablePart(path, level)

    def commit(self, version: TablesVersion) -> TablesVersion:
        """Makes this version the current version. Returns the version with its new number."""
        recent = {path: number for path, number in version.retired.items() if number > version.number - _KEPT_COMMITS}
        committed = replace(version, number=version.number + 1, retired=recent)
        values: dict[str, Any] = {
            "number": committed.number,
            "parts": {
                table: [{"path": part.path, "level": part.level} for part in parts]
                for table, parts in committed.parts.items()
            },
            "followed": dict(committed.followed),
            "retired": dict(committed.retired),
            "newest": committed.newest,
        }
        path = self.root / f".{_CURRENT}"
        with path.open("w") as file:
            json.dump(values, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        path.replace(self.root / _CURRENT)
        return committed

    def compacted(
        self, version: TablesVersion, table: str, schema: str, merge: Callable[[DataFrame], DataFrame]
    ) -> TablesVersion:
        """Merges small parts of a table with `merge`. Returns the new version, which the caller has to commit.

        The old parts are not removed yet, because other processes may be reading them.
        """
        level = 0
        while len(small := [part for part in version.of(table) if part.level == level]) >= _MERGED_PARTS:
            merged = self.write(table, merge(self.read_parts(small, schema)), level + 1)
            kept = [part for part in version.of(table) if part.level != level]
            version = version.having(table, [*kept, merged] if merged else kept)
            version = replace(version, retired={**version.retired, **{part.path: version.number for part in small}})
            level += 1
        return version

    def _remove_unused(self) -> None:
        """Removes parts that were never committed, and parts that were replaced over `_KEPT_COMMITS` commits ago."""
        version = self.version()
        kept = {part.path for parts in version.parts.values() for part in parts} | set(version.retired)
        for folder in self.root.glob("*/*"):
            if folder.parent.name.startswith((*SCHEMAS, TALLIES)) and str(folder.relative_to(self.root)) not in kept:
                shutil.rmtree(folder)


def _union(frames: Sequence[DataFrame]) -> DataFrame:
    union = frames[0]
    for frame in frames[1:]:
        union = union.unionAll(frame)
    return union


def struct(schema: str) -> StructType:
    """Returns the type of a schema that is given as text."""
    parsed = StructType.fromDDL(schema)
    assert isinstance(parsed, StructType)
    return parsed


def columns(schema: str) -> list[str]:
    """Returns the column names of a schema that is given as text."""
    return struct(schema).names
