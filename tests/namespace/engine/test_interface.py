"""The rest of the project uses only those modules of the engine that its docstring offers."""

from __future__ import annotations

import ast
from pathlib import Path

import twinbus
from twinbus.namespace import engine

SOURCE = Path(twinbus.__file__).parent
ENGINE = Path(engine.__file__).parent
PREFIX = "twinbus.namespace.engine"

OFFERED = {
    "descriptions",
    "effects",
    "entity_properties",
    "events",
    "forwarding",
    "limits",
    "queue",
    "registry",
    "rules.values",
    "storage_protocol",
    "topic",
    "transactions",
    "validation",
}


def modules_used(path: Path) -> set[str]:
    """The modules of the engine that a file imports, without the prefix."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == PREFIX:
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PREFIX + "."):
            found.add((node.module or "").removeprefix(PREFIX + "."))
    return found


def test_other_code_imports_only_the_modules_that_the_engine_offers() -> None:
    outside = [path for path in SOURCE.rglob("*.py") if ENGINE not in path.parents]
    reached = {str(path.relative_to(SOURCE)): inner for path in outside if (inner := modules_used(path) - OFFERED)}
    assert reached == {}


def test_the_docstring_of_the_engine_names_every_module_it_offers() -> None:
    assert engine.__doc__ is not None
    assert [name for name in OFFERED if name not in engine.__doc__] == []
