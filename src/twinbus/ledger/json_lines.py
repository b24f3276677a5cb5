"""Entries as lines of JSON, and back. The lines of operations are put together by hand: one is written for every send.

Nothing here knows files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Any, Final
from uuid import UUID

from twinbus.errors import CallerError
from twinbus.ledger.entries import ENTRY_KINDS, OK, SCHEMA_VERSION, Entry, Intent, Move, Operation, Outcome, Role, Stage


class EntryError(CallerError, ValueError):
    """A line that is no entry of this schema."""


quoted: Final[Callable[[str], str]] = encode_basestring_ascii

# --- ids -------------------------------------------------------------------------------------------------------------

_TYPED: Final = ("uuid:", "ulong:", "binary:", "string:")


def id_text(value: object) -> str:
    """A message id of any AMQP type, so that no two ids have one text."""
    if type(value) is str and (":" not in value or not value.startswith(_TYPED)):
        return value
    match value:
        case str():
            return f"string:{value}" if value.startswith(_TYPED) else str(value)
        case bytes() | bytearray() | memoryview():
            return f"binary:{bytes(value).hex()}"
        case UUID():
            return f"uuid:{value}"
        case int():
            return f"ulong:{value:d}"
        case _:
            return str(value)


# --- the lines of operations -----------------------------------------------------------------------------------------


@lru_cache(4096)
def operation_prefix(stage: Stage, namespace: str, entity: str, destination: str | None = None) -> str:
    """What the lines of one sender's operations have in common."""
    toward = "" if destination is None else f',"destination":{quoted(destination)}'
    return f'"stage":"{stage}","namespace":{quoted(namespace)},"entity":{quoted(entity)}{toward}'


def listed(ids: Iterable[str]) -> str:
    return ",".join(map(quoted, ids))


def ending(seconds: float, result: str, cause: str | None = None, failed: Iterable[str] = ()) -> str:
    if result == OK and cause is None and not failed:
        return f'"seconds":{seconds:.6f},"result":"ok"'
    behind = "" if cause is None else f',"cause":{quoted(cause)}'
    some = f',"failed":[{listed(failed)}]' if failed else ""
    return f'"seconds":{seconds:.6f},"result":{quoted(result)}{behind}{some}'


def intent_line(at: int, number: str, prefix: str, ids: str, size: int, units: int) -> str:
    return (
        f'{{"v":1,"kind":"intent","at":{at},"id":"{number}",{prefix},"ids":[{ids}],"bytes":{size},"units":{units}}}\n'
    )


def outcome_line(at: int, number: str, ending: str) -> str:
    return f'{{"v":1,"kind":"outcome","at":{at},"id":"{number}",{ending}}}\n'


def operation_line(at: int, number: str, prefix: str, ids: str, size: int, units: int, ending: str) -> str:
    return (
        f'{{"v":1,"kind":"operation","at":{at},"id":"{number}",{prefix},"ids":[{ids}],"bytes":{size},"units":{units},'
        f"{ending}}}\n"
    )


# --- any entry -------------------------------------------------------------------------------------------------------


def encode_entry(entry: Entry) -> str:
    """Its line, with the newline. Pure ASCII."""
    match entry:
        case Intent():
            there = operation_prefix(entry.stage, entry.namespace, entry.entity, entry.destination)
            return intent_line(entry.at, entry.id, there, listed(entry.ids), entry.bytes, entry.units)
        case Outcome():
            end = ending(entry.seconds, entry.result, entry.cause, entry.failed)
            return outcome_line(entry.at, entry.id, end)
        case Operation():
            there = operation_prefix(entry.stage, entry.namespace, entry.entity, entry.destination)
            end = ending(entry.seconds, entry.result, entry.cause, entry.failed)
            return operation_line(entry.at, entry.id, there, listed(entry.ids), entry.bytes, entry.units, end)
        case _:
            values = {name: getattr(entry, name) for name in _NAMES[entry.kind]}
            said = {name: value for name, value in values.items() if value is not None}
            return json.dumps({"v": SCHEMA_VERSION, "kind": entry.kind, **said}, separators=(",", ":")) + "\n"


def decode_entry(line: str | bytes) -> Entry:
    """EntryError for what is none. A field that this version does not know is passed over."""
    try:
        said = json.loads(line)
    except ValueError as error:
        raise EntryError(f"no JSON: {error}") from None
    if not isinstance(said, dict):
        raise EntryError("no JSON object")
    version, kind = said.get("v"), said.get("kind")
    if type(version) is not int or version > SCHEMA_VERSION:
        raise EntryError(f"its schema is version {version!r}; this Twinbus reads versions up to {SCHEMA_VERSION}")
    entry = ENTRY_KINDS.get(kind) if isinstance(kind, str) else None
    if entry is None:
        raise EntryError(f"there is no kind {kind!r}")
    try:
        return entry(**{name: _READERS[name](said[name]) for name in _NAMES[entry.kind] if name in said})
    except (TypeError, ValueError) as error:
        raise EntryError(f"no {kind} entry: {error}") from None


def _exactly(kind: type) -> Callable[[object], Any]:
    def read(value: object) -> object:
        if type(value) is not kind:
            raise TypeError(f"{value!r} is no {kind.__name__}")
        return value

    return read


def _number(value: object) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is no number")
    return float(value)  # type: ignore[arg-type] # one of the two


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or any(type(one) is not str for one in value):
        raise TypeError(f"{value!r} is no list of texts")
    return tuple(value)


def _facts(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or any(type(one) not in (str, int, float, bool) for one in value.values()):
        raise TypeError(f"{value!r} is no object of plain values")
    return value


_TEXT, _INTEGER = _exactly(str), _exactly(int)
_NAMES: Final = {kind: tuple(field.name for field in fields(entry)) for kind, entry in ENTRY_KINDS.items()}
_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(
        ("id", "writer", "host", "version", "namespace", "entity", "destination", "result", "cause"), _TEXT
    ),
    **dict.fromkeys(("event", "pair", "source", "reason", "op", "operation"), _TEXT),
    **dict.fromkeys(("at", "pid", "segment", "bytes", "units", "count", "since", "until"), _INTEGER),
    **dict.fromkeys(("ids", "failed"), _texts),
    "seconds": _number,
    "facts": _facts,
    "role": Role,
    "stage": Stage,
    "move": Move,
}
