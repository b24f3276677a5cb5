"""Lines of the ledger as rows: Spark's own JSON parser for nearly all, and the ledger's reader for those it rejects.

So what is an entry, and how a line that is none is told, is decided in `twinbus.ledger.json_lines` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, fields
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any, Final

import pandas as pd  # type: ignore[import-untyped] # comes without
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import ENTRY_KINDS, SCHEMA_VERSION, EntryError, Move, Role, Stage, decode_entry
from twinbus.pipeline.segment_source import opened
from twinbus.pipeline.tables import PENDING, SCHEMAS, struct

_LARGEST: Final = 2**63 - 1
_WORDS: Final = {"stage": Stage, "role": Role, "move": Move}


def parsed(lines: DataFrame) -> DataFrame:
    """The columns of an entry, and `file`, `position` and `line`, the last only where it is to be looked at closely."""
    schema = struct(f"v int, {SCHEMAS[PENDING]}")
    said = lines.select("file", "position", "line", F.from_json(F.col("line").cast("string"), schema).alias("said"))
    rows = said.select("file", "position", F.col("line").alias("raw"), "said.*")
    return rows.withColumn("line", F.when(_is_entry(), None).otherwise(F.col("raw"))).drop("raw", "v")


def _is_entry() -> Column:
    by_kind = F.lit(False)
    for name, entry in ENTRY_KINDS.items():
        needed = [field.name for field in fields(entry) if field.default is field.default_factory is MISSING]
        checks = [F.col(column).isNotNull() for column in needed]
        checks += [F.col(column).isin([str(word) for word in _WORDS[column]]) for column in needed if column in _WORDS]
        checks += [~F.exists(column, lambda one: one.isNull()) for column in needed if column == "ids"]
        by_kind = F.when(F.col("kind") == name, reduce(and_, checks)).otherwise(by_kind)
    return F.coalesce((F.col("v") <= SCHEMA_VERSION) & by_kind, F.lit(False))


def looked_at(rejected: DataFrame, directory: Path) -> DataFrame:
    """The lines that Spark rejected, as the ledger's reader sees them: entries, or a `problem` on line `number`."""
    columns = struct(f"file string, number long, problem string, {SCHEMAS[PENDING]}")
    return rejected.select("file", "position", "line").mapInPandas(_looker(directory, columns.names), columns)


def _looker(directory: Path, columns: list[str]) -> Callable[[Iterator[pd.DataFrame]], Iterator[pd.DataFrame]]:
    def look(batches: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for batch in batches:
            rows = [
                _row(directory, file, position, bytes(line))
                for file, position, line in zip(batch["file"], batch["position"], batch["line"], strict=True)
            ]
            made = pd.DataFrame(rows, columns=columns).astype(object)
            yield made.where(made.notna(), None)

    return look


def _row(directory: Path, file: str, position: int, line: bytes) -> dict[str, Any]:
    try:
        entry = decode_entry(line)
        said = asdict(entry)
        if any(type(value) is int and abs(value) > _LARGEST for value in said.values()):
            raise EntryError("a number is beyond 64 bits")
    except EntryError as error:
        return {"file": file, "number": _number(directory, file, position), "problem": str(error)}
    if "facts" in said:
        said["facts"] = {name: str(value) for name, value in said["facts"].items()}
    return {"file": file, "kind": entry.kind, **said}


def _number(directory: Path, segment: str, position: int) -> int:
    """Of the line that begins there, from 1; 0 where the file is gone."""
    file = opened(directory, segment)
    if file is None:
        return 0
    with file:
        return file.read(position).count(b"\n") + 1
