"""Prints rows as a table if the terminal is wide enough for the table, and else as a list of fields. Breaks no word.

A cell that a user copies, such as an entity, an id or a time, must be whole on one line. Rich would cut or fold the
cells of a table that is too wide. So the width is computed first: only the columns in `wrapped` may be narrower than
their cells, and each of them stays as wide as its longest word.

Output that goes to a file or to another program has no width: the table is as wide as its cells.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Final, Literal

from twinbus.cli.terminal import console
from twinbus.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Cell = str | int | float | None
# Rich draws a border and a space on each side of a cell.
_CELL_FRAME: Final = 3
_TABLE_FRAME: Final = 1
# Columns of a table without borders have this distance.
_GAP: Final = 2


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    wrapped: Collection[str] = (),
    optional: Collection[str] = (),
) -> None:
    """Print rows with these columns. A column in `optional` is left out if no row has a value in it.

    A table that is too wide is printed without borders and with titles of several lines; one that is still too wide, as
    a list of fields.
    """
    texts = [[_text(cell) for cell in row] for row in rows]
    shown = [number for number, name in enumerate(columns) if name not in optional or any(row[number] for row in texts)]
    table = _FittedTable(
        [columns[number] for number in shown],
        [[row[number] for number in shown] for row in texts],
        [all(isinstance(row[number], int | float | None) for row in rows) for number in shown],
        wrapped,
    )
    screen, width = console(), _width()
    if width is None:
        screen.width = max(screen.width, table.bordered_width(()))
        screen.print(table.bordered())
    elif table.bordered_width(wrapped) <= width:
        screen.print(table.bordered())
    elif table.plain_width() <= width:
        screen.print(table.plain())
    else:
        _print_fields(screen, table.names, table.rows)


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:,.3f}"
    return "" if cell is None else f"{cell:,}" if isinstance(cell, int) else printable(cell)


def _width() -> int | None:
    """Return the columns of the terminal, or None if the output goes to no terminal and COLUMNS is not set."""
    return console().width if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else None


class _FittedTable:
    """The cells of a table, the widths that it needs, and the table itself, with borders and without."""

    def __init__(
        self, names: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[bool], wrapped: Collection[str]
    ) -> None:
        self.names = names
        self.rows = rows
        self._numbers = numbers
        self._wrapped = wrapped

    def bordered_width(self, wrapped: Collection[str]) -> int:
        """Return the least width with borders, if the columns in `wrapped` are as narrow as their longest words."""
        widths = (self._widest(number, name in wrapped, name in wrapped) for number, name in enumerate(self.names))
        return _TABLE_FRAME + sum(width + _CELL_FRAME for width in widths)

    def plain_width(self) -> int:
        """Return the least width without borders. Titles have several lines."""
        widths = [self._widest(number, name in self._wrapped, True) for number, name in enumerate(self.names)]
        return sum(widths) + _GAP * (len(widths) - 1)

    def bordered(self) -> Table:
        from rich.table import Table  # noqa: PLC0415 - slow

        return self._filled(Table(), list(self.names))

    def plain(self) -> Table:
        from rich.table import Table  # noqa: PLC0415 - slow

        titles = [
            "\n".join(wrap(name, self._widest(number, name in self._wrapped, True), break_long_words=False))
            for number, name in enumerate(self.names)
        ]
        return self._filled(Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim"), titles)

    def _filled(self, table: Table, titles: Sequence[str]) -> Table:
        from rich.text import Text  # noqa: PLC0415 - slow

        for name, title, is_number in zip(self.names, titles, self._numbers, strict=True):
            side: Literal["left", "right"] = "right" if is_number else "left"
            table.add_column(title, justify=side, no_wrap=name not in self._wrapped, vertical="top")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def _widest(self, number: int, cells_wrapped: bool, title_wrapped: bool) -> int:
        from rich.cells import cell_len  # noqa: PLC0415 - slow

        name = self.names[number]
        parts = name.split() if title_wrapped else [name]
        for row in self.rows:
            parts += row[number].split() if cells_wrapped else [row[number]]
        return max(map(cell_len, parts), default=0)


def _print_fields(screen: Console, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print each row as lines of name and value. A long value continues below itself."""
    from rich.table import Table  # noqa: PLC0415 - slow
    from rich.text import Text  # noqa: PLC0415

    for number, row in enumerate(rows):
        if number:
            screen.print()
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        # A word that is longer than the line, such as a long path, continues on the next line.
        grid.add_column(overflow="fold")
        for name, value in zip(names, row, strict=True):
            if value:
                grid.add_row(name, Text(value))
        screen.print(grid)
