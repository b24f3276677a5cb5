"""The house as data: its Python files, parsed."""

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "twinbus"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """Dotted name, of a file of the package."""
        parts = self.path.relative_to(PACKAGE.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.name)


def sources(folder: Path) -> list[Source]:
    return [Source(path) for path in sorted(folder.rglob("*.py")) if "node_modules" not in path.parts]


def names_of_tests(source: Source) -> set[str]:
    """Return the names of the tests that pytest finds in a file: `test_x`, `TestY::test_x`."""
    found: set[str] = set()
    for node in source.tree.body:
        if isinstance(node, Function):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{child.name}" for child in node.body if isinstance(child, Function)}
    return {name for name in found if name.split("::")[-1].startswith("test_")}


def thorough_tests(source: Source) -> set[str]:
    """Return the tests that carry the mark `thorough`, by decorator or for the whole file (tests/tiers.py)."""
    whole_file = any(
        isinstance(node, ast.Assign)
        and getattr(node.targets[0], "id", "") == "pytestmark"
        and _names_thorough(node.value)
        for node in source.tree.body
    )
    if whole_file:
        return names_of_tests(source)
    marked = {
        node.name
        for node in source.tree.body
        if isinstance(node, Function) and any(_names_thorough(decorator) for decorator in node.decorator_list)
    }
    return names_of_tests(source) & marked


def _names_thorough(expression: ast.expr) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "thorough" for node in ast.walk(expression))


def bindings(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for, by its full dotted path."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return bound


def full_name(node: ast.AST, bound: dict[str, str]) -> str | None:
    match node:
        case ast.Name():
            return bound.get(node.id, node.id)
        case ast.Attribute() if inner := full_name(node.value, bound):
            return f"{inner}.{node.attr}"
        case _:
            return None
