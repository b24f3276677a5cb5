"""docs/ledger.md describes exactly the kinds and fields of the schema."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from twinbus.ledger.balance import STAGE_EFFECTS
from twinbus.ledger.entries import ENTRY_KINDS, SCHEMA_VERSION, Entry, Move, Role, Stage

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "ledger.md").read_text(encoding="utf-8")
EVERYWHERE = {"at", "id"}


def described(kind: str) -> str:
    """Return the text of docs/ledger.md about this kind."""
    (found,) = re.findall(rf"^\*\*`{kind}`\*\*:(.*?)(?=^\*\*`|^## )", PAGE, re.DOTALL | re.MULTILINE)
    return str(found)


def test_the_documentation_has_every_kind_once_and_no_other() -> None:
    assert sorted(re.findall(r"^\*\*`(\w+)`\*\*:", PAGE, re.MULTILINE)) == sorted(ENTRY_KINDS)
    assert f"**version {SCHEMA_VERSION}**" in PAGE


@pytest.mark.parametrize("kind", sorted(set(ENTRY_KINDS) - {"operation"}))
def test_the_documentation_names_every_field_of_a_kind(kind: str) -> None:
    entry: type[Entry] = ENTRY_KINDS[kind]
    names = {field.name for field in fields(entry)} - EVERYWHERE
    assert {name for name in names if f"`{name}`" not in described(kind)} == set()


def test_an_operation_has_the_fields_of_intent_and_outcome() -> None:
    def names(kind: str) -> set[str]:
        return {field.name for field in fields(ENTRY_KINDS[kind])}

    # `count` is for operations without ids, which never have an intent.
    assert names("operation") == names("intent") | names("outcome") | {"count"}


@pytest.mark.parametrize("word", [*Stage, *Move, *Role])
def test_the_documentation_names_every_word(word: str) -> None:
    assert f"`{word}`" in PAGE


def test_the_documentation_gives_an_effect_to_the_stages_of_the_balance() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `") and line.count(" | ") == 2]
    stages = {name: row[2] for row in rows for name in re.findall(r"`(\w+)`", row[0]) if name in set(Stage)}
    assert set(stages) == set(Stage)
    assert {Stage(name) for name, effect in stages.items() if effect != "– |"} == set(STAGE_EFFECTS)
