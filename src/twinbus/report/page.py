"""Makes the report as one HTML file, which loads no other files, and writes the file to disk.

`render_page` reads no clock: the same data and the same `ReportInfo` give the same page.
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
from twinbus.report.cost_section import cost_section
from twinbus.report.formatting import time_text
from twinbus.report.markup import Markup, element, escaped, join
from twinbus.report.sections import entities_section, latency_section
from twinbus.report.timeline_section import incidents_section, timeline_section
from twinbus.report.verdict import verdict_section


@dataclass(frozen=True, slots=True)
class ReportInfo:
    """What the page shows in addition to the data of the ledger."""

    title: str
    source: str
    """Name of the ledger."""
    made: datetime
    """When the page was made."""
    prices: Prices
    scenario: Scenario
    asked: str = ""
    """The time window as text, if the user asked for one."""


def render_page(data: ReportData, info: ReportInfo) -> str:
    """Returns the HTML document."""
    style, script = (files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # With these rules the browser loads no files and runs no other script, even if a script were in the data unescaped.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'"
    head = join(
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{escaped(rules)}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        element("title", info.title),
        element("style", Markup(style)),
    )
    body = join(_header(data, info), _main(data, info), _footer(info), element("script", Markup(script)))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def _header(data: ReportData, info: ReportInfo) -> Markup:
    timeline = data.timeline
    last = timeline.start + timeline.width * len(timeline.waiting) if timeline else 0
    period = f"{time_text(timeline.start)} to {time_text(last)} UTC" if timeline else ""
    subtitle = " · ".join(filter(None, (f"ledger {info.source}", period, info.asked)))
    toggle = element("button", "Dark", id="theme", type="button", hidden=True)
    return element("header", element("div", element("h1", info.title), element("p", subtitle)), toggle)


def _main(data: ReportData, info: ReportInfo) -> Markup:
    return element(
        "main",
        verdict_section(data),
        timeline_section(data),
        incidents_section(data),
        latency_section(data),
        cost_section(data, info.prices),
        entities_section(data),
    )


def _footer(info: ReportInfo) -> Markup:
    made = element("time", f"{info.made:%Y-%m-%d %H:%M:%S} UTC", datetime=f"{info.made:%Y-%m-%dT%H:%M:%SZ}")
    tip = element("div", id="tip", role="status", hidden=True)
    return join(element("footer", element("p", "Made ", made, " by twinbus report. All times are UTC.")), tip)


def check_writable(path: Path) -> None:
    """Raises OperatorError if a page cannot be written to this path. Call this before the report is computed."""
    if path.is_dir():
        raise OperatorError(f"{path} is a folder", "Name a file: -o report.html.")
    if not path.parent.is_dir():
        raise OperatorError(f"{path.parent} is not a folder", "Make it first, or name another path for the report.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OperatorError(f"{path.parent} cannot be written by this user", "Name another path for the report.")


def write_page(path: Path, text: str) -> None:
    """Writes the page to a file: either the whole page or nothing.

    Replaces an existing file. A process that has the old file open can still read the old content.
    """
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
