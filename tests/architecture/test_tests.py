"""Rules for the tests themselves."""

import ast

import pytest

from .source import ROOT, bindings, full_name, sources

MARKS = ("pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail")
CALLS = ("pytest.skip", "pytest.xfail")


def unreasoned_skips(tree: ast.AST) -> list[str]:
    """Return the skips without a reason: a mark without `reason=`, or a call of pytest.skip without a text."""
    bound = bindings(tree)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        name = full_name(node, bound)
        if name not in MARKS + CALLS:
            continue
        call = calls.get(id(node))
        reasoned = call and (
            call.args or call.keywords if name in CALLS else "reason" in [k.arg for k in call.keywords]
        )
        if not reasoned:
            found.append(f"{name} on line {getattr(node, 'lineno', 0)}")
    return found


def test_no_test_is_skipped_without_a_reason() -> None:
    found = {source.name: bad for source in sources(ROOT / "tests") if (bad := unreasoned_skips(source.tree))}
    assert not found


@pytest.mark.parametrize(
    ("line", "reasoned"),
    [
        ("import pytest\n@pytest.mark.skip\ndef test_x(): ...", False),
        ("import pytest\n@pytest.mark.skipif(True)\ndef test_x(): ...", False),
        ("import pytest\n@pytest.mark.skipif(True, reason='no node')\ndef test_x(): ...", True),
        ("import pytest\npytest.skip()", False),
        ("from pytest import skip\nskip()", False),
        ("import pytest\npytest.skip('no node')", True),
    ],
)
def test_a_skip_without_a_reason_is_found(line: str, reasoned: bool) -> None:
    assert bool(unreasoned_skips(ast.parse(line))) is not reasoned
