"""Drawings that stretch to any width: shapes are SVG without texts, texts are HTML beside them at their own size.

A value is a height in its bucket, a bucket is one unit wide. What the numbers mean is not decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from twinbus.report.formatting import ceiling, marks, short
from twinbus.report.markup import Markup, element, joined

_HEIGHT: Final = 100
# What is there is seen, however small it is beside the largest.
_LEAST: Final = 1.5
_MARKS: Final = 8


@dataclass(frozen=True, slots=True)
class Layer:
    """`look` is a class of the style sheet: the colour of a meaning."""

    look: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Axis:
    """Of time: from `first` to `last`, in milliseconds, with so many buckets."""

    first: int
    last: int
    buckets: int

    def share(self, instant: int) -> float:
        """Where an instant is, in hundredths of the width; what is beyond an end is at that end."""
        return round(min(max((instant - self.first) / (self.last - self.first), 0), 1) * 100, 3)

    def marks(self) -> list[tuple[float, str]]:
        return [(self.share(instant), said) for instant, said in marks(self.first, self.last, _MARKS)]


def plot(axis: Axis, layers: Sequence[Layer], shades: Sequence[tuple[int, int]], label: str, *, low: bool) -> Markup:
    """Layers upon each other, over the marks of both axes. `shades`: spans of time that are tinted."""
    totals = [sum(values) for values in zip(*(layer.values for layer in layers), strict=True)]
    top = ceiling(max(totals, default=0))
    tinted = [
        _box(axis.share(start) * axis.buckets / 100, axis.share(end) * axis.buckets / 100, "shade")
        for start, end in shades
    ]
    lines = [_line(share * axis.buckets / 100, 0, 0, _HEIGHT) for share, _ in axis.marks()]
    lines += [_line(0, height, axis.buckets, 0) for height in (0, _HEIGHT / 2)]
    paths, ground = [], [0.0] * axis.buckets
    for layer in layers:
        roof = [below + value for below, value in zip(ground, layer.values, strict=True)]
        paths.append(element("path", class_=layer.look, d=Markup(area(ground, roof, top))))
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
        element("span", short(top * part), class_="tick", style=f"bottom:{part * 100:g}%", aria_hidden="true")
        for part in (0.5, 1)
    ]
    return element("div", *heights, drawing, class_="plot low" if low else "plot")


def area(ground: Sequence[float], roof: Sequence[float], top: float) -> str:
    """A path of steps: along the roof to the end, and back along the ground."""
    over = [_height(value, top, value > below) for value, below in zip(roof, ground, strict=True)]
    under = [min(_height(below, top, below > 0), high) for below, high in zip(ground, over, strict=True)]
    return f"M0 {_y(under[0])}{_steps(over)}{_steps_back(under)}Z"


def _height(value: float, top: float, seen: bool) -> float:
    height = value / top * _HEIGHT
    return max(height, _LEAST) if seen else height


def _y(height: float) -> str:
    return f"{_HEIGHT - height:.1f}".removesuffix(".0")


def _steps(heights: Sequence[float]) -> str:
    said, last = [], ""
    for place, height in enumerate(heights):
        if (y := _y(height)) != last:
            said.append((f"H{place}" if place else "") + f"V{y}")
            last = y
    return "".join(said) + f"H{len(heights)}"


def _steps_back(heights: Sequence[float]) -> str:
    said, last = [], ""
    for place in range(len(heights), 0, -1):
        if (y := _y(heights[place - 1])) != last:
            said.append((f"H{place}" if place < len(heights) else "") + f"V{y}")
            last = y
    return "".join(said) + "H0"


def _box(start: float, end: float, look: str) -> Markup:
    return element("rect", class_=look, x=f"{start:.2f}", y=0, width=f"{max(end - start, 0):.2f}", height=_HEIGHT)


def _line(x: float, y: float, width: float, height: float) -> Markup:
    return element("path", class_="rule", d=f"M{x:.2f} {y:g}l{width:g} {height:g}")


def time_axis(axis: Axis) -> Markup:
    """The texts under a drawing; every other one gives way on a small screen."""
    found = [
        element("span", said, class_=f"mark {_side(share)}{' minor' if place % 2 else ''}", style=f"left:{share}%")
        for place, (share, said) in enumerate(axis.marks())
    ]
    return element("div", *found, class_="axis", aria_hidden="true")


def _side(share: float) -> str:
    """A text at an end stays inside."""
    return "begin" if share < 4 else "end" if share > 96 else "middle"


def bar(look: str, share: float) -> Markup:
    """A bar of that part of its room."""
    return element("div", element("div", class_=f"fill {look}", style=f"width:{share * 100:.2f}%"), class_="bar")


def span_bar(axis: Axis, look: str, start: int, end: int, tip: str) -> Markup:
    """From one instant to another, on a lane."""
    left = axis.share(start)
    width = max(axis.share(end) - left, 0)
    return element("span", class_=f"span {look}", style=f"left:{left}%;width:{width:.3f}%", data_tip=tip)


def legend(*entries: tuple[str, str]) -> Markup:
    """Looks, and what they mean."""
    return element(
        "p",
        joined(*(element("span", element("i", class_=f"swatch {look}"), said, class_="key") for look, said in entries)),
        class_="legend",
    )
