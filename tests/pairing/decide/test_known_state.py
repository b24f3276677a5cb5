"""What processes tell each other about failovers and holds, clause by clause: S15, S16."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pairing.decide.test_failover import CLOSED, FAILED, FAILING, HEALTHY, OVER, PINGING, K
from tests.pairing.decide.test_failover_hold import HELD
from tests.pairing.decide.test_failover_trial import TRIAL
from twinbus.backlog import FailureKind
from twinbus.pairing.decide import failover as f
from twinbus.pairing.decide import failover_events as e
from twinbus.pairing.decide import known_state as s
from twinbus.pairing.decide.known_state import EVERY_ENTITY, NOTHING_KNOWN, KnownState, apply_changes

WALL, NOW = 1_700_000_000.0, 500.0
OVER_SINCE = s.FailoverRecord("Orders", K.TIMEOUT, WALL - 100, WALL + 20, 60.0, 0, WALL - 40, "host:1")
RESTORED = s.RestoreRecord("orders", WALL, "host:2")


def hold(entity: str = EVERY_ENTITY) -> s.HoldRecord:
    return s.HoldRecord(entity, WALL - 1000, "operator")


def release(entity: str = EVERY_ENTITY) -> s.ReleaseRecord:
    return s.ReleaseRecord(entity, WALL, "operator")


def taken_over(*changes: s.StateChange, wall: float = WALL, entity: str = "orders") -> e.FailoverKnown | None:
    return s.known_failover(apply_changes(changes), entity, wall, NOW)


# --- S16: failovers --------------------------------------------------------------------------------------------------


def test_s16_a_failover_is_taken_over_with_cause_age_and_ping_schedule() -> None:
    expected = e.FailoverKnown(K.TIMEOUT, engaged=NOW - 100, next_ping=NOW + 20)
    assert taken_over(OVER_SINCE) == expected
    assert taken_over(replace(OVER_SINCE, failed_trials=2)) == replace(expected, failed_trials=2)


def test_s16_nothing_known_is_nothing_to_take_over() -> None:
    assert taken_over() is None
    assert taken_over(OVER_SINCE, entity="bills") is None


def test_s16_a_ping_that_is_due_is_due_now() -> None:
    found = taken_over(replace(OVER_SINCE, next_ping_at=WALL - 5))
    assert found is not None
    assert found.next_ping == NOW


def test_s16_any_restore_clears_a_failover_and_a_later_failover_counts_again() -> None:
    assert taken_over(OVER_SINCE, RESTORED) is None
    assert taken_over(OVER_SINCE, RESTORED, OVER_SINCE) is not None
    assert taken_over(RESTORED) is None


@pytest.mark.parametrize(
    ("age", "believed"), [(0.0, True), (179.9, True), (180.0, True), (180.1, False), (-180.0, True), (-180.1, False)]
)
def test_s16_a_failover_is_believed_for_three_ping_intervals_past_or_future(age: float, believed: bool) -> None:
    record = replace(OVER_SINCE, written_at=WALL - age)
    assert (taken_over(record) is not None) is believed


def test_s16_the_age_limit_grows_with_the_current_ping_interval() -> None:
    record = replace(OVER_SINCE, written_at=WALL - 500, ping_interval=240.0, failed_trials=2)
    assert taken_over(record) is not None


def test_s16_a_failover_of_the_future_engaged_now() -> None:
    found = taken_over(replace(OVER_SINCE, engaged_at=WALL + 30, written_at=WALL + 30))
    assert found is not None
    assert found.engaged == NOW


def test_s16_paths_ignore_case_and_slashes() -> None:
    assert taken_over(OVER_SINCE, entity="/ORDERS/") is not None
    assert taken_over(OVER_SINCE, replace(RESTORED, entity="ORDERS/")) is None
    assert s.entity_key("/~Orders~/") == "~orders~"


# --- S15: holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ([], False),
        ([hold("orders")], True),
        ([hold("Orders/")], True),
        ([hold("bills")], False),
        ([hold()], True),
        ([hold("orders"), release("orders")], False),
        ([hold("orders"), release()], False),
        ([hold(), release()], False),
        ([hold(), release("orders")], False),
        ([hold(), release("bills")], True),
        ([hold(), release("orders"), hold()], True),
        ([hold(), release("orders"), hold("orders")], True),
        ([hold(), release("orders"), hold("bills")], False),
        ([hold("orders"), hold(), release("orders")], False),
        ([release("orders"), hold()], True),
        ([hold(), release(), hold("bills")], False),
        ([hold(), release("orders"), release()], False),
        ([hold("orders"), RESTORED], True),
        ([hold("orders"), OVER_SINCE, RESTORED], True),
    ],
)
def test_s15_the_last_hold_or_release_of_an_entity_or_of_all_decides(changes: list[s.StateChange], held: bool) -> None:
    state = apply_changes(changes)
    assert (state.hold_of("orders") is not None) is held
    assert (taken_over(*changes) == e.FailoverKnown(e.DrillCause.FORCED, NOW - 1000, hold=True)) is held
    rebuilt = apply_changes(s.hold_changes(state))
    assert (rebuilt.holds, rebuilt.released) == (state.holds, state.released)


def test_s15_what_is_held_is_listed_for_a_person() -> None:
    assert apply_changes([]).held_names() == ()
    assert apply_changes([hold("Orders"), hold("bills")]).held_names() == ("Orders", "bills")
    assert apply_changes([hold(), release("z"), release("a"), hold("b")]).held_names() == (
        "all entities",
        "not a",
        "not z",
        "b",
    )
    assert apply_changes([hold(), release("a"), hold("a")]).held_names() == ("all entities", "a")


def test_s15_a_hold_has_no_age_limit_and_no_future() -> None:
    assert taken_over(hold("orders"), wall=WALL + 1e9) is not None
    found = taken_over(hold("orders"), wall=WALL - 1e6)
    assert found is not None
    assert (found.engaged, found.hold) == (NOW, True)


def test_s15_a_hold_goes_before_a_failover() -> None:
    found = taken_over(OVER_SINCE, hold())
    assert found is not None
    assert found.hold
    after = taken_over(OVER_SINCE, hold(), release())
    assert after is not None
    assert not after.hold


# --- what a process writes -------------------------------------------------------------------------------------------


def shared(entity: f.Entity, event: e.Event, now: float, *, longest_ping: float = 5.0) -> s.StateChange | None:
    after = f.advance(entity, event, now).entity
    return s.change_to_share(entity, after, event, now, WALL, "me", longest_ping=longest_ping)


def test_s16_a_failover_that_engages_is_written_with_its_first_ping() -> None:
    record = s.FailoverRecord("orders", K.TIMEOUT, WALL, WALL + 30.0, 30.0, 0, WALL, "me")
    assert shared(FAILING, e.FailoverTimerFired(), 70.0) == record


@pytest.mark.parametrize(("longest_ping", "claimed"), [(5.0, 5.0), (30.0, 30.0), (300.0, 30.0)])
def test_s16_a_ping_that_begins_is_claimed_for_the_longest_time_of_a_ping_and_for_one_interval_at_most(
    longest_ping: float, claimed: float
) -> None:
    record = s.FailoverRecord("orders", K.TIMEOUT, WALL - 30.0, WALL + claimed, 30.0, 0, WALL, "me")
    assert shared(OVER, e.PingDue(), 100.0, longest_ping=longest_ping) == record


def test_s16_a_ping_that_failed_is_written_with_the_time_of_the_next_one() -> None:
    # PINGING began its ping at 100.0 and pings every 30 s.
    record = s.FailoverRecord("orders", K.TIMEOUT, WALL - 31.0, WALL + 29.0, 30.0, 0, WALL, "me")
    assert shared(PINGING, e.PingFailed(1, K.TIMEOUT), 101.0) == record
    late = shared(PINGING, e.PingFailed(1, K.TIMEOUT), 140.0)
    assert isinstance(late, s.FailoverRecord)
    assert late.next_ping_at == WALL - 10.0


def test_s16_a_refused_ping_is_written_with_its_cause() -> None:
    found = shared(PINGING, e.PingFailed(1, K.ENTITY_NOT_FOUND), 101.0)
    assert isinstance(found, s.FailoverRecord)
    assert found.cause is K.ENTITY_NOT_FOUND


def test_s16_a_process_leaves_a_ping_to_another_only_while_the_ping_is_in_progress_and_shared() -> None:
    assert s.claims_ping(PINGING)
    assert not s.claims_ping(OVER)
    assert not s.claims_ping(HEALTHY)
    drill = f.advance(HEALTHY, e.FailoverForced(), 100.0).entity
    assert not s.claims_ping(f.advance(drill, e.PingDue(), 200.0).entity)


@pytest.mark.parametrize("event", [e.PingSucceeded(1), e.RestoreForced()])
def test_s16_every_restore_is_written(event: e.Event) -> None:
    assert shared(PINGING, event, 101.0) == s.RestoreRecord("orders", WALL, "me")


def test_s14_s16_a_failed_trial_is_written_with_its_longer_interval() -> None:
    found = shared(TRIAL, FAILED, 300.0)
    assert isinstance(found, s.FailoverRecord)
    assert (found.ping_interval, found.failed_trials, found.next_ping_at) == (60.0, 1, WALL + 60.0)


@pytest.mark.parametrize(
    ("entity", "event"),
    [
        (HEALTHY, e.PrimarySendSucceeded()),
        (HEALTHY, FAILED),
        (FAILING, e.PrimarySendSucceeded()),
        (OVER, e.BacklogAccepted()),
        (OVER, FAILED),
        (OVER, e.PairClosed()),
        (CLOSED, e.RestoreForced()),
        (TRIAL, e.PrimarySendSucceeded()),
        (TRIAL, e.PairClosed()),
    ],
)
def test_s16_a_step_that_engages_and_restores_nothing_writes_nothing(entity: f.Entity, event: e.Event) -> None:
    assert shared(entity, event, 100.0) is None


def test_s16_what_was_taken_over_is_not_written_before_its_first_ping() -> None:
    known = e.FailoverKnown(K.DNS, engaged=50.0, next_ping=90.0)
    assert shared(HEALTHY, known, 100.0) is None
    over = f.advance(HEALTHY, known, 100.0).entity
    found = shared(over, e.PingDue(), 100.0)
    assert found == s.FailoverRecord("orders", K.DNS, WALL - 50.0, WALL + 5.0, 30.0, 0, WALL, "me")


@pytest.mark.parametrize("event", [e.FailoverForced(), e.FailoverForced(hold=True)])
def test_s11_s16_a_drill_of_one_process_is_not_written(event: e.FailoverForced) -> None:
    assert shared(HEALTHY, event, 100.0) is None
    forced = f.advance(HEALTHY, event, 100.0).entity
    assert shared(forced, e.PingDue(), 200.0) is None


def test_s15_s16_the_end_of_a_hold_clears_an_earlier_failover_of_the_entity() -> None:
    assert shared(HELD, e.RestoreForced(), 100.0) == s.RestoreRecord("orders", WALL, "me")


# --- text ------------------------------------------------------------------------------------------------------------

entities = st.text(min_size=1, max_size=260)
times = st.integers(86_400_001, 4_000_000_000_000).map(lambda ms: ms / 1000)
writers = st.text(min_size=1, max_size=100)
changes = st.one_of(
    st.builds(
        s.FailoverRecord,
        entities,
        st.sampled_from(FailureKind),
        times,
        times,
        st.floats(0.001, 1800),
        st.integers(0, 64),
        times,
        writers,
    ),
    st.builds(s.RestoreRecord, entities, times, writers),
    st.builds(s.HoldRecord, entities, times, writers),
    st.builds(s.ReleaseRecord, entities, times, writers),
)


@given(st.lists(changes, max_size=20))
def test_s16_what_is_written_is_read_as_it_was(written: list[s.StateChange]) -> None:
    text = s.state_text(written)
    assert s.read_state(text) == s.read_state(text.encode()) == tuple(written)


@given(st.lists(changes, max_size=12))
def test_s15_the_holds_of_any_state_can_be_written_again(written: list[s.StateChange]) -> None:
    state = apply_changes(written)
    rebuilt = apply_changes(s.hold_changes(state))
    assert (rebuilt.holds, rebuilt.released) == (state.holds, state.released)


def test_s16_the_text_is_what_the_docs_show() -> None:
    found = json.loads(s.state_text([OVER_SINCE, hold()]))
    assert found == {
        "version": 1,
        "changes": [
            {
                "what": "failed_over",
                "entity": "Orders",
                "writer": "host:1",
                "cause": "timeout",
                "engaged_at": "2023-11-14T22:11:40.000+00:00",
                "next_ping_at": "2023-11-14T22:13:40.000+00:00",
                "ping_interval": 60.0,
                "failed_trials": 0,
                "written_at": "2023-11-14T22:12:40.000+00:00",
            },
            {
                "what": "held",
                "entity": "*",
                "writer": "operator",
                "cause": "forced",
                "engaged_at": "2023-11-14T21:56:40.000+00:00",
            },
        ],
    }


def test_s16_a_later_version_may_add_kinds_causes_and_fields() -> None:
    found = json.loads(s.state_text([OVER_SINCE]))
    found["changes"][0] |= {"cause": "solar_flare", "more": 1}
    found["changes"].append({"what": "something else", "entity": "x", "writer": "y"})
    assert s.read_state(json.dumps(found)) == (replace(OVER_SINCE, cause=K.UNKNOWN),)


GOOD = json.loads(s.state_text([OVER_SINCE]))["changes"][0]
NO_STATE = "the text is no shared state: "


def changed(**fields: object) -> str:
    """A state with one change that has these fields instead of its own."""
    return json.dumps({"version": 1, "changes": [GOOD | fields]})


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", NO_STATE),
        ("{", NO_STATE),
        ("[]", NO_STATE),
        ("null", NO_STATE),
        ("7", NO_STATE),
        ('"text"', NO_STATE),
        ("[" * 600_000, NO_STATE),
        ("{}", f"{NO_STATE}'version'"),
        ('{"version": 2, "changes": []}', "the state has version '2'; this Twinbus reads 1"),
        (
            '{"version": "12345678901234567890123", "changes": []}',
            "the state has version '12345678901234567890'; this Twinbus reads 1",
        ),
        ('{"version": 1}', NO_STATE),
        ('{"version": 1, "changes": {}}', "the state has version '1'; this Twinbus reads 1"),
        ('{"version": 1, "changes": [7]}', "a change is no JSON object"),
        (" " * (1024 * 1024 + 1), "the text is longer than 1048576 bytes"),
        (b"\xff\xfe\xfa", NO_STATE),
        (changed(entity=""), "entity is no text"),
        (changed(entity=None), "entity is no text"),
        (changed(entity="x" * 1025), "entity is no text"),
        (changed(writer=5), "writer is no text"),
        (changed(cause=None), "cause is no text"),
        (changed(engaged_at="yesterday"), "engaged_at is no time"),
        (changed(engaged_at="2023-11-14T22:11:40"), "engaged_at has no time zone, or is far from today"),
        (changed(engaged_at="0001-01-01T00:00:00+23:59"), "engaged_at has no time zone, or is far from today"),
        (changed(engaged_at="1970-01-02T00:00:00+00:00"), "engaged_at has no time zone, or is far from today"),
        (changed(written_at="9999-01-01T00:00:00+00:00"), "written_at has no time zone, or is far from today"),
        (changed(next_ping_at=5), "next_ping_at is no time"),
        (changed(written_at=None), "written_at is no time"),
        (changed(ping_interval=0), "ping_interval is no interval"),
        (changed(ping_interval=1801), "ping_interval is no interval"),
        (changed(ping_interval=True), "ping_interval is no interval"),
        (changed(ping_interval=float("nan")), "ping_interval is no interval"),
        (changed(failed_trials=-1), "failed_trials is no count"),
        (changed(failed_trials=1.0), "failed_trials is no count"),
    ],
)
def test_s16_a_text_that_is_no_state_is_refused(text: str | bytes, error: str) -> None:
    with pytest.raises(s.StateFormatError) as raised:
        s.read_state(text)
    found = str(raised.value)
    assert found.startswith(error) if error is NO_STATE else found == error


@pytest.mark.parametrize("trials", [64, 65, 1000])
def test_s14_s16_after_any_number_of_failed_trials_what_is_written_can_be_read(trials: int) -> None:
    entity = f.Entity("orders", f.FailoverPolicy(failover_interval=0, ping_interval=1.0), 0.0, failed_trials=trials)
    record = shared(entity, FAILED, 10.0)
    assert isinstance(record, s.FailoverRecord)
    (found,) = s.read_state(s.state_text([record]))
    assert isinstance(found, s.FailoverRecord)
    assert found == replace(record, failed_trials=64)
    known = taken_over(found)
    assert known is not None
    assert f.advance(HEALTHY, known, NOW).entity.ping_interval == f.MAX_PING_INTERVAL


def test_s16_a_count_of_failed_trials_that_another_version_wrote_is_read() -> None:
    (found,) = s.read_state(changed(failed_trials=1000))
    assert isinstance(found, s.FailoverRecord)
    assert found.failed_trials == 64


def test_s16_the_longest_texts_and_the_outermost_numbers_are_read() -> None:
    text = changed(
        entity="x" * 1024,
        engaged_at="1970-01-02T00:00:00.001+00:00",
        next_ping_at="9998-12-31T23:59:59-05:00",
        ping_interval=1800,
        failed_trials=64,
    )
    (found,) = s.read_state(text.ljust(1024 * 1024))
    assert isinstance(found, s.FailoverRecord)
    assert (found.entity, found.ping_interval, found.failed_trials) == ("x" * 1024, 1800.0, 64)
    assert (found.engaged_at, found.next_ping_at) == (86400.001, 253_370_782_799.0)


def test_s15_a_path_that_no_entity_can_have_is_refused() -> None:
    s.refuse_impossible_path("x")
    s.refuse_impossible_path(f"/{'x' * 260}/")
    for path, shown in (("/", "'/'"), ("", "''"), ("x" * 261, repr("x" * 30))):
        with pytest.raises(ValueError, match="is no path") as raised:
            s.refuse_impossible_path(path)
        assert str(raised.value) == (
            f"{shown} is no path of a queue or topic: give 1 to 260 characters, or leave it out for all entities"
        )


@given(st.binary(max_size=200))
def test_s16_no_bytes_raise_another_error(data: bytes) -> None:
    with contextlib.suppress(s.StateFormatError):
        s.read_state(data)


def test_the_empty_state_knows_nothing() -> None:
    assert KnownState() == NOTHING_KNOWN
    assert s.StateReading(NOTHING_KNOWN) == (NOTHING_KNOWN, (), False)
    assert s.hold_changes(NOTHING_KNOWN) == ()
