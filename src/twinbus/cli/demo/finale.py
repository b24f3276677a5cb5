"""The results at the end of the demo: prints reconciliation, incidents, cost and verdict, or returns them for JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from twinbus.cli.demo.processes import LEDGER
from twinbus.cli.demo.screen import BACKLOG, DOWN, HOME, PRIMARY
from twinbus.cli.demo.script import DemoOptions, DemoResult
from twinbus.cli.demo.verdict import DemoVerdict
from twinbus.cli.ledger import SUMS, VERDICT_COLOURS

# Signs that differ without colours, too.
_AWAY, _RETURNING = "▓", "░"
_BAR: Final = 36
_EXPLAINED: Final = 3
# These parts always add up: accepted = delivered + in backlog + dead-lettered + unknown + lost (docs/ledger.md).
_PARTS: Final = ("delivered", "in_backlog", "dead_lettered", "unknown", "lost")


def print_results(console: Console, found: DemoResult, proof: DemoVerdict) -> None:
    _reconciliation(console, found, proof)
    if found.incidents is not None:
        _incidents(console, found.incidents)
    if found.cost is not None:
        _cost(console, found.cost)
    _verdict(console, found, proof)


def _reconciliation(console: Console, found: DemoResult, proof: DemoVerdict) -> None:
    sums = found.sums
    console.print("\n[bold]Reconciliation[/] [dim]what became of every accepted message[/]")
    for name in _PARTS:
        colour = PRIMARY if name == "delivered" else "dim" if not sums[name] else DOWN
        console.print(f"  [{colour}]{SUMS[name].strip():16}{sums[name]:>8,}[/]")
    console.print(f"  [bold]{'accepted':16}{sums['accepted']:>8,}[/]")
    colour = DOWN if sums["duplicated"] else "dim"
    console.print(f"  [{colour}]{'duplicated':16}{sums['duplicated']:>8,}[/]")
    if sums["possibly_duplicated"]:
        _note(
            console,
            f"{sums['possibly_duplicated']} sends had no answer when the primary died, and were diverted with the "
            "same id. Where both copies arrived, duplicate detection dropped one.",
        )
    if found.kept.redelivered:
        _note(
            console,
            f"{found.kept.redelivered} messages were delivered again: the primary died before it stored their "
            "completion.",
        )


def _note(console: Console, text: str) -> None:
    _indented(console, Text(text, style="dim"))


def _indented(console: Console, text: Text) -> None:
    """Print a text with two spaces before each line, also before the lines into which a small screen breaks it."""
    console.print(Padding(text, (0, 0, 0, 2)))


def _incidents(console: Console, incidents: Sequence[dict[str, Any]]) -> None:
    spans = [_span(one) for one in incidents if one["began"] and one["restored"]]
    if not spans:
        return
    first = min(began for began, _, _ in spans)
    last = max(drained or restored for _, restored, drained in spans)
    took = (last - first).total_seconds()
    console.print(f"\n[bold]Incident[/] [dim]from {first:%H:%M:%S} UTC, {took:.1f} s until every message was home[/]")
    for one, (began, restored, drained) in zip((one for one in incidents if one["restored"]), spans, strict=True):
        scale = _BAR / max(took, 0.1)
        away = [round((instant - first).total_seconds() * scale) for instant in (began, restored, drained or restored)]
        bar = Text.assemble(
            " " * away[0],
            (_AWAY * max(1, away[1] - away[0]), BACKLOG),
            (_RETURNING * max(0, away[2] - away[1]), HOME),
        )
        bar.pad_right(_BAR - bar.cell_len)
        name = str(one["destination"]).partition("/")[2]
        console.print(
            Text.assemble(
                f"  {name:10}", bar, f" {one['seconds_to_restore']:.1f} s, {one['returned']:,} diverted and home"
            )
        )
    legend = ((_AWAY, BACKLOG), " failed over  ", (_RETURNING, HOME), " until the last was home")
    console.print(Text.assemble("  " + " " * 10, *legend))


def _span(incident: dict[str, Any]) -> tuple[datetime, datetime, datetime | None]:
    began, restored, drained = (
        None if incident[name] is None else datetime.fromisoformat(incident[name])
        for name in ("began", "restored", "drained")
    )
    assert began is not None
    assert restored is not None
    return began, restored, drained


def _cost(console: Console, cost: dict[str, Any]) -> None:
    bill = cost["bill"]
    console.print("\n[bold]Cost[/] [dim]billable units of the whole run, and the forecast for what happened in it[/]")
    for note in cost["notes"]:
        _note(console, note)
    if cost["forecast"] is None:
        return _note(console, f"{bill['units']:,} units")
    stages, units = cost["stages"], cost["units"]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("  stage")
    for title in ("forecast", "actual", "difference"):
        table.add_column(title, justify="right")
    for one in sorted(stages, key=lambda one: -(one["actual"] or one["forecast"])):
        actual = "–" if one["actual"] is None else f"{one['actual']:,}"
        table.add_row(f"  {_as_text(one['stage'])}", f"{one['forecast']:,}", actual, _signed(one))
    more = f"{units['actual'] - units['forecast']:+,}"
    table.add_row(*(f"[bold]{text}[/]" for text in ("  all", f"{units['forecast']:,}", f"{units['actual']:,}", more)))
    foreseen, spent = cost["cost"]["forecast"], cost["cost"]["actual"]
    amounts = (f"{foreseen:.6f}", f"{spent:.6f}", f"{spent - foreseen:+.6f}")
    table.add_row(f"  {escape(bill['currency'])}, with the base of {bill['seconds']:,.0f} s", *amounts)
    console.print(table)
    differing = sorted((one for one in stages if _signed(one)), key=lambda one: -abs(one["difference"]))
    for one in differing[:_EXPLAINED]:
        parts = "; ".join(f"{part['units']:+,} {part['why']}" for part in one["parts"] if part["units"])
        _note(console, f"{_as_text(one['stage'])} {_signed(one)}: {parts}")
    of_bytes = sum(part["cost"] for one in stages for part in one["parts"] if part["why"].startswith("bytes: "))
    _note(console, f"of the difference in {escape(bill['currency'])}, {of_bytes:+.6f} are bytes")
    _note(console, f"{units['unexplained']:,} of {units['actual']:,} units unexplained")
    return None


def _as_text(name: str) -> str:
    return name.replace("_", " ")


def _signed(stage: dict[str, Any]) -> str:
    return f"{stage['difference']:+,}" if stage["actual"] is not None and stage["difference"] else ""


def _verdict(console: Console, found: DemoResult, proof: DemoVerdict) -> None:
    console.print()
    if proof.problems:
        console.print(f"[{DOWN}]✕ This went wrong:[/]")
        for problem in proof.problems:
            console.print(f"  {escape(problem)}", soft_wrap=True)
        _indented(console, Text.assemble("The ledger: ", _judged(proof)))
        return
    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_row(Text("✓", style=f"bold {VERDICT_COLOURS[proof.ledger.verdict]}"), _judged(proof))
    console.print(line)
    _indented(
        console,
        Text(
            f"{proof.accepted:,} messages sent, {proof.diverted:,} of them diverted, {len(found.kept.errors)} errors "
            "in the application. Receivers have each message once."
        ),
    )


def _judged(proof: DemoVerdict) -> Text:
    word = proof.ledger.verdict
    return Text.assemble((word, f"bold {VERDICT_COLOURS[word]}"), f": {proof.ledger.sentence}")


def print_places(console: Console, found: DemoResult, keep: Path | None, page: Path | None) -> None:
    """Print where report and ledger are, and how long each step of the demo took."""
    console.print()
    for label, text in _places(found, keep, page):
        console.print(f"[dim]{label:8}[/] {escape(text)}", soft_wrap=True)
    took = ", ".join(f"{name}\N{NO-BREAK SPACE}{seconds:g}\N{NO-BREAK SPACE}s" for name, seconds in found.took.items())
    # rich would also break a line at a no-break space.
    for number, line in enumerate(textwrap.wrap(took, max(console.width - 9, 20))):
        console.print(f"[dim]{'' if number else 'took':8}[/] {line}", soft_wrap=True)


def _places(found: DemoResult, keep: Path | None, page: Path | None) -> Iterator[tuple[str, str]]:
    if page is not None:
        yield "report", str(page)
    if keep is None:
        yield "ledger", "gone with the demo's folder; `twinbus demo --keep DIR` keeps it"
    else:
        yield "ledger", str(keep.absolute() / LEDGER)
        yield "", f"a report of it, which needs twinbus[spark]: twinbus report {keep / LEDGER} -o report.html"


def summary(
    options: DemoOptions, found: DemoResult, proof: DemoVerdict, keep: Path | None, page: Path | None
) -> dict[str, Any]:
    """Return the results of the demo as a dict for JSON."""
    return {
        "verdict": proof.ledger.verdict,
        "sentence": proof.ledger.sentence,
        "proven": not proof.problems,
        "problems": proof.problems,
        **asdict(options),
        "accepted": proof.accepted,
        "diverted": proof.diverted,
        "received": proof.received,
        "missing": proof.missing,
        "duplicated": proof.duplicated,
        "redelivered": found.kept.redelivered,
        "errors": found.kept.errors,
        "reconciliation": found.sums,
        "incidents": found.incidents,
        "cost": found.cost,
        "ledger": None if keep is None else str(keep.absolute() / LEDGER),
        "report": None if page is None else str(page),
        "took": found.took,
    }
