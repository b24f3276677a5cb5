"""The backlog queues in use (S6, P7)."""

from __future__ import annotations

import pytest

from twinbus.backlog import COUNTING_FAILURES, EVICTING_FAILURES, FailureKind
from twinbus.pairing.decide import rotation as r
from twinbus.pairing.decide.rotation import Rotation, RotationDecision, advance
from twinbus.pairing.decide.send_flow import choose_queue
from twinbus.pairing.errors import BacklogUnavailableError, QueueCause

K = FailureKind
FULL = Rotation(("b0", "b1", "b2"), 30.0)
LOST = QueueCause("b1", K.CONNECTION_LOST, "reset by peer")
WITHOUT_1 = advance(FULL, r.BacklogSendFailed(*LOST), 5.0).rotation


@pytest.mark.parametrize(("chance", "queue"), [(0.0, "b0"), (0.33, "b0"), (0.34, "b1"), (0.67, "b2"), (0.999999, "b2")])
def test_s6_a_sender_picks_a_queue_at_random(chance: float, queue: str) -> None:
    assert choose_queue(FULL.usable, None, chance) == queue


@pytest.mark.parametrize("queue", ["b0", "b1", "b2"])
def test_s6_a_sender_stays_on_its_queue(queue: str) -> None:
    assert choose_queue(FULL.usable, queue, 0.0) == queue
    assert choose_queue(FULL.usable, queue, 0.999) == queue


@pytest.mark.parametrize("kind", sorted(COUNTING_FAILURES))
def test_s6_a_queue_that_fails_for_a_reason_of_the_first_list_leaves_for_all_senders(kind: FailureKind) -> None:
    after, effects = advance(FULL, r.BacklogSendFailed("b1", kind, "text"), 5.0)
    assert after.usable == ("b0", "b2")
    assert effects == (r.PublishQueueNotice(r.QueueLeft("b1", 5.0, kind, 2)), r.ArmProbation(35.0), r.TryAnother())
    assert after.causes == (("b1", kind, "text"),)
    assert after.absent == (r.Absence(QueueCause("b1", kind, "text"), 5.0, 35.0),)
    assert [choose_queue(after.usable, "b1", chance) for chance in (0.0, 0.49, 0.5, 0.99)] == ["b0", "b0", "b2", "b2"]
    assert choose_queue(after.usable, "b2", 0.0) == "b2"


def test_s6_a_queue_that_is_gone_or_closed_to_us_alone_leaves_too() -> None:
    assert {K.ENTITY_NOT_FOUND, K.UNAUTHORIZED, K.AUTHENTICATION} == EVICTING_FAILURES - COUNTING_FAILURES


@pytest.mark.parametrize("kind", sorted(set(FailureKind) - EVICTING_FAILURES))
def test_s6_a_fault_of_the_message_and_server_busy_never_evict_a_queue(kind: FailureKind) -> None:
    assert advance(FULL, r.BacklogSendFailed("b1", kind), 5.0) == RotationDecision(FULL, (r.RaiseSendError(),))


def test_s6_a_cause_without_a_text_has_none() -> None:
    left = advance(FULL, r.BacklogSendFailed("b0", K.TIMEOUT), 5.0).rotation
    assert advance(left, r.QueueMissing("b1", K.DNS), 5.0).rotation.causes == (("b0", K.TIMEOUT, ""), ("b1", K.DNS, ""))


def test_s6_those_still_under_way_to_a_queue_that_left_go_on_and_do_not_draw_out_its_probation() -> None:
    assert advance(WITHOUT_1, r.BacklogSendFailed("b1", K.TIMEOUT), 20.0) == RotationDecision(
        WITHOUT_1, (r.TryAnother(),)
    )


def test_s6_the_earliest_probation_is_waited_for() -> None:
    after, effects = advance(WITHOUT_1, r.BacklogSendFailed("b0", K.TIMEOUT), 10.0)
    assert r.ArmProbation(35.0) in effects
    after, effects = advance(after, r.ProbationEnded(), 35.0)
    assert effects == (r.PublishQueueNotice(r.QueueReturned("b1", 35.0)), r.ArmProbation(40.0))
    assert after.usable == ("b1", "b2")
    after, effects = advance(after, r.ProbationEnded(), 40.0)
    assert effects == (r.PublishQueueNotice(r.QueueReturned("b0", 40.0)),)
    assert after == FULL


def test_s6_a_probation_that_ends_early_is_waited_for_again() -> None:
    assert advance(WITHOUT_1, r.ProbationEnded(), 34.9) == RotationDecision(WITHOUT_1, (r.ArmProbation(35.0),))


def test_s6_a_probation_timer_with_nobody_away_does_no_harm() -> None:
    assert advance(FULL, r.ProbationEnded(), 1e6) == RotationDecision(FULL)


def test_s6_a_queue_that_came_back_and_fails_again_leaves_again() -> None:
    back = advance(WITHOUT_1, r.ProbationEnded(), 35.0).rotation
    assert advance(back, r.BacklogSendFailed(*LOST), 36.0).rotation.absent == (r.Absence(LOST, 36.0, 66.0),)


def test_s6_with_none_left_the_error_carries_every_cause() -> None:
    rotation = FULL
    for queue in FULL.queues:
        rotation = advance(rotation, r.BacklogSendFailed(queue, K.QUOTA_EXCEEDED, f"{queue} is full"), 5.0).rotation
    assert choose_queue(rotation.usable, "b0", 0.5) is None
    error = BacklogUnavailableError("orders", rotation.causes)
    assert [cause.queue for cause in error.causes] == ["b0", "b1", "b2"]
    assert "orders" in str(error)
    assert "b2: quota_exceeded (b2 is full)" in str(error)


def test_s6_with_no_queue_at_all_the_error_says_so() -> None:
    assert "none was found or created" in str(BacklogUnavailableError("orders", ()))


# --- P7, P8 ----------------------------------------------------------------------------------------------------------


def test_p7_a_queue_that_could_not_be_created_drops_out_without_probation() -> None:
    after, effects = advance(FULL, r.QueueMissing("b2", K.UNAUTHORIZED, "Manage"), 1.0)
    assert effects == (r.PublishQueueNotice(r.QueueLeft("b2", 1.0, K.UNAUTHORIZED, 2)),)
    assert after.usable == ("b0", "b1")
    assert after.causes == (("b2", K.UNAUTHORIZED, "Manage"),)
    assert advance(after, r.ProbationEnded(), 1e9) == RotationDecision(after)


def test_p7_one_that_never_was_does_not_hide_the_probation_of_another() -> None:
    after = advance(FULL, r.QueueMissing("b2", K.UNAUTHORIZED), 1.0).rotation
    assert r.ArmProbation(32.0) in advance(after, r.BacklogSendFailed("b0", K.TIMEOUT), 2.0).effects


def test_p8_a_queue_found_later_joins_in_its_place() -> None:
    missing = advance(FULL, r.QueueMissing("b0", K.TIMEOUT), 1.0).rotation
    assert advance(missing, r.QueueFound("b0"), 9.0) == RotationDecision(
        FULL, (r.PublishQueueNotice(r.QueueReturned("b0", 9.0)),)
    )


def test_p8_a_pair_may_begin_with_no_queue_and_get_them_one_by_one() -> None:
    rotation = Rotation((), 30.0)
    assert choose_queue(rotation.usable, None, 0.5) is None
    for queue in ("b0", "b1"):
        rotation = advance(rotation, r.QueueFound(queue), 1.0).rotation
    assert rotation == Rotation(("b0", "b1"), 30.0)


def test_p8_a_queue_found_twice_is_one() -> None:
    assert advance(FULL, r.QueueFound("b1"), 9.0) == RotationDecision(FULL)


def test_the_notices_have_names_of_their_own() -> None:
    assert (r.QueueLeft.name, r.QueueReturned.name) == ("backlog_queue_left", "backlog_queue_returned")


def test_c1_p7_a_queue_on_probation_is_there_and_one_that_was_never_found_is_not() -> None:
    assert advance(WITHOUT_1, r.QueueMissing("b2", K.DNS), 5.0).rotation.found == ("b0", "b1")


# --- P1, before the first try to find the queues has ended ------------------------------------------------------------

SOUGHT = Rotation(("b0", "b1"), 30.0, sought=("b0", "b1"))


def test_p1_a_call_that_finds_only_queues_that_are_sought_waits() -> None:
    assert (SOUGHT.usable, SOUGHT.found) == ((), ())
    assert SOUGHT.causes == tuple((queue, K.TIMEOUT, "the secondary has not answered yet") for queue in ("b0", "b1"))
    assert advance(SOUGHT, r.ProbeAsked(), 1.0) == RotationDecision(SOUGHT, (r.WaitForProbe(None),))


def test_p1_a_queue_that_the_first_try_finds_never_left() -> None:
    assert advance(SOUGHT, r.QueueFound("b1"), 1.0) == RotationDecision(Rotation(("b0", "b1"), 30.0, sought=("b0",)))


def test_p1_when_the_first_try_has_found_none_calls_no_longer_wait() -> None:
    one, effects = advance(SOUGHT, r.QueueMissing("b0", K.TIMEOUT, "silent"), 1.0)
    assert effects == (r.PublishQueueNotice(r.QueueLeft("b0", 1.0, K.TIMEOUT, 0)),)
    assert advance(one, r.ProbeAsked(), 1.0).effects == (r.WaitForProbe(None),)
    none = advance(one, r.QueueMissing("b1", K.TIMEOUT, "silent"), 1.0).rotation
    assert none.causes == (("b0", K.TIMEOUT, "silent"), ("b1", K.TIMEOUT, "silent"))
    assert advance(none, r.ProbeAsked(), 1.0) == RotationDecision(none, (r.RaiseUnavailable(),))


# --- S6, none left: probes -------------------------------------------------------------------------------------------


def emptied(*queues: str, at: float = 5.0) -> Rotation:
    rotation = FULL
    for second, queue in enumerate(queues):
        rotation = advance(rotation, r.BacklogSendFailed(queue, K.TIMEOUT), at + second).rotation
    return rotation


NONE_LEFT = emptied("b2", "b0", "b1")
"""b2 left at 5, b0 at 6, b1 at 7."""
PROBING = advance(NONE_LEFT, r.ProbeAsked(), 10.0).rotation


def test_s6_with_none_left_a_call_probes_the_queue_that_left_first_on_probation_or_not() -> None:
    after, effects = advance(NONE_LEFT, r.ProbeAsked(), 10.0)
    assert effects == (r.ProbeQueue("b2"),)
    assert (after.probing, after.next_probe, after.usable) == (True, 11.0, ())


def test_s6_a_call_does_not_probe_a_queue_that_it_tried_itself() -> None:
    assert advance(NONE_LEFT, r.ProbeAsked(frozenset({"b2"})), 10.0).effects == (r.ProbeQueue("b0"),)
    tried = frozenset(FULL.queues)
    assert advance(NONE_LEFT, r.ProbeAsked(tried), 10.0) == RotationDecision(NONE_LEFT, (r.RaiseUnavailable(),))
    assert advance(PROBING, r.ProbeAsked(tried), 10.0) == RotationDecision(PROBING, (r.RaiseUnavailable(),))


def test_s6_one_call_at_a_time_probes_and_the_others_wait_for_its_result() -> None:
    assert advance(PROBING, r.ProbeAsked(), 60.0) == RotationDecision(PROBING, (r.WaitForProbe(None),))


@pytest.mark.parametrize("end", [r.ProbeFailed("b2", K.TIMEOUT), r.ProbeAbandoned()])
def test_s6_probes_are_at_least_a_second_apart(end: r.Event) -> None:
    ended = advance(PROBING, end, 10.2).rotation
    assert not ended.probing
    assert advance(ended, r.ProbeAsked(), 10.999) == RotationDecision(ended, (r.WaitForProbe(11.0),))
    assert isinstance(advance(ended, r.ProbeAsked(), 11.0).effects[0], r.ProbeQueue)


def test_s6_a_probe_that_succeeds_brings_the_queue_back() -> None:
    after, effects = advance(PROBING, r.ProbeSucceeded("b2"), 10.5)
    assert (after.usable, after.probing, after.failed_probes) == (("b2",), False, 0)
    assert effects[0] == r.PublishQueueNotice(r.QueueReturned("b2", 10.5))


@pytest.mark.parametrize("kind", sorted(EVICTING_FAILURES))
def test_s6_a_probe_that_fails_lets_the_next_one_try_another_queue(kind: FailureKind) -> None:
    after, effects = advance(PROBING, r.ProbeFailed("b2", kind, "still"), 10.5)
    assert effects == (r.TryAnother(),)
    assert after.causes == (("b0", K.TIMEOUT, ""), ("b1", K.TIMEOUT, ""), ("b2", kind, "still"))
    # Its probation still ends when it would have ended.
    assert after.absent[-1] == r.Absence(QueueCause("b2", kind, "still"), 5.0, 35.0)
    assert (after.probing, after.failed_probes) == (False, 1)
    assert advance(after, r.ProbeAsked(), 11.0).effects == (r.ProbeQueue("b0"),)


@pytest.mark.parametrize("kind", sorted(set(FailureKind) - EVICTING_FAILURES))
def test_s6_a_probe_that_ends_by_a_fault_of_its_message_or_server_busy_is_no_failed_probe(kind: FailureKind) -> None:
    after, effects = advance(PROBING, r.ProbeFailed("b2", kind), 10.5)
    assert effects == (r.RaiseSendError(),)
    assert (after.absent, after.probing, after.failed_probes) == (NONE_LEFT.absent, False, 0)


def test_s6_a_probe_without_a_result_changes_nothing_but_that_it_is_over() -> None:
    after, effects = advance(PROBING, r.ProbeAbandoned(), 10.5)
    assert (after.absent, after.probing, after.failed_probes, effects) == (NONE_LEFT.absent, False, 0, ())


def test_s6_a_queue_that_returned_during_its_probe_leaves_again_if_the_probe_fails() -> None:
    back = advance(PROBING, r.ProbationEnded(), 35.0).rotation
    assert (back.usable, back.probing) == (("b2",), True)
    after, effects = advance(back, r.ProbeFailed("b2", K.DETACHED, "again"), 36.0)
    assert after.usable == ()
    assert after.absent[-1] == r.Absence(QueueCause("b2", K.DETACHED, "again"), 36.0, 66.0)
    assert effects[0] == r.PublishQueueNotice(r.QueueLeft("b2", 36.0, K.DETACHED, 0))
    assert effects[-1] == r.TryAnother()
    assert after.failed_probes == 1
    assert advance(back, r.ProbeSucceeded("b2"), 36.0).rotation.usable == ("b2",)


def test_s6_a_call_that_asks_when_a_queue_has_just_returned_looks_again_at_once() -> None:
    assert advance(WITHOUT_1, r.ProbeAsked(), 8.0) == RotationDecision(WITHOUT_1, (r.WaitForProbe(8.0),))


def test_p1_a_queue_that_was_never_found_is_not_probed() -> None:
    missing = Rotation(("b0", "b1"), 30.0)
    for queue in missing.queues:
        missing = advance(missing, r.QueueMissing(queue, K.DNS), 1.0).rotation
    assert advance(missing, r.ProbeAsked(), 9.0) == RotationDecision(missing, (r.RaiseUnavailable(),))
