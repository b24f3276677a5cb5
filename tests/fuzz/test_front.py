"""A short run of the fuzzer of the AMQP front; `make fuzz` runs the long one, with the official SDK's traffic too."""

import random

from tests.fuzz import cpu_cost

from .amounts import inputs_of
from .front import mutate, run


async def test_mutated_traffic_harms_neither_the_namespace_nor_another_client() -> None:
    inputs = inputs_of("front")
    tally = await run(inputs, seed=1, with_sdk=False)
    assert tally.inputs == inputs
    assert tally.answered > inputs // 2, "the mutations leave enough of a conversation to be answered"
    # A slow disk lowers the number: a connection may end before the namespace has carried out its last operations.
    assert tally.operations > inputs // 3, "and to be understood"
    assert tally.rounds == inputs // 10
    assert 0 < tally.slowest <= cpu_cost.MOST


def test_an_input_is_repeated_by_its_seed() -> None:
    recorded = [[b"AMQP\x00\x01\x00\x00", bytes(range(40)), bytes(range(60))], [b"AMQP\x03\x01\x00\x00"]]
    assert mutate(random.Random("1/7"), recorded) == mutate(random.Random("1/7"), recorded)
