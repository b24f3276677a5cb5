"""How the demo looks while it runs: a picture that lives on a terminal. Elsewhere it is `lines`.

What is seen is told by `sight`; nothing is counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from twinbus.cli.demo.application import RECEIVERS, TOPIC
from twinbus.cli.demo.sight import EntitySight, Second, Sight

# One hue for each way a message may take, in every part of the picture.
PRIMARY: Final = "green"
BACKLOG: Final = "yellow"
HOME: Final = "cyan"
RECEIVED: Final = "blue"
DOWN: Final = "bold red"
_STATES: Final[Mapping[str, tuple[str, str]]] = {
    "healthy": ("●", PRIMARY),
    "failing": ("◐", BACKLOG),
    "failed_over": ("●", BACKLOG),
    "unusable": ("✕", DOWN),
    "closed": ("○", "dim"),
}
_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_LABEL, _VALUE, _LEAST_CHART = 16, 9, 20


def picture(
    chapter: str, sight: Sight, seconds: Sequence[Second], ports: Mapping[str, int], width: int
) -> RenderableType:
    """All of it, at most so wide."""
    head = Rule(Text(f" {chapter} ", style="bold"), align="left", style="dim")
    return Group(
        head, Text(), *_flows(sight, ports, seconds), Text(), _entities(sight), Text(), _charts(sight, seconds, width)
    )


# --- the way of a message --------------------------------------------------------------------------------------------


def _flows(sight: Sight, ports: Mapping[str, int], seconds: Sequence[Second]) -> list[Text]:
    direct, diverted, received = sight.rates
    up = sight.primary_up
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
    home = seconds[-1].returned if seconds and sight.returned else 0
    second = Text.assemble(
        "       ",
        _arrow("┗━━━━━━━━━", diverted, BACKLOG, "▶"),
        (" ● secondary ", PRIMARY),
        (f":{ports['secondary']} ", "dim"),
        "up    ",
        (f"{sight.waiting:,} waiting", BACKLOG if sight.waiting else "dim"),
        *([("  ↑ ", HOME), (f"{home}/s home" if home else f"{sight.returned:,} home", HOME)] if sight.returned else []),
    )
    return [first, second]


def _arrow(tail: str, rate: float, hue: str, head: str) -> Text:
    return Text(f"{tail}{f' {rate:.0f}/s '.rjust(8)}━{head}", style=hue if rate >= 0.5 else "dim")


def _entities(sight: Sight) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("  entity", no_wrap=True)
    table.add_column("state", no_wrap=True, min_width=13)
    for title, hue in (("primary/s", PRIMARY), ("backlog/s", BACKLOG), ("diverted", BACKLOG), ("received", RECEIVED)):
        table.add_column(title, justify="right", style=hue)
    for one in sight.entities:
        sign, hue = _STATES.get(one.state, ("?", "dim"))
        direct, diverted, _ = one.rates
        table.add_row(
            f"  {_name(one)}",
            Text(f"{sign} {one.state.replace('_', ' ')}", style=hue),
            _quiet(direct),
            _quiet(diverted),
            f"{one.flow.diverted:,}",
            f"{one.flow.received:,}",
        )
    return table


def _name(entity: EntitySight) -> str:
    return f"{entity.path} → {len(RECEIVERS[TOPIC])} subs" if entity.path == TOPIC else entity.path


def _quiet(rate: float) -> Text:
    return Text(f"{rate:.0f}") if rate >= 0.5 else Text("·", style="dim")


# --- second by second ------------------------------------------------------------------------------------------------


def _charts(sight: Sight, seconds: Sequence[Second], width: int) -> Group:
    room = max(_LEAST_CHART, width - _LABEL - _VALUE - 2)
    shown = seconds[-room:]
    direct, diverted, received = sight.rates
    rows: list[tuple[str, Callable[[Second], int], str, str]] = [
        ("to the primary", lambda one: one.flow.direct, PRIMARY, f"{direct:.0f}/s"),
        ("to the backlog", lambda one: one.flow.diverted, BACKLOG, f"{diverted:.0f}/s"),
        ("backlog depth", lambda one: one.waiting, BACKLOG, f"{sight.waiting:,}"),
        ("brought home", lambda one: one.returned, HOME, f"{sight.returned:,}"),
        ("received", lambda one: one.flow.received, RECEIVED, f"{received:.0f}/s"),
    ]
    drawn = [_line(label, _bars([of(one) for one in shown], hue), value, room) for label, of, hue, value in rows]
    pings = Text.assemble(*(_ping(one.pings) for one in shown))
    told = f"{sight.pings.get(False, 0)}✕ {sight.pings.get(True, 0)}✓" if sight.pings else "none"
    return Group(*drawn, _line("pings", pings, told, room))


def _bars(values: Sequence[int], hue: str) -> Text:
    highest = max((*values, 1))
    # What is more than nothing is seen.
    heights = [0 if value <= 0 else max(1, round(value / highest * 8)) for value in values]
    return Text("".join(_BLOCKS[height] for height in heights), style=hue)


def _ping(found: Mapping[bool, int]) -> Text:
    if found.get(True):
        return Text("✓", style=PRIMARY)
    return Text("✕", style=DOWN) if found.get(False) else Text(" ")


def _line(label: str, chart: Text, value: str, room: int) -> Text:
    return Text.assemble((f"  {label}".ljust(_LABEL), "dim"), chart, " " * (room - chart.cell_len), value.rjust(_VALUE))
