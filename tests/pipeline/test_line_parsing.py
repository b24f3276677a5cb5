"""Lines become rows as `twinbus.ledger` reads them, also odd lines (D3)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.pipeline.books import MIDNIGHT, history, operation, segment_name
from tests.tiers import budget
from twinbus.ledger import EntryError, Stage, decode_entry, encode_entry
from twinbus.pipeline.line_parsing import ENTRY_COLUMNS, REST, parse_lines
from twinbus.pipeline.packed_rows import unpack
from twinbus.pipeline.parsed_batch import ParsedBatch
from twinbus.pipeline.segment_source import SegmentPartition, SegmentRange, SegmentReader
from twinbus.pipeline.table_log import DataFile
from twinbus.storage_location import StorageLocation

PLAIN = [encode_entry(entry).encode().rstrip() for entry in history(1, steps=60)]
INSERTED = (
    b"null", b"{", b"}", b"[", b"]", b'"', b",", b":", b"1.5", b"-0", b"NaN", b"1e999", b"\\ud800", b"\xff", b"\x00",
    b"true", b"\t", b" ", b"{}", b'"v":2,', b'"kind":"gap",', b'"ids":[null],', b'"cause":null,', b"\r", b"\xc3\xa9",
    b"9223372036854775808", b'"seconds":NaN,', b'"failed":["a",null],', b'"count":"x",',
)  # fmt: skip
ODD = (
    b"", b"null", b"{}", b"[]", b"1", b'"x"', b"\xef\xbb\xbf" + PLAIN[0], b"  " + PLAIN[0], PLAIN[0] + b" ",
    PLAIN[0] + PLAIN[1], PLAIN[0] + b"null" + PLAIN[1], PLAIN[0] + b"\r", b'{"v":1,"kind":"gap"', b"{" * 3000 + b"}",
    b'{"a":' * 3000 + b"1" + b"}" * 3000,
)  # fmt: skip


def expected(line: bytes, number: int) -> dict[str, Any]:
    """Return the row of a line: its entry, or its problem."""
    try:
        entry = decode_entry(line)
        values = asdict(entry)
        if any(type(value) is int and abs(value) >= 2**63 for value in values.values()):
            raise EntryError("a number is beyond 64 bits")
    except EntryError as error:
        return {"number": number, "problem": text(str(error))}
    row: dict[str, Any] = {"kind": entry.kind}
    for name, value in values.items():
        if name == "facts":
            facts = {text(key): text(one if isinstance(one, str) else json.dumps(one)) for key, one in value.items()}
            row[name] = sorted(facts.items())
        elif isinstance(value, tuple):
            row[name] = [text(one) if isinstance(one, str) else one for one in value]
        elif value is not None:
            row[name] = text(value) if isinstance(value, str) else value
    return row


def text(value: str) -> str:
    """Return the text as a column has it."""
    return value.encode(errors="replace").decode()


def found(data: bytes) -> list[dict[str, Any]]:
    """Return the rows of lines, without nulls."""
    rows = []
    for batch in parse_lines("segment", data, lambda: 0):
        for row in batch.to_pylist():
            flat = {**row, **(row[REST] or {})}
            names = ["number", "problem", *(name.removeprefix(f"{REST}.") for name in ENTRY_COLUMNS)]
            one = {name: flat[name] for name in names if flat.get(name) is not None}
            if "facts" in one:
                one["facts"] = sorted(one["facts"])
            rows.append(one)
    return rows


def ordered(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return the rows in an order. A list that is missing in a line is empty in its entry."""
    return sorted(json.dumps({name: row[name] for name in sorted(row) if row[name] != []}) for row in rows)


def mutated(chance: Random) -> bytes:
    line = bytearray(chance.choice(PLAIN))
    for _ in range(chance.randrange(1, 3)):
        begin = chance.randrange(len(line) + 1)
        line[begin : begin + chance.choice([0, 0, 1, 3, 10])] = chance.choice(INSERTED)
    return bytes(line).replace(b"\n", b"")


def test_d3_every_line_is_judged_as_the_ledger_judges_it() -> None:
    for seed in range(budget(60, 1000, 20_000)):
        chance = Random(seed)
        kinds = [partial(chance.choice, PLAIN), partial(mutated, chance), partial(chance.choice, ODD)]
        lines = [chance.choices(kinds, [90, 8, 2])[0]() + b"\n" for _ in range(chance.randrange(1, 200))]
        rows = [expected(line, number) for number, line in enumerate(lines, 1)]
        assert ordered(found(b"".join(lines))) == ordered(rows), f"seed {seed}"


def test_d3_a_problem_in_any_part_of_a_segment_has_its_line_number(tmp_path: Path) -> None:
    lines = [encode_entry(operation(Stage.SEND_PRIMARY, "a", at=MIDNIGHT + number)) for number in range(50)]
    lines[7] = lines[30] = lines[49] = "no entry\n"
    segment, data = segment_name(0), "".join(lines)
    (tmp_path / segment).write_text(data + "torn")
    reader = SegmentReader(StorageLocation.parse(tmp_path), 1)
    rows = []
    for begin in range(0, len(data), 1000):
        part = SegmentRange(segment, begin, min(begin + 1000, len(data)))
        rows += [row for batch in reader.read(SegmentPartition((part,))) for row in batch.to_pylist()]
    assert [row["number"] for row in rows if row["problem"]] == [8, 31, 50]
    packed = [unpack(row["packed"]) for row in rows if not row["problem"]]
    assert [at for lines in packed for at in lines["at"].to_pylist()] == [
        MIDNIGHT + number for number in range(50) if number not in (7, 30, 49)
    ]


# --- lines that are in the tables already -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "may"),
    [
        ({}, True),
        ({"id": ("b", "c"), "at": (10, 20)}, True),
        ({"id": ("d", "e"), "at": (10, 20)}, False),
        ({"id": ("a", "a9"), "at": (10, 20)}, False),
        ({"id": ("a", "b"), "at": (10, 20)}, True),
        ({"id": ("b", "c"), "at": (1, 9)}, False),
        ({"id": ("b", "c"), "at": (21, 22)}, False),
        ({"id": ("b", "c"), "at": (1, 9), "ended": (5, 10)}, True),
        ({"id": ("b", "c"), "at": (21, 22), "ended": (20, 22)}, True),
        ({"at": (20, 30)}, True),
        ({"id": ("a", "a" * 32), "at": (10, 20)}, True),
    ],
)
def test_d3_files_that_cannot_have_a_line_of_a_batch_are_not_compared_with_it(
    limits: dict[str, tuple[Any, Any]], may: bool
) -> None:
    rows: Any = None  # it does not look at the rows
    batch = ParsedBatch(rows, lines=2, others=0, moved=0, rejected=0, oldest=10, newest=20, ids=("b", "c"))
    assert batch.may_be_in(DataFile("file", 1, 1, {}, limits=limits)) is may
