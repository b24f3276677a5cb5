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
from typing import TYPE_CHECKING, Final

from twinbus.cli.terminal import console
from twinbus.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Cell = str | int | float | None
# Rich draws a border and a space on each side of a cell.
_CELL_FRAME: Final = 3
_TABLE_FRAME: Final = 1


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    wrapped: Collection[str] = (),
    optional: Collection[str] = (),
) -> None:
    """Print rows with these columns. A column in `optional` is left out if no row has a value in it."""
    texts = [[_text(cell) for cell in row] for row in rows]
    shown = [number for number, name in enumerate(columns) if name not in optional or any(row[number] for row in texts)]
    names = [columns[number] for number in shown]
    cells = [[row[number] for number in shown] for row in texts]
    numbers = [all(isinstance(row[number], int | float | None) for row in rows) for number in shown]
    width = _width()
    screen = console()
    if width is None or _least_width(names, cells, wrapped) <= width:
        if width is None:
            screen.width = max(screen.width, _least_width(names, cells, ()))
        screen.print(_table(names, cells, numbers, wrapped))
    else:
        _print_fields(screen, names, cells)


def _text(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:,.3f}"
    return "" if cell is None else f"{cell:,}" if isinstance(cell, int) else printable(cell)


def _width() -> int | None:
    """Return the columns of the terminal, or None if the output goes to no terminal and COLUMNS is not set."""
    return console().width if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else None


def _least_width(names: Sequence[str], rows: Sequence[Sequence[str]], wrapped: Collection[str]) -> int:
    from rich.cells import cell_len  # noqa: PLC0415 - slow

    total = _TABLE_FRAME
    for number, name in enumerate(names):
        column = [name, *(row[number] for row in rows)]
        parts = [word for text in column for word in text.split()] if name in wrapped else column
        total += max((cell_len(part) for part in parts), default=0) + _CELL_FRAME
    return total


def _table(
    names: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[bool], wrapped: Collection[str]
) -> Table:
    from rich.table import Table  # noqa: PLC0415 - slow
    from rich.text import Text  # noqa: PLC0415

    table = Table()
    for name, is_number in zip(names, numbers, strict=True):
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name not in wrapped)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


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
