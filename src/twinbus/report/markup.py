"""HTML and SVG that cannot be broken out of: whatever is not markup already is escaped, attributes too.

What nobody can see is shown as a mark: control characters, characters that change the writing direction, halves of
pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from typing import Final

from twinbus.pipeline import RowValues, TopRows
from twinbus.report.formatting import number, span

_UNSEEN: Final = "\N{REPLACEMENT CHARACTER}"
# Names and ids have limits of their own on a service; a ledger may hold anything.
_LONGEST: Final = 300


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def plain(value: object) -> str:
    """As a person may see it: cut where it is too long, and with a mark for what cannot be seen."""
    said = str(value)
    said = said if len(said) <= _LONGEST else f"{said[: _LONGEST - 1]}…"
    return said if said.isprintable() else "".join(one if one.isprintable() else _UNSEEN for one in said)


def text(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(escape(plain(value)))


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """`class_` and `aria_label` are `class` and `aria-label`; None is left out, True has no value."""
    said = "".join(
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{text(value)}"')
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{said}>{joined(*children)}</{tag}>")


def joined(*children: object) -> Markup:
    return Markup("".join(text(child) for child in children))


@dataclass(frozen=True, slots=True)
class Column:
    """`say` makes text or markup of a row; `look` is `name`, `number` or nothing."""

    title: str
    say: Callable[[RowValues], object]
    look: str = ""


def counted(title: str, name: str) -> Column:
    return Column(title, lambda row: number(row[name]), look="number")


def spanned(title: str, name: str) -> Column:
    return Column(title, lambda row: span(row[name]), look="number")


def table(
    columns: Iterable[Column], rows: Iterable[RowValues], foot: Markup | None = None, **attributes: object
) -> Markup:
    columns = list(columns)
    head = element("tr", *(element("th", one.title, scope="col", class_=one.look or None) for one in columns))
    body = [element("tr", *(_cell(one, one.say(row)) for one in columns)) for row in rows]
    made = element("table", element("thead", head), element("tbody", *body), foot or "", **attributes)
    return element("div", made, class_="scroll")


def _cell(column: Column, said: object) -> Markup:
    """On a phone, where a row is a card, a nought is left out."""
    looks = " ".join(filter(None, (column.look, "nought" if said == "0" else "")))
    return element("td", said, class_=looks or None, data_label=column.title)


def more(some: TopRows, where: str) -> Markup:
    """How many are not shown."""
    rest = some.total - len(some.rows)
    return element("p", f"… and {number(rest)} more; {where}.", class_="note") if rest else Markup()
