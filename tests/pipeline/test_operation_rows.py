"""Lines of operations become rows of the tables, in the Python workers (D3, D5)."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.books import MIDNIGHT, halves, history, operation
from twinbus.ledger import Entry, Intent, Operation, Outcome, Stage, encode_entry
from twinbus.pipeline.line_parsing import parse_lines
from twinbus.pipeline.operation_rows import LINES, completed, line_keys, lines_of, without_repeated
from twinbus.pipeline.packed_lines import packed_lines
from twinbus.pipeline.packed_rows import is_among, packed_by_place, text_hashes, unpack, unpacked
from twinbus.pipeline.step_rows import operation_steps, places_of

Kinds = Operation | Intent | Outcome
ENTRIES: list[Entry] = [entry for entry in history(3, steps=60) if isinstance(entry, Kinds)]
EMPTY = LINES.empty_table()


def lines(entries: Sequence[Entry]) -> pa.Table:
    """Return the lines of entries, as the source packs them."""
    data = "".join(map(encode_entry, entries)).encode()
    batches = packed_lines(parse_lines("segment", data, lambda: 0)) if data else iter(())
    return pa.concat_tables([EMPTY, *(unpack(value) for batch in batches for value in batch["packed"])])


def key(entry: Entry) -> tuple[str, str]:
    return entry.kind, entry.id


def keys(table: pa.Table) -> list[tuple[str, str]]:
    return list(zip(table["kind"].to_pylist(), table["id"].to_pylist(), strict=True))


# --- hashes and packs -------------------------------------------------------------------------------------------------


@given(st.lists(st.text(max_size=300)), st.data())
def test_d3_equal_texts_have_equal_hashes_and_different_texts_different_ones(
    texts: list[str], data: st.DataObject
) -> None:
    found = text_hashes(pa.array(texts, pa.string())).tolist()
    assert [len(set(hashes)) for hashes in (found, zip(texts, found, strict=True))] == [len(set(texts))] * 2
    begin = data.draw(st.integers(0, len(texts)))
    assert text_hashes(pa.array(texts, pa.string()).slice(begin)).tolist() == found[begin:]


@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9)))
def test_d3_hashes_are_found_among_sorted_ones(hashes: list[int], wanted: list[int]) -> None:
    found = is_among(np.array(hashes, np.int64), np.sort(np.array(wanted, np.int64)))
    assert found.tolist() == [one in wanted for one in hashes]


@given(st.lists(st.integers(0, 4)))
def test_d3_packed_rows_are_all_there_in_their_places(places: list[int]) -> None:
    rows, hashes = pa.table({"number": range(len(places))}), np.arange(len(places))
    packed = list(packed_by_place(rows, np.array(places, np.int64), hashes))
    found = {batch["place"][0].as_py(): unpack(batch["packed"][0])["number"].to_pylist() for batch in packed}
    assert found == {place: [n for n, one in enumerate(places) if one == place] for place in set(places)}
    assert [np.frombuffer(batch["keys"][0].as_py(), np.int64).tolist() for batch in packed] == list(found.values())
    assert sum(len(table) for table in unpacked(iter(packed))) == len(places)


# --- operations -------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(ENTRIES), max_size=60), st.sets(st.sampled_from(ENTRIES).map(key), max_size=10))
def test_d3_each_line_is_taken_once_and_none_that_the_tables_have(
    entries: list[Entry], known: set[tuple[str, str]]
) -> None:
    stored = lines_of(pa.Table.from_pylist([{"kind": kind, "id": id_} for kind, id_ in known], LINES))
    found = keys(without_repeated(lines(entries), stored))
    assert Counter(found) == Counter({key(entry) for entry in entries} - known)


@given(st.lists(st.sampled_from(ENTRIES), max_size=60, unique_by=key))
def test_d3_intents_meet_their_outcomes_and_the_rest_is_left(entries: list[Entry]) -> None:
    there = {key(entry): entry for entry in entries}
    done, left = completed(lines(entries))
    expected: dict[str, Any] = {}
    for (kind, id_), entry in there.items():
        outcome = entry if kind == "operation" else there.get(("outcome", id_))
        if not isinstance(entry, Operation | Intent) or not isinstance(outcome, Operation | Outcome):
            continue
        ended = entry.at + round(outcome.seconds * 1000) if kind == "operation" else outcome.at
        toward = (entry.destination or f"{entry.namespace}/{entry.entity}").lower()
        expected[id_] = (kind == "operation", entry.at, ended, toward, outcome.result, list(outcome.failed))
    names = ("whole", "at", "ended", "destination", "result", "failed")
    rows = {row["id"]: tuple(row[name] for name in names) for row in done.to_pylist()}
    assert {id_: (*row[:-1], row[-1] or []) for id_, row in rows.items()} == expected
    assert len(rows) == done.num_rows
    assert all(row["day"].isoformat() == np.datetime64(row["at"], "ms").astype(str)[:10] for row in done.to_pylist())
    used = {("operation", id_) for id_ in expected} | {
        (kind, id_) for kind in ("intent", "outcome") for id_ in expected
    }
    assert Counter(keys(left)) == Counter(there.keys() - used)


def test_d3_keys_of_lines_depend_on_kind_and_id() -> None:
    there = {key(entry): entry for entry in ENTRIES}
    assert len(set(line_keys(lines(list(there.values()))).tolist())) == len(there)


@pytest.mark.parametrize("at", [0, MIDNIGHT, -5, 2**63 - 1, -(2**63), 2**62 + 1])
@pytest.mark.parametrize("seconds", [0.0, 0.0005, 0.0015, 0.00049999999999999994, 1.2345, -0.0005, 2.0**53, 1e300])
def test_d3_an_operation_ends_at_the_nearest_millisecond_that_a_column_can_have(at: int, seconds: float) -> None:
    entry = operation(Stage.SEND_PRIMARY, "a", at=at, seconds=0.125)
    line = re.sub(r'"seconds":[^,]+', f'"seconds":{seconds!r}', encode_entry(entry))
    (batch,) = packed_lines(parse_lines("segment", line.encode(), lambda: 0))
    done, _ = completed(unpack(batch["packed"][0]))
    took = int(Decimal(seconds * 1000).quantize(Decimal(1), ROUND_HALF_UP)) if abs(seconds) < 1e20 else 2**63 - 1
    assert done["ended"].to_pylist() == [min(max(at + took, -(2**63)), 2**63 - 1)]


def test_d3_a_destination_is_in_lower_case_as_in_the_balance() -> None:
    begun, ended = halves(operation(Stage.SEND_BACKLOG, "a", to="İSTANBUL-ΣΑΣ"))
    done, _ = completed(lines([begun, ended]))
    assert begun.destination is not None
    assert done["destination"].to_pylist() == [begun.destination.lower()]


# --- steps ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abc"))), max_size=8))
def test_d5_a_step_has_the_messages_own_result(given_ids: list[tuple[list[str], list[str]]]) -> None:
    entries = [
        operation(Stage.SEND_PRIMARY, *ids, result="server_busy", failed=tuple(failed)) for ids, failed in given_ids
    ]
    done, _ = completed(lines(entries))
    steps = operation_steps(done)
    expected = []
    for entry in entries:
        for place, message in enumerate(entry.ids):
            concerned = not entry.failed or entry.ids[:place].count(message) < entry.failed.count(message)
            expected.append((entry.id, message, "server_busy" if concerned else "ok"))
    found = list(zip(*(steps[name].to_pylist() for name in ("entry", "id", "result")), strict=True))
    assert Counter(found) == Counter(expected)
    prefixes = [hashlib.md5(id_.encode(), usedforsecurity=False).hexdigest()[:4] for id_ in steps["id"].to_pylist()]
    assert steps["prefix"].to_pylist() == prefixes
    for count in (1, 3):
        assert places_of(steps, count).tolist() == [int(prefix, 16) * count // 65536 for prefix in prefixes]
