"""The rows that the data source `ledger` gives to Spark: lines of operations are packed, other lines are rows.

Nearly all lines of a ledger are operations, or parts of one. Spark never sees their columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from twinbus.pipeline.line_parsing import ARROW_SCHEMA, OPERATION_KINDS, OPERATION_LINE, PARSED_SCHEMA
from twinbus.pipeline.operation_rows import line_keys, lines_of
from twinbus.pipeline.packed_rows import Batches, pack

PACKED_LINES_SCHEMA: Final = (
    f"{PARSED_SCHEMA}, packed binary, packed_keys binary, "
    "packed_limits struct<rows: long, oldest: long, newest: long, least: string, greatest: string>"
)
"""The columns of the source, for Spark.

A row with `packed` has lines of operations, and no value in the columns of parsed lines. `packed_keys` has the hashes
of kind and id, 8 bytes each. `packed_limits` has the number of lines, and the limits of their times and ids.
"""
_LIMITS: Final = pa.struct(
    {
        "rows": pa.int64(),
        "oldest": pa.int64(),
        "newest": pa.int64(),
        "least": pa.string(),
        "greatest": pa.string(),
    }
)
_PACKED: Final = (
    pa.field("packed", pa.binary()),
    pa.field("packed_keys", pa.binary()),
    pa.field("packed_limits", _LIMITS),
)
_PACK_LINES: Final = 10_000
_SCHEMA: Final = pa.schema([*ARROW_SCHEMA, *_PACKED])


def packed_lines(parsed: Iterable[pa.RecordBatch]) -> Batches:
    """Yields parsed lines: one row for thousands of lines of operations, and a row for each other line."""
    operations: list[pa.RecordBatch] = []
    waiting = 0
    for batch in parsed:
        is_operation = pc.is_in(batch["kind"], pa.array(OPERATION_KINDS))
        count = is_operation.true_count
        if count:
            whole = batch.select(OPERATION_LINE.names)
            operations.append(whole if count == batch.num_rows else whole.filter(is_operation))
            waiting += count
        if count < batch.num_rows:
            others = batch.filter(pc.invert(is_operation)) if count else batch
            empty = [pa.nulls(others.num_rows, field.type) for field in _PACKED]
            yield pa.RecordBatch.from_arrays([*others.columns, *empty], schema=_SCHEMA)
        if waiting >= _PACK_LINES:
            yield _packed(pa.Table.from_batches(operations))
            operations, waiting = [], 0
    if operations:
        yield _packed(pa.Table.from_batches(operations))


def _packed(operations: pa.Table) -> pa.RecordBatch:
    lines = lines_of(operations)
    times, ids = (pc.min_max(lines[name]).as_py() for name in ("at", "id"))
    limits = {
        "rows": lines.num_rows,
        "oldest": times["min"],
        "newest": times["max"],
        "least": ids["min"],
        "greatest": ids["max"],
    }
    values: list[Any] = [pack(lines).to_pybytes(), line_keys(lines).tobytes(), limits]
    columns = [pa.nulls(1, field.type) for field in ARROW_SCHEMA]
    columns += [pa.array([value], field.type) for value, field in zip(values, _PACKED, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
