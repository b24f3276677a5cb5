"""The API that a user discovers with `help()`: complete, explained with examples, and free of internals."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from enum import EnumType
from importlib import import_module
from typing import Any

import pytest

import twinbus
import twinbus.aio
from tests.architecture.source import ROOT
from tests.architecture.test_clauses import lines_of
from twinbus.pairing import EVENTS

MODULES = (
    "twinbus",
    "twinbus.aio",
    "twinbus.kombu",
    "twinbus.pipeline.servicebus",
    "twinbus.pipeline.session",
    "twinbus.testing",
)
# Spark alone calls the methods of this class, which are those of pyspark's DataSource.
CALLED_BY_SPARK = ("ServiceBusDataSource",)
CLAUSE = re.compile(r"\b[PSGYCLMNDXK]\d{1,2}\b")
# The SDK itself takes further keywords, and ours pass them on. The last one takes all fields of its class.
WITH_KEYWORDS = re.compile(
    r"\.(get_\w+|send_messages|schedule_messages|cancel_scheduled_messages|peek_messages|from_connection_string"
    r"|pair_connection_strings|for_short_lived_processes)$"
)


def public() -> Iterator[tuple[str, Any]]:
    """Return every public function and class, and every member of a class that this project defines."""
    for module in MODULES:
        face = import_module(module)
        yield module, face
        for name in face.__all__:
            found = getattr(face, name)
            if inspect.isclass(found) or inspect.isfunction(found):
                yield f"{module}.{name}", found
            if inspect.isclass(found) and not isinstance(found, EnumType) and name not in CALLED_BY_SPARK:
                for member, value in inspect.getmembers_static(found):
                    if not member.startswith("_") and is_ours(value):
                        yield f"{module}.{name}.{member}", value


def is_ours(member: object) -> bool:
    called = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
    return inspect.isfunction(called) and called.__module__.startswith("twinbus")


PUBLIC = dict(public())


def attribute_docstrings(owner: type) -> Iterator[tuple[str, str]]:
    """Return the public attributes of a class that have a docstring in its source, and the docstring."""
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(body, ast.ClassDef)
    for attribute, below in itertools.pairwise(body.body):
        match attribute, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ) if not name.startswith("_"):
                yield name, text


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_member_is_explained_with_an_example_and_without_clauses(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert text, f"{name} has no docstring"
    assert name in MODULES or "Example" in text, f"{name} has no example: {text}"
    assert not (found := CLAUSE.findall(text)), f"{name} names the clauses {found}"


def test_no_docstring_of_a_public_attribute_names_a_clause() -> None:
    classes = {one for found in PUBLIC.values() if inspect.isclass(found) for one in found.__mro__}
    ours = sorted((one for one in classes if one.__module__.startswith("twinbus")), key=str)
    texts = [(f"{one.__qualname__}.{name}", text) for one in ours for name, text in attribute_docstrings(one)]
    assert "SendAvailabilityOptions.ledger_durability" in dict(texts)
    assert [(name, found) for name, text in texts if (found := CLAUSE.findall(text))] == []


def test_every_module_that_a_version_promises_has_a_page_of_the_site() -> None:
    promise = next(line for line in lines_of("versioning.md") if line.startswith("| `twinbus`"))
    promised = re.findall(r"`([\w.]+)`", promise.split("|")[1])
    assert set(promised) == {*MODULES, "twinbus.ledger.Ledger"}
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [name for name in MODULES if f"- {name}: api/" not in navigation] == []


def test_keywords_are_named() -> None:
    taken = []
    for name, found in PUBLIC.items():
        called = getattr(found, "__func__", found)
        if inspect.isfunction(called) and not WITH_KEYWORDS.search(name):
            kinds = [one.kind for one in inspect.signature(called).parameters.values()]
            taken += [name] * (inspect.Parameter.VAR_KEYWORD in kinds)
    assert taken == []


def test_everything_is_importable_from_twinbus_and_help_shows_it() -> None:
    from twinbus import EntityMode, EntityState, FailoverEngaged, Ledger, Pair, SideState, TwinbusError  # noqa: PLC0415

    assert all((EntityMode, EntityState, FailoverEngaged, Ledger, Pair, SideState, TwinbusError))
    assert re.fullmatch(r"\d+\..*", twinbus.__version__)
    shown = subprocess.run(
        [sys.executable, "-c", "import twinbus; help(twinbus)"], capture_output=True, text=True, check=True
    ).stdout
    assert [name for name in twinbus.__all__ if name not in shown] == ["__version__"]
    assert twinbus.__version__ in shown


def test_every_event_has_its_class() -> None:
    classes = [getattr(twinbus, name) for name in twinbus.__all__]
    named = {one.name: one for one in classes if isinstance(getattr(one, "name", None), str)}
    assert set(named) == set(EVENTS)


def test_every_error_has_a_family() -> None:
    families = (twinbus.CallerError, twinbus.RetryError, twinbus.OperatorError)
    errors = [getattr(twinbus, name) for name in twinbus.__all__ if name.endswith("Error")]
    assert len(errors) > 15
    assert [one for one in errors if one is not twinbus.TwinbusError and not issubclass(one, families)] == []


@pytest.mark.parametrize("pair", [twinbus.Pair, twinbus.aio.Pair], ids=["sync", "aio"])
def test_internals_are_not_public(pair: type) -> None:
    names = {name for name in dir(pair) if not name.startswith("_")}
    assert names & {"emit", "ping", "stop_ping", "timer", "home", "is_alive"} == set()
    assert names >= {"close", "entities", "force_failover", "force_restore", "get_queue_sender", "on"}
