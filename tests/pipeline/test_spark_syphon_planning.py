"""When the driver of the Spark syphon plans a batch, and of what (D2): pure, so any moment of any run."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from twinbus.backlog import FailureKind
from twinbus.connect import HttpProxy, NetworkOptions, TransportType
from twinbus.pipeline.servicebus.backlog_look import LookJob, QueueRange
from twinbus.pipeline.syphon_job import SyphonJob
from twinbus.pipeline.syphon_job.messages import BatchPlan, LaneReport, LaneTask, ScanResult
from twinbus.pipeline.syphon_job.planning import BatchPlanner
from twinbus.syphon import (
    SCAN_INTERVAL,
    DestinationMemory,
    HeldEntities,
    MessageCounts,
    QueueCounts,
    Readiness,
    WaitingDestination,
)
from twinbus.syphon.plan import DeferredMessages, DestinationRoute, Destinations

CLEAN_SCAN = ScanResult(0, None)


def planner(*queues: str, looked: bool = True, **options: Any) -> BatchPlanner:
    """A planner at 10 s that has scanned all its queues."""
    made = BatchPlanner("run", **options)
    made.queues_found(queues, 0.0)
    if looked:
        made.lanes_reported([report(queue, scan=CLEAN_SCAN) for queue in queues], 10.0)
    return made


def report(queue: str, **said: Any) -> LaneReport:
    usual: dict[str, Any] = {
        "plan": "run-1",
        "lane": 0,
        "worker": "here/1",
        "seconds": 1.0,
        "is_empty": True,
        "failure": None,
        "counts": {},
        "operations": {},
        "memories": (),
        "waiting": {},
        "probes": {},
        "scan": None,
    }
    return LaneReport(queue=queue, **{**usual, **said})


def aside(path: str, left: float = 5.0, readiness: Readiness = Readiness.ASIDE, age: float = 0.0) -> DestinationMemory:
    return DestinationMemory(path, readiness, FailureKind.SERVER_BUSY, 5.0, age, left, None)


def slices(plan: BatchPlan | None) -> list[tuple[str, int]]:
    return [] if plan is None else [(one.queue, one.lane) for one in plan.tasks]


def test_d2_y2_nothing_is_planned_while_no_message_waits_and_every_queue_is_polled() -> None:
    made = planner("a", "b")
    assert made.plan(20.0) is None
    assert made.queues_to_poll() == {"a", "b"}
    assert made.due(20.0) == 10.0 + SCAN_INTERVAL


def test_d2_a_queue_whose_poll_ended_is_drained_in_lanes_that_fill_the_cores() -> None:
    made = planner("a", "b", slots=4)
    made.message_arrived("a")
    assert made.due(20.0) == 20.0
    assert made.queues_to_poll() == {"b"}
    assert slices(made.plan(20.0)) == [("a", 0), ("a", 1), ("a", 2), ("a", 3)]
    made.message_arrived("b")
    assert slices(made.plan(20.0)) == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


def test_d2_lanes_can_be_told_and_share_the_rate() -> None:
    made = planner("a", slots=8, lanes=2, rate=100.0)
    made.message_arrived("a")
    plan = made.plan(20.0)
    assert plan is not None
    assert [one.rate for one in plan.tasks] == [50.0, 50.0]


def test_d2_a_lane_that_ran_out_of_time_is_followed_by_another_and_one_that_found_nothing_by_a_poll() -> None:
    made = planner("a")
    made.message_arrived("a")
    made.lanes_reported([report("a", is_empty=False, counts={"x": MessageCounts(returned=5)})], 20.0)
    assert slices(made.plan(20.0)) == [("a", 0)]
    made.lanes_reported([report("a")], 21.0)
    assert made.plan(21.0) is None
    assert made.queues_to_poll() == {"a"}


def test_d2_while_the_backlog_does_not_answer_the_poll_is_what_finds_out() -> None:
    made = planner("a")
    made.message_arrived("a")
    made.lanes_reported([report("a", is_empty=False, failure="connection_lost")], 20.0)
    assert made.plan(20.0) is None
    assert made.queues_to_poll() == {"a"}


def test_y5_a_new_queue_is_scanned_once_and_every_six_hours() -> None:
    made = planner("a", looked=False)
    plan = made.plan(5.0)
    assert plan is not None
    assert [one.scan_from for one in plan.tasks] == [0]
    made.lanes_reported([report("a", scan=CLEAN_SCAN)], 6.0)
    assert made.plan(7.0) is None
    again = made.plan(6.0 + SCAN_INTERVAL)
    assert again is not None
    assert [one.scan_from for one in again.tasks] == [0]


def test_y5_after_its_pause_a_destination_is_probed_with_one_message_and_scanned_for_once_ready() -> None:
    made = planner("a")
    made.lanes_reported([report("a", waiting={"x": (300, 7)}, memories=(aside("x"),))], 20.0)
    assert made.messages_aside().total() == 300
    assert made.plan(24.0) is None
    assert made.due(24.0) == 25.0
    plan = made.plan(25.0)
    assert plan is not None
    assert plan.tasks == (LaneTask("a", 0, None, {"x": 7}, None),)
    assert plan.memories == (aside("x", 0.0, age=5.0),)
    made.lanes_reported([report("a", waiting={"x": (1, 7)}, probes={"x": 7}, memories=(aside("x", 10.0),))], 26.0)
    assert made.messages_aside().total() == 300
    assert made.due(26.0) == 36.0
    ready = aside("x", readiness=Readiness.READY)
    found = report("a", waiting={"x": (100, 120)}, probes={"x": 7}, scan=ScanResult(7, 400), memories=(ready,))
    made.lanes_reported([found], 37.0)
    assert made.messages_aside().total() == 100
    later = made.plan(37.0)
    assert later is not None
    assert later.tasks == (LaneTask("a", 0, None, {}, 120),)
    made.lanes_reported([report("a", scan=ScanResult(120, None))], 38.0)
    assert made.messages_aside().total() == 0
    assert made.plan(38.0) is None


def test_y5_a_scan_finds_another_message_if_that_of_a_probe_is_gone() -> None:
    made = planner("a")
    made.lanes_reported([report("a", waiting={"x": (3, 7)}, memories=(aside("x", 0.0),))], 20.0)
    made.lanes_reported([report("a", probes={"x": 7}, memories=(aside("x", 60.0),))], 21.0)
    plan = made.plan(21.0)
    assert plan is not None
    assert [one.scan_from for one in plan.tasks] == [7]


def test_y5_the_latest_news_of_a_destination_holds() -> None:
    made = planner("a")
    ready, old = aside("x", readiness=Readiness.READY, age=1.0), aside("X", age=3.0)
    made.lanes_reported([report("a", memories=(ready,)), report("a", memories=(old,))], 20.0)
    assert [one.readiness for one in made.memories(20.0)] == [Readiness.READY]


def test_d2_y11_a_drain_is_settled_when_a_whole_scan_found_nothing_that_can_move_and_nothing_was_moved_since() -> None:
    made = planner("a", "b", looked=False, drain=True)
    assert not made.is_settled(10.0, 60.0)
    made.lanes_reported([report("a", scan=CLEAN_SCAN), report("b", scan=ScanResult(0, None, {"x": 1}))], 10.0)
    assert not made.is_settled(10.0, 60.0)
    assert slices(made.plan(10.0)) == []
    assert slices(made.plan(12.0)) == [("b", 0)]
    made.lanes_reported([report("b", scan=CLEAN_SCAN, counts={"x": MessageCounts(returned=1)})], 13.0)
    assert not made.is_settled(13.0, 60.0)
    made.lanes_reported([report("b", scan=CLEAN_SCAN)], 14.0)
    assert made.is_settled(14.0, 60.0)
    made.message_arrived("a")
    assert not made.is_settled(14.0, 60.0)


def test_y5_a_drain_does_not_scan_a_queue_for_messages_it_knows_to_be_put_aside() -> None:
    made = planner("a", drain=True)
    made.lanes_reported([report("a", waiting={"x": (300, 7)}, memories=(aside("x", 60.0),))], 20.0)
    assert made.is_settled(20.0, 60.0)
    assert made.plan(79.0) is None
    assert not made.is_settled(80.0, 60.0), "the destination is due for a probe"


def test_y11_each_try_of_a_lane_counts_and_a_destination_that_is_ready_again_starts_anew() -> None:
    made = planner("a", drain=True)
    first = report("a", waiting={"X": (3, 7)}, memories=(aside("X", 60.0),), failures={"X": 1})
    made.lanes_reported([first], 20.0)
    assert made.waiting(40.0, 60.0) == [WaitingDestination("X", 20.0, 1)]
    made.lanes_reported([report("a", memories=(aside("X", 50.0, age=10.0),))], 31.0)
    assert made.waiting(40.0, 60.0) == [WaitingDestination("X", 20.0, 1)], "the lane has not tried"
    made.lanes_reported([report("a", memories=(aside("x", 60.0),), failures={"x": 1})], 40.0)
    assert made.waiting(40.0, 60.0) == [WaitingDestination("X", 40.0, 2)]
    made.lanes_reported([report("a", memories=(aside("x", readiness=Readiness.READY),))], 50.0)
    assert made.waiting(40.0, 60.0) == [WaitingDestination("X", -inf, 0)]


def test_y11_the_last_try_of_a_drain_is_planned_at_its_time_but_not_before_the_first_pause() -> None:
    made = planner("a", drain=True)
    made.lanes_reported([report("a", waiting={"x": (3, 7)}, memories=(aside("x", 60.0),))], 20.0)
    made.retry_by("x", inf, 1.0)
    assert made.due(20.0) == 80.0
    made.retry_by("X", 5.0, 1.0)
    assert made.due(20.0) == 21.0
    plan = made.plan(21.0)
    assert plan is not None
    assert plan.tasks == (LaneTask("a", 0, None, {"x": 7}, None),)


def test_y11_messages_that_others_have_locked_are_scanned_for_with_growing_pauses_and_then_given_up() -> None:
    made, now, scans = planner("a", looked=False, drain=True), 1.0, []
    while not made.is_settled(now, 60.0):
        now = made.due(now)
        scans.append(now)
        made.lanes_reported([report("a", scan=ScanResult(0, None, {"x": 2}, {"x": 1}))], now)
    assert scans == [1.0, 3.0, 7.0, 15.0, 31.0, 61.0, 91.0]
    assert made.queue_counts() == [QueueCounts("a", Counter(x=2), Counter(x=1))]
    assert made.messages_that_cannot_move() == 1


def test_y11_a_scan_over_several_lanes_counts_each_message_once_and_notices_what_was_moved_meanwhile() -> None:
    made = planner("a", looked=False, drain=True)
    moved = {"x": MessageCounts(returned=1)}
    made.lanes_reported([report("a", scan=ScanResult(0, 50, {}, {"x": 1}), counts=moved)], 10.0)
    made.lanes_reported([report("a", scan=ScanResult(50, None, {}, {"x": 1}))], 11.0)
    assert made.queue_counts() == [QueueCounts("a", Counter(), Counter(x=2))]
    assert not made.is_settled(11.0, 60.0)
    # A scan for the messages of one destination says nothing about the whole queue.
    made.lanes_reported([report("a", scan=ScanResult(7, None, {"x": 9}))], 12.0)
    assert made.queue_counts() == [QueueCounts("a", Counter(), Counter(x=2))]


def test_y11_a_queue_that_does_not_answer_is_tried_again_and_given_up_when_patience_is_over() -> None:
    made, now = planner("a", drain=True), 20.0
    made.lanes_reported([report("a", is_empty=False, failure="connection_lost")], now)
    tries: list[float] = []
    while not made.is_settled(now, 60.0):
        now = made.due(now)
        tries.append(now)
        made.lanes_reported([report("a", is_empty=False, failure="connection_lost")], now)
    assert made.queue_counts()[0].failure is FailureKind.CONNECTION_LOST
    assert len(tries) > 3
    made.lanes_reported([report("a", scan=CLEAN_SCAN)], now)
    assert made.queue_counts()[0].failure is None
    assert made.is_settled(now, 60.0)


def test_y11_messages_put_aside_in_a_queue_that_is_given_up_do_not_keep_a_drain_from_ending() -> None:
    made = planner("a", "b", drain=True)
    made.lanes_reported([report("a", waiting={"x": (3, 7)}, memories=(aside("x"),), failures={"x": 1})], 20.0)
    away = report("a", is_empty=False, failure="connection_lost", memories=(aside("x"),))
    made.lanes_reported([away], 30.0)
    assert made.waiting(89.0, 60.0) == [WaitingDestination("x", 20.0, 1)]
    assert (made.is_settled(90.0, 60.0), made.waiting(90.0, 60.0)) == (True, [])
    assert made.messages_aside() == Counter(x=3)


def test_s15_nothing_is_planned_for_a_held_destination_until_it_is_released() -> None:
    made = planner("a", drain=True)
    made.held = HeldEntities(frozenset({"x"}))
    made.lanes_reported([report("a", waiting={"X": (3, 7)}, scan=CLEAN_SCAN)], 20.0)
    assert made.plan(21.0) is None
    assert made.is_settled(21.0, 60.0)
    assert made.waiting(21.0, 60.0) == [WaitingDestination("X", -inf, 0, True)]
    assert made.messages_that_cannot_move() == 3
    made.held = HeldEntities()
    plan = made.plan(22.0)
    assert plan is not None
    assert plan.tasks == (LaneTask("a", 0, scan_from=7),)
    assert plan.held == HeldEntities()


def test_s15_the_lanes_of_a_plan_know_what_is_held() -> None:
    made = planner("a")
    made.held = HeldEntities(every=True, released=frozenset({"bills"}))
    made.message_arrived("a")
    plan = made.plan(20.0)
    assert plan is not None
    held = BatchPlan.of_json(plan.to_json()).held
    assert [path in held for path in ("orders", "/Bills", "bills/", "")] == [True, False, False, False]


# --- what is told ----------------------------------------------------------------------------------------------------


def test_a_plan_and_a_report_come_back_as_they_were() -> None:
    plan = BatchPlan("run-1", (LaneTask("a", 1, 2.5, {"x": 7}, 9),), (aside("x")._replace(missing=3.0),), {"a": 60.0})
    plan = replace(plan, held=HeldEntities(frozenset({"x"}), True, frozenset({"y"})))
    assert BatchPlan.of_json(plan.to_json()) == plan
    said = report(
        "a", memories=plan.memories, waiting={"x": (1, 2)}, scan=CLEAN_SCAN, counts={"x": MessageCounts(returned=1)}
    )
    assert LaneReport.of_json(said.to_json()) == said


def test_d2_a_report_with_messages_that_a_scan_found_is_the_same_after_json() -> None:
    scan = ScanResult(0, 7, active=Counter(orders=2), scheduled=Counter(orders=1, bills=3))
    assert LaneReport.of_json(report("a", scan=scan).to_json()) == report("a", scan=scan)


def test_the_json_of_a_plan_stays_as_checkpoints_hold_it() -> None:
    text = (
        '{"number": "run-1", "slices": [{"queue": "a", "lane": 1, "rate": 2.5, "seeds": {"x": 7}, "look": 9}], '
        '"memories": [["x", "aside", "server_busy", 1.0, 0.0, 5.0, null]]}'
    )
    memory = DestinationMemory("x", Readiness.ASIDE, FailureKind.SERVER_BUSY, 1.0, 0.0, 5.0, None)
    plan = BatchPlan("run-1", (LaneTask("a", 1, 2.5, {"x": 7}, 9),), (memory,))
    assert BatchPlan.of_json(text) == plan
    assert plan.to_json() == text


def test_a_job_shows_no_key() -> None:
    job = SyphonJob(primary="key-1", secondary="key-2", primary_name="a", secondary_name="b", ledger="books")
    assert SyphonJob.of_json(job.to_json()) == job
    assert "key-" not in repr(job)


def test_d2_l3_the_jobs_of_a_syphon_and_of_an_audit_keep_the_way_through_a_proxy() -> None:
    proxied = NetworkOptions(
        transport_type=TransportType.AmqpOverWebsocket,
        http_proxy=HttpProxy("proxy.example", 3128, "twin", "sesame"),
        connection_verify="/ca.pem",
    )
    other = NetworkOptions(custom_endpoint_address="sb://gateway.example:8443")
    job = SyphonJob(
        primary="key-1",
        secondary="key-2",
        primary_name="a",
        secondary_name="b",
        primary_network=proxied,
        secondary_network=other,
    )
    assert SyphonJob.of_json(job.to_json()) == job
    assert SyphonJob.of_json(replace(job, secondary_network=None).to_json()).secondary_network is None
    key = "Endpoint=sb://h;SharedAccessKeyName=a;SharedAccessKey=key-3"
    look = LookJob(key, "books", "b", 5.0, network=proxied, ranges=(QueueRange("q", 1, 9),))
    found = LookJob.of_json(look.to_json())
    assert (found.network, found.ranges) == (proxied, look.ranges)
    assert found.options("q").network_options() == proxied
    for one in (job, look):
        assert "sesame" not in repr(one)
        assert "key-" not in repr(one)


def test_y5_what_one_syphon_knows_of_a_destination_holds_for_the_next() -> None:
    one, other = Destinations(), Destinations()
    one.failed("x", one.route("x", 100.0).epoch, FailureKind.SERVER_BUSY, 100.0, 0.0, retried=False, messages=1)
    other.remember(one.memories(100.5), 7.0)
    assert other.route("X", 7.1).route is DestinationRoute.PUT_ASIDE
    probe = other.route("x", 7.6)
    assert probe.route is DestinationRoute.PROBE
    other.failed("x", probe.epoch, FailureKind.SERVER_BUSY, 7.6, 0.0, retried=False, messages=1)
    assert other.due("x") == pytest.approx(9.6)
    assert one.memories(100.5)[0].left == pytest.approx(0.5)


def test_deferred_messages_are_counted_by_destination() -> None:
    deferred = DeferredMessages(Destinations())
    deferred.schedule_first_scan(inf)
    deferred.add("x", (9, 5))
    deferred.add(None, (3,))
    assert deferred.waiting() == {"x": (2, 5), "": (1, 3)}
