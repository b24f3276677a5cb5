"""Charts that can have any width. The shapes are SVG without text; texts are HTML elements, which do not change size.

In the SVG, each time bucket is one unit wide, and its height shows its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from twinbus.report.formatting import axis_label, axis_top, time_marks
from twinbus.report.markup import Markup, element, join

_HEIGHT: Final = 100
# The least height of a value above zero, so that it is visible beside much larger values.
_LEAST_HEIGHT: Final = 1.5
_MARKS: Final = 8


@dataclass(frozen=True, slots=True)
class ChartLayer:
    """One series of values in a chart."""

    css: str
    """CSS class, which sets the colour."""
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The time from `first` to `last`, in milliseconds, divided into buckets."""

    first: int
    last: int
    buckets: int

    def share(self, instant: int) -> float:
        """Returns the position of a time in percent of the width: 0 before `first`, 100 after `last`."""
        return round(min(max((instant - self.first) / (self.last - self.first), 0), 1) * 100, 3)

    def marks(self) -> list[tuple[float, str]]:
        """Returns position (in percent of the width) and text of each mark of the axis."""
        return [(self.share(instant), label) for instant, label in time_marks(self.first, self.last, _MARKS)]


def plot(
    axis: TimeAxis, layers: Sequence[ChartLayer], shades: Sequence[tuple[int, int]], label: str, *, low: bool
) -> Markup:
    """Returns a stacked chart of the layers, with the marks of both axes.

    `shades` are spans of time that are tinted.
    """
    totals = [sum(values) for values in zip(*(layer.values for layer in layers), strict=True)]
    top = axis_top(max(totals, default=0))
    tinted = [
        _box(axis.share(start) * axis.buckets / 100, axis.share(end) * axis.buckets / 100, "shade")
        for start, end in shades
    ]
    lines = [_line(share * axis.buckets / 100, 0, 0, _HEIGHT) for share, _ in axis.marks()]
    lines += [_line(0, height, axis.buckets, 0) for height in (0, _HEIGHT / 2)]
    paths, ground = [], [0.0] * axis.buckets
    for layer in layers:
        roof = [below + value for below, value in zip(ground, layer.values, strict=True)]
        paths.append(element("path", class_=layer.css, d=Markup(area(ground, roof, top))))
        ground = roof
    drawing = element(
        "svg",
        *tinted,
        *lines,
        *paths,
        viewBox=f"0 0 {axis.buckets} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
    )
    heights = [
        element("span", axis_label(top * part), class_="tick", style=f"bottom:{part * 100:g}%", aria_hidden="true")
        for part in (0.5, 1)
    ]
    return element("div", *heights, drawing, class_="plot low" if low else "plot")


def area(ground: Sequence[float], roof: Sequence[float], top: float) -> str:
    """Returns an SVG path around the area between two lines of steps: along the roof, then back along the ground."""
    over = [_height(value, top, value > below) for value, below in zip(roof, ground, strict=True)]
    under = [min(_height(below, top, below > 0), high) for below, high in zip(ground, over, strict=True)]
    return f"M0 {_y(under[0])}{_steps(over)}{_steps_back(under)}Z"


def _height(value: float, top: float, seen: bool) -> float:
    height = value / top * _HEIGHT
    return max(height, _LEAST_HEIGHT) if seen else height


def _y(height: float) -> str:
    return f"{_HEIGHT - height:.1f}".removesuffix(".0")


def _steps(heights: Sequence[float]) -> str:
    steps, last = [], ""
    for index, height in enumerate(heights):
        if (y := _y(height)) != last:
            steps.append((f"H{index}" if index else "") + f"V{y}")
            last = y
    return "".join(steps) + f"H{len(heights)}"


def _steps_back(heights: Sequence[float]) -> str:
    steps, last = [], ""
    for index in range(len(heights), 0, -1):
        if (y := _y(heights[index - 1])) != last:
            steps.append((f"H{index}" if index < len(heights) else "") + f"V{y}")
            last = y
    return "".join(steps) + "H0"


def _box(start: float, end: float, css: str) -> Markup:
    return element("rect", class_=css, x=f"{start:.2f}", y=0, width=f"{max(end - start, 0):.2f}", height=_HEIGHT)


def _line(x: float, y: float, width: float, height: float) -> Markup:
    return element("path", class_="rule", d=f"M{x:.2f} {y:g}l{width:g} {height:g}")


def time_axis(axis: TimeAxis) -> Markup:
    """Returns the texts under a chart. On a small screen, every second text is hidden."""
    found = [
        element("span", label, class_=f"mark {_side(share)}{' minor' if index % 2 else ''}", style=f"left:{share}%")
        for index, (share, label) in enumerate(axis.marks())
    ]
    return element("div", *found, class_="axis", aria_hidden="true")


def _side(share: float) -> str:
    """Returns the alignment of a text under a chart, chosen so that the text does not extend beyond the chart."""
    return "begin" if share < 4 else "end" if share > 96 else "middle"


def bar(css: str, share: float) -> Markup:
    """Returns a bar that fills the given share (0 to 1) of its width."""
    return element("div", element("div", class_=f"fill {css}", style=f"width:{share * 100:.2f}%"), class_="bar")


def span_bar(axis: TimeAxis, css: str, start: int, end: int, tip: str) -> Markup:
    """Returns a bar on a time axis, from `start` to `end`. The mouse pointer shows the text `tip`."""
    left = axis.share(start)
    width = max(axis.share(end) - left, 0)
    return element("span", class_=f"span {css}", style=f"left:{left}%;width:{width:.3f}%", data_tip=tip)


def legend(*entries: tuple[str, str]) -> Markup:
    """Returns a legend. Each entry is a CSS class, for the colour, and its meaning."""
    return element(
        "p",
        join(*(element("span", element("i", class_=f"swatch {css}"), label, class_="key") for css, label in entries)),
        class_="legend",
    )
