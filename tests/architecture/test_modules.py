"""Rules for every module of the product: it has a docstring, and a name that says what it contains."""

import ast
import re
from collections.abc import Iterator

from .source import PACKAGE, ROOT, sources
from .test_clauses import specified

EMPTY_NAMES = re.compile(r"(^|_)(utils?|common|helpers?|managers?|base)(_|$)")


def test_every_module_introduces_itself() -> None:
    introductions = {source.name: ast.get_docstring(source.tree) for source in sources(PACKAGE)}
    assert introductions
    assert [name for name, text in introductions.items() if not text] == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [source.name for source in sources(PACKAGE) if EMPTY_NAMES.search(source.path.stem)] == []


def test_no_text_for_users_names_a_clause() -> None:
    clause = re.compile(rf"\b({'|'.join(specified())})\b")
    texts = [(source.name, text) for source in sources(PACKAGE) for text in _texts(source.tree)]
    texts += [(path.name, path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.toml")]
    assert len(texts) > 1000
    # The commands of an SVG path look like clauses.
    assert [(name, text) for name, text in texts if clause.search(text) and not name.endswith("charts.py")] == []


def test_guides_name_no_clause_but_as_a_link_to_it() -> None:
    clause = re.compile(rf"\b({'|'.join(specified())})\b")
    link = re.compile(r"\[[^]]*\]\([^)]*\)")
    pages = [ROOT / "README.md", *(ROOT / "docs" / "guides").glob("*.md")]
    bare = {path.name: set(clause.findall(link.sub("", path.read_text(encoding="utf-8")))) for path in pages}
    # S3 is also the object store of AWS.
    assert {name: found for name, found in bare.items() if found} == {"storage.md": {"S3"}}


def _texts(tree: ast.Module) -> Iterator[str]:
    """Yield the literals that are text and no docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
