"""The heap of deadlines behaves like a plain dict, and does not grow with cancelled deadlines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twinbus.namespace.engine.deadline_heap import DeadlineHeap

operations = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 20), st.integers(0, 100)),
        st.tuples(st.just("clear"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("due"), st.just(0), st.integers(0, 100)),
    ),
    max_size=200,
)


@given(operations)
def test_deadlines_are_due_in_the_order_of_their_last_setting(steps: list[tuple[str, int, int]]) -> None:
    deadlines: DeadlineHeap[int] = DeadlineHeap()
    plain: dict[int, int] = {}
    for kind, key, at in steps:
        if kind == "set":
            deadlines.set(key, at)
            plain[key] = at
        elif kind == "clear":
            deadlines.cancel(key)
            plain.pop(key, None)
        else:
            due = sorted((instant, number) for number, instant in plain.items() if instant <= at)
            assert deadlines.take_due(at) == [number for _, number in due]
            plain = {number: instant for number, instant in plain.items() if instant > at}
        assert deadlines.first() == min(plain.values(), default=None)


def test_a_hundred_thousand_settled_locks_leave_nothing_behind() -> None:
    deadlines: DeadlineHeap[int] = DeadlineHeap()
    deadlines.set(-1, 0)
    for number in range(100_000):
        deadlines.set(number, number)
        deadlines.cancel(number)
    assert len(deadlines._heap) < 200
    deadlines.cancel(-1)
    assert deadlines.first() is None
