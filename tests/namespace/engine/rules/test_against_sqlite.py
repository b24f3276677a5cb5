"""Filters against an independent evaluator: SQLite, for the part of the language that both have.

Both have integers and texts (never mixed), null for what is missing, LIKE by case, and no division by zero.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.amqp import build_message
from twinbus.namespace.engine.rules.compiler import compile_filter

from .messages import view

NUMBERS, TEXTS = ("n", "m", "k"), ("s", "t")
LETTERS = "ab%_!"

integers = st.integers(-6, 6)
texts = st.text(LETTERS, max_size=4)
rows = st.fixed_dictionaries(
    {
        **{name: st.none() | integers for name in NUMBERS},
        **{name: st.none() | texts for name in TEXTS},
    }
)
comparison = st.sampled_from(("=", "<>", "!=", "<", "<=", ">", ">="))


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def number(value: int) -> str:
    return f"({value})" if value < 0 else str(value)


def calculated(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, st.sampled_from(("+", "-", "*")), inner).map(lambda part: f"({' '.join(part)})"),
        st.tuples(inner, st.sampled_from(("/", "%")), integers.filter(bool).map(number)).map(
            lambda part: f"({' '.join(part)})"
        ),
        inner.map(lambda part: f"(- {part})"),
    )


numeric = st.recursive(
    st.one_of(st.sampled_from(NUMBERS), integers.map(number), st.just("NULL")), calculated, max_leaves=4
)
textual = st.one_of(st.sampled_from(TEXTS), texts.map(quoted), st.just("NULL"))


def listed(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    choices = st.lists(values, min_size=1, max_size=3).map(", ".join)
    return st.tuples(values, st.sampled_from(("IN", "NOT IN")), choices).map(lambda p: f"{p[0]} {p[1]} ({p[2]})")


def escaped(pattern: str) -> str:
    """Put the escape character only before characters that need it: elsewhere the two languages differ."""
    return quoted(pattern.replace("!", "!!"))


simple = st.one_of(
    st.tuples(numeric, comparison, numeric).map(" ".join),
    st.tuples(textual, comparison, textual).map(" ".join),
    listed(numeric),
    listed(textual),
    st.tuples(textual, st.sampled_from(("LIKE", "NOT LIKE")), textual).map(" ".join),
    st.tuples(st.sampled_from(TEXTS), texts).map(lambda p: f"{p[0]} LIKE {escaped(p[1])} ESCAPE '!'"),
    st.tuples(st.sampled_from(NUMBERS + TEXTS), st.sampled_from(("IS NULL", "IS NOT NULL"))).map(" ".join),
)
conditions = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(("AND", "OR")), inner).map(" ".join),
        inner.map(lambda part: f"NOT {part}"),
        inner.map(lambda part: f"({part})"),
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def database() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA case_sensitive_like = ON")
    connection.execute("CREATE TABLE message (n INTEGER, m INTEGER, k INTEGER, s TEXT, t TEXT)")
    yield connection
    connection.close()


@given(conditions, rows)
def test_sqlite_evaluates_the_expression_to_the_same_value(
    database: sqlite3.Connection, condition: str, row: dict[str, int | str | None]
) -> None:
    database.execute("DELETE FROM message")
    database.execute("INSERT INTO message VALUES (:n, :m, :k, :s, :t)", row)
    (expected,) = database.execute(f"SELECT {condition} FROM message").fetchone()  # noqa: S608  # made above
    present = {name: value for name, value in row.items() if value is not None}
    found = compile_filter(condition, {}).evaluate(view(build_message(application_properties=present)))
    assert found is (None if expected is None else bool(expected))
