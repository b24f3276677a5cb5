"""When results are up to date, and as of when (D7): the rules as a table of cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.answers import Freshness, LedgerState, ResultState, age_text, judge_freshness

NOW = 1_790_000_000_000
RECENT, OLD = NOW - 59_000, NOW - 61_000
SILENCE = 900.0
COMPUTED = ResultState(computed_at=OLD, silence=SILENCE)
READ = LedgerState("here", OLD, at_hand=True)


@pytest.mark.parametrize(
    ("result", "ledgers", "as_of", "reason"),
    [
        (None, [], None, "there are no results in the tables"),
        (COMPUTED, [], None, "it is not known when the ledger was looked at"),
        # The ledger is elsewhere: the time of the pipeline's look counts.
        (COMPUTED, [LedgerState("away", RECENT)], RECENT, None),
        (COMPUTED, [LedgerState("away", OLD)], OLD, "the results are 61 s old"),
        (COMPUTED, [LedgerState("away", 0)], None, "it is not known when the ledger was looked at"),
        # The ledger can be read here.
        (COMPUTED, [READ], NOW, None),
        (COMPUTED, [LedgerState("here", 0, at_hand=True)], NOW, None),
        (COMPUTED, [LedgerState("here", RECENT, at_hand=True, unread_open="a")], RECENT, None),
        (COMPUTED, [LedgerState("here", OLD, at_hand=True, unread_open="a")], OLD, "the results are 61 s old"),
        (
            COMPUTED,
            [LedgerState("here", RECENT, at_hand=True, unread_sealed="b")],
            RECENT,
            "the results do not have all of b",
        ),
        (COMPUTED, [LedgerState("here", None)], None, "the results have nothing of here"),
        # The oldest of several ledgers counts.
        (COMPUTED, [READ, LedgerState("away", RECENT)], RECENT, None),
        (COMPUTED, [READ, LedgerState("away", OLD)], OLD, "the results are 61 s old"),
        (COMPUTED, [READ, LedgerState("other", None)], None, "the results have nothing of other"),
    ],
)
def test_d7_results_are_up_to_date_if_all_sealed_segments_are_in_and_open_ones_were_looked_at(
    result: ResultState | None, ledgers: list[LedgerState], as_of: int | None, reason: str | None
) -> None:
    assert judge_freshness(result, ledgers, NOW, 60) == Freshness(as_of, reason)


@pytest.mark.parametrize(
    ("result", "ledger", "silence", "as_of", "reason"),
    [
        (COMPUTED, READ, SILENCE, NOW, None),
        (COMPUTED, READ, 300.0, NOW, "the results take a writer for dead after 900 s of silence"),
        # A writer has died, or may count as dead by now: the results are those of the time when they were computed.
        (
            COMPUTED,
            LedgerState("here", OLD, at_hand=True, same_writers=False),
            SILENCE,
            OLD,
            "the results are 61 s old",
        ),
        (ResultState(OLD, SILENCE, has_undecided=True), READ, SILENCE, OLD, "the results are 61 s old"),
        (ResultState(RECENT, SILENCE, has_undecided=True), READ, SILENCE, RECENT, None),
        # Cost, incidents and latency do not depend on which writers are dead.
        (COMPUTED, LedgerState("here", OLD, at_hand=True, same_writers=False), None, NOW, None),
        (ResultState(OLD, SILENCE, has_undecided=True), READ, None, NOW, None),
    ],
)
def test_d7_l1_a_balance_is_up_to_date_only_while_the_same_writers_are_dead(
    result: ResultState, ledger: LedgerState, silence: float | None, as_of: int, reason: str | None
) -> None:
    assert judge_freshness(result, [ledger], NOW, 60, silence) == Freshness(as_of, reason)


@given(
    looked_at=st.one_of(st.none(), st.integers(0, NOW)),
    at_hand=st.booleans(),
    sealed=st.one_of(st.none(), st.just("a")),
    opened=st.one_of(st.none(), st.just("b")),
    max_age=st.integers(0, 10**10),
)
def test_d7_no_results_without_a_sealed_segment_are_up_to_date_and_none_that_are_too_old(
    looked_at: int | None, at_hand: bool, sealed: str | None, opened: str | None, max_age: int
) -> None:
    state = LedgerState("here", looked_at, at_hand, sealed, opened)
    found = judge_freshness(COMPUTED, [state], NOW, max_age)
    if found.is_up_to_date:
        assert looked_at is not None
        assert sealed is None
        assert found.as_of is not None
        assert NOW - found.as_of <= max_age * 1000
        assert opened is None or found.as_of <= looked_at


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(-5, "0 s"), (999, "0 s"), (119_999, "119 s"), (120_000, "2 min"), (7_200_000, "2 h"), (3 * 86_400_000, "3 days")],
)
def test_d7_an_age_is_a_number_and_one_unit(milliseconds: int, text: str) -> None:
    assert age_text(milliseconds) == text
