"""Operations and movements become rows of the table `steps`: with Arrow, without Spark.

A row is what happened to one message. `prefix` is the first four hexadecimal digits of the MD5 of the message id.
"""

from __future__ import annotations

from collections import Counter
from hashlib import md5
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from twinbus.ledger import OK, Movement
from twinbus.pipeline.line_parsing import arrow_schema
from twinbus.pipeline.operation_rows import lower, one_array
from twinbus.pipeline.tables import STEPS

STEP_ROWS: Final = arrow_schema(STEPS)
_PREFIXES: Final = 16**4


def operation_steps(operations: pa.Table) -> pa.Table:
    """Returns a row for each message of each operation, with the message's own result."""
    parents, messages = _each_message(operations)
    return _steps(operations, parents, messages, {"result": _own_results(operations, parents)})


def movement_steps(entries: pa.Table) -> pa.Table:
    """Returns a row for each message of each movement. Other entries have none."""
    moves = entries.filter(pc.equal(entries["kind"], Movement.kind)).combine_chunks()
    parents, messages = _each_message(moves)
    return _steps(moves, parents, messages, {"destination": lower(one_array(moves["destination"])).take(parents)})


def places_of(steps: pa.Table, count: int) -> npt.NDArray[np.int64]:
    """Returns for each step the number of its file, of `count` files. The files have no prefix in common.

    The prefixes are even, so the files have about the same size.
    """
    numbers = [int(prefix, 16) * count // _PREFIXES for prefix in steps["prefix"].to_pylist()]
    return np.array(numbers, np.int64)


def _each_message(rows: pa.Table) -> tuple[pa.Array, pa.StringArray]:
    """Returns the message ids of all rows, and for each the number of its row."""
    ids = one_array(rows["ids"])
    return pc.list_parent_indices(ids), pc.list_flatten(ids)


def _steps(rows: pa.Table, parents: pa.Array, messages: pa.StringArray, made: dict[str, Any]) -> pa.Table:
    prefixes = [md5(message.encode(), usedforsecurity=False).hexdigest()[:4] for message in messages.to_pylist()]
    made = {"prefix": pa.array(prefixes, pa.string()), "id": messages, **made}
    given = {"entry": "id"}
    columns = []
    for field in STEP_ROWS:
        name = given.get(field.name, field.name)
        if field.name in made:
            columns.append(made[field.name])
        elif name in rows.schema.names:
            columns.append(one_array(rows[name]).take(parents))
        else:
            columns.append(pa.nulls(len(messages), field.type))
    return pa.Table.from_arrays(columns, schema=STEP_ROWS)


def _own_results(operations: pa.Table, parents: pa.Array) -> pa.StringArray:
    """Returns the result of each message.

    If `failed` is empty, the operation's result applies to all ids. Otherwise it applies only to the ids in `failed`.
    An id may be in `ids` several times: if it is n times in `failed`, the result applies to the first n of them.
    """
    results = one_array(operations["result"]).take(parents)
    failed, ids = one_array(operations["failed"]), one_array(operations["ids"])
    partly = np.flatnonzero(pc.fill_null(pc.greater(pc.list_value_length(failed), 0), False))
    if not len(partly):
        return results
    begins = np.concatenate(([0], np.cumsum(pc.list_value_length(ids).to_numpy())))
    is_ok = np.zeros(len(results), np.bool_)
    for number in partly.tolist():
        named = Counter(failed[number].as_py())
        for place, message in enumerate(ids[number].as_py(), begins[number]):
            is_ok[place] = named[message] <= 0
            named[message] -= 1
    return pc.if_else(pa.array(is_ok), OK, results)
