"""A table of rows: what each column says, and that it can be read on a phone, where every row becomes a card."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from twinbus.pipeline.overview import Some, Values
from twinbus.report.markup import Markup, element
from twinbus.report.measures import number, span


@dataclass(frozen=True, slots=True)
class Column:
    """`say` makes text or markup of a row; `look` is `name`, `number` or nothing."""

    title: str
    say: Callable[[Values], object]
    look: str = ""


def counted(title: str, name: str) -> Column:
    return Column(title, lambda row: number(row[name]), look="number")


def spanned(title: str, name: str) -> Column:
    return Column(title, lambda row: span(row[name]), look="number")


def table(
    columns: Iterable[Column], rows: Iterable[Values], foot: Markup | None = None, **attributes: object
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


def more(some: Some, where: str) -> Markup:
    """How many are not shown."""
    rest = some.total - len(some.rows)
    return element("p", f"… and {number(rest)} more; {where}.", class_="note") if rest else Markup()
