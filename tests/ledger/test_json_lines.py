"""Entries become lines and lines become entries; ids as texts; billable units."""

import json
import math
from dataclasses import fields
from itertools import combinations
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ledger.strategies import ENTRIES
from twinbus.ledger.entries import ENTRY_KINDS, UNIT_BYTES, Entry, Operation, Stage, State, billable_units
from twinbus.ledger.json_lines import EntryError, decode_entry, encode_entry, id_text

WHOLE = {
    "v": 1, "kind": "operation", "at": 1, "id": "a-1", "stage": "ping", "namespace": "n", "entity": "e", "ids": ["x"],
    "bytes": 0, "units": 1, "seconds": 0.5, "result": "ok",
}  # fmt: skip


@pytest.mark.parametrize("kind", ENTRY_KINDS.values(), ids=ENTRY_KINDS)
def test_every_entry_comes_back_from_its_line_as_it_was(kind: type[Entry]) -> None:
    @given(entry=ENTRIES[kind])
    def holds(entry: Entry) -> None:
        line = encode_entry(entry)
        assert decode_entry(line) == entry
        assert line.isascii()
        assert line.endswith("\n")
        assert line.count("\n") == 1

    holds()


def test_every_kind_has_its_strategy_and_its_name_once() -> None:
    assert set(ENTRIES) == set(ENTRY_KINDS.values())
    assert all(entry.kind == kind for kind, entry in ENTRY_KINDS.items())


def test_a_field_has_one_type_in_all_kinds() -> None:
    found: dict[str, set[str]] = {}
    for entry in ENTRY_KINDS.values():
        for field in fields(entry):
            found.setdefault(field.name, set()).add(str(field.type).removesuffix(" | None"))
    assert {name: types for name, types in found.items() if len(types) > 1} == {}


def test_a_field_of_a_later_version_is_ignored() -> None:
    assert isinstance(decode_entry(json.dumps({**WHOLE, "colour": "red"})), Operation)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "not JSON"),
        ('{"v":1,"kind":"operation","at":', "not JSON"),
        ("[]", "not a JSON object"),
        (json.dumps({**WHOLE, "v": 2}), "version 2"),
        (json.dumps({**WHOLE, "v": True}), "version True"),
        (json.dumps({**WHOLE, "kind": "dream"}), "no kind 'dream'"),
        (json.dumps({**WHOLE, "kind": ["operation"]}), "no kind"),
        (json.dumps({**WHOLE, "stage": "nap"}), "'nap' is not a valid Stage"),
        (json.dumps({**WHOLE, "at": "1"}), "'1' is not of type int"),
        (json.dumps({**WHOLE, "at": True}), "True is not of type int"),
        (json.dumps({**WHOLE, "ids": "x"}), "not a list of strings"),
        (json.dumps({**WHOLE, "ids": [1]}), "not a list of strings"),
        (json.dumps({**WHOLE, "seconds": "1"}), "not a number"),
        (json.dumps({**WHOLE, "seconds": 10**400}), "not finite"),
        (json.dumps({**WHOLE, "seconds": math.nan}), "not finite"),
        (json.dumps({**WHOLE, "seconds": math.inf}), "not finite"),
        ("[" * 100_000, "nested too deep"),
        (json.dumps({**WHOLE, "broker_at": 1.5}), "1.5 is not of type int"),
        (json.dumps({**WHOLE, "waited": [1, "2"]}), "not a list of integers"),
        (json.dumps({**WHOLE, "waited": 1}), "not a list of integers"),
        (json.dumps({**WHOLE, "result": None}), "None is not of type str"),
        (json.dumps({name: value for name, value in WHOLE.items() if name != "result"}), "result"),
        (
            json.dumps({"v": 1, "kind": "state", "at": 1, "id": "a", "event": "e", "pair": "p", "facts": {"x": []}}),
            "plain",
        ),
    ],
)
def test_a_line_that_is_not_an_entry_raises_an_error_with_the_reason(line: str, says: str) -> None:
    with pytest.raises(EntryError, match=says):
        decode_entry(line)


def test_the_line_of_a_send_stays_as_it_was_published() -> None:
    entry = Operation(
        at=1700000000000, id="00ff00ff00ff00ff-7", stage=Stage.SEND_BACKLOG, namespace="paris",
        entity="contoso/x-servicebus-transfer/0", destination="contoso/orders", ids=("a", "uuid:…"), bytes=10, units=2,
        seconds=0.25, result="unknown", cause="timeout", failed=("a",),
    )  # fmt: skip
    assert encode_entry(entry) == (
        '{"v":1,"kind":"operation","at":1700000000000,"id":"00ff00ff00ff00ff-7","stage":"send_backlog",'
        '"namespace":"paris","entity":"contoso/x-servicebus-transfer/0","destination":"contoso/orders",'
        '"ids":["a","uuid:\\u2026"],"bytes":10,"units":2,"seconds":250000e-6,"result":"unknown","cause":"timeout",'
        '"failed":["a"]}\n'
    )
    state = State(at=1, id="a-1", event="restored", pair="contoso", facts={"entity": "orders"})
    assert encode_entry(state) == (
        '{"v":1,"kind":"state","at":1,"id":"a-1","event":"restored","pair":"contoso","facts":{"entity":"orders"}}\n'
    )


# --- ids and units ---------------------------------------------------------------------------------------------------


def test_two_different_ids_never_have_the_same_text() -> None:
    number = UUID(int=5)
    ids: list[object] = [
        "5", 5, b"5", number, str(number), f"uuid:{number}", "ulong:5", "binary:35", "string:5", "string:ulong:5",
        "", b"",
    ]  # fmt: skip
    for one, other in combinations(ids, 2):
        assert id_text(one) != id_text(other)
    assert id_text("order-5") == "order-5"
    assert id_text(5) == "ulong:5"
    assert id_text(b"\x00\xff") == "binary:00ff"
    assert id_text(memoryview(b"\x00")) == "binary:00"


@pytest.mark.parametrize(
    ("messages", "size", "expected"),
    [
        (0, 0, 1),  # an empty receive
        (1, 0, 1),
        (1, UNIT_BYTES, 1),
        (1, UNIT_BYTES + 1, 2),
        (3, 0, 3),  # completions
        (2, [UNIT_BYTES, UNIT_BYTES + 1], 3),
        (2, [1, 1], 2),
        (2, UNIT_BYTES + 1, 2),
        (2, UNIT_BYTES + 2, 3),
        (0, [], 1),
    ],
)
def test_m2_a_unit_is_64_kb_or_a_part_of_it_of_every_message(
    messages: int, size: int | list[int], expected: int
) -> None:
    assert billable_units(messages, size) == expected


@given(st.lists(st.integers(0, 5 * UNIT_BYTES), min_size=1, max_size=6))
def test_m2_a_total_size_costs_at_least_as_much_as_any_distribution_of_it(sizes: list[int]) -> None:
    assert billable_units(len(sizes), sum(sizes)) >= billable_units(len(sizes), sizes)
