"""Tools for benchmarks: CPU time and memory of another process, medians with their spread, one table.

The scripts define what is measured and with what it is compared.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

MIB: Final = 1024 * 1024
_TICK: Final = 1 / os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM = 11, 12  # fields of /proc/<pid>/stat after the name, which may hold spaces


class ProcessMeter:
    """CPU time and memory of another process with all its threads, from the kernel."""

    def __init__(self, pid: int) -> None:
        self._folder = Path("/proc") / str(pid)

    def cpu_seconds(self) -> float:
        fields = (self._folder / "stat").read_text().rpartition(") ")[2].split()
        return (int(fields[_USER]) + int(fields[_SYSTEM])) * _TICK

    def rss_megabytes(self) -> float:
        return self._status("VmRSS")

    def peak_rss_megabytes(self) -> float:
        return self._status("VmHWM")

    def _status(self, name: str) -> float:
        lines = (self._folder / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


@dataclass(slots=True)
class Samples:
    """One quantity, measured in every repeat."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def told(self, pattern: str = "{:,.0f}") -> str:
        """Return the median as text, and with several repeats the lowest and the highest."""
        median = pattern.format(self.median)
        if len(self.values) == 1:
            return median
        return f"{median} [dim]({pattern.format(min(self.values))}–{pattern.format(max(self.values))})[/]"


def ratios(samples: Samples, peer: Samples) -> Samples:
    """Return the ratio of each repeat: a busy machine slows down both measurements of a repeat."""
    return Samples([one / other for one, other in zip(samples.values, peer.values, strict=True)])


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table, or a heading that ends in a colon. `met` is None if the figure has no aim."""

    what: str
    measured: str = ""
    beside: str = ""
    ratio: str = ""
    aim: str = ""
    met: bool | None = None
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return "" if self.met is None else "[green]met[/]" if self.met else "[red]missed[/]"


def show(title: str, figures: Sequence[Figure], notes: Sequence[str]) -> None:
    """Print the table."""
    table = Table(title=title, title_justify="left", caption="\n".join(notes), caption_justify="left")
    table.add_column("figure")
    table.add_column("measured", justify="right")
    table.add_column("beside it, in the same run", justify="right")
    table.add_column("ratio", justify="right")
    table.add_column("aim")
    table.add_column("")
    for figure in figures:
        if figure.what.endswith(":"):
            table.add_section()
            table.add_row(f"[bold]{figure.what[:-1]}[/]")
        else:
            table.add_row(figure.what, figure.measured, figure.beside, figure.ratio, figure.aim, figure.verdict)
    Console(width=170, highlight=False).print(table)


def write_json(figures: Sequence[Figure], notes: Sequence[str]) -> None:
    """Write the same data as JSON, with the values of every repeat."""
    found = [asdict(figure) for figure in figures if figure.values]
    for figure in found:
        for shown in ("measured", "beside", "ratio"):
            del figure[shown]
    print(json.dumps({"figures": found, "notes": list(notes)}, indent=2))
