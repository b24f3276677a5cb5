"""HTML and SVG elements and tables. Everything that is not `Markup` is escaped, in attributes too.

Invisible characters are shown as a mark: control characters, characters that change the writing direction, surrogates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from typing import Final

from twinbus.pipeline import RowValues, TopRows
from twinbus.report.formatting import duration, number

_INVISIBLE: Final = "\N{REPLACEMENT CHARACTER}"
# A service limits the length of names and ids, but a ledger may hold anything.
_MOST_CHARACTERS: Final = 300


class Markup(str):
    """Text that is markup and must not be escaped."""

    __slots__ = ()


def plain(value: object) -> str:
    """Returns a value as visible text, cut if it is too long."""
    content = str(value)
    content = content if len(content) <= _MOST_CHARACTERS else f"{content[: _MOST_CHARACTERS - 1]}…"
    return content if content.isprintable() else "".join(one if one.isprintable() else _INVISIBLE for one in content)


def escaped(value: object) -> Markup:
    """Returns markup as it is, and any other value as escaped text."""
    return value if isinstance(value, Markup) else Markup(escape(plain(value)))


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """Returns an element. `class_` and `aria_label` become `class` and `aria-label`.

    An attribute that is None is left out; one that is True has no value.
    """
    content = "".join(
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(value)}"')
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{content}>{join(*children)}</{tag}>")


def join(*children: object) -> Markup:
    """Returns the children one after the other."""
    return Markup("".join(escaped(child) for child in children))


# --- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table."""

    title: str
    cell: Callable[[RowValues], object]
    """Returns text or markup for a row."""
    css: str = ""
    """Class of the style sheet, such as `name` or `number`."""


def number_column(title: str, name: str) -> TableColumn:
    """Returns a column of numbers, from the value with this name."""
    return TableColumn(title, lambda row: number(row[name]), css="number")


def duration_column(title: str, name: str) -> TableColumn:
    """Returns a column of durations, from the seconds with this name."""
    return TableColumn(title, lambda row: duration(row[name]), css="number")


def table(
    columns: Iterable[TableColumn], rows: Iterable[RowValues], foot: Markup | None = None, **attributes: object
) -> Markup:
    """Returns a table. On a phone, each row is shown as a card with the column titles as labels."""
    columns = list(columns)
    head = element("tr", *(element("th", one.title, scope="col", class_=one.css or None) for one in columns))
    body = [element("tr", *(_cell(one, one.cell(row)) for one in columns)) for row in rows]
    made = element("table", element("thead", head), element("tbody", *body), foot or "", **attributes)
    return element("div", made, class_="scroll")


def _cell(column: TableColumn, content: object) -> Markup:
    # The class `nought` hides a zero on a card.
    classes = " ".join(filter(None, (column.css, "nought" if content == "0" else "")))
    return element("td", content, class_=classes or None, data_label=column.title)


def more_note(shown: TopRows, where: str) -> Markup:
    """Returns a note on how many rows are not shown and where they are; empty if all are shown."""
    rest = shown.total - len(shown.rows)
    return element("p", f"… and {number(rest)} more; {where}.", class_="note") if rest else Markup()
