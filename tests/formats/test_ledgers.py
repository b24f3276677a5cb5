"""Ledgers that earlier versions wrote: every entry is read as it was recorded, and the balance is the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.formats.sets import expected, sets_with, unpacked
from twinbus.ledger import (
    ENTRY_KINDS,
    Dropped,
    Ended,
    Entry,
    Gap,
    Intent,
    Ledger,
    Operation,
    Outcome,
    Role,
    SegmentHeader,
    balance,
    list_segments,
    read_ledger,
)


class Old:
    """A copy of an old ledger, its entries by writer, and what was recorded."""

    def __init__(self, ledger: Path, said: dict[str, Any]) -> None:
        self.ledger = ledger
        self.said = said
        self.entries = list(read_ledger(ledger))

    def of(self, *ids: str) -> list[Entry]:
        """All entries of the writer that recorded an operation on these message ids."""
        (prefix,) = {
            entry.id.partition("-")[0]
            for entry in self.entries
            if isinstance(entry, Operation | Intent) and entry.ids == ids
        }
        return [entry for entry in self.entries if entry.id.startswith(prefix)]


@pytest.fixture(params=sets_with("ledger.tar.xz"))
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Old:
    return Old(unpacked(request.param / "ledger.tar.xz", tmp_path), expected(request.param / "ledger.json"))


def comparable(entries: Iterable[Entry], said: Iterable[dict[str, Any]]) -> tuple[Counter[str], Counter[str]]:
    """Return the entries, and the entries in the list of the set, as texts. Compares only fields in the list."""
    names: dict[str, set[str]] = {}
    wanted: Counter[str] = Counter()
    for one in said:
        names.setdefault(one["kind"], set()).update(one)
    for one in said:
        wanted[_text({name: one.get(name) for name in names[one["kind"]]})] += 1
    found: Counter[str] = Counter()
    for entry in entries:
        if entry.kind in names:
            values = {"kind": entry.kind, **asdict(entry)}
            found[_text({name: values[name] for name in names[entry.kind]})] += 1
    return found, wanted


def _text(values: dict[str, Any]) -> str:
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return str(sorted((name, str(value)) for name, value in plain.items() if value not in (None, [])))


def test_l1_every_kind_of_entry_of_an_older_ledger_is_read_as_it_was_recorded(old: Old) -> None:
    entries = old.of("never ended")
    found, wanted = comparable(entries, old.said["everything"])
    assert found == wanted
    # `ended` came after the first set.
    assert {entry.kind for entry in old.entries} | {Ended.kind} == ENTRY_KINDS.keys()
    (outcome,) = [entry for entry in entries if isinstance(entry, Outcome)]
    (begun,) = [entry for entry in entries if isinstance(entry, Intent) and entry.ids == ("ended",)]
    assert outcome.id == begun.id


def test_l1_what_an_older_ledger_misses_is_known(old: Old) -> None:
    there = [entry for entry in old.entries if isinstance(entry, Operation) and entry.ids[:1] != ()]
    names = {entry.ids[0] for entry in there}
    told = {one["ids"][0] for one in old.said["gap"]}
    (gap,) = [entry for entry in old.entries if isinstance(entry, Gap)]
    assert gap.count == len(told - names) > 0
    dropped = [entry for entry in old.entries if isinstance(entry, Dropped)]
    assert dropped
    assert {one["ids"][0] for one in old.said["dropped"]} > names & {f"d{number}" for number in range(1000)} != set()
    assert {one["ids"][0] for one in old.said["torn"]} == names & {f"t{number}" for number in range(1000)}


def test_d3_the_balance_of_an_older_ledger_is_what_was_sent(old: Old) -> None:
    found = balance(old.entries)
    for word in ("delivered", "in_backlog"):
        ids = Counter(message.id for message in getattr(found, word) for _ in range(getattr(found, word)[message]))
        assert {name: ids[name] for name in old.said[word]} == dict.fromkeys(old.said[word], 1)
    assert not found.lost
    roles = {entry.role for entry in old.entries if isinstance(entry, SegmentHeader)}
    # `audit` came after the first set.
    assert roles | {Role.AUDIT} == set(Role)


def test_l1_a_new_writer_goes_on_in_an_older_ledger_and_seals_what_dead_writers_left(old: Old) -> None:
    left_open = [segment for segment in list_segments(old.ledger) if segment.is_open]
    assert len(left_open) == 2
    before = {segment.path: segment.path.read_bytes() for segment in list_segments(old.ledger)}
    assert any(not before[segment.path].endswith(b"\n") for segment in left_open), "one has a torn last line"
    with Ledger(old.ledger, Role.SYPHON) as ledger:
        ledger.state("restored", {})
        assert ledger.flush()
        assert [segment.writer for segment in list_segments(old.ledger) if segment.is_open] == [ledger.writer]
    for path, content in before.items():
        sealed = path.with_name(path.name.removesuffix(".open"))
        assert sealed.read_bytes().startswith(content[: content.rfind(b"\n") + 1])
    entries = list(read_ledger(old.ledger))
    ended = [entry for entry in entries if isinstance(entry, Ended)]
    assert {entry.writer for entry in ended} == {segment.writer for segment in left_open}
    own = ledger.writer.rpartition("-")[2]
    after = [entry for entry in entries if entry not in ended and not entry.id.startswith(own)]
    assert Counter(map(str, after)) == Counter(map(str, old.entries))
