"""Rules for every module of the product: it has a docstring, and a name that says what it contains."""

import ast
import re

from .source import PACKAGE, sources

EMPTY_NAMES = re.compile(r"(^|_)(utils?|common|helpers?|managers?|base)(_|$)")


def test_every_module_introduces_itself() -> None:
    introductions = {source.name: ast.get_docstring(source.tree) for source in sources(PACKAGE)}
    assert introductions
    assert [name for name, text in introductions.items() if not text] == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [source.name for source in sources(PACKAGE) if EMPTY_NAMES.search(source.path.stem)] == []
