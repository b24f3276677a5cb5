"""When a credential counts as refused for good (C1)."""

from twinbus.pairing.pair_sides import REFUSED_FOR_GOOD_SECONDS, CredentialRefusals

QUEUES = ("a", "b")
LATER = 100.0 + REFUSED_FOR_GOOD_SECONDS


def test_c1_every_queue_must_have_refused_it_from_first_to_last_for_the_whole_time() -> None:
    refusals = CredentialRefusals()
    assert [refusals.refused(queue, QUEUES, 100.0) for queue in QUEUES] == [False, False]
    assert not refusals.refused("a", QUEUES, LATER)
    assert not refusals.refused("b", QUEUES, LATER - 0.5)
    assert refusals.refused("b", QUEUES, LATER)


def test_c1_a_queue_that_refused_it_only_once_keeps_it_from_being_for_good() -> None:
    refusals = CredentialRefusals()
    for queue in QUEUES:
        refusals.refused(queue, QUEUES, 100.0)
    assert not refusals.refused("a", QUEUES, 2 * LATER)


def test_c1_any_other_answer_of_a_queue_begins_its_time_anew() -> None:
    refusals = CredentialRefusals()
    for queue in QUEUES:
        refusals.refused(queue, QUEUES, 100.0)
    refusals.forget("b")
    assert [refusals.refused(queue, QUEUES, LATER) for queue in QUEUES] == [False, False]
    assert refusals.refused("b", QUEUES, LATER + REFUSED_FOR_GOOD_SECONDS)


def test_c1_a_queue_that_is_no_longer_used_is_not_asked_after() -> None:
    refusals = CredentialRefusals()
    refusals.refused("a", QUEUES, 100.0)
    assert refusals.refused("a", ("a",), LATER)
