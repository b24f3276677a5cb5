"""Errors of a pair say who must act, and have the data that is needed for it."""

from __future__ import annotations

from twinbus.backlog import FailureKind
from twinbus.errors import CallerError, OperatorError, RetryError
from twinbus.pairing import errors


def test_s9_too_large_for_the_backlog_says_by_how_many_bytes_and_of_which_limit() -> None:
    error = errors.MessageTooLargeForBacklogError("m1", 262_200, 262_144)
    assert isinstance(error, CallerError)
    assert (error.message_id, error.excess, error.limit) == ("m1", 56, 262_144)
    assert "56 bytes too large" in str(error)


def test_s9_a_partial_send_names_the_ids() -> None:
    cause = TimeoutError("too slow")
    error = errors.PartialSendError(["a"], ["b", "c"], cause)
    assert isinstance(error, RetryError)
    assert (error.safe, error.unsafe, error.cause) == (("a",), ("b", "c"), cause)
    assert str(error).startswith("1 messages are safe, 2 are not: too slow; send again")


def test_s10_what_was_not_cancelled_is_named() -> None:
    error = errors.ScheduledInBacklogError([-1, -2])
    assert error.handles == (-1, -2)
    assert "-1, -2; what was scheduled" in str(error)
    assert "once the entity is restored" in str(error)


def test_g4_an_unusable_primary_is_the_operators_with_a_hint() -> None:
    error = errors.PrimaryUnusableError("orders", FailureKind.ENTITY_NOT_FOUND)
    assert isinstance(error, OperatorError)
    assert (error.entity, error.cause) == ("orders", FailureKind.ENTITY_NOT_FOUND)
    assert str(error).endswith("Create the entity or mend the credential.")


def test_p7_the_same_cause_of_several_queues_is_told_once() -> None:
    causes = [errors.QueueCause(f"q{number}", FailureKind.TIMEOUT, "no answer") for number in range(3)]
    causes.append(errors.QueueCause("q3", FailureKind.DNS, ""))
    assert errors.listed_causes(causes) == "q0 and 2 more: timeout (no answer); q3: dns"
    assert errors.BacklogUnavailableError("orders", causes).causes == tuple(causes)
