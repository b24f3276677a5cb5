"""Pure parts take time, chance and ids as arguments. Checks what the import contract cannot check."""

import ast
import re
import tomllib

import pytest

from .source import PACKAGE, ROOT, Source, bindings, full_name, sources

# Parts that do not exist yet are listed too, so that they are checked from their first day.
PURE = (
    "amqp",
    "values",
    "backlog",
    "namespace/engine",
    "pairing/decide",
    "syphon/plan",
    "answers/freshness",
    "ledger/audit_rules",
    "ledger/balance",
    "ledger/verdict",
    "money/billing",
    "money/outage_model",
    "money/forecast",
    "money/forecast_vs_actual",
    "money/scenario",
)
IMPURE = re.compile(
    r"uuid\.(uuid\d|getnode)|datetime\.(datetime|date)\.(now|utcnow|today)|(time|random|secrets|os)\..+"
    r"|(__import__|importlib\.import_module|open|input|print|breakpoint)"
)


def pure_sources() -> list[Source]:
    single = [Source(path) for part in PURE if (path := PACKAGE / f"{part}.py").exists()]
    return single + [source for part in PURE for source in sources(PACKAGE / part)]


def impurities(tree: ast.AST) -> list[str]:
    bound = bindings(tree)
    names = [
        (full_name(node, bound), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)
    ]
    return [f"line {line}: {name}" for name, line in names if name and IMPURE.fullmatch(name)]


def test_no_pure_part_asks_for_time_chance_or_ids() -> None:
    found = {source.name: bad for source in pure_sources() if (bad := impurities(source.tree))}
    assert not found


def test_the_import_contract_names_every_pure_part_that_exists() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (pure,) = [contract for contract in contracts if contract["name"].startswith("Pure parts")]
    named = set(pure["source_modules"])
    existing = {part for part in PURE if (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").exists()}
    assert named == {"twinbus." + part.replace("/", ".") for part in existing}


@pytest.mark.parametrize(
    "line",
    [
        "import uuid; uuid.uuid4()",
        "from uuid import uuid1 as make; make()",
        "from datetime import datetime; now = datetime.now",
        "import datetime as dt; dt.datetime.utcnow()",
        "import time as clock; clock.monotonic()",
        "from random import Random; Random(1)",
        "open('a file')",
    ],
)
def test_an_impure_line_is_found(line: str) -> None:
    assert impurities(ast.parse(line))


@pytest.mark.parametrize(
    "line",
    [
        "from uuid import UUID; UUID(bytes_le=tag)",
        "from datetime import datetime; datetime.fromtimestamp(now, UTC)",
        "entity.time.now",
        "connection.open",
    ],
)
def test_a_pure_line_is_left_alone(line: str) -> None:
    assert not impurities(ast.parse(line))
