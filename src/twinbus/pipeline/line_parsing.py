"""Turns lines of the ledger into columns of Arrow, in the Python processes that read the segments.

Theory of operation. Arrow's JSON parser parses thousands of lines at once, first with the columns that operations have.
Lines of other kinds are parsed again with all columns. The parser is strict: it fails if one of the lines is odd. Then
the lines are parsed again in two halves, until few lines are left. `twinbus.ledger` reads these one by one. It also
reads lines that Arrow parses but that are no complete entries, and entries with facts, for which Arrow's parser has no
type. It decides whether such a line is an entry, and otherwise says what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

from twinbus.ledger import (
    ENTRY_KINDS,
    SCHEMA_VERSION,
    EntryError,
    Intent,
    Move,
    Operation,
    Outcome,
    Role,
    Stage,
    State,
    decode_entry,
)
from twinbus.pipeline.tables import OPERATIONS, PENDING, column_types

_TYPES: Final = {
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "string": pa.string(),
    "long": pa.int64(),
    "double": pa.float64(),
    "array<string>": pa.list_(pa.string()),
    "array<long>": pa.list_(pa.int64()),
    "map<string,string>": pa.map_(pa.string(), pa.string()),
}


def arrow_schema(table: str) -> pa.Schema:
    """Returns the schema of a table, for Arrow."""
    return pa.schema([(name, _TYPES[kind]) for name, kind in column_types(table).items()])


_ENTRY: Final = column_types(PENDING)
_OF_OPERATIONS: Final = {"kind", *column_types(OPERATIONS)}
_FIRST: Final = {name: kind for name, kind in _ENTRY.items() if name in _OF_OPERATIONS}
_REST: Final = {name: kind for name, kind in _ENTRY.items() if name not in _OF_OPERATIONS}
REST: Final = "rest"
"""The column for what operations do not have: for most lines, Spark then keeps one null instead of twenty."""
PARSED_SCHEMA: Final = ", ".join(
    [
        *(f"{name} {kind}" for name, kind in _FIRST.items()),
        f"{REST} struct<{', '.join(f'{name}: {kind}' for name, kind in _REST.items())}>",
        "file string, number long, problem string",
    ]
)
"""The columns of parsed lines, for Spark. A line that is no entry has only the last three: the name of the segment, the
number of the line, and what is wrong."""
ENTRY_COLUMNS: Final = tuple(name if name in _FIRST else f"{REST}.{name}" for name in _ENTRY)
"""The columns of an entry in parsed lines, in the order of the table `pending`."""
OPERATION_LINE: Final = pa.schema([(name, _TYPES[kind]) for name, kind in _FIRST.items()])
"""The columns that lines of operations have, for Arrow."""
_REST_TYPE: Final = pa.struct([(name, _TYPES[kind]) for name, kind in _REST.items()])
ARROW_SCHEMA: Final = pa.schema(
    [
        *OPERATION_LINE,
        (REST, _REST_TYPE),
        ("file", pa.string()),
        ("number", pa.int64()),
        ("problem", pa.string()),
    ]
)
_FACTS: Final = "facts"


def _options(columns: Mapping[str, str]) -> arrow_json.ParseOptions:
    named = [(name, _TYPES[kind]) for name, kind in columns.items() if name != _FACTS]
    schema = pa.schema([("v", pa.int64()), *named])
    return arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")


# With the columns of operations alone, Arrow takes 1.5 µs for a line; with all columns, 2.5 µs.
_OF_OPERATION, _OF_ENTRY = _options(_FIRST), _options(_ENTRY)
_LISTS: Final = ("ids", "failed", "waited")
_WORDS: Final = {
    "stage": pa.array([str(word) for word in Stage]),
    "role": pa.array([str(word) for word in Role]),
    "move": pa.array([str(word) for word in Move]),
}
# What a line of each kind must have. Entries with facts are not here.
_NEEDED: Final = {
    kind: [field.name for field in fields(entry) if field.default is field.default_factory is MISSING]
    for kind, entry in ENTRY_KINDS.items()
    if kind != State.kind
}
OPERATION_KINDS: Final = (Operation.kind, Intent.kind, Outcome.kind)
"""The kinds of the lines that are operations, or parts of one."""
_FEW: Final = 16
_LARGEST: Final = 2**63 - 1
_NEWLINE, _OPENING, _CLOSING = ord("\n"), ord("{"), ord("}")
_NULL: Final = b"null"

_Numbers = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]


def parse_lines(segment: str, data: bytes, lines_before: Callable[[], int]) -> Iterator[pa.RecordBatch]:
    """Yields the rows of whole lines, which are in `data`. The columns are those of PARSED_SCHEMA.

    `lines_before` returns the number of the lines that come before in the segment.
    """
    lines = _Lines(data)
    odd: list[int] = np.flatnonzero(~lines.look_plain).tolist()
    others: list[int] = []
    for batch, numbers in _parsed(lines, np.flatnonzero(lines.look_plain), _OF_OPERATION):
        if batch is None:
            odd += numbers.tolist()
            continue
        is_operation = _flags(pc.is_in(batch["kind"], pa.array(OPERATION_KINDS)))
        is_entry = is_operation & _are_entries(batch, OPERATION_KINDS)
        odd += numbers[is_operation & ~is_entry].tolist()
        others += numbers[~is_operation].tolist()
        if is_entry.any():
            yield _row_batch(batch if is_entry.all() else batch.filter(pa.array(is_entry)), has_rest=False)
    for batch, numbers in _parsed(lines, np.array(others, np.int64), _OF_ENTRY):
        is_entry = _are_entries(batch, _NEEDED) if batch is not None else np.zeros(len(numbers), np.bool_)
        odd += numbers[~is_entry].tolist()
        if batch is not None and is_entry.any():
            yield _row_batch(batch.filter(pa.array(is_entry)), has_rest=True)
    if odd:
        before = lines_before()
        rows = [_row(segment, before + number + 1, lines.line(number)) for number in sorted(odd)]
        yield pa.RecordBatch.from_pylist(rows, ARROW_SCHEMA)


class _Lines:
    """Lines of a segment, by their number from 0."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        values = np.frombuffer(data, np.uint8)
        self._ends: _Numbers = np.flatnonzero(values == _NEWLINE)
        self._starts: _Numbers = np.concatenate(([0], self._ends[:-1] + 1))
        # Arrow would take two objects in a line for two lines, and an object over two lines for one. If every line has
        # such a beginning and such an end, an object cannot go on in the next line.
        self.look_plain: _Flags = (values[self._starts] == _OPENING) & (values[self._ends - 1] == _CLOSING)
        if not data.isascii() or _NULL in data:
            self.look_plain &= np.array(
                [_looks_plain(self.line(number)) for number in range(len(self._ends))], np.bool_
            )

    def line(self, number: int) -> bytes:
        return self._data[self._starts[number] : self._ends[number] + 1]

    def text(self, numbers: _Numbers) -> bytes:
        first, last = numbers[0], numbers[-1]
        if last - first + 1 == len(numbers):
            return self._data[self._starts[first] : self._ends[last] + 1]
        return b"".join(map(self.line, numbers))


def _looks_plain(line: bytes) -> bool:
    """Returns whether the line is UTF-8, which Arrow does not check, and has no null, which Arrow takes for nothing."""
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return _NULL not in line


def _parsed(
    lines: _Lines, numbers: _Numbers, options: arrow_json.ParseOptions
) -> Iterator[tuple[pa.RecordBatch | None, _Numbers]]:
    """Yields parsed lines with their numbers. None: Arrow cannot parse these few lines."""
    if not len(numbers):
        return
    batch = _parse(lines.text(numbers), options)
    if batch is not None and batch.num_rows == len(numbers):
        yield batch, numbers
    elif len(numbers) <= _FEW:
        yield None, numbers
    else:
        for half in np.array_split(numbers, 2):
            yield from _parsed(lines, half, options)


def _parse(text: bytes, options: arrow_json.ParseOptions) -> pa.RecordBatch | None:
    whole = arrow_json.ReadOptions(use_threads=False, block_size=len(text))
    try:
        table = arrow_json.read_json(pa.BufferReader(text), whole, options)
    except pa.ArrowInvalid:
        return None
    return table.combine_chunks().to_batches()[0] if table.num_rows else None


def _are_entries(batch: pa.RecordBatch, wanted: Collection[str]) -> _Flags:
    """Returns which of the lines are entries of the wanted kinds for sure."""
    kinds = batch["kind"]
    found: _Flags = np.zeros(batch.num_rows, np.bool_)
    for kind in pc.unique(kinds).to_pylist():
        if kind in wanted:
            checks = [pc.equal(kinds, kind), *(pc.is_valid(batch[name]) for name in _NEEDED[kind])]
            checks += [pc.is_in(batch[name], words) for name, words in _WORDS.items() if name in _NEEDED[kind]]
            found |= np.logical_and.reduce([_flags(check) for check in checks])
    found &= _flags(pc.less_equal(batch["v"], SCHEMA_VERSION))
    found &= _flags(pc.fill_null(pc.is_finite(batch["seconds"]), True))
    for name in _LISTS:
        values = batch[name].flatten()
        if values.null_count:
            found[pc.list_parent_indices(batch[name]).filter(pc.is_null(values)).to_numpy()] = False
    return found


def _flags(values: pa.BooleanArray) -> _Flags:
    found: _Flags = pc.fill_null(values, False).to_numpy(zero_copy_only=False)
    return found


def _row_batch(batch: pa.RecordBatch, *, has_rest: bool) -> pa.RecordBatch:
    count = batch.num_rows
    rest = pa.nulls(count, _REST_TYPE)
    if has_rest:
        values = [pa.nulls(count, _TYPES[kind]) if name == _FACTS else batch[name] for name, kind in _REST.items()]
        rest = pa.StructArray.from_arrays(values, fields=list(_REST_TYPE))
    ends = [pa.nulls(count, ARROW_SCHEMA.field(name).type) for name in ("file", "number", "problem")]
    return pa.RecordBatch.from_arrays([*(batch[name] for name in _FIRST), rest, *ends], schema=ARROW_SCHEMA)


# --- one line --------------------------------------------------------------------------------------------------------


def _row(segment: str, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry = decode_entry(line)
        values = {name: _column_value(value) for name, value in asdict(entry).items()}
    except EntryError as error:
        return {"file": segment, "number": number, "problem": _encodable(str(error))}
    rest = {name: value for name, value in values.items() if name in _REST}
    first = {name: value for name, value in values.items() if name in _FIRST}
    return {"kind": entry.kind, **first, REST: rest or None}


def _column_value(value: object) -> object:
    """Returns a value of an entry for a column. Raises EntryError if no column can have it."""
    match value:
        case int() if abs(value) > _LARGEST:
            raise EntryError("a number is beyond 64 bits")
        case str():
            return _encodable(value)
        case tuple():
            return [_column_value(one) for one in value]
        case dict():
            return [(_encodable(name), _fact_text(one)) for name, one in value.items()]
    return value


def _fact_text(value: object) -> str:
    return _encodable(value if isinstance(value, str) else json.dumps(value))


def _encodable(text: str) -> str:
    """Returns the text with a question mark for each half of a surrogate pair, which no column can have."""
    return text.encode(errors="replace").decode()
