"""Lines of operations become rows of the table `operations`: with Arrow, without Spark.

An operation is one line, or two: an intent and an outcome with the same id.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from twinbus.pipeline.line_parsing import OPERATION_KINDS, OPERATION_LINE, arrow_schema
from twinbus.pipeline.packed_rows import Hashes, text_hashes
from twinbus.pipeline.tables import OPERATIONS, PENDING

LAST_DAY: Final = 2_932_896
"""Days since 1970. An entry may have any number as its time, but Spark's dates have a limit."""
DAY_MILLISECONDS: Final = 86_400_000
HASH: Final = "hash"
LINES: Final = OPERATION_LINE.append(pa.field(HASH, pa.int64()))
"""The columns of lines of operations. HASH is the hash of the id."""
OPERATION_ROWS: Final = arrow_schema(OPERATIONS)
_PENDING_ROWS: Final = arrow_schema(PENDING)
_KIND_MARKS: Final = {
    kind: np.int64(0x5851F42D4C957F2D * number % 2**63) for number, kind in enumerate(OPERATION_KINDS)
}
_LEAST, _MOST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_BEYOND: Final = 2.0**63
_HALF: Final = 0.5
_OF_OUTCOME: Final = ("seconds", "result", "cause", "failed")

_Flags = npt.NDArray[np.bool_]


# --- lines -----------------------------------------------------------------------------------------------------------


def lines_of(rows: pa.Table) -> pa.Table:
    """Returns rows with the columns of LINES. A column that `rows` does not have is null; the hash is computed."""
    rows = rows.combine_chunks()
    columns = [
        one_array(rows[field.name]).cast(field.type)
        if field.name in rows.schema.names
        else pa.nulls(len(rows), field.type)
        for field in OPERATION_LINE
    ]
    return pa.Table.from_arrays([*columns, pa.array(text_hashes(one_array(rows["id"])))], schema=LINES)


def line_keys(lines: pa.Table) -> Hashes:
    """Returns a hash of kind and id of each line. Lines with the same kind and id are the same entry."""
    marks = np.zeros(lines.num_rows, np.int64)
    for kind, mark in _KIND_MARKS.items():
        marks[_flags(pc.equal(lines["kind"], kind))] = mark
    found: Hashes = lines[HASH].to_numpy() ^ marks
    return found


def without_repeated(lines: pa.Table, known: pa.Table) -> pa.Table:
    """Returns each line once, without the lines that are in `known`. Compares kinds and ids."""
    kept = []
    for kind in OPERATION_KINDS:
        of_kind = lines.filter(pc.equal(lines["kind"], kind))
        before = known.filter(pc.equal(known["kind"], kind))
        fresh = of_kind.filter(pc.invert(pc.is_in(of_kind["id"], value_set=one_array(before["id"]))))
        codes = one_array(fresh["id"]).dictionary_encode().indices.to_numpy()
        kept.append(fresh.take(np.sort(np.unique(codes, return_index=True)[1])))
    return pa.concat_tables(kept).combine_chunks()


def pending_rows(lines: pa.Table) -> pa.Table:
    """Returns lines as rows of the table `pending`."""
    columns = [
        lines[field.name] if field.name in lines.schema.names else pa.nulls(lines.num_rows, field.type)
        for field in _PENDING_ROWS
    ]
    return pa.Table.from_arrays(columns, schema=_PENDING_ROWS)


# --- operations ------------------------------------------------------------------------------------------------------


def completed(lines: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Returns the operations that have ended, as OPERATION_ROWS, and the lines that are left.

    Those are intents without an outcome and outcomes without an intent. No two lines have the same kind and id.
    """
    whole, intents, outcomes = (
        lines.filter(pc.equal(lines["kind"], kind)).combine_chunks() for kind in OPERATION_KINDS
    )
    places = pc.index_in(one_array(intents["id"]), value_set=one_array(outcomes["id"]))
    begun = intents.filter(pc.is_valid(places))
    used = pc.drop_null(places)
    ends = outcomes.take(used)
    ended_with = {name: ends[name] for name in _OF_OUTCOME}
    unused = np.ones(outcomes.num_rows, np.bool_)
    unused[used.to_numpy()] = False
    ended = pa.array(_ended(_numbers(whole["at"]), whole["seconds"].to_numpy()))
    rows = [_rows(whole, {}, ended, is_whole=True), _rows(begun, ended_with, ends["at"], is_whole=False)]
    left = [intents.filter(pc.is_null(places)), outcomes.filter(pa.array(unused))]
    return pa.concat_tables(rows).combine_chunks(), pa.concat_tables(left).combine_chunks()


def _rows(lines: pa.Table, replaced: dict[str, Any], ended: Any, *, is_whole: bool) -> pa.Table:
    made = {
        **replaced,
        "whole": pa.repeat(pa.scalar(is_whole), lines.num_rows),
        "ended": ended,
        "destination": _destinations(lines),
        "day": _days(_numbers(lines["at"])),
    }
    columns = [made.get(name, lines[name] if name in lines.schema.names else None) for name in OPERATION_ROWS.names]
    return pa.Table.from_arrays(columns, schema=OPERATION_ROWS)


def _ended(began: Hashes, seconds: npt.NDArray[np.float64]) -> Hashes:
    """Returns the end of each operation in milliseconds; the nearest number of 64 bits if it has none."""
    with np.errstate(over="ignore"):
        exact = seconds * 1000
        whole = np.trunc(np.clip(exact, -_BEYOND, np.nextafter(_BEYOND, 0)))
        took = (whole + np.sign(exact) * (np.abs(exact - whole) >= _HALF)).astype(np.int64)
        took[exact >= _BEYOND] = _MOST
        ends = began + took
    is_beyond = ((began ^ ends) & (took ^ ends)) < 0
    found: Hashes = np.where(is_beyond, np.where(took < 0, _LEAST, _MOST), ends)
    return found


def _days(at: Hashes) -> pa.Array:
    return pa.array(np.clip(at // DAY_MILLISECONDS, 0, LAST_DAY).astype(np.int32)).cast(pa.date32())


def _destinations(lines: pa.Table) -> pa.Array:
    """Returns `namespace/entity` of the entity that the messages are meant for, in lower case as in the balance."""
    own = pc.binary_join_element_wise(lines["namespace"], lines["entity"], "/", null_handling="skip")
    given = pc.fill_null(pc.not_equal(lines["destination"], ""), False)
    return lower(one_array(pc.if_else(given, lines["destination"], own)))


def lower(texts: pa.StringArray) -> pa.StringArray:
    """Returns the texts in lower case, as Python makes it. Meant for texts of which many are equal."""
    encoded = texts.dictionary_encode()
    words = pa.array([word.lower() for word in encoded.dictionary.to_pylist()], pa.string())
    return words.take(encoded.indices)


# --- arrays ----------------------------------------------------------------------------------------------------------


def one_array(values: Any) -> Any:
    """Returns a column as one array."""
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _numbers(values: Any) -> Hashes:
    found: Hashes = one_array(values).to_numpy(zero_copy_only=False)
    return found


def _flags(values: Any) -> _Flags:
    found: _Flags = pc.fill_null(one_array(values), False).to_numpy(zero_copy_only=False)
    return found
