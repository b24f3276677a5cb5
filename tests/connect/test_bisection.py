"""A request that is refused for one of its items: every other item still gets its answer."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from twinbus.connect.bisection import bisect_refused
from twinbus.connect.errors import MessageNotFoundError


@given(st.sets(st.integers(0, 60)), st.integers(0, 60))
async def test_refused_items_are_found_and_the_others_are_answered(refused: set[int], count: int) -> None:
    async def ask(part: Sequence[int]) -> list[int]:
        if refused.intersection(part):
            raise MessageNotFoundError("one of them")
        return list(part)

    answers = await bisect_refused(range(count), ask, MessageNotFoundError)
    assert [one for _, answer in answers for one in answer or ()] == [one for one in range(count) if one not in refused]
    assert [part[0] for part, answer in answers if answer is None] == [one for one in range(count) if one in refused]
