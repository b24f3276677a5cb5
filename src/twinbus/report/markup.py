"""HTML and SVG elements and tables. Every value that is not `Markup` is escaped, in attributes too.

Invisible characters (control characters, characters that change the writing direction, surrogates) are replaced by the
character U+FFFD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from typing import Final

from twinbus.pipeline import RowValues, TopRows
from twinbus.report.formatting import duration, number

_INVISIBLE: Final = "\N{REPLACEMENT CHARACTER}"
# Longer texts are cut. The service limits the length of names and ids, but a ledger may contain a text of any length.
_MOST_CHARACTERS: Final = 300


class Markup(str):
    """Text that is markup and must not be escaped."""

    __slots__ = ()


def plain(value: object) -> str:
    """Returns a value as visible text, cut if it is too long."""
    content = str(value)
    return _visible(content if len(content) <= _MOST_CHARACTERS else f"{content[: _MOST_CHARACTERS - 1]}…")


def _visible(content: str) -> str:
    return content if content.isprintable() else "".join(one if one.isprintable() else _INVISIBLE for one in content)


def whole(content: str) -> Markup:
    """Returns a text of limited length as escaped text, without a cut."""
    return Markup(escape(_visible(content)))


def escaped(value: object) -> Markup:
    """Returns markup as it is, and any other value as escaped text."""
    return value if isinstance(value, Markup) else Markup(escape(plain(value)))


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """Returns an element. `class_` and `aria_label` become `class` and `aria-label`.

    If an attribute is None, it is not written. If it is True, its name is written without a value.
    """
    content = "".join(
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(value)}"')
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{content}>{join(*children)}</{tag}>")


def join(*children: object) -> Markup:
    """Returns the children as markup, one after the other."""
    return Markup("".join(escaped(child) for child in children))


# --- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table."""

    title: str
    cell: Callable[[RowValues], object]
    """Returns the content of the cell in a row, as text or markup."""
    css: str = ""
    """CSS class of the column, such as `name` or `number`."""


def number_column(title: str, name: str) -> TableColumn:
    """Returns a column that shows the number `row[name]`."""
    return TableColumn(title, lambda row: number(row[name]), css="number")


def duration_column(title: str, name: str) -> TableColumn:
    """Returns a column that shows the duration `row[name]`, which is in seconds."""
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
    # The CSS class `nought` hides a zero if the row is shown as a card.
    classes = " ".join(filter(None, (column.css, "nought" if content == "0" else "")))
    return element("td", content, class_=classes or None, data_label=column.title)


def more_note(shown: TopRows, where: str) -> Markup:
    """Returns a note that says how many rows are not shown and where to find them; empty if all rows are shown."""
    rest = shown.total - len(shown.rows)
    return element("p", f"… and {number(rest)} more; {where}.", class_="note") if rest else Markup()
