"""How fast a syphon moves messages (Y9)."""

from hypothesis import given
from hypothesis import strategies as st

from twinbus.syphon.context import RateLimit


def test_without_a_rate_nothing_waits() -> None:
    limit = RateLimit()
    limit.spend(1_000_000, 0.0)
    assert limit.delay(0.0) == 0.0
    assert limit.batch_size(500) == 500


def test_few_are_taken_at_a_time_where_the_rate_is_low_and_the_pumps_are_many() -> None:
    assert RateLimit(20.0).batch_size(500) == 10
    assert RateLimit(20.0).batch_size(500, pumps=5) == 2
    assert RateLimit(0.1).batch_size(500) == 1


def test_a_new_rate_forgives_what_was_owed() -> None:
    limit = RateLimit(1.0)
    limit.spend(100, 0.0)
    limit.set_rate(100.0, 0.0)
    assert limit.delay(0.0) == 0.0


@given(st.floats(2, 1000), st.lists(st.floats(0, 2), min_size=1, max_size=50))
def test_no_more_go_than_the_rate_and_one_second_of_it(rate: float, pauses: list[float]) -> None:
    limit, now, gone = RateLimit(rate), 0.0, 0
    for pause in pauses:
        now += pause
        now += limit.delay(now)
        count = limit.batch_size(1000)
        limit.spend(count, now)
        gone += count
        assert gone <= rate * (now + 1.0) + 0.001
