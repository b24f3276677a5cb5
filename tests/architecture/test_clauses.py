"""docs/clauses.md names every clause of docs/spec.md, and nothing that does not exist."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .source import PACKAGE, ROOT, Source, names_of_tests, sources, thorough_tests

STATES = ("done", "part", "later")
HEADING = re.compile(r"### ([A-Z]\d+) ")
SHORT_CLAUSE = re.compile(r"- (K\d+) ")
PART = re.compile(r"- (\w+): (.+)")
REFERENCE = re.compile(r"  - (code|test): `([^`]+)`")


@dataclass
class Part:
    """One part of a clause: what it is, how far it is built, and where."""

    clause: str
    state: str
    text: str
    code: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)


def parts() -> list[Part]:
    found: list[Part] = []
    clause = ""
    for line in lines_of("clauses.md"):
        if heading := HEADING.match(line):
            clause = heading[1]
        elif part := PART.match(line):
            found.append(Part(clause, part[1], part[2]))
        elif reference := REFERENCE.match(line):
            (found[-1].code if reference[1] == "code" else found[-1].tests).append(reference[2])
    return found


def lines_of(page: str) -> list[str]:
    return (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()


def specified() -> Iterator[str]:
    for line in lines_of("spec.md"):
        if found := HEADING.match(line) or SHORT_CLAUSE.match(line):
            yield found[1]


def exists(reference: str) -> bool:
    """Return whether `tests` holds this file or folder, or `file::test`; in JavaScript the test is a title."""
    name, _, test = reference.partition("::")
    path = ROOT / "tests" / name
    if not path.exists() or not test:
        return path.exists()
    if path.suffix == ".py":
        return test in names_of_tests(Source(path))
    text = path.read_text(encoding="utf-8")
    return any(f"{quote}{test}{quote}" in text for quote in "\"'`")


def test_every_clause_of_the_specification_has_a_part_and_every_part_a_clause() -> None:
    assert list(dict.fromkeys(part.clause for part in parts())) == list(specified())
    assert {part.state for part in parts()} <= set(STATES)


def test_every_file_and_test_that_the_clauses_name_exists() -> None:
    assert [name for part in parts() for name in part.code if not (PACKAGE / name).exists()] == []
    assert [name for part in parts() for name in part.tests if not exists(name)] == []


def test_what_is_done_names_its_code_and_its_test() -> None:
    assert [part for part in parts() if part.state == "done" and not (part.code and part.tests)] == []


def is_quick(reference: str) -> bool:
    """Return whether the tier `quick` runs this test, or a test of this file or folder."""
    name, _, test = reference.partition("::")
    path = ROOT / "tests" / name
    if path.is_dir():
        return any(names_of_tests(source) - thorough_tests(source) for source in sources(path))
    if path.suffix != ".py":
        return True
    quick = names_of_tests(Source(path)) - thorough_tests(Source(path))
    return test in quick if test else bool(quick)


def test_make_test_touches_every_clause() -> None:
    built = {part.clause for part in parts() if part.state != "later"}
    touched = {part.clause for part in parts() if any(is_quick(reference) for reference in part.tests)}
    assert built - touched == set()


def test_what_comes_later_names_nothing_yet() -> None:
    assert [part for part in parts() if part.state == "later" and (part.code or part.tests)] == []


def test_a_reference_to_nothing_is_found() -> None:
    assert exists("architecture/test_clauses.py::test_a_reference_to_nothing_is_found")
    assert not exists("architecture/test_clauses.py::test_that_nobody_wrote")
    assert not exists("nowhere.py")
