"""The page as one file: what it is made of, in which order, and that it needs and runs nothing but itself.

No clock is read here: the moment it was made is told to it, so that one ledger makes one page.
"""

from __future__ import annotations

import base64
import hashlib
import os
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from twinbus.errors import OperatorError
from twinbus.money import Prices, Scenario
from twinbus.pipeline import ReportData
from twinbus.report.formatting import at
from twinbus.report.markup import Markup, element, joined, text
from twinbus.report.sections import cost, entities, latency
from twinbus.report.timeline_section import happened, incidents
from twinbus.report.verdict import verdict


@dataclass(frozen=True, slots=True)
class ReportInfo:
    """What the ledger cannot tell. `asked`: the window, in words, where one was asked for."""

    title: str
    source: str
    made: datetime
    prices: Prices
    scenario: Scenario
    asked: str = ""


def render_page(found: ReportData, about: ReportInfo) -> str:
    """A whole document."""
    style, script = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # Nothing is loaded, and no other script runs: not even one that got past the escaping.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    head = joined(
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{text(rules)}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        element("title", about.title),
        element("style", Markup(style)),
    )
    body = joined(_header(found, about), _main(found, about), _footer(about), element("script", Markup(script)))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def _header(found: ReportData, about: ReportInfo) -> Markup:
    line = found.timeline
    last = line.start + line.width * len(line.waiting) if line else 0
    told = f"{at(line.start)} to {at(last)} UTC" if line else ""
    said = " · ".join(filter(None, (f"ledger {about.source}", told, about.asked)))
    toggle = element("button", "Dark", id="theme", type="button", hidden=True)
    return element("header", element("div", element("h1", about.title), element("p", said)), toggle)


def _main(found: ReportData, about: ReportInfo) -> Markup:
    return element(
        "main",
        verdict(found),
        happened(found),
        incidents(found),
        latency(found),
        cost(found, about.prices, about.scenario),
        entities(found),
    )


def _footer(about: ReportInfo) -> Markup:
    made = element("time", f"{about.made:%Y-%m-%d %H:%M:%S} UTC", datetime=f"{about.made:%Y-%m-%dT%H:%M:%SZ}")
    tip = element("div", id="tip", role="status", hidden=True)
    return joined(element("footer", element("p", "Made ", made, " by twinbus report. All times are UTC.")), tip)


def check_writable(path: Path) -> None:
    """Told before the work, not after it."""
    if path.is_dir():
        raise OperatorError(f"{path} is a folder", "Name a file: -o report.html.")
    if not path.parent.is_dir():
        raise OperatorError(f"{path.parent} is no folder", "Make it first, or name another place for the report.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OperatorError(f"{path.parent} cannot be written by this user", "Name another place for the report.")


def write_page(path: Path, text: str) -> None:
    """In the place of what was there before; who reads that meanwhile keeps it."""
    check_writable(path)
    made = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with made.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)
    except OSError as error:
        raise OperatorError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        made.unlink(missing_ok=True)
