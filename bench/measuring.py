"""Tools for benchmarks: CPU time and memory of another process, medians with their spread, one table.

The scripts define what is measured and with what it is compared.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

MIB: Final = 1024 * 1024
_TICK: Final = 1 / os.sysconf("SC_CLK_TCK")
_PARENT, _USER, _SYSTEM, _ENDED_USER, _ENDED_SYSTEM = 1, 11, 12, 13, 14
"""Fields of /proc/<pid>/stat after the name, which may hold spaces."""
_SAMPLE_INTERVAL: Final = 0.2


class ProcessMeter:
    """CPU time and memory of another process with all its threads, from the kernel."""

    def __init__(self, pid: int) -> None:
        self._folder = Path("/proc") / str(pid)

    def cpu_seconds(self) -> float:
        return self._ticks(_USER, _SYSTEM)

    def ended_children_seconds(self) -> float:
        """CPU time of the processes that this process has started and whose end it has awaited."""
        return self._ticks(_ENDED_USER, _ENDED_SYSTEM)

    def parent(self) -> int:
        return int(self._fields()[_PARENT])

    def rss_megabytes(self) -> float:
        return self._status("VmRSS")

    def peak_rss_megabytes(self) -> float:
        return self._status("VmHWM")

    def _fields(self) -> list[str]:
        return (self._folder / "stat").read_text().rpartition(") ")[2].split()

    def _ticks(self, *places: int) -> float:
        fields = self._fields()
        return sum(int(fields[place]) for place in places) * _TICK

    def _status(self, name: str) -> float:
        lines = (self._folder / "status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


class ProcessTree:
    """CPU time and memory of all processes that a process has started, and that these have started."""

    def __init__(self, root: int) -> None:
        self._root = root

    def cpu_seconds(self) -> float:
        """CPU time, also of processes that have ended."""
        total = ProcessMeter(self._root).ended_children_seconds()
        for meter in self.meters():
            with suppress(OSError):  # the process has ended
                total += meter.cpu_seconds() + meter.ended_children_seconds()
        return total

    def rss_megabytes(self) -> float:
        total = 0.0
        for meter in self.meters():
            with suppress(OSError, StopIteration):  # the process has ended
                total += meter.rss_megabytes()
        return total

    def meters(self) -> list[ProcessMeter]:
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # the process has ended
                parents[int(stat.parent.name)] = ProcessMeter(int(stat.parent.name)).parent()
        found, added = set[int](), {self._root}
        while added:
            added = {pid for pid, parent in parents.items() if parent in added}
            found |= added
        return [ProcessMeter(pid) for pid in found]


class PeakMeter:
    """The highest value of a measurement while a block runs. A thread measures again and again."""

    def __init__(self, measure: Callable[[], float]) -> None:
        self.most = 0.0
        self._measure = measure
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PeakMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_SAMPLE_INTERVAL):
            self.most = max(self.most, self._measure())


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


@dataclass(slots=True)
class Spent:
    """Seconds and processor time of the same work, measured in every repeat."""

    seconds: Samples = field(default_factory=Samples)
    cpu: Samples = field(default_factory=Samples)

    def timed(self, call: Callable[[], Any], cpu: Callable[[], float]) -> Any:
        """Return what `call` returns, and measure it. `cpu` returns the processor time so far."""
        start, used = time.perf_counter(), cpu()
        answer = call()
        self.seconds.values.append(time.perf_counter() - start)
        self.cpu.values.append(cpu() - used)
        return answer


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


def compared(
    what: str, ours: Samples, theirs: Samples, peer: str, *, most: float | None = None, pattern: str = "{:.2f}"
) -> Figure:
    """Return the figure of seconds beside those of a peer. `most` is the highest ratio that is aimed at."""
    ratio = ratios(ours, theirs)
    return Figure(
        what,
        f"{ours.told(pattern)} s",
        f"{peer} {theirs.told(pattern)} s",
        ratio.told("{:.2f}"),
        "" if most is None else f"≤ {most:g}",
        None if most is None else ratio.median <= most,
        {"ours": ours.values, peer: theirs.values},
    )


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
