"""Draws a verb's help so that it fits 80 columns, without cutting names of options and variables.

Typer puts names, types and help into six columns of one table. On a small terminal that leaves some 20 columns for the
help, and Rich cuts longer words. `fit_help` replaces Typer's function for one panel of options or arguments: the name
and its type are in one column, or above the help if they are too long for this column. Typer also keeps the line breaks
of a docstring, whose lines are longer than a small terminal. `fit_help` replaces the function that does this:
`fill_paragraphs` joins the lines of a paragraph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType
    from typer.core import TyperArgument, TyperOption

_NAMES: Final = 26


def fit_help() -> None:
    """Use `print_options` and `fill_paragraphs` for the help of all verbs. tests/cli/test_screens.py shows the help."""
    from typer import rich_utils  # noqa: PLC0415 - slow, and needed for help only

    for name, function in (("_print_options_panel", print_options), ("_fix_linebreaks", fill_paragraphs)):
        if hasattr(rich_utils, name):
            setattr(rich_utils, name, function)


def fill_paragraphs(paragraphs: Sequence[str], markup_mode: object) -> str:
    """Return the text of a help, where only indented lines keep their line breaks. Has the signature of Typer's."""
    del markup_mode
    return "\n\n".join(text if "\n  " in text else " ".join(text.split("\n")) for text in paragraphs)


def print_options(
    *, name: str, params: Sequence[TyperOption | TyperArgument], ctx: Any, markup_mode: Any, console: Console
) -> None:
    """Print one panel of options or arguments. Has the signature of Typer's function."""
    from rich.console import Group  # noqa: PLC0415 - slow
    from rich.panel import Panel  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415
    from typer import rich_utils  # noqa: PLC0415

    rows: list[RenderableType] = []
    for param in params:
        text = Text(_names(param, ctx), style=rich_utils.STYLE_OPTION)
        if param.required:
            text.append(" *", style=rich_utils.STYLE_REQUIRED_SHORT)
        told = rich_utils._get_parameter_help(param=param, ctx=ctx, markup_mode=markup_mode)
        if allowed := _range(param):
            told.add_renderable(Text(f"[{allowed}]", style="dim"))
        grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
        grid.add_column(width=_NAMES)
        grid.add_column(ratio=1)
        if text.cell_len > _NAMES:
            rows.append(text)
            text = Text()
        grid.add_row(text, told)
        rows.append(grid)
    if rows:
        border, side = rich_utils.STYLE_OPTIONS_PANEL_BORDER, rich_utils.ALIGN_OPTIONS_PANEL
        console.print(Panel(Group(*rows), border_style=border, title=name, title_align=side))


def _names(param: TyperOption | TyperArgument, ctx: Any) -> str:
    """Return the names of an option, and the type of its value: `--count, -n <int>`. A flag has no type."""
    from typer.core import TyperArgument  # noqa: PLC0415 - slow

    if isinstance(param, TyperArgument):
        return param.metavar or param.name or ""
    names = ", ".join([*param.opts, *param.secondary_opts])
    if param.is_flag or param.name == "help":
        return names
    return f"{names} {param.make_metavar(ctx=ctx).replace(' range', '')}"


def _range(param: TyperOption | TyperArgument) -> str:
    """Return the allowed range of a number: `x>=1`; empty if there is none."""
    describe = getattr(param.type, "_describe_range", None)
    return "" if describe is None else str(describe())
