"""D4: the page of a ledger with problems, names that contain markup, and the limit of the page's size."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql import functions as F  # noqa: N812  # as everybody calls it

from tests.pipeline.books import MIDNIGHT
from tests.report.conftest import EVIL, EVIL_CAUSE, EVIL_ID, Books
from tests.report.documents import MOMENT, Document, made
from twinbus.ledger import judge_ledger
from twinbus.pipeline import ReportData, Timeline, TimeWindow, TopRows, read_history
from twinbus.pipeline.report_data import MOST_ENTITIES, MOST_IDS, MOST_INCIDENTS
from twinbus.pipeline.timeline import build_timeline
from twinbus.pipeline.timeline_buckets import BUCKETS, RATES

DAY = datetime(2026, 9, 22, tzinfo=UTC)
pytestmark = pytest.mark.timeout(600)  # Spark is slow on a busy machine


@pytest.mark.thorough
def test_d4_lost_duplicated_and_unknown_messages_are_listed_by_id_at_the_top(troubled: ReportData) -> None:
    found = Document(made(troubled))
    said = "".join(found.said)
    assert found.said[found.said.index("lost") + 1].startswith("2 of 71 accepted messages are in neither namespace. ")
    assert said.index("in neither namespace") < said.index("What happened when")
    assert {"gone", EVIL_ID, "who-knows", "home", "contoso/orders"} <= set(found.said)
    assert troubled.sums["dead_lettered"] == 1
    assert any("67 delivered, 1 dead-lettered, 1 unknown, 2 lost" in label for label in found.labels), found.labels


@pytest.mark.thorough
def test_d4_a_real_outage_is_an_incident_that_was_restored_and_drained(troubled: ReportData) -> None:
    (real,) = [one for one in troubled.incidents.rows if not one["destination"].startswith("contoso/")]
    assert (real["diverted"], real["returned"], real["processes"]) == (3, 3, 1)
    assert real["began"] < real["restored"]
    assert real["drained"] is not None
    found = Document(made(troubled))
    assert any(said.startswith("1 failover · 3 diverted · ") for said in found.said)
    assert any(label.startswith(f"{real['destination']} · cause: ") for label in found.labels)


@pytest.mark.thorough
def test_d4_the_report_data_counts_what_the_ledger_holds(troubled: ReportData) -> None:
    first, second = troubled.entities.rows[:2]
    assert [first["destination"], second["destination"]] == ["contoso/orders", f"contoso/{EVIL}".lower()]
    assert (first["lost"], first["unknown"], first["duplicated"], first["dead_lettered"]) == (1, 1, 1, 1)
    assert (troubled.entities.total, troubled.incidents.total) == (4, 3)
    assert (troubled.spread["diverted"], troubled.spread["returned"], troubled.spread["most"]) == (8, 4, 180.0)
    spent = {one.stage: one.units for one in troubled.cost.bill.stages}
    assert (spent["send_backlog"], spent["return_primary"], spent["complete_backlog"]) == (8, 5, 7)


@pytest.mark.thorough
def test_d4_the_timeline_of_a_window_starts_with_the_depth_before_it(books: Books) -> None:
    tables, hour = books.tables, timedelta(hours=1)
    operations, entries = read_history(tables, tables.version(), F.lit(True))
    whole = build_timeline(operations, entries, TimeWindow(until=DAY + 2 * hour))
    assert whole is not None
    assert (whole.start, whole.width) == (MIDNIGHT, 30_000)
    assert {name: sum(counts) for name, counts in whole.counts.items()} == {
        "direct": 61, "diverted": 5, "returned": 2, "failed": 1,
    }  # fmt: skip
    assert sorted(set(whole.waiting)) == [0, 3, 4]
    assert whole.waiting[-1] == 4, "lost, unknown and dead ones did not come home"
    half = build_timeline(operations, entries, TimeWindow(DAY + hour / 2, DAY + 2 * hour))
    assert half is not None
    assert (half.start, sum(half.counts["direct"]), sum(half.counts["diverted"])) == (MIDNIGHT + 30 * 60_000, 31, 1)
    assert (half.waiting[0], half.waiting[-1]) == (3, 4)
    assert build_timeline(operations, entries, TimeWindow(until=DAY)) is None


@pytest.mark.thorough
def test_d4_names_causes_and_ids_stay_text_whatever_they_contain(troubled: ReportData) -> None:
    found = Document(made(troubled))
    assert found.tags.count("script") == 1
    assert "img" not in found.tags
    assert (found.handlers, found.unbalanced) == ([], [])
    assert f"contoso/{EVIL.lower()}" in found.said
    assert any(EVIL_CAUSE in said for said in found.said)
    assert any(EVIL_CAUSE in label for label in found.labels), "and where it is pointed at"


@pytest.mark.thorough
def test_d4_nothing_is_loaded_and_only_the_page_s_own_script_may_run(troubled: ReportData) -> None:
    text = made(troubled)
    found = Document(text)
    assert found.loaded == []
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src &#x27;none&#x27;" in text


@pytest.mark.thorough
def test_d4_every_chart_has_a_label_and_its_numbers_are_in_a_table(troubled: ReportData) -> None:
    found = Document(made(troubled))
    assert found.tags.count("svg") == 4
    assert [label for label in found.labels if "at most" in label or "At most" in label]
    line = troubled.timeline
    assert line is not None
    assert len(found.ids) == len(set(found.ids))
    assert found.tags.count("tr") > len(line.waiting)
    assert "2026-09-22 00:00:00" in found.said


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sums", "reasons", "css"),
    [
        ({"delivered": 10}, [], "good"),
        ({"delivered": 7, "in_backlog": 2, "dead_lettered": 1}, [], "good"),
        ({"delivered": 10, "possibly_duplicated": 3}, [], "doubtful"),
        ({"delivered": 9, "duplicated": 1, "unknown": 1}, [], "unproven"),
        ({"delivered": 10, "possibly_duplicated": 3}, ["segments 2 of w are not there"], "unproven"),
        ({"delivered": 7, "unknown": 2, "lost": 1}, ["segments 2 of w are not there", "x" * 190, "y" * 190], "bad"),
    ],
)
def test_l6_the_page_has_the_verdict_of_the_commands_in_its_colour(
    troubled: ReportData, sums: dict[str, int], reasons: list[str], css: str
) -> None:
    counts = dict.fromkeys(troubled.sums, 0) | {"accepted": 10} | sums
    data = replace(troubled, sums=counts, incomplete=TopRows([{"reason": one} for one in reasons], len(reasons)))
    text, judged = made(data), judge_ledger(counts, reasons)
    said = Document(text).said
    assert said[said.index(judged.verdict) + 1] == judged.sentence
    assert f'class="verdict {css}"' in text
    for reason in reasons:
        assert reason in said, "and not only in the sentence"
        assert text.index(reason) < text.index('class="balance"'), "not below what it makes doubtful"


@pytest.mark.thorough
def test_d4_two_pages_of_one_ledger_differ_only_in_the_time_they_were_made(troubled: ReportData) -> None:
    first, second = made(troubled), made(troubled, second=1)
    assert first != second
    assert MOMENT.sub("", first) == MOMENT.sub("", second)


@pytest.mark.thorough
def test_d4_the_page_is_small_whatever_the_ledger_holds(troubled: ReportData) -> None:
    name = "x" * 1000
    incident = {**troubled.incidents.rows[0], "destination": name, "cause": name}
    many = replace(
        troubled,
        incidents=TopRows([{**incident, "destination": f"{n}{name}"} for n in range(MOST_INCIDENTS)], 10**9),
        entities=TopRows([{**troubled.entities.rows[0], "destination": name}] * MOST_ENTITIES, 10**9),
        listed={
            kind: TopRows([{"destination": name, "id": name, "count": 1}] * MOST_IDS, 10**9) for kind in troubled.listed
        },
        timeline=Timeline(0, 1000, dict.fromkeys(RATES, [10**9] * BUCKETS), [10**9] * BUCKETS),
    )
    assert len(made(many)) < 1_000_000
    assert "… and 999,999,800 more; `twinbus ledger incidents` lists them all." in Document(made(many)).said
