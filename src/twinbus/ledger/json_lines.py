"""Entries as lines of JSON, and back. This module does no I/O.

Every send writes the line of an operation, so these lines are formatted by fast code of this module. The longest part
of such a line (`operation_prefix`) is the same for all operations of a sender. Its seconds are a whole number of
microseconds with an exponent (`1234e-6`), because to format a float takes more than 1 % of a send. All other entries
are encoded by the module `json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Any, Final
from uuid import UUID

from twinbus.errors import CallerError
from twinbus.ledger.entries import ENTRY_KINDS, OK, SCHEMA_VERSION, Entry, Intent, Move, Operation, Outcome, Role, Stage


class EntryError(CallerError, ValueError):
    """A line is not an entry of this schema."""


quoted: Final[Callable[[str], str]] = encode_basestring_ascii
"""Returns a text as a JSON string, in ASCII."""

# --- message ids -----------------------------------------------------------------------------------------------------

_TYPE_MARKS: Final = ("uuid:", "ulong:", "binary:", "string:")


def id_text(value: object) -> str:
    """Returns a message id of any AMQP type as text. Two different ids never have the same text."""
    if type(value) is str and (":" not in value or not value.startswith(_TYPE_MARKS)):
        return value
    match value:
        case str():
            return f"string:{value}" if value.startswith(_TYPE_MARKS) else str(value)
        case bytes() | bytearray() | memoryview():
            return f"binary:{bytes(value).hex()}"
        case UUID():
            return f"uuid:{value}"
        case int():
            return f"ulong:{value:d}"
        case _:
            return str(value)


def id_value(text: str) -> str | bytes | UUID | int:
    """Returns the message id of a text that `id_text` returned. `id_text` of the result is the same text again."""
    mark, _, rest = text.partition(":")
    try:
        match mark:
            case "string":
                return rest
            case "binary":
                return bytes.fromhex(rest)
            case "uuid":
                return UUID(rest)
            case "ulong":
                return int(rest)
            case _:
                return text
    except ValueError:
        return text


# --- lines of operations ---------------------------------------------------------------------------------------------


@lru_cache(4096)
def operation_prefix(stage: Stage, namespace: str, entity: str, destination: str | None = None) -> str:
    """Returns the part of a line that is the same for all operations of one sender."""
    toward = "" if destination is None else f',"destination":{quoted(destination)}'
    return f'"stage":"{stage}","namespace":{quoted(namespace)},"entity":{quoted(entity)}{toward}'


def broker_times(broker_at: int | None, waited: Iterable[int] = ()) -> str:
    """Returns the part of a line with the times of the broker's clock (L5). It follows an `operation_prefix`."""
    at = "" if broker_at is None else f',"broker_at":{broker_at}'
    times = ",".join(map(str, waited))
    return f'{at},"waited":[{times}]' if times else at


def quoted_ids(ids: Iterable[str]) -> str:
    """Returns the ids as elements of a JSON array, without the brackets of the array."""
    return ",".join(map(quoted, ids))


def result_fields(result: str, cause: str | None = None, failed: Iterable[str] = ()) -> str:
    """Returns the fields of a line that say how an operation ended."""
    because = "" if cause is None else f',"cause":{quoted(cause)}'
    of_these = f',"failed":[{quoted_ids(failed)}]' if failed else ""
    return f'"result":{quoted(result)}{because}{of_these}'


OK_FIELDS: Final = result_fields(OK)
"""The `result_fields` of an operation that succeeded."""


def intent_line(at: int, id_: str, prefix: str, ids: str, size: int, units: int) -> str:
    """Returns the line of an intent. `prefix` and `ids` are results of `operation_prefix` and `quoted_ids`."""
    return f'{{"v":1,"kind":"intent","at":{at},"id":"{id_}",{prefix},"ids":[{ids}],"bytes":{size},"units":{units}}}\n'


def outcome_line(at: int, id_: str, seconds: float, ending: str) -> str:
    """Returns the line of an outcome. `ending` is a result of `result_fields`."""
    return f'{{"v":1,"kind":"outcome","at":{at},"id":"{id_}","seconds":{round(seconds * 1e6)}e-6,{ending}}}\n'


def operation_line(at: int, id_: str, prefix: str, ids: str, size: int, units: int, seconds: float, ending: str) -> str:
    """Returns the line of an operation that has ended. The arguments are those of `intent_line` and `outcome_line`."""
    return (
        f'{{"v":1,"kind":"operation","at":{at},"id":"{id_}",{prefix},"ids":[{ids}],"bytes":{size},"units":{units},'
        f'"seconds":{round(seconds * 1e6)}e-6,{ending}}}\n'
    )


# --- any entry -------------------------------------------------------------------------------------------------------


def encode_entry(entry: Entry) -> str:
    """Returns the line of an entry, in ASCII, with the newline."""
    match entry:
        case Intent():
            prefix = operation_prefix(entry.stage, entry.namespace, entry.entity, entry.destination)
            prefix += broker_times(entry.broker_at, entry.waited)
            return intent_line(entry.at, entry.id, prefix, quoted_ids(entry.ids), entry.bytes, entry.units)
        case Outcome():
            ending = result_fields(entry.result, entry.cause, entry.failed)
            return outcome_line(entry.at, entry.id, entry.seconds, ending)
        case Operation():
            prefix = operation_prefix(entry.stage, entry.namespace, entry.entity, entry.destination)
            prefix += broker_times(entry.broker_at, entry.waited)
            ending = result_fields(entry.result, entry.cause, entry.failed)
            if entry.count is not None:
                ending += f',"count":{entry.count}'
            ids = quoted_ids(entry.ids)
            return operation_line(entry.at, entry.id, prefix, ids, entry.bytes, entry.units, entry.seconds, ending)
        case _:
            values = {name: getattr(entry, name) for name in _FIELDS[entry.kind]}
            given = {name: value for name, value in values.items() if value is not None}
            return json.dumps({"v": SCHEMA_VERSION, "kind": entry.kind, **given}, separators=(",", ":")) + "\n"


def decode_entry(line: str | bytes) -> Entry:
    """Returns the entry of a line. Raises EntryError if the line is not an entry. Ignores unknown fields."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise EntryError(f"not JSON: {error}") from None
    except RecursionError:
        raise EntryError("nested too deep") from None
    if not isinstance(values, dict):
        raise EntryError("not a JSON object")
    version, kind = values.get("v"), values.get("kind")
    if type(version) is not int or version > SCHEMA_VERSION:
        raise EntryError(f"its schema is version {version!r}; this Twinbus reads versions up to {SCHEMA_VERSION}")
    entry = ENTRY_KINDS.get(kind) if isinstance(kind, str) else None
    if entry is None:
        raise EntryError(f"there is no kind {kind!r}")
    try:
        return entry(**{name: _READERS[name](values[name]) for name in _FIELDS[entry.kind] if name in values})
    except (TypeError, ValueError) as error:
        raise EntryError(f"not a valid {kind} entry: {error}") from None


def _exactly(kind: type) -> Callable[[object], Any]:
    def read(value: object) -> object:
        if type(value) is not kind:
            raise TypeError(f"{value!r} is not of type {kind.__name__}")
        return value

    return read


def _read_number(value: object) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is not a number")
    try:
        number = float(value)  # type: ignore[arg-type] # an int or a float
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):  # JSON has no such numbers, but Python reads NaN, Infinity and 1e999
        raise ValueError("a number is not finite")
    return number


def _read_texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or any(type(one) is not str for one in value):
        raise TypeError(f"{value!r} is not a list of strings")
    return tuple(value)


def _read_integers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(one) is not int for one in value):
        raise TypeError(f"{value!r} is not a list of integers")
    return tuple(value)


def _read_facts(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or any(type(one) not in (str, int, float, bool) for one in value.values()):
        raise TypeError(f"{value!r} is not an object of plain values")
    return value


_TEXT, _INTEGER = _exactly(str), _exactly(int)
_FIELDS: Final = {kind: tuple(field.name for field in fields(entry)) for kind, entry in ENTRY_KINDS.items()}
# One reader per field name: a field has the same type in all kinds.
_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(
        ("id", "writer", "host", "version", "namespace", "entity", "destination", "result", "cause"), _TEXT
    ),
    **dict.fromkeys(("event", "pair", "source", "reason", "op", "operation", "by", "durability"), _TEXT),
    **dict.fromkeys(("at", "pid", "segment", "bytes", "units", "count", "since", "until", "broker_at"), _INTEGER),
    **dict.fromkeys(("ids", "failed"), _read_texts),
    "waited": _read_integers,
    "seconds": _read_number,
    "facts": _read_facts,
    "role": Role,
    "stage": Stage,
    "move": Move,
}
