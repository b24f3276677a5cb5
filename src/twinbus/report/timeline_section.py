"""The sections timeline and incidents: charts of failovers, message rates and backlog, and a table of incidents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from twinbus.pipeline import ReportData, RowValues, Timeline
from twinbus.report.charts import ChartLayer, TimeAxis, legend, plot, span_bar, time_axis
from twinbus.report.formatting import duration, number, rate_unit, time_text
from twinbus.report.markup import Markup, TableColumn, element, join, more_note, number_column, table

_LANES: Final = 12
_RATES: Final = {
    "direct": "to the primary",
    "diverted": "to the backlog",
    "returned": "brought home",
    "failed": "failed tries",
}


def timeline_section(data: ReportData) -> Markup:
    if data.timeline is None:
        return Markup()
    timeline = data.timeline
    axis = TimeAxis(timeline.start, timeline.start + timeline.width * len(timeline.waiting), len(timeline.waiting))
    shades = list(_merged(data.incidents.rows, axis.last))
    lanes = _lanes(data.incidents.rows, axis)
    drawn = element(
        "div",
        *([lanes, time_axis(axis)] if lanes else []),
        *_panels(timeline, axis, shades),
        time_axis(axis),
        element("div", class_="cursor", hidden=True),
        class_="stack",
        tabindex=0,
        role="group",
        aria_label="Over time. The arrow keys go from bucket to bucket; the table below has the same numbers.",
    )
    behind = element(
        "details",
        element("summary", f"The numbers, for every {duration(timeline.width / 1000)}"),
        _numbers(timeline),
    )
    heading = element("h2", "What happened when", id="when")
    return element("section", heading, drawn, behind, class_="card", aria_labelledby="when")


# --- incidents -------------------------------------------------------------------------------------------------------


def _ended(incident: RowValues, last: int) -> int:
    """Returns the end of a failover; the end of the chart if the failover has not ended."""
    return last if incident["restored"] is None else int(incident["restored"])


def _merged(incidents: Sequence[RowValues], last: int) -> Iterator[tuple[int, int]]:
    """Yields begin and end of each span of time in which at least one entity was failed over."""
    start = end = None
    for began, ended in sorted((one["began"], _ended(one, last)) for one in incidents if one["began"] is not None):
        if end is not None and began <= end:
            end = max(end, ended)
            continue
        if start is not None and end is not None:
            yield start, end
        start, end = began, ended
    if start is not None and end is not None:
        yield start, end


def _lanes(incidents: Sequence[RowValues], axis: TimeAxis) -> Markup | None:
    """Returns a chart with one row of bars for each entity; None if there is no failover.

    Entities that are still failed over come first, then those with the most diverted messages.
    """
    begun = sorted(
        (one for one in incidents if one["began"] is not None), key=lambda one: (one["destination"], one["began"])
    )
    entities = [(entity, list(found)) for entity, found in groupby(begun, key=lambda one: str(one["destination"]))]
    entities.sort(key=lambda pair: (not _is_open(pair[1]), -sum(one["diverted"] for one in pair[1]), pair[0]))
    if not entities:
        return None
    still = [("trouble open", "not restored, or not home")] if any(one["drained"] is None for one in begun) else []
    keys = legend(("trouble", "failed over"), ("backlog", "draining"), *still)
    rest = len(entities) - _LANES
    note = element("p", f"… and {number(rest)} more entities: see the incidents", class_="note") if rest > 0 else ""
    return join(_titled("Failovers", keys), *(_lane(*entity, axis) for entity in entities[:_LANES]), note)


def _is_open(incidents: Sequence[RowValues]) -> bool:
    return any(one["restored"] is None for one in incidents)


def _lane(entity: str, incidents: Sequence[RowValues], axis: TimeAxis) -> Markup:
    causes = ", ".join(dict.fromkeys(str(one["cause"]) for one in incidents if one["cause"]))
    times = f"{number(len(incidents))} failover{'' if len(incidents) == 1 else 's'}"
    diverted = f"{number(sum(one['diverted'] for one in incidents))} diverted"
    summary = element("small", " · ".join(filter(None, (times, diverted, causes))))
    bars = join(*(_bars(one, axis) for one in incidents))
    return element(
        "div",
        element("p", element("b", entity), summary, class_="who"),
        element("div", bars, class_="lane"),
        class_="entity",
    )


def _bars(one: RowValues, axis: TimeAxis) -> Markup:
    tip = _tip(one)
    failed = span_bar(
        axis, "trouble" if one["restored"] is not None else "trouble open", one["began"], _ended(one, axis.last), tip
    )
    if one["drained"] is None:
        waits = one["restored"] is not None and one["diverted"] > one["returned"]
        return join(failed, span_bar(axis, "backlog open", one["restored"], axis.last, tip) if waits else "")
    since = _ended(one, one["began"])
    return join(failed, span_bar(axis, "backlog", since, one["drained"], tip) if one["drained"] > since else "")


def _restored(one: RowValues) -> tuple[str, str]:
    """Returns two texts: how long it took until the restore, and the time of the restore."""
    if one["restored"] is None:
        return ("not yet" if one["began"] is not None else "–"), ""
    return f"after {duration(one['seconds_to_restore'])}", time_text(one["restored"])


def _drained(one: RowValues) -> tuple[str, str]:
    if one["drained"] is None:
        return (f"{number(one['diverted'] - one['returned'])} not home" if one["diverted"] else "–"), ""
    seconds = one["seconds_to_drain"]
    if seconds is None:
        return time_text(one["drained"]), ""
    return (f"{duration(seconds)} later" if seconds else "before that"), time_text(one["drained"])


def _tip(one: RowValues) -> str:
    facts = {
        "cause": one["cause"] or "unknown",
        "failed over": time_text(one["began"]),
        "restored": ", ".join(filter(None, _restored(one))),
        "drained": ", ".join(filter(None, _drained(one))),
        "diverted": number(one["diverted"]),
        "returned": number(one["returned"]),
    }
    return " · ".join((str(one["destination"]), *(f"{name}: {text}" for name, text in facts.items())))


def _with_detail(texts: tuple[str, str]) -> Markup:
    text, detail = texts
    return element("span", text, element("small", detail) if detail else "")


def incidents_section(data: ReportData) -> Markup:
    some = data.incidents
    if not some.total:
        return Markup()
    columns = [
        TableColumn("Entity", lambda row: row["destination"], css="name"),
        TableColumn("Cause", lambda row: row["cause"] or "–"),
        TableColumn("Failed over", lambda row: "unknown" if row["began"] is None else time_text(row["began"])),
        TableColumn("Restored", lambda row: _with_detail(_restored(row))),
        TableColumn("Drained", lambda row: _with_detail(_drained(row))),
        number_column("Diverted", "diverted"),
        number_column("Returned", "returned"),
        number_column("Processes", "processes"),
    ]
    rows = sorted(some.rows, key=lambda row: (row["began"] is not None, row["began"] or 0, row["destination"]))
    heading = element("h2", "Incidents", id="incidents")
    rest = more_note(some, "`twinbus ledger incidents` lists them all")
    return element(
        "section",
        heading,
        element("div", table(columns, rows, class_="cards"), class_="long"),
        rest,
        class_="card",
        aria_labelledby="incidents",
    )


# --- rates and depth -------------------------------------------------------------------------------------------------


def _titled(title: str, keys: Markup | str = "") -> Markup:
    return element("div", element("h3", title), keys, class_="titled")


@dataclass(frozen=True, slots=True)
class _Rate:
    """A series of rates: messages per `unit` of time in each bucket.

    The unit is the shortest in which the largest rate of the chart is at least 1.
    """

    title: str
    unit: str
    values: Sequence[float]


def _rates(timeline: Timeline) -> dict[str, _Rate]:
    seconds = timeline.width / 1000
    found = {}
    for together in (("direct", "diverted"), ("returned",), ("failed",)):
        unit, length = rate_unit(max(max(timeline.counts[name]) for name in together) / seconds)
        for name in together:
            values = [count / seconds * length for count in timeline.counts[name]]
            found[name] = _Rate(_RATES[name], unit, values)
    return found


def _panels(timeline: Timeline, axis: TimeAxis, shades: Sequence[tuple[int, int]]) -> Iterator[Markup]:
    rates = _rates(timeline)

    def drawn(title: str, *layers: tuple[str, str], keys: Markup | str = "", low: bool = False) -> Markup:
        drawn_rates = [(rates[name], css) for name, css in layers]
        peaks = ", ".join(f"{rate.title} at most {number(max(rate.values))} a {rate.unit}" for rate, _ in drawn_rates)
        made = plot(axis, [ChartLayer(css, rate.values) for rate, css in drawn_rates], shades, peaks, low=low)
        return join(_titled(f"{title}, messages/{drawn_rates[0][0].unit}", keys), made)

    both = legend(("primary", "by the primary"), ("backlog", "by the backlog"))
    yield drawn("Accepted from senders", ("direct", "primary"), ("diverted", "backlog"), keys=both)
    if any(timeline.counts["failed"]):
        yield drawn("Tries that failed or have no known outcome", ("failed", "trouble"), low=True)
    if any(timeline.waiting) or any(timeline.counts["returned"]):
        yield drawn("Brought home to the primary", ("returned", "primary"), low=True)
        yield _titled("Backlog: diverted messages that are not home yet")
        most = f"At most {number(max(timeline.waiting))} messages, {number(timeline.waiting[-1])} at the end"
        yield plot(axis, [ChartLayer("backlog", timeline.waiting)], shades, most, low=False)


def _numbers(timeline: Timeline) -> Markup:
    """Returns the numbers of the charts as a table.

    page.js takes from this table the numbers that it shows beside the mouse pointer.
    """
    rates = _rates(timeline)
    form = "%Y-%m-%d" if timeline.width % 86_400_000 == 0 else "%Y-%m-%d %H:%M:%S"
    values = zip(timeline.waiting, *(map(number, rate.values) for rate in rates.values()), strict=True)
    rows = [
        {
            "from": time_text(timeline.start + index * timeline.width, form),
            "waiting": waiting,
            **dict(zip(rates, texts, strict=True)),
        }
        for index, (waiting, *texts) in enumerate(values)
    ]
    columns = [
        TableColumn("From", lambda row: row["from"]),
        *(_text_column(f"{rate.title.capitalize()} /{rate.unit}", name) for name, rate in rates.items()),
        number_column("Backlog", "waiting"),
    ]
    return table(columns, rows, id="numbers")


def _text_column(title: str, name: str) -> TableColumn:
    return TableColumn(title, lambda row: row[name], css="number")
