"""Y9, L6: what the driver of a syphon on Spark counts, while lanes run and after they died. Without Spark."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.syphon.two_namespaces import until
from tests.tiers import budget
from twinbus.ledger import OK, UNKNOWN, Ledger, Move, Role, Stage, balance, read_ledger
from twinbus.pipeline.syphon_job import lane_counts
from twinbus.pipeline.syphon_job.lane_counts import (
    CountsAddress,
    CountsListener,
    LaneCounts,
    LaneProgress,
    LaneTry,
    send_counts,
)
from twinbus.pipeline.syphon_job.lost_lanes import LostLanes, record_start
from twinbus.pipeline.syphon_job.messages import SyphonJob
from twinbus.syphon import MessageCounts, ProgressCounter

LANE = LaneTry("run-1", "t/x-servicebus-transfer/0", 0, 0)


# --- while lanes run --------------------------------------------------------------------------------------------------

_grown = st.lists(
    st.builds(
        MessageCounts,
        returned=st.integers(0, 9),
        deferred=st.integers(0, 9),
        kept=st.integers(0, 9),
        possible_duplicates=st.integers(0, 9),
        bytes=st.integers(0, 99),
        dead_letter_reasons=st.dictionaries(st.sampled_from("ab"), st.integers(0, 3), max_size=2),
    ),
    min_size=1,
    max_size=5,
)


@given(st.dictionaries(st.integers(0, 3), _grown, min_size=1))
def test_y9_each_number_counts_once_however_often_a_lane_reports_it(lanes: dict[int, list[MessageCounts]]) -> None:
    """Each lane reports growing numbers, and its last report twice. The sums are those of the last reports."""
    total = ProgressCounter(0.0)
    counted = LaneCounts(total)
    last = []
    for lane, steps in lanes.items():
        sums = MessageCounts()
        for step in [*steps, MessageCounts()]:
            reasons = {
                reason: sums.dead_letter_reasons.get(reason, 0) + step.dead_letter_reasons.get(reason, 0)
                for reason in "ab"
            }
            sums = MessageCounts(
                sums.returned + step.returned,
                sums.deferred + step.deferred,
                sum(reasons.values()),
                sums.kept + step.kept,
                sums.possible_duplicates + step.possible_duplicates,
                sums.bytes + (step.bytes if step.returned else 0),
                reasons,
            )
            counted.add(LANE._replace(lane=lane), {"orders": sums}, {Stage.RETURN_PRIMARY: sums.returned}, 1.0)
        last.append(sums)
    assert total.total.returned == sum(one.returned for one in last)
    assert total.total.bytes == sum(one.bytes for one in last)
    assert total.total.deferred == sum(one.deferred for one in last)
    assert total.total.dead_lettered == sum(one.dead_lettered for one in last)
    assert total.total.kept == sum(one.kept for one in last)
    assert total.total.possible_duplicates == sum(one.possible_duplicates for one in last)
    assert total.operations[Stage.RETURN_PRIMARY] == total.total.returned


async def test_y9_a_running_lane_reports_what_it_counts_and_a_wrong_token_is_refused() -> None:
    received: list[LaneProgress] = []
    listener = CountsListener(received.append)
    address = await listener.listen("127.0.0.1", "127.0.0.1")
    assert address is not None
    counts = ProgressCounter(0.0)
    wrong = CountsAddress(address.host, address.port, "0" * len(address.token))
    counts.returned("orders", 600, 6_000, 0.0)
    refused = asyncio.create_task(send_counts(wrong, LANE, counts))
    sending = asyncio.create_task(send_counts(address, LANE, counts))
    await until(lambda: received)
    counts.returned("events", 5, 50, 0.0)
    await until(lambda: len(received) > 1)
    for task in (sending, refused):
        task.cancel()
    await asyncio.wait([sending, refused])
    await listener.close()
    assert [list(one.counts) for one in received] == [["orders"], ["events"]]
    assert received[0].lane == LANE
    assert received[0].counts["orders"] == MessageCounts(returned=600, bytes=6_000)


async def test_y9_a_lane_that_dies_within_a_line_has_reported_the_lines_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    received: list[LaneProgress] = []
    listener = CountsListener(received.append)
    address = await listener.listen("127.0.0.1", "127.0.0.1")
    assert address is not None
    line = LaneProgress(LANE, {"orders": MessageCounts(returned=1)}, {}).to_json().encode() + b"\n"
    for last, warnings in ((line[:-9], 0), (b"{}\n", 1), (b"x" * 2**20 + line, 2)):
        received.clear()
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(address.token.encode() + line + last)
        writer.write_eof()
        with suppress(ConnectionError):
            assert await reader.read() == b"", "the driver closes the connection and answers nothing"
        writer.close()
        assert [one.counts["orders"].returned for one in received] == [1]
        assert len(caplog.records) == warnings
    await listener.close()


@pytest.mark.timeout(60)
async def test_x1_connections_without_a_token_have_a_limit_and_do_not_keep_lanes_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_counts, "_MOST_WITHOUT_TOKEN", 3)
    monkeypatch.setattr(lane_counts, "_TOKEN_SECONDS", 3600.0)
    received: list[LaneProgress] = []
    listener = CountsListener(received.append)
    address = await listener.listen("127.0.0.1", "127.0.0.1")
    assert address is not None
    strangers = [await asyncio.open_connection(address.host, address.port) for _ in range(5)]
    for reader, _ in strangers[:2]:
        with suppress(ConnectionResetError):  # nothing else ends it within this hour
            assert await reader.read() == b"", "a later connection has ended it"
    counts = ProgressCounter(0.0)
    counts.returned("orders", 1, 10, 0.0)
    sending = asyncio.create_task(send_counts(address, LANE, counts))
    await until(lambda: received)
    sending.cancel()
    await asyncio.wait([sending])
    for _, writer in strangers:
        writer.close()
    await listener.close()


async def test_y9_a_lane_that_cannot_reach_the_driver_goes_on_without_it() -> None:
    listener = CountsListener(lambda _: None)
    address = await listener.listen("127.0.0.1", "127.0.0.1")
    assert address is not None
    await listener.close()
    await send_counts(address, LANE, ProgressCounter(0.0))


def test_y9_the_address_of_the_driver_travels_with_the_job_and_is_not_shown() -> None:
    address = CountsAddress("driver", 4711, "token-of-a-run")
    job = SyphonJob(primary="p", secondary="s", primary_name="one", secondary_name="two", counts_to=address)
    assert SyphonJob.of_json(job.to_json()) == job
    assert "token-of-a-run" not in repr(job)


# --- lanes that died --------------------------------------------------------------------------------------------------


def test_l6_what_a_dead_lane_recorded_is_counted_as_the_ledger_counts_it(tmp_path: Path) -> None:
    """Six messages are accepted, and a lane dies with each of them in another state. A second lane delivers all."""
    ids = [str(number) for number in range(8)]
    with Ledger(tmp_path, Role.CLIENT) as client:
        client.done(Stage.SEND_BACKLOG, "two", "q", ids, (1,) * 8, "one/orders", seconds=0.1)
    before = LostLanes(tmp_path)
    lane = Ledger(tmp_path, Role.SYPHON)
    record_start(lane, LANE, "one")
    completed = ["0", "1"]
    lane.begin(Stage.RETURN_PRIMARY, "one", "orders", ["0", "1", "2"], (1,) * 3).end(OK)  # "2" is not completed
    lane.done(Stage.COMPLETE_BACKLOG, "two", "q", completed, (0, 0), "one/orders", seconds=0.1)
    lane.begin(Stage.RETURN_PRIMARY, "one", "orders", ["3"], (1,)).end(UNKNOWN, cause="timeout")
    lane.begin(Stage.RETURN_PRIMARY, "one", "orders", ["4"], (1,)).end("server_busy")
    lane.begin(Stage.RETURN_PRIMARY, "one", "orders", ["5", "6"], (1,) * 2).end("server_busy", failed=["6"])
    lane.begin(Stage.RETURN_PRIMARY, "one", "orders", ["7"], (1,))  # under way
    lane.moved(Move.KEPT, ["4"], "two/q", "one/orders", "why")
    lane.flush()
    ((found_lane, found),) = before.read([LANE, LANE._replace(number=1)], "one")
    assert found_lane == LANE
    orders = found.counts["orders"]
    assert (orders.returned, orders.kept) == (4, 1)
    assert found.operations[Stage.RETURN_PRIMARY] == 8
    with Ledger(tmp_path, Role.SYPHON) as second:
        again = [one for one in ids if one not in completed]
        second.begin(Stage.RETURN_PRIMARY, "one", "orders", again, (1,) * 6).end(OK)
        second.done(Stage.COMPLETE_BACKLOG, "two", "q", again, (0,) * 6, "one/orders", seconds=0.1)
    told = balance(read_ledger(tmp_path), dead={lane.writer})
    assert orders.possible_duplicates == (told.duplicated + told.possibly_duplicated).total() == 4
    lane.close()


class Try(Enum):
    """How one try of a lane to move a message ends, as the ledger and the broker see it."""

    REFUSED = "the destination refused it"
    UNKNOWN = "no answer of the destination was recorded as unknown"
    KILLED_SENDING = "the lane died while it sent"
    KILLED_DELIVERED = "the lane died when the message was delivered"
    LOCK_LOST = "the lock was lost before the completion"
    KILLED_COMPLETED = "the lane died when the message was completed, before it recorded that"
    COMPLETED = "completed"


_LAST = (Try.KILLED_COMPLETED, Try.COMPLETED)
_AGAIN = [one for one in Try if one not in _LAST]
_histories = st.tuples(st.lists(st.sampled_from(_AGAIN), max_size=3), st.sampled_from(_LAST))


def record_try(lane: Ledger, one: Try, name: str) -> None:
    send = lane.begin(Stage.RETURN_PRIMARY, "one", "orders", [name], (1,))
    if one is Try.KILLED_SENDING:
        return
    results = {Try.REFUSED: "server_busy", Try.UNKNOWN: UNKNOWN}
    send.end(results.get(one, OK), cause="timeout" if one in results else None)
    if one is Try.COMPLETED or one is Try.LOCK_LOST:
        result = OK if one is Try.COMPLETED else UNKNOWN
        lane.done(Stage.COMPLETE_BACKLOG, "two", "q", [name], (0,), "one/orders", seconds=0.1, result=result)
    if one is Try.LOCK_LOST:
        lane.moved(Move.POSSIBLE_DUPLICATE, [name], "two/q", "one/orders", "the lock was lost")


@settings(max_examples=budget(10, 60, 1000))
@given(st.lists(_histories, min_size=1, max_size=3))
def test_l6_the_possible_duplicates_of_a_drain_are_those_of_the_ledger(
    histories: list[tuple[list[Try], Try]],
) -> None:
    """Each message is tried by one lane after the other, until one has completed it."""
    with TemporaryDirectory() as name:
        folder, tries = Path(name), [[*again, last] for again, last in histories]
        with Ledger(folder, Role.CLIENT) as client:
            ids = [str(number) for number in range(len(tries))]
            client.done(Stage.SEND_BACKLOG, "two", "q", ids, (1,) * len(ids), "one/orders", seconds=0.1)
        before = LostLanes(folder)
        writers = set[str]()
        for lane_number in range(max(map(len, tries))):
            with Ledger(folder, Role.SYPHON) as lane:
                record_start(lane, LANE._replace(number=lane_number), "one")
                writers.add(lane.writer)
                for message, history in enumerate(tries):
                    if lane_number < len(history):
                        record_try(lane, history[lane_number], str(message))
        told = balance(read_ledger(folder), dead=writers)
        counted = before.possible_duplicates("one")
        assert counted.total() == (told.duplicated + told.possibly_duplicated).total()


def test_l6_a_message_that_two_dead_lanes_delivered_and_the_second_completed_has_one_duplicate(tmp_path: Path) -> None:
    before = LostLanes(tmp_path)
    lanes = [LANE._replace(number=number) for number in range(2)]
    for this, ends in zip(lanes, (Try.KILLED_DELIVERED, Try.KILLED_COMPLETED), strict=True):
        with Ledger(tmp_path, Role.SYPHON) as lane:
            record_start(lane, this, "one")
            record_try(lane, ends, "0")
    doubts = [found.counts["orders"].possible_duplicates for _, found in before.read(lanes, "one")]
    assert doubts == [1, 1], "each lane has a doubt"
    total = ProgressCounter(0.0)
    total.possible_duplicates("orders", sum(doubts))
    total.recount_possible_duplicates(before.possible_duplicates("one"))
    assert total.total.possible_duplicates == total.by_destination["orders"].possible_duplicates == 1


def test_l6_segments_of_an_earlier_run_are_not_read(tmp_path: Path) -> None:
    with Ledger(tmp_path, Role.SYPHON) as lane:
        record_start(lane, LANE, "one")
    assert LostLanes(tmp_path).read([LANE], "one") == []
