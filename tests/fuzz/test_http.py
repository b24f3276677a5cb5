"""A short run of the HTTP fuzzer; `make fuzz` runs the long one."""

import random

import pytest

from .amounts import inputs_of
from .http import SLOW, HttpFuzzCounts, compare_costs, mutate, run, world


async def test_mutated_requests_end_in_answers_and_a_closed_connection() -> None:
    inputs = inputs_of("http")
    tally = await run(inputs, seed=1)
    assert tally.inputs == inputs
    assert tally.answered > inputs * 0.9, "the mutations leave enough of a request to be answered"
    assert (tally.slow, tally.healthy) == (inputs // 500, inputs // 10)


def test_an_input_is_repeated_by_its_seed() -> None:
    assert mutate(random.Random("1/7")) == mutate(random.Random("1/7"))


@pytest.mark.parametrize("name", SLOW)
async def test_x1_a_request_made_to_be_slow_takes_time_in_proportion_to_its_bytes(name: str) -> None:
    await compare_costs(await world(), name, HttpFuzzCounts())
