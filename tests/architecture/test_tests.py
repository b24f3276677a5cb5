"""Rules for the tests themselves."""

import ast
import re
from pathlib import Path

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


def has_soak_budget(tree: ast.AST) -> bool:
    """Whether a file calls `budget` with three arguments, or names `Tier.SOAK`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name("budget"), args=[_, _, _]):
                return True
            case ast.Attribute(value=ast.Name("Tier"), attr="SOAK"):
                return True
    return False


def test_every_test_with_a_budget_for_the_soak_is_run_by_make_soak() -> None:
    recipe = re.search(r"^soak:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert recipe is not None
    soaked = [Path(path) for path in re.findall(r"tests/[\w/.]+", recipe[1])]
    assert all((ROOT / path).exists() for path in soaked)
    with_budget = {Path(source.name) for source in sources(ROOT / "tests") if has_soak_budget(source.tree)}
    with_budget -= {Path("tests/tiers.py"), Path("tests/conftest.py")}  # they define the tiers
    assert len(with_budget) > 10
    missing = {str(path) for path in with_budget if not any(path.is_relative_to(each) for each in soaked)}
    assert not missing, "add these to the target `soak` of the Makefile, and to docs/testing.md"
