"""The first section of the report: the verdict, the sums of the balance, and the ids of lost or doubtful messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from twinbus.ledger import Judgement, Verdict, judge_ledger
from twinbus.pipeline import ReportData, TopRows
from twinbus.report.formatting import number
from twinbus.report.markup import Markup, TableColumn, element, join, more_note, table, whole

# Parts of the balance, each with a colour, a name and a meaning. Their sum is `accepted` (docs/ledger.md).
_PARTS: Final = {
    "delivered": ("primary", "delivered", "the primary has them"),
    "in_backlog": ("backlog", "in backlog", "safe on the secondary, not home yet"),
    "dead_lettered": ("dead", "dead-lettered", "safe, but cannot be delivered as they are"),
    "unknown": ("doubt", "unknown", "safe or not: it depends on operations with unknown outcome"),
    "lost": ("trouble", "lost", "accepted, and in neither namespace"),
}
_BESIDE: Final = {
    "duplicated": ("trouble", "duplicated", "delivered more often than sent"),
    "possibly_duplicated": ("doubt", "possibly duplicated", "perhaps delivered again, or still to come again"),
    "unconfirmed": ("doubt", "unconfirmed", "never accepted, but delivered or in the backlog, surely or possibly"),
}


# CSS class and sign of each verdict. The colour of the section follows from the class.
_LOOKS: Final = {
    Verdict.PROVEN: ("good", "✓"),
    Verdict.POSSIBLE_DUPLICATES: ("doubtful", "✓"),
    Verdict.NOT_PROVEN: ("unproven", "?"),
    Verdict.LOST: ("bad", "✕"),
}


def judge_report(data: ReportData) -> Judgement:
    """Returns the verdict of the page: the same as that of `twinbus ledger reconcile` for the same time."""
    reasons = [row["reason"] for row in data.incomplete.rows]
    return judge_ledger(data.sums, reasons, data.incomplete.total - len(reasons))


def verdict_section(data: ReportData) -> Markup:
    judged = judge_report(data)
    css, sign = _LOOKS[judged.verdict]
    has_messages = bool(data.sums["accepted"] or any(data.sums[name] for name in _BESIDE))
    if judged.verdict is Verdict.PROVEN and not has_messages and data.timeline is None:
        css, sign = "calm", "–"
    heading = element(
        "h2",
        element("span", sign, class_="sign", aria_hidden="true"),
        element("span", str(judged.verdict), class_="word"),
        id="verdict",
    )
    parts = [heading, element("p", whole(judged.sentence))]
    if data.incomplete.total:
        parts.append(_incomplete(data.incomplete))
    if has_messages:
        parts += [_balance(data.sums), _tiles(data.sums), *_listed(data)]
    return element("section", *parts, class_=f"verdict {css}", aria_labelledby="verdict")


def _messages(count: int) -> str:
    return f"{number(count)} message{'' if count == 1 else 's'}"


def _balance(sums: Mapping[str, int]) -> Markup:
    """Returns one bar for all accepted messages, divided into the parts of the balance (delivered, lost and so on)."""
    shares = ", ".join(f"{number(sums[name])} {label}" for name, (_, label, _) in _PARTS.items() if sums[name])
    pieces = [
        element("span", class_=css, style=f"flex-grow:{sums[name]}", data_tip=f"{label} · {number(sums[name])}")
        for name, (css, label, _) in _PARTS.items()
        if sums[name]
    ]
    return element(
        "div", *pieces, class_="balance", role="img", aria_label=f"What became of them: {shares or 'nothing'}"
    )


def _tiles(sums: Mapping[str, int]) -> Markup:
    def tile(name: str, css: str, label: str, meaning: str) -> Markup:
        return element(
            "div",
            element("dt", element("i", class_=f"swatch {css}"), label),
            element("dd", element("b", number(sums[name])), element("small", meaning)),
            class_="tile" if sums[name] else "tile none",
        )

    tiles = [
        element("dl", *(tile(name, *texts) for name, texts in group.items()), class_="tiles")
        for group in (_PARTS, _BESIDE)
    ]
    flight = sums["in_flight"]
    note = (
        f"{number(flight)} of the unknown and unconfirmed may still be explained: by entries of the last hour that are "
        "not in the ledger yet, or by entries from before this time."
    )
    return join(*tiles, element("p", note, class_="note") if flight else "")


def _listed(data: ReportData) -> list[Markup]:
    named = {**_PARTS, **_BESIDE}
    return [
        _ids(named[name][1], some, is_open=name == "lost")
        for name in ("lost", "unknown", "duplicated", "possibly_duplicated", "unconfirmed")
        if (some := data.listed[name]).total
    ]


def _ids(label: str, some: TopRows, *, is_open: bool) -> Markup:
    columns = [
        TableColumn("Entity", lambda row: row["destination"], css="name"),
        TableColumn("Message id", lambda row: row["id"], css="name"),
        TableColumn("Copies", lambda row: number(row["count"]), css="number"),
    ]
    rest = more_note(some, "`twinbus ledger reconcile --json` lists them all")
    summary = element("summary", f"{label.capitalize()}: {_messages(some.total)} by id")
    return element("details", summary, table(columns, some.rows), rest, open=is_open or None, class_="ids")


def _incomplete(reasons: TopRows) -> Markup:
    count = f"{number(reasons.total)} reason{'' if reasons.total == 1 else 's'}"
    return element(
        "details",
        element("summary", f"Entries are missing from the ledger, so these figures may be wrong: {count}"),
        element("ul", *(element("li", row["reason"]) for row in reasons.rows)),
        more_note(reasons, "`twinbus ledger reconcile` lists them all"),
        open=True,
        class_="ids",
    )
