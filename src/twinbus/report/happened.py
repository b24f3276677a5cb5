"""What happened when: failovers of each entity, rates and backlog over one axis of time; and a table of incidents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from twinbus.pipeline.overview import Overview, Timeline, Values
from twinbus.report.markup import Markup, element, joined
from twinbus.report.measures import at, number, rate_unit, span
from twinbus.report.pictures import Axis, Layer, legend, plot, span_bar, time_axis
from twinbus.report.tables import Column, counted, more, table

_LANES: Final = 25
_RATES: Final = {
    "direct": "to the primary",
    "diverted": "to the backlog",
    "returned": "brought home",
    "failed": "failed tries",
}


def happened(found: Overview) -> Markup:
    if found.timeline is None:
        return Markup()
    line = found.timeline
    axis = Axis(line.start, line.start + line.width * len(line.waiting), len(line.waiting))
    shades = list(_merged(found.incidents.rows, axis.last))
    lanes = _lanes(found.incidents.rows, axis)
    drawn = element(
        "div",
        *([lanes, time_axis(axis)] if lanes else []),
        *_panels(line, axis, shades),
        time_axis(axis),
        element("div", class_="cursor", hidden=True),
        class_="stack",
        tabindex=0,
        role="group",
        aria_label="Over time. The arrow keys go from bucket to bucket; the table below has the same numbers.",
    )
    behind = element(
        "details",
        element("summary", f"The numbers, for every {span(line.width / 1000)}"),
        _numbers(line),
    )
    heading = element("h2", "What happened when", id="when")
    return element("section", heading, drawn, behind, class_="card", aria_labelledby="when")


# --- incidents -------------------------------------------------------------------------------------------------------


def _ended(incident: Values, last: int) -> int:
    """When its failover ended, or else the end of the picture."""
    return last if incident["restored"] is None else int(incident["restored"])


def _merged(incidents: Sequence[Values], last: int) -> Iterator[tuple[int, int]]:
    """The spans in which any entity was failed over."""
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


def _lanes(incidents: Sequence[Values], axis: Axis) -> Markup | None:
    """One for each entity, the ones with most diverted messages first."""
    told = sorted(
        (one for one in incidents if one["began"] is not None), key=lambda one: (one["destination"], one["began"])
    )
    entities = [(entity, list(found)) for entity, found in groupby(told, key=lambda one: str(one["destination"]))]
    entities.sort(key=lambda pair: (-sum(one["diverted"] for one in pair[1]), pair[0]))
    if not entities:
        return None
    keys = legend(("trouble", "failed over"), ("backlog", "draining"), ("trouble open", "not restored, not home"))
    rest = len(entities) - _LANES
    note = element("p", f"… and {number(rest)} more entities", class_="note") if rest > 0 else ""
    return joined(_titled("Failovers", keys), *(_lane(*entity, axis) for entity in entities[:_LANES]), note)


def _lane(entity: str, incidents: Sequence[Values], axis: Axis) -> Markup:
    causes = ", ".join(dict.fromkeys(str(one["cause"]) for one in incidents if one["cause"]))
    times = f"{number(len(incidents))} failover{'' if len(incidents) == 1 else 's'}"
    diverted = f"{number(sum(one['diverted'] for one in incidents))} diverted"
    said = element("small", " · ".join(filter(None, (times, diverted, causes))))
    bars = joined(*(_bars(one, axis) for one in incidents))
    return element(
        "div",
        element("p", element("b", entity), said, class_="who"),
        element("div", bars, class_="lane"),
        class_="entity",
    )


def _bars(one: Values, axis: Axis) -> Markup:
    messages = ("Diverted", number(one["diverted"])), ("Returned", number(one["returned"]))
    tip = " · ".join((str(one["destination"]), *(f"{title}: {said}" for title, said in (*_facts(one), *messages))))
    failed = span_bar(
        axis, "trouble" if one["restored"] is not None else "trouble open", one["began"], _ended(one, axis.last), tip
    )
    if one["drained"] is None:
        waits = one["restored"] is not None and one["diverted"] > one["returned"]
        return joined(failed, span_bar(axis, "backlog open", one["restored"], axis.last, tip) if waits else "")
    since = _ended(one, one["began"])
    return joined(failed, span_bar(axis, "backlog", since, one["drained"], tip) if one["drained"] > since else "")


def _facts(one: Values) -> list[tuple[str, str]]:
    restored = (
        "not yet" if one["restored"] is None else f"{at(one['restored'])}, after {span(one['seconds_to_restore'])}"
    )
    if one["drained"] is not None:
        drained = at(one["drained"])
        if one["seconds_to_drain"] is not None:
            drained += f", {span(one['seconds_to_drain'])} after" if one["seconds_to_drain"] else ", before the restore"
    else:
        drained = f"{number(one['diverted'] - one['returned'])} not home" if one["diverted"] else "–"
    return [
        ("Cause", str(one["cause"] or "–")),
        ("Failed over", "not told" if one["began"] is None else at(one["began"])),
        ("Restored", "–" if one["began"] is None else restored),
        ("Drained", drained),
    ]


def _fact(title: str) -> Column:
    return Column(title, lambda row: dict(_facts(row))[title])


def incidents(found: Overview) -> Markup:
    some = found.incidents
    if not some.total:
        return Markup()
    columns = [
        Column("Entity", lambda row: row["destination"], look="name"),
        *(_fact(title) for title, _ in _facts(some.rows[0])),
        counted("Diverted", "diverted"),
        counted("Returned", "returned"),
        counted("Processes", "processes"),
    ]
    rows = sorted(some.rows, key=lambda row: (row["began"] is not None, row["began"] or 0, row["destination"]))
    heading = element("h2", "Incidents", id="incidents")
    rest = more(some, "`twinbus ledger incidents` tells them all")
    return element(
        "section", heading, table(columns, rows, class_="cards"), rest, class_="card", aria_labelledby="incidents"
    )


# --- rates and depth -------------------------------------------------------------------------------------------------


def _titled(title: str, keys: Markup | str = "") -> Markup:
    return element("div", element("h3", title), keys, class_="titled")


def _rates(line: Timeline) -> tuple[str, dict[str, list[float]]]:
    """In one unit for all, such that the largest of them is no fraction."""
    seconds = line.width / 1000
    unit, length = rate_unit(max(map(max, line.counts.values())) / seconds)
    return unit, {name: [count / seconds * length for count in counts] for name, counts in line.counts.items()}


def _panels(line: Timeline, axis: Axis, shades: Sequence[tuple[int, int]]) -> Iterator[Markup]:
    unit, rates = _rates(line)

    def drawn(layers: Sequence[tuple[str, str]], *, low: bool = False) -> Markup:
        peaks = ", ".join(f"{_RATES[name]} at most {number(max(rates[name]))} a {unit}" for name, _ in layers)
        return plot(axis, [Layer(look, rates[name]) for name, look in layers], shades, peaks, low=low)

    keys = legend(("primary", "by the primary"), ("backlog", "by the backlog"))
    yield _titled(f"Accepted from senders, messages/{unit}", keys)
    yield drawn([("direct", "primary"), ("diverted", "backlog")])
    if any(line.counts["failed"]):
        yield _titled(f"Tries that failed or have no known outcome, messages/{unit}")
        yield drawn([("failed", "trouble")], low=True)
    if any(line.waiting) or any(line.counts["returned"]):
        yield _titled(f"Brought home to the primary, messages/{unit}")
        yield drawn([("returned", "primary")], low=True)
        yield _titled("Backlog: diverted messages that are not home yet")
        most = f"At most {number(max(line.waiting))} messages, {number(line.waiting[-1])} at the end"
        yield plot(axis, [Layer("backlog", line.waiting)], shades, most, low=False)


def _numbers(line: Timeline) -> Markup:
    """The same as drawn, and what is told where the pointer is: page.js reads it from here."""
    unit, rates = _rates(line)
    form = "%Y-%m-%d" if line.width % 86_400_000 == 0 else "%Y-%m-%d %H:%M:%S"
    told = zip(line.waiting, *(map(number, rates[name]) for name in _RATES), strict=True)
    rows = [
        {"from": at(line.start + place * line.width, form), "waiting": waiting, **dict(zip(_RATES, said, strict=True))}
        for place, (waiting, *said) in enumerate(told)
    ]
    columns = [
        Column("From", lambda row: row["from"]),
        *(_rate(f"{title.capitalize()} /{unit}", name) for name, title in _RATES.items()),
        counted("Backlog", "waiting"),
    ]
    return table(columns, rows, id="numbers")


def _rate(title: str, name: str) -> Column:
    return Column(title, lambda row: row[name], look="number")
