"""Parses a page as a browser does: its elements, the files it would load, the scripts it would run, and its text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html.parser import HTMLParser

from twinbus.money import Prices, Scenario
from twinbus.pipeline import ReportData
from twinbus.report.page import ReportInfo, render_page

VOID = {"meta"}
MOMENT = re.compile(r"<time.*?</time>")
"""When the page was made."""
LOADING = ("src", "href", "srcset", "data", "action", "poster", "background", "xlink:href")


@dataclass
class Document(HTMLParser):
    """`handlers`: attributes that would run something; `loaded`: that would fetch something; `unbalanced`: tags."""

    text: str
    tags: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    handlers: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    unbalanced: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self.feed(self.text)
        self.close()
        self.unbalanced += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open += [] if tag in VOID else [tag]
        for name, value in attrs:
            self.handlers += [name] if name.startswith("on") else []
            self.loaded += [f"{name}={value}"] if name in LOADING else []
            self.ids += [value or ""] if name == "id" else []
            self.labels += [value or ""] if name in ("aria-label", "data-tip") else []

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.unbalanced.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.said.append(data)


def made(found: ReportData, second: int = 0) -> str:
    moment = datetime(2026, 11, 15, 12, 0, second, tzinfo=UTC)
    return render_page(found, ReportInfo("A title", "books", moment, Prices.default(), Scenario()))
