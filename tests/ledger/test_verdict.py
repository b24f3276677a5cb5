"""The one verdict (L6): its four words, the order in which they win, and what its sentence names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinbus.ledger import Verdict, judge_ledger

NAMES = ("delivered", "in_backlog", "dead_lettered", "unknown", "lost", "duplicated", "possibly_duplicated")
PARTS = NAMES[:5]
SUMS = st.fixed_dictionaries({name: st.integers(0, 3) for name in NAMES}).map(
    lambda sums: {**sums, "accepted": sum(sums[name] for name in PARTS)}
)
REASONS = st.lists(st.sampled_from(["2 entries are missing: the disk was full", "segments 3 of w are not there"]))


def test_l6_there_are_exactly_four_words() -> None:
    assert [*map(str, Verdict)] == ["proven", "proven with possible duplicates", "not proven", "lost"]


@pytest.mark.parametrize(
    ("sums", "missing", "said", "code"),
    [
        ({}, [], "proven: No message was accepted.", 0),
        (
            {"unconfirmed": 2},
            [],
            "proven: No message was accepted. The ledger has 2 unconfirmed messages: the applications that send must "
            "record in it, too (option `ledger`).",
            0,
        ),
        (
            {"accepted": 1, "delivered": 1, "unconfirmed": 1},
            [],
            "proven: The accepted message is accounted for: 1 delivered.",
            0,
        ),
        (
            {"accepted": 1, "delivered": 1},
            [],
            "proven: The accepted message is accounted for: 1 delivered.",
            0,
        ),
        (
            {"accepted": 20_400, "delivered": 20_000, "in_backlog": 398, "dead_lettered": 2},
            [],
            "proven: All 20,400 accepted messages are accounted for: 20,000 delivered, 398 in the backlog, "
            "2 dead-lettered.",
            0,
        ),
        (
            {"accepted": 20_400, "delivered": 20_400, "duplicated": 1, "possibly_duplicated": 844},
            [],
            "proven with possible duplicates: All 20,400 accepted messages are accounted for: 20,400 delivered. "
            "1 was delivered more than once. 844 may have been delivered more than once.",
            0,
        ),
        (
            {"accepted": 4, "delivered": 3, "unknown": 1},
            [],
            "not proven: 1 of 4 accepted messages is unknown: safe or lost, depending on operations whose outcome is "
            "not in the ledger.",
            3,
        ),
        (
            {"accepted": 2, "delivered": 2},
            ["a", "b", "c"],
            "not proven: All 2 accepted messages are accounted for: 2 delivered. "
            "Entries are missing from the ledger: a; b; and 1 more reason.",
            3,
        ),
        (
            {"accepted": 3, "lost": 2, "delivered": 1},
            ["a"],
            "lost: 2 of 3 accepted messages are in neither namespace. Entries are missing from the ledger: a.",
            1,
        ),
    ],
)
def test_l6_word_sentence_and_exit_code(sums: dict[str, int], missing: list[str], said: str, code: int) -> None:
    judged = judge_ledger(sums, missing)
    assert (str(judged), judged.exit_code) == (said, code)


@given(sums=SUMS, missing=REASONS)
def test_l6_the_worst_word_that_applies_wins(sums: dict[str, int], missing: list[str]) -> None:
    verdict = judge_ledger(sums, missing).verdict
    assert (verdict is Verdict.LOST) == (sums["lost"] > 0)
    if not sums["lost"]:
        assert (verdict is Verdict.NOT_PROVEN) == bool(sums["unknown"] or missing)
    if verdict is Verdict.PROVEN:
        assert not any(sums[name] for name in ("unknown", "lost", "duplicated", "possibly_duplicated"))


def test_l6_the_sentence_is_the_same_in_whatever_order_and_length_the_reasons_come() -> None:
    reasons = [f"reason {number}" for number in range(9)]
    said = judge_ledger({"accepted": 1, "delivered": 1}, reasons)
    assert said == judge_ledger({"accepted": 1, "delivered": 1}, reversed(reasons))
    assert said == judge_ledger({"accepted": 1, "delivered": 1}, reasons[:4], more_missing=5)
    assert said.sentence.endswith("reason 0; reason 1; and 7 more reasons.")


def test_l6_a_long_reason_is_cut_and_has_no_line_break() -> None:
    sentence = judge_ledger({}, ["two\nlines", "x" * 5000]).sentence
    assert "two lines; xxx" in sentence
    assert "\n" not in sentence
    assert len(sentence) < 400


@given(sums=SUMS, missing=REASONS)
def test_l6_the_sentence_names_every_number_that_decided(sums: dict[str, int], missing: list[str]) -> None:
    sentence = judge_ledger(sums, missing).sentence
    for name, text in (("lost", "in neither namespace"), ("unknown", "unknown: safe or lost")):
        assert (f"{sums[name]} of {sums['accepted']}" in sentence and text in sentence) or not sums[name]
    assert all(reason in sentence for reason in sorted(missing)[:2])
    assert "\n" not in sentence
