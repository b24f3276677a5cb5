"""How a file of the product looks: short, introduced in five lines, under a name that says something."""

import ast
import re

from .source import PACKAGE, sources

LONGEST_FILE = 400
LONGEST_FUNCTION = 50
LONGEST_DOCSTRING = 5
EMPTY_NAMES = re.compile(r"(^|_)(utils?|common|helpers?|managers?|base)(_|$)")

# "src/twinbus/x.py" or "src/twinbus/x.py::function" → why there is only one idea in it.
ALLOWED: dict[str, str] = {}


def too_long() -> dict[str, int]:
    found: dict[str, int] = {}
    for source in sources(PACKAGE):
        if (lines := source.text.count("\n")) > LONGEST_FILE:
            found[source.name] = lines
        for function in source.functions():
            # A docstring is not code: that of a verb is its whole help.
            told = len((ast.get_docstring(function) or "").splitlines())
            if (lines := (function.end_lineno or function.lineno) - function.lineno + 1 - told) > LONGEST_FUNCTION:
                found[f"{source.name}::{function.name}"] = lines
    return found


def test_no_file_and_no_function_grows_into_a_monster() -> None:
    assert {where: lines for where, lines in too_long().items() if where not in ALLOWED} == {}


def test_every_allowance_is_reasoned_and_still_needed() -> None:
    assert set(ALLOWED) <= set(too_long())
    assert all(reason.strip() for reason in ALLOWED.values())


def test_every_module_introduces_itself_in_at_most_five_lines() -> None:
    introductions = {source.name: ast.get_docstring(source.tree) for source in sources(PACKAGE)}
    assert introductions
    assert [name for name, text in introductions.items() if not text] == []
    assert [name for name, text in introductions.items() if len((text or "").splitlines()) > LONGEST_DOCSTRING] == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [source.name for source in sources(PACKAGE) if EMPTY_NAMES.search(source.path.stem)] == []
