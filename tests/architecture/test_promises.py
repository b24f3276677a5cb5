"""docs/promises.md names a test for each promise of the README, of the guides and of tables.md, as the page says it."""

import re

from .source import ROOT
from .test_clauses import exists

OTHERS = (ROOT / "README.md", ROOT / "docs" / "tables.md")
PAGES = {path.name: path for path in (*OTHERS, *(ROOT / "docs" / "guides").glob("*.md"))}
# A row that describes a part of a page, and does not quote it.
DESCRIBED = ("the table ", "the table and ")


def words(text: str) -> str:
    """Return the text without bold marks, in one line."""
    return " ".join(text.replace("**", "").split())


def promises() -> list[tuple[str, str, list[str]]]:
    """Return page, quoted words and named tests of each row."""
    found, page = [], ""
    for line in (ROOT / "docs" / "promises.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            page = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith(("| the page", "| ---")):
            said, tests = (cell.strip() for cell in line.strip("|").split(" | "))
            found.append((page, said, re.findall(r"`([^`]+)`", tests)))
    return found


def test_every_page_has_a_section_and_every_section_a_page() -> None:
    assert {page for page, _, _ in promises()} == set(PAGES)


def test_every_page_still_says_what_is_quoted() -> None:
    texts = {name: words(path.read_text(encoding="utf-8")) for name, path in PAGES.items()}
    changed = [
        f"{page}: {said}"
        for page, said, _ in promises()
        if not said.startswith(DESCRIBED) and words(said) not in texts[page]
    ]
    assert changed == [], "these pages changed their words: change the rows of docs/promises.md, and check the tests"


def test_every_promise_names_tests_that_exist() -> None:
    assert [said for _, said, tests in promises() if not tests] == []
    named = {name for _, _, tests in promises() for name in tests}
    assert [name for name in sorted(named) if not exists(name)] == []
