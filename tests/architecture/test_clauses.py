"""docs/clauses.md is true: what it names exists, and what it calls done has code and a test."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .source import ROOT, Source, names_of_tests

STATES = ("done", "part", "later")
QUOTED = re.compile(r"`([^`]+)`")
NAMESPACE = {"G3", "N1", "N2", "N3", "N4", "N5"}


@dataclass(frozen=True)
class Row:
    clause: str
    state: str
    code: list[str]
    tests: list[str]


def rows() -> Iterator[Row]:
    for line in (ROOT / "docs" / "clauses.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("| ") and re.fullmatch(r"[PSGYCLMNDXK]\d+", cells[0]):
            clause, _says, state, code, tests = cells
            yield Row(clause, state, QUOTED.findall(code), QUOTED.findall(tests))


def exists(reference: str) -> bool:
    """A folder or file; or `file::test`, the test found in the file's syntax tree, or, in JavaScript, as its title."""
    name, _, test = reference.partition("::")
    path = ROOT / name
    if not path.exists() or not test:
        return path.exists()
    if path.suffix == ".py":
        return test in names_of_tests(Source(path))
    text = path.read_text(encoding="utf-8")
    return any(f"{quote}{test}{quote}" in text for quote in "\"'`")


def test_every_clause_of_the_namespace_has_rows_and_every_state_is_known() -> None:
    assert {row.clause for row in rows()} >= NAMESPACE
    assert {row.state for row in rows()} <= set(STATES)


def test_every_file_and_test_that_the_clauses_name_exists() -> None:
    assert [name for row in rows() for name in row.code + row.tests if not exists(name)] == []


def test_what_is_called_done_names_its_code_and_its_test() -> None:
    assert [row.clause for row in rows() if row.state == "done" and not (row.code and row.tests)] == []


def test_what_comes_later_names_nothing_yet() -> None:
    assert [row.clause for row in rows() if row.state == "later" and (row.code or row.tests)] == []


def test_a_reference_to_nothing_is_found() -> None:
    assert exists("tests/architecture/test_clauses.py::test_a_reference_to_nothing_is_found")
    assert not exists("tests/architecture/test_clauses.py::test_that_nobody_wrote")
    assert not exists("src/twinbus/nowhere.py")
