"""Mutants of the pure parts of `twinbus.pairing` and `twinbus.backlog`: which small changes no test notices.

`python -m tests.pairing.mutation [--workers 1] [--only machine]` changes one place at a time and runs the tests of that
part and a few hundred worlds against it, each mutant in a process of its own. Survivors: docs/decisions/0010.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import EllipsisType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "src" / "twinbus"
OURS = ("twinbus.backlog", "twinbus.pairing", "tests.pairing.")
SEEDS = 300
SECONDS = 20
"""Seconds of CPU time after which a mutant that hangs is killed."""
FAILOVER = tuple(
    f"pairing/decide/test_failover{name}.py" for name in ("", "_pings", "_trial", "_hold", "_busy", "_known")
)
PARTS = {
    "pairing/decide/failover.py": (
        *FAILOVER,
        "pairing/decide/test_failover_diagram.py",
        "pairing/test_options.py",
    ),
    "pairing/decide/failover_events.py": FAILOVER,
    "pairing/decide/known_state.py": ("pairing/decide/test_known_state.py",),
    "pairing/decide/rotation.py": ("pairing/decide/test_rotation.py",),
    "backlog/message_format.py": ("backlog/test_message_format.py",),
    "backlog/body_compression.py": ("backlog/test_body_compression.py",),
    "backlog/batch_split.py": ("backlog/test_batch_split.py",),
    "pairing/decide/send_flow.py": ("pairing/decide/test_send_flow.py",),
    "pairing/decide/backlog_watch.py": ("pairing/decide/test_backlog_watch.py",),
}
"""Each pure part, and the tests that must notice a mutant of it. Paths start in `src/twinbus` and in `tests`."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
}
ENUMS = {"Trigger", "EntityMode", "Action", "SendRoute", "_T", "_A"}


TYPE_ALIASES = {
    "Cause", "Effect", "Event", "FailoverNotice", "PropertyName", "QueueNotice", "SendStep", "SendSteps",
    "StateChange", "T",
}  # fmt: skip


class Mutant(NamedTuple):
    part: str
    line: int
    change: str
    source: str


def members(name: str) -> list[str]:
    table = importlib.import_module("twinbus.pairing.decide.failover")
    return list(getattr(table, {"_T": "Trigger", "_A": "Action"}.get(name, name)).__members__)


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield each change of this node: a description, and the node that replaces it."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield "comparison", ast.Compare(node.left, [COMPARISONS[type(op)]()], node.comparators)
        case ast.BoolOp():
            yield "and/or", ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "not", node.operand
        case ast.UnaryOp(op=ast.USub()):
            yield "sign", node.operand
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield "constant", ast.Constant(node.value + 1)  # type: ignore[operator]  # the pattern says a number
        case ast.Constant(value=str(text)):
            yield "text", ast.Constant(text + "~")
        case ast.Attribute(value=ast.Name(id=enum)) if enum in ENUMS and node.attr in members(enum):
            names = members(enum)
            other = names[(names.index(node.attr) + 1) % len(names)]
            yield f"{node.attr} → {other}", ast.Attribute(node.value, other, node.ctx)
        case ast.IfExp() | ast.If():
            for forced in (True, False):
                changed = copy.copy(node)
                changed.test = ast.Constant(forced)
                yield f"condition {forced}", changed
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return None", ast.Return(ast.Constant(None))
        case ast.Assign() | ast.AugAssign() | ast.Expr():
            yield "statement removed", ast.Pass()
        case ast.Dict() if None not in node.keys:
            for index in range(len(node.keys)):
                keys, values = (
                    node.keys[:index] + node.keys[index + 1 :],
                    node.values[:index] + node.values[index + 1 :],
                )
                yield f"entry {index} removed", ast.Dict(keys, values)
        case ast.Tuple(ctx=ast.Load()) | ast.Set():
            for index in range(len(node.elts)):
                fewer = copy.copy(node)
                fewer.elts = node.elts[:index] + node.elts[index + 1 :]
                yield f"element {index} removed", fewer
        case ast.Call():
            for index, keyword in enumerate(node.keywords):
                rest = node.keywords[:index] + node.keywords[index + 1 :]
                yield f"{keyword.arg}= removed", ast.Call(node.func, node.args, rest)


def skipped(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node without behaviour: docstrings, annotations, decorators, assertions, imports."""
    match node:
        case ast.Assert() | ast.Import() | ast.ImportFrom():
            yield node
        case ast.Expr(value=ast.Constant(value=str() | EllipsisType())):
            yield node
        case ast.AnnAssign():
            yield node.annotation
        case ast.arg(annotation=ast.expr() as annotation):
            yield annotation
        case ast.FunctionDef() | ast.ClassDef():
            yield from node.decorator_list
            if isinstance(node, ast.FunctionDef) and node.returns:
                yield node.returns
        case ast.Assign(targets=[ast.Name(id=name)]) if name in TYPE_ALIASES:
            yield node
        case ast.match_case(pattern=ast.MatchAs(pattern=None)):
            yield node


def mutants(part: str) -> Iterator[Mutant]:
    tree = ast.parse((FOLDER / part).read_text(encoding="utf-8"))
    out = {id(inner) for node in ast.walk(tree) for top in skipped(node) for inner in ast.walk(top)}
    for parent in list(ast.walk(tree)):
        if id(parent) in out:
            continue
        for name, value in ast.iter_fields(parent):
            for index, node in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(node, ast.AST) or id(node) in out:
                    continue
                for change, other in changes(node):
                    ast.copy_location(other, node)
                    place(parent, name, index, other)
                    source = ast.unparse(ast.fix_missing_locations(tree))
                    place(parent, name, index, node)
                    yield Mutant(part, getattr(node, "lineno", 0), change, source)


def place(parent: ast.AST, name: str, index: int, node: ast.AST) -> None:
    value = getattr(parent, name)
    if isinstance(value, list):
        value[index] = node
    else:
        setattr(parent, name, node)


def survives(mutant: Mutant) -> bool:
    """Run the tests on a mutant, in a child of this process, which has imported no part of the product."""
    child = os.fork()
    if child == 0:
        os._exit(trial(mutant))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def trial(mutant: Mutant) -> int:
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        for name in [name for name in sys.modules if name.startswith(OURS)]:
            if name != __name__:
                del sys.modules[name]
        install(mutant)
        # Before pytest, which loads parts of the product with a loader of its own.
        importlib.import_module("twinbus." + mutant.part.removesuffix(".py").replace("/", "."))
        for seed in range(SEEDS):
            world = importlib.import_module("tests.pairing.simulation.world")
            world.World(seed).settle()
        files = [str(ROOT / "tests" / name) for name in PARTS[mutant.part]]
        return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]))
    except BaseException:
        return 1


def install(mutant: Mutant) -> None:
    """Make the import of this part load the mutant instead of the file."""
    path = str(FOLDER / mutant.part)
    loader = importlib.import_module("importlib.machinery").SourceFileLoader
    read = loader.get_code

    def get_code(self: object, fullname: str) -> object:
        if getattr(self, "path", "") == path:
            return compile(mutant.source, path, "exec")
        return read(self, fullname)

    loader.get_code = get_code


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pairing.mutation")
    parser.add_argument("--only", default="", help="parts whose name holds this")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    found = [mutant for part in PARTS if given.only in part for mutant in mutants(part)]
    # Other packages are imported once, for all children.
    importlib.import_module("tests.pairing.simulation.world")
    for part in {mutant.part: None for mutant in found}:
        unchanged = (FOLDER / part).read_text(encoding="utf-8")
        if not survives(Mutant(part, 0, "none", unchanged)):
            # Otherwise an error in the tests would look as if the tests had noticed every mutant.
            sys.exit(f"{part}: its tests fail without a mutant")
    alive = []
    with ThreadPoolExecutor(given.workers) as pool:
        for mutant, lives in zip(found, pool.map(survives, found), strict=True):
            if lives:
                alive.append(mutant)
                print(f"{mutant.part}, line {mutant.line}: {mutant.change} survives", flush=True)
    for part in PARTS:
        made = sum(mutant.part == part for mutant in found)
        lived = [mutant for mutant in alive if mutant.part == part]
        if made:
            print(f"{part}: {made} mutants, {made - len(lived)} killed ({(made - len(lived)) / made:.1%})")
    print(f"all: {len(found)} mutants, {len(found) - len(alive)} killed ({1 - len(alive) / len(found):.1%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
