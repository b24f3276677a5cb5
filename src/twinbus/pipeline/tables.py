"""The tables of the pipeline on a disk that the driver and all executors share, and which of their parts are alive.

A part is a folder of Parquet files that never changes. One small file names the living parts and is replaced as one,
so that a batch counts entirely or not at all. What the rows mean is not decided here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
    since long, until long"""
# docs/tables.md says what each column is.
SCHEMAS: Final[Mapping[str, str]] = {
    OPERATIONS: """id string, whole boolean, at long, ended long, stage string, namespace string, entity string,
        destination string, ids array<string>, bytes long, units long, seconds double, result string, cause string,
        failed array<string>, day date""",
    PENDING: f"kind string, {_ENTRY}",
    ENTRIES: f"kind string, {_ENTRY}, day date",
    PROBLEMS: "file string, line long, cause string",
}
TALLIES: Final = "tallies-"
"""Before the name of a job: its tallies so far."""
BY_DAY: Final = frozenset({OPERATIONS, ENTRIES})
_CURRENT: Final = "current.json"
# So many parts of one size become one of the next: few files, and no row is written again more than a few times.
_TOGETHER: Final = 16
# Those who read a part while it is replaced have so many commits' time.
_KEPT_COMMITS: Final = 16
_PIECES: Final = "spark.sql.adaptive.coalescePartitions.initialPartitionNum"
# Of files, which hold several times as much in memory.
_PIECE_BYTES: Final = 4 * 1024 * 1024
_ROW_BYTES: Final = 40
_FEWEST_PIECES: Final = 2
_MOST_PIECES: Final = 200


@dataclass(frozen=True, slots=True)
class TablePart:
    """`level`: how often its rows were put together with those of others."""

    path: str
    level: int = 0


@dataclass(frozen=True, slots=True)
class TablesVersion:
    """What is alive after so many commits. `followed`: of each job, the commit up to which its tallies are there.

    `retired`: parts that others have taken the place of, each with the commit that did it. `newest`: the instant of the
    newest entry, in milliseconds.
    """

    number: int = 0
    parts: Mapping[str, tuple[TablePart, ...]] = field(default_factory=dict)
    followed: Mapping[str, int] = field(default_factory=dict)
    retired: Mapping[str, int] = field(default_factory=dict)
    newest: int = 0

    def of(self, table: str) -> tuple[TablePart, ...]:
        return self.parts.get(table, ())

    def having(self, table: str, parts: Sequence[TablePart]) -> TablesVersion:
        return replace(self, parts={**self.parts, table: tuple(parts)})


class Tables:
    """In the folder `root`, which one process at a time may change, and any may read."""

    def __init__(self, spark: SparkSession, root: str | os.PathLike[str]) -> None:
        self.spark = spark
        self.root = Path(root).absolute()
        self._settled = 0

    # --- reading -----------------------------------------------------------------------------------------------------

    def version(self) -> TablesVersion:
        try:
            said = json.loads((self.root / _CURRENT).read_text())
        except FileNotFoundError:
            return TablesVersion()
        parts = {table: tuple(TablePart(**part) for part in found) for table, found in said["parts"].items()}
        return TablesVersion(said["number"], parts, said["followed"], said["retired"], said["newest"])

    def read(self, table: str, schema: str | None = None, version: TablesVersion | None = None) -> DataFrame:
        """All rows of a table, empty where there are none yet."""
        version = version or self.version()
        return self.read_parts(version.of(table), schema or SCHEMAS[table])

    def read_parts(self, parts: Sequence[TablePart], schema: str) -> DataFrame:
        if not parts:
            return self.spark.createDataFrame([], schema)
        frames = [self.spark.read.schema(schema).parquet(str(self.root / part.path)) for part in parts]
        return _union(frames)

    def divide(self, version: TablesVersion, *tables: str, rows: int = 0) -> None:
        """Let what is computed from these be added in as many pieces as keep each in memory, few where there is little.

        Sixty-four for a few rows would take seconds; two for a hundred million would not fit. `rows`: that are not in
        the tables yet.
        """
        if self._settled:
            return
        parts = [self.root / part.path for table in tables for part in version.of(table)]
        size = sum(file.stat().st_size for part in parts for file in part.glob("**/*.parquet")) + rows * _ROW_BYTES
        # Spark's own setting, 200 where nobody has set it, is for who has more than these bytes would ask for.
        most = int(self.spark.conf.get("spark.sql.shuffle.partitions") or 1)
        self.spark.conf.set(_PIECES, str(max(_FEWEST_PIECES, min(max(_MOST_PIECES, most), size // _PIECE_BYTES))))

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Within, everything is added in as many pieces as all tables together ask for, whoever asks meanwhile."""
        version = self.version()
        self.divide(version, *version.parts)
        self._settled += 1
        try:
            yield
        finally:
            self._settled -= 1

    # --- writing -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Nobody else changes them meanwhile."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OperatorError(
                    f"another process is writing the tables in {self.root}", "Wait for it, or end it."
                ) from None
            self._sweep()
            yield

    def write(self, table: str, rows: DataFrame, level: int = 0) -> TablePart | None:
        """A new part, not alive before it is committed; None where there are no rows."""
        path = f"{table}/{uuid4().hex}"
        writer = rows.write.option("compression", "zstd")
        (writer.partitionBy("day") if table in BY_DAY else writer).parquet(str(self.root / path))
        if next((self.root / path).glob("**/*.parquet"), None) is None:
            shutil.rmtree(self.root / path)
            return None
        return TablePart(path, level)

    def commit(self, version: TablesVersion) -> TablesVersion:
        """From now on this is what is there."""
        recent = {path: number for path, number in version.retired.items() if number > version.number - _KEPT_COMMITS}
        made = replace(version, number=version.number + 1, retired=recent)
        said: dict[str, Any] = {
            "number": made.number,
            "parts": {
                table: [{"path": part.path, "level": part.level} for part in parts]
                for table, parts in made.parts.items()
            },
            "followed": dict(made.followed),
            "retired": dict(made.retired),
            "newest": made.newest,
        }
        path = self.root / f".{_CURRENT}"
        with path.open("w") as file:
            json.dump(said, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        path.replace(self.root / _CURRENT)
        return made

    def compacted(
        self, version: TablesVersion, table: str, schema: str, merge: Callable[[DataFrame], DataFrame]
    ) -> TablesVersion:
        """Many small parts as one, not committed yet. The old ones stay for those who read them now."""
        level = 0
        while len(small := [part for part in version.of(table) if part.level == level]) >= _TOGETHER:
            made = self.write(table, merge(self.read_parts(small, schema)), level + 1)
            kept = [part for part in version.of(table) if part.level != level]
            version = version.having(table, [*kept, made] if made else kept)
            version = replace(version, retired={**version.retired, **{part.path: version.number for part in small}})
            level += 1
        return version

    def _sweep(self) -> None:
        """Remove parts of batches that did not come to their end, and those that were retired long ago."""
        version = self.version()
        kept = {part.path for parts in version.parts.values() for part in parts} | set(version.retired)
        for folder in self.root.glob("*/*"):
            if folder.parent.name.startswith((*SCHEMAS, TALLIES)) and str(folder.relative_to(self.root)) not in kept:
                shutil.rmtree(folder)


def _union(frames: Sequence[DataFrame]) -> DataFrame:
    all_of_them = frames[0]
    for frame in frames[1:]:
        all_of_them = all_of_them.unionAll(frame)
    return all_of_them


def struct(schema: str) -> StructType:
    parsed = StructType.fromDDL(schema)
    assert isinstance(parsed, StructType)
    return parsed


def columns(schema: str) -> list[str]:
    return struct(schema).names


_AT_ONCE: Final = 4


@contextmanager
def parallel_queries(tables: Tables) -> Iterator[ThreadPoolExecutor]:
    """Submit the questions, and take the results within the block."""
    pool = ThreadPoolExecutor(_AT_ONCE)
    with tables.settled():
        try:
            yield pool
        except BaseException:
            # Those that run are ended by Spark, or come to their end unheard.
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
