"""Turns lines of the ledger into rows.

Spark's JSON parser parses most lines. Lines that Spark rejects are read again by `twinbus.ledger`, which decides
whether such a line is an entry, and otherwise says what is wrong with the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, fields
from functools import reduce
from operator import and_
from typing import Any, Final

import pandas as pd  # type: ignore[import-untyped] # comes without
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from twinbus.ledger import ENTRY_KINDS, SCHEMA_VERSION, EntryError, Move, Role, Stage, decode_entry
from twinbus.pipeline.segment_source import open_segment
from twinbus.pipeline.tables import PENDING, SCHEMAS, struct
from twinbus.storage_location import StorageLocation

_LARGEST: Final = 2**63 - 1
_WORDS: Final = {"stage": Stage, "role": Role, "move": Move}


def parse_lines(lines: DataFrame) -> DataFrame:
    """Returns the columns of an entry, and `file`, `position` and `line`. `line` is null if Spark could parse it."""
    schema = struct(f"v int, {SCHEMAS[PENDING]}")
    entries = lines.select("file", "position", "line", F.from_json(F.col("line").cast("string"), schema).alias("entry"))
    rows = entries.select("file", "position", F.col("line").alias("raw"), "entry.*")
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


def reread_lines(rejected: DataFrame, directory: StorageLocation) -> DataFrame:
    """Reads rejected lines again with `twinbus.ledger`. Returns rows: entries, and lines that are not entries.

    A line that is not an entry has the reason in the column `problem`, and its line number in `number`.
    """
    columns = struct(f"file string, number long, problem string, {SCHEMAS[PENDING]}")
    return rejected.select("file", "position", "line").mapInPandas(_line_reader(directory, columns.names), columns)


def _line_reader(
    directory: StorageLocation, columns: list[str]
) -> Callable[[Iterator[pd.DataFrame]], Iterator[pd.DataFrame]]:
    def read(batches: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for batch in batches:
            rows = [
                _row(directory, file, position, bytes(line))
                for file, position, line in zip(batch["file"], batch["position"], batch["line"], strict=True)
            ]
            made = pd.DataFrame(rows, columns=columns).astype(object)
            yield made.where(made.notna(), None)

    return read


def _row(directory: StorageLocation, file: str, position: int, line: bytes) -> dict[str, Any]:
    try:
        entry = decode_entry(line)
        values = asdict(entry)
        if any(type(value) is int and abs(value) > _LARGEST for value in values.values()):
            raise EntryError("a number is beyond 64 bits")
    except EntryError as error:
        return {"file": file, "number": _line_number(directory, file, position), "problem": str(error)}
    if "facts" in values:
        values["facts"] = {name: str(value) for name, value in values["facts"].items()}
    return {"file": file, "kind": entry.kind, **values}


def _line_number(directory: StorageLocation, segment: str, position: int) -> int:
    """Returns the number of the line that begins at this position, counted from 1; 0 if the file does not exist."""
    file = open_segment(directory, segment)
    if file is None:
        return 0
    with file:
        return file.read(position).count(b"\n") + 1
