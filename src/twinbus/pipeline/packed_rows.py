"""Many rows as one value: a batch of Arrow, compressed. Spark keeps and shuffles such values at almost no cost (D3).

Theory of operation. Spark copies each column of each row when it keeps, shuffles or writes rows. So the ingest gives
Spark few rows, and each has thousands of lines of operations in its column `packed`. Functions in the Python workers
unpack them and compute with Arrow. Spark plans the work, repeats what failed, keeps what is needed again, and moves
packed rows to the task that needs them: `place` is the number of that task.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

PACKED_ROWS: Final = "place int, packed binary, messages long, keys binary"
"""The columns of packed rows, for Spark.

`messages` is the number of message ids that lines or operations name; null for other rows. `keys` has hashes of the
rows, or is null.
"""
_SCHEMA: Final = pa.schema(
    [("place", pa.int32()), ("packed", pa.binary()), ("messages", pa.int64()), ("keys", pa.binary())]
)
_OPTIONS: Final = pa.ipc.IpcWriteOptions(compression="lz4")
# Rows are unpacked and worked on together up to this size.
_GROUP_ROWS: Final = 250_000
_GROUP_BYTES: Final = 256 * 1024 * 1024

Hashes = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int64]
Batches = Iterator[pa.RecordBatch]


def pack(rows: pa.Table) -> pa.Buffer:
    """Returns the rows as one value."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=_OPTIONS) as writer:
        writer.write_table(rows)
    return sink.getvalue()


def unpack(value: pa.BinaryScalar | bytes) -> pa.Table:
    """Returns the rows of a value that `pack` has made."""
    return pa.ipc.open_stream(value if isinstance(value, bytes) else value.as_buffer()).read_all()


def packed_row(rows: pa.Table, place: int | None = None, keys: Hashes | None = None) -> pa.RecordBatch:
    """Returns one row with the columns of PACKED_ROWS."""
    messages = pc.sum(pc.list_value_length(rows["ids"])).as_py() or 0 if "ids" in rows.schema.names else None
    values: list[Any] = [place, pack(rows).to_pybytes(), messages, None if keys is None else keys.tobytes()]
    columns = [pa.array([value], field.type) for value, field in zip(values, _SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def packed_by_place(rows: pa.Table, places: Numbers, keys: Hashes | None = None) -> Batches:
    """Yields a packed row for each place that rows have. `places` has the place of each row, and `keys` its hash."""
    if not rows.num_rows:
        return
    order = np.argsort(places, kind="stable")
    found, begins = np.unique(places[order], return_index=True)
    ordered = rows if len(found) == 1 else rows.take(order)
    for place, begin, end in zip(found.tolist(), begins, [*begins[1:], len(order)], strict=True):
        yield packed_row(ordered.slice(begin, end - begin), place, None if keys is None else keys[order[begin:end]])


def unpacked(batches: Batches) -> Iterator[pa.Table]:
    """Yields the rows of packed rows, in tables of about 250,000 rows."""
    waiting: list[pa.Table] = []
    count = size = 0
    for batch in batches:
        for value in batch.column("packed"):
            rows = unpack(value)
            waiting.append(rows)
            count, size = count + rows.num_rows, size + rows.nbytes
            if count >= _GROUP_ROWS or size >= _GROUP_BYTES:
                yield _joined(waiting)
                waiting, count, size = [], 0, 0
    if waiting:
        yield _joined(waiting)


def _joined(tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables).combine_chunks()


# --- hashes ----------------------------------------------------------------------------------------------------------

_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns numbers in which every bit depends on every bit of a value. Different values have different numbers."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST_MULTIPLIER
    values = (values ^ (values >> np.uint64(27))) * _SECOND_MULTIPLIER
    return values ^ (values >> np.uint64(31))


# One weight for each place of a byte. Longer texts use the weights again.
_WEIGHTS: Final = _mixed(np.arange(1, 257, dtype=np.uint64) * _STEP)


def text_hashes(texts: pa.StringArray) -> Hashes:
    """Returns a hash of each text. Equal texts have equal hashes; different texts almost always have different ones."""
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    data = texts.buffers()[2]
    if data is None or not len(texts):
        return np.zeros(len(texts), np.int64)
    values = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]
    lengths = np.diff(offsets)
    begins = offsets[:-1] - offsets[0]
    places = np.arange(len(values)) - np.repeat(begins, lengths)
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values * _WEIGHTS[places % len(_WEIGHTS)], out=sums[1:])
    found = sums[begins + lengths] - sums[begins] + lengths.astype(np.uint64) * _STEP
    return _mixed(found).view(np.int64)


def is_among(hashes: Hashes, wanted: Hashes) -> npt.NDArray[np.bool_]:
    """Returns which of the hashes are in `wanted`, which is sorted."""
    if not len(wanted):
        return np.zeros(len(hashes), np.bool_)
    found: npt.NDArray[np.bool_] = wanted[np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)] == hashes
    return found
