"""The first thing on the page: does everything add up? A sentence, the sums behind it, and the ids if it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from twinbus.pipeline import ReportData, TopRows
from twinbus.report.formatting import number
from twinbus.report.markup import Column, Markup, element, joined, more, table

# accepted = the sum of these, always: docs/ledger.md. Each has its look, its name and what it is.
_PARTS: Final = {
    "delivered": ("primary", "delivered", "the primary has them"),
    "in_backlog": ("backlog", "in backlog", "safe on the secondary, not home yet"),
    "dead_lettered": ("dead", "dead-lettered", "safe, but cannot be delivered as they are"),
    "unknown": ("doubt", "unknown", "safe or not: it depends on outcomes nobody knows"),
    "lost": ("trouble", "lost", "reported safe, and in neither namespace"),
}
_BESIDE: Final = {
    "duplicated": ("trouble", "duplicated", "delivered more often than sent"),
    "possibly_duplicated": ("doubt", "possibly duplicated", "if outcomes nobody knows were good"),
    "unconfirmed": ("doubt", "unconfirmed", "never reported safe, but there, or perhaps there"),
}


def verdict(found: ReportData) -> Markup:
    look, sign, sentence, reason = _said(found)
    heading = element(
        "h2", element("span", sign, class_="sign", aria_hidden="true"), element("span", sentence), id="verdict"
    )
    parts = [heading, element("p", reason)]
    if found.sums["accepted"] or any(found.sums[name] for name in _BESIDE):
        parts += [_balance(found.sums), _tiles(found.sums), *_listed(found)]
    if found.incomplete.total:
        parts.append(_incomplete(found.incomplete))
    return element("section", *parts, class_=f"verdict {look}", aria_labelledby="verdict")


def _said(found: ReportData) -> tuple[str, str, str, str]:
    """Look, sign, sentence and the one after it."""
    sums = found.sums
    if not sums["accepted"] and not sums["unconfirmed"] and found.timeline is None:
        return "calm", "–", "Nothing happened", "The ledger tells of no message and no failover in this time."
    told = f"{_messages(sums['accepted'])} accepted from senders."
    if sums["lost"]:
        return "bad", "✕", f"{_messages(sums['lost'])} lost", f"{told} The lost ones are listed below by id."
    if sums["unknown"] or sums["duplicated"]:
        doubts = [f"{number(sums[name])} {name}" for name in ("unknown", "duplicated") if sums[name]]
        return "doubtful", "!", f"Nothing surely lost, but {' and '.join(doubts)}", told
    waiting = sums["in_backlog"] + sums["dead_lettered"]
    if waiting:
        return "open", "…", f"Nothing lost; {_messages(waiting)} not home yet", told
    perhaps = " Some may have been delivered twice: see below." if sums["possibly_duplicated"] else ""
    return "good", "✓", "Nothing lost, nothing duplicated", f"{told} The primary has every one of them.{perhaps}"


def _messages(count: int) -> str:
    return f"{number(count)} message{'' if count == 1 else 's'}"


def _balance(sums: Mapping[str, int]) -> Markup:
    """Accepted, as one bar of what became of it. Where something is lost, it is seen."""
    said = ", ".join(f"{number(sums[name])} {label}" for name, (_, label, _) in _PARTS.items() if sums[name])
    pieces = [
        element("span", class_=look, style=f"flex-grow:{sums[name]}", data_tip=f"{label} · {number(sums[name])}")
        for name, (look, label, _) in _PARTS.items()
        if sums[name]
    ]
    return element("div", *pieces, class_="balance", role="img", aria_label=f"What became of them: {said or 'nothing'}")


def _tiles(sums: Mapping[str, int]) -> Markup:
    def tile(name: str, look: str, label: str, meaning: str) -> Markup:
        return element(
            "div",
            element("dt", element("i", class_=f"swatch {look}"), label),
            element("dd", element("b", number(sums[name])), element("small", meaning)),
            class_="tile" if sums[name] else "tile none",
        )

    tiles = [
        element("dl", *(tile(name, *said) for name, said in group.items()), class_="tiles")
        for group in (_PARTS, _BESIDE)
    ]
    flight = sums["in_flight"]
    note = (
        f"{number(flight)} of the unknown and unconfirmed may yet be explained: by entries of the last hour that are "
        "not in the ledger yet, or by some from before the time that was asked for."
    )
    return joined(*tiles, element("p", note, class_="note") if flight else "")


def _listed(found: ReportData) -> list[Markup]:
    named = {**_PARTS, **_BESIDE}
    return [
        _ids(named[name][1], some, is_open=name == "lost")
        for name in ("lost", "unknown", "duplicated", "possibly_duplicated", "unconfirmed")
        if (some := found.listed[name]).total
    ]


def _ids(label: str, some: TopRows, *, is_open: bool) -> Markup:
    columns = [
        Column("Entity", lambda row: row["destination"], look="name"),
        Column("Message id", lambda row: row["id"], look="name"),
        Column("Copies", lambda row: number(row["count"]), look="number"),
    ]
    rest = more(some, "`twinbus ledger reconcile --json` lists them all")
    summary = element("summary", f"{label.capitalize()}: {_messages(some.total)} by id")
    return element("details", summary, table(columns, some.rows), rest, open=is_open or None, class_="ids")


def _incomplete(reasons: TopRows) -> Markup:
    count = f"{number(reasons.total)} reason{'' if reasons.total == 1 else 's'}"
    return element(
        "details",
        element("summary", f"The ledger does not hold everything, so that what it says may be wrong: {count}"),
        element("ul", *(element("li", row["reason"]) for row in reasons.rows)),
        more(reasons, "`twinbus ledger reconcile` tells them all"),
        class_="ids",
    )
