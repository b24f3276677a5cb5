"""Draws the demo's live screen from its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from twinbus.cli.demo.application import PLACES, TOPIC
from twinbus.cli.demo.monitor import DemoEntity, DemoState, SecondCounts

# One colour for each path of a message, in every part of the screen. Primary and backlog are as in the report.
PRIMARY: Final = "bright_blue"
BACKLOG: Final = "yellow"
HOME: Final = "cyan"
RECEIVED: Final = "green"
DOWN: Final = "bold red"
_STATES: Final[Mapping[str, tuple[str, str]]] = {
    "healthy": ("●", PRIMARY),
    "failing": ("◐", BACKLOG),
    "failed_over": ("●", BACKLOG),
    "unusable": ("✕", DOWN),
    "held": ("■", BACKLOG),
    "on_trial": ("◐", PRIMARY),
    "closed": ("○", "dim"),
}
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
# For the second of two values in a bar, which must differ from the first without colours, too.
_SHADES: Final = " ░░░▒▒▒▒▒"
_EIGHTHS: Final = 8
_LABEL, _VALUE, _LEAST_CHART = 20, 8, 20


def draw_screen(
    state: DemoState, seconds: Sequence[SecondCounts], ports: Mapping[str, int], width: int
) -> RenderableType:
    """Return the whole screen, at most `width` columns wide."""
    title = Text(f" {state.seconds:.0f} s ", style="bold")
    if state.errors:
        title.append(f"· {state.errors:,} errors in the application ", style=DOWN)
    head = Rule(title, align="left", style="dim")
    return Group(
        head,
        Text(),
        *_flows(state, ports, seconds),
        Text(),
        _entities(state),
        Text(),
        _charts(state, seconds, width),
    )


# --- paths of messages -----------------------------------------------------------------------------------------------


def _flows(state: DemoState, ports: Mapping[str, int], seconds: Sequence[SecondCounts]) -> list[Text]:
    direct, diverted, received = state.rates
    up = state.primary_up
    first = Text.assemble(
        ("  application ", "bold"),
        _arrow("━━━", direct, PRIMARY, "▶"),
        (" ● primary   " if up else " ✕ primary   ", PRIMARY if up else DOWN),
        (f":{ports['primary']} ", "dim"),
        ("up  " if up else "DOWN", "" if up else DOWN),
        "  ",
        _arrow("━", received, RECEIVED, "▶"),
        (" receivers", "bold"),
    )
    home = seconds[-1].returned if seconds and state.returned else 0
    second = Text.assemble(
        "       ",
        _arrow("┗━━━━━━━━━", diverted, BACKLOG, "▶"),
        (" ● secondary ", PRIMARY),
        (f":{ports['secondary']} ", "dim"),
        "up    ",
        (f"{state.waiting:,} waiting", BACKLOG if state.waiting else "dim"),
        *([("  ↑ ", HOME), (f"{home}/s home" if home else f"{state.returned:,} home", HOME)] if state.returned else []),
    )
    return [first, second]


def _arrow(tail: str, rate: float, colour: str, head: str) -> Text:
    return Text(f"{tail}{f' {rate:.0f}/s '.rjust(8)}━{head}", style=colour if rate >= 0.5 else "dim")


def _entities(state: DemoState) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("  entity", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=13)
    for title, colour in (
        ("primary/s", PRIMARY),
        ("backlog/s", BACKLOG),
        ("diverted", BACKLOG),
        ("received", RECEIVED),
    ):
        table.add_column(title, justify="right", style=colour)
    for one in state.entities:
        sign, colour = _STATES.get(one.state, ("?", "dim"))
        direct, diverted, _ = one.rates
        table.add_row(
            f"  {_name(one)}",
            Text(f"{sign} {one.state.replace('_', ' ')}", style=colour),
            _quiet(direct),
            _quiet(diverted),
            f"{one.flow.diverted:,}",
            f"{one.flow.received:,}",
        )
    return table


def _name(entity: DemoEntity) -> str:
    return f"{entity.path} → {len(PLACES[TOPIC])} subs" if entity.path == TOPIC else entity.path


def _quiet(rate: float) -> Text:
    return Text(f"{rate:.0f}") if rate >= 0.5 else Text("·", style="dim")


# --- second by second ------------------------------------------------------------------------------------------------


def _charts(state: DemoState, seconds: Sequence[SecondCounts], width: int) -> Group:
    """Return charts with one column per second. In an outage the bars of sends change their colour: sends go on."""
    room = max(_LEAST_CHART, width - _LABEL - _VALUE - 2)
    shown = seconds[-room:]
    direct, diverted, received = state.rates
    sent = [((one.flow.direct, PRIMARY), (one.flow.diverted, BACKLOG)) for one in shown]
    depth = [((one.waiting, BACKLOG),) for one in shown]
    arrived = [((one.flow.received, RECEIVED),) for one in shown]
    pings = Text.assemble(*(_ping(one.pings) for one in shown))
    pings_text = f"{state.pings.get(False, 0)}✕ {state.pings.get(True, 0)}✓" if state.pings else "none"
    keys = [Text("sent"), Text("■ to the primary", style=PRIMARY), Text("▒ to the backlog", style=BACKLOG)]
    return Group(
        *_chart(keys, _columns(sent, 3, shaded=BACKLOG), f"{direct + diverted:.0f}/s", room),
        *_chart([Text("in the backlog")], _columns(depth, 2), f"{state.waiting:,}", room),
        *_chart([Text("received")], _columns(arrived, 2), f"{received:.0f}/s", room),
        *_chart([Text("pings")], [pings], pings_text, room),
    )


def _columns(stacks: Sequence[Sequence[tuple[int, str]]], rows: int, shaded: str = "") -> list[Text]:
    """Return the rows of a chart with one stacked bar for each of `stacks`, the uppermost row first.

    A stack has pairs of a value and the colour of the value. The chart has `rows` rows. Values of the colour `shaded`
    are drawn with shades.
    """
    highest = max((sum(value for value, _ in stack) for stack in stacks), default=0) or 1
    lines = [Text() for _ in range(rows)]
    for stack in stacks:
        total = sum(value for value, _ in stack)
        # A total above 0 is always visible. Above the highest bar, there is a small gap to the previous chart.
        height = max(1, round(total / highest * (rows * _EIGHTHS - 1))) if total > 0 else 0
        for row, line in enumerate(reversed(lines)):
            filled = min(_EIGHTHS, max(0, height - row * _EIGHTHS))
            colour = _colour_at(stack, (row + 0.5) / rows * highest)
            line.append((_SHADES if colour == shaded else _BLOCKS)[filled], style=colour)
    return lines


def _colour_at(stack: Sequence[tuple[int, str]], level: float) -> str:
    """Return the colour of the value at this level of the stack. Above the stack, return that of its highest value."""
    found, top = "", 0
    for value, colour in stack:
        if value and (not found or level > top):
            found = colour
        top += value
    return found


def _ping(found: Mapping[bool, int]) -> Text:
    if found.get(True):
        return Text("✓", style=PRIMARY)
    return Text("✕", style=DOWN) if found.get(False) else Text(" ")


def _chart(labels: Sequence[Text], lines: Sequence[Text], value: str, room: int) -> list[Text]:
    drawn = []
    for index, line in enumerate(lines):
        label = labels[index].copy() if index < len(labels) else Text()
        label.pad_left(2)
        label.pad_right(_LABEL - label.cell_len)
        line.pad_right(room - line.cell_len)
        drawn.append(Text.assemble(label, line, "" if index else value.rjust(_VALUE)))
    return drawn
