"""How fast a syphon moves messages (Y9)."""

from hypothesis import given
from hypothesis import strategies as st

from twinbus.syphon.pacing import Pacing


def test_without_a_rate_nothing_waits() -> None:
    pacing = Pacing()
    assert pacing.spend(1_000_000, 0.0) == 0.0
    assert pacing.most(500) == 500


def test_few_are_taken_at_a_time_where_the_rate_is_low() -> None:
    assert Pacing(20.0).most(500) == 20
    assert Pacing(0.1).most(500) == 1


def test_a_new_rate_forgives_what_was_owed() -> None:
    pacing = Pacing(1.0)
    pacing.spend(100, 0.0)
    pacing.set_rate(100.0, 0.0)
    assert pacing.spend(100, 0.0) <= 1.0


@given(st.floats(0.5, 1000), st.lists(st.tuples(st.integers(1, 50), st.floats(0, 2)), min_size=1, max_size=50))
def test_no_more_go_than_the_rate_and_one_second_of_it(rate: float, sends: list[tuple[int, float]]) -> None:
    pacing, now, gone = Pacing(rate), 0.0, 0
    for count, pause in sends:
        now += pause
        now += pacing.spend(count, now)
        gone += count
        assert gone <= rate * (now + 1.0) + 0.001
